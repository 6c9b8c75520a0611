"""Who may import whom, read from the source:

    correction <- batch <- {fault_tolerance, proof, recording, monitor, extensions, staleness, replay, support,
    centering, delivery} <- {worker, preflight} <- {trainer, doctor, analysis, translate} <- commands

A room imports those below it, and in its own brace those to its left; verl_patches and correction import no one of
ours. Imports inside functions and those for type checkers count too.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.support.paths import ROOT

RECIPE = "recipe.offpolicy"
GROUND = ("correction",)
FLOORS = (
    GROUND,
    ("batch",),
    (
        "fault_tolerance",
        "proof",
        "recording",
        "monitor",
        "extensions",
        "staleness",
        "replay",
        "support",
        "centering",
        "delivery",
    ),
    ("worker", "preflight"),
    ("trainer", "doctor", "analysis", "translate"),
)
ROOMS = [room for floor in FLOORS for room in floor]
COMMANDS = "commands"
"""Modules of the package itself, and a package's ``__main__``: commands, and what they share."""

Imports = Mapping[str, Iterable[str]]
"""A module's dotted name -> the full names of the modules that it imports."""


def sources(folder: str) -> list[Path]:
    return sorted(path for path in (ROOT / folder).rglob("*.py") if "outputs" not in path.parts)


def module_name(path: Path) -> str:
    """Return the dotted name from the checkout's root: recipe/offpolicy/correction/spec.py -> recipe.offpolicy..."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def imports(path: Path) -> tuple[str, ...]:
    """Return absolute names of everything that a file imports; `from . import x` counts as the module x."""
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[str]:
    module = module_name(path)
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = [*base, *(node.module.split(".") if node.module else [])]
            whole = ".".join(origin)
            # A package's attribute may be a submodule: name it in full.
            yield from (f"{whole}.{alias.name}" if is_package(origin) else whole for alias in node.names)


def is_package(parts: list[str]) -> bool:
    return parts[:1] == ["recipe"] and (ROOT.joinpath(*parts)).is_dir()


def room_of(name: str) -> str | None:
    """Return the package of the module, COMMANDS, or None if the module is not part of the recipe."""
    if not name.startswith(f"{RECIPE}."):
        return None
    room, _, rest = name.removeprefix(f"{RECIPE}.").partition(".")
    return room if (rest and rest != "__main__") or (room in ROOMS and rest != "__main__") else COMMANDS


def strangers(found: Imports) -> list[str]:
    """Return the modules that are in no package."""
    return [name for name in found if room_of(name) not in (*ROOMS, COMMANDS, None)]


def upward(found: Imports) -> list[str]:
    """Return imports that violate the reading rule."""
    rank = {room: place for place, room in enumerate([*ROOMS, COMMANDS])}
    wrong = []
    for here, there in ((name, imported) for name, all_of in found.items() for imported in all_of):
        own, other = room_of(here), room_of(there)
        if own in rank and other in rank and own != other and rank[other] > rank[own]:
            wrong.append(f"{here} imports {there}")
    return wrong


@pytest.fixture(scope="module")
def found() -> Imports:
    return {module_name(path): imports(path) for path in sources("recipe/offpolicy")}


def test_every_module_has_a_room(found: Imports) -> None:
    assert strangers(found) == []
    assert strangers({f"{RECIPE}.attic.trunk": []}) == [f"{RECIPE}.attic.trunk"]


def test_imports_point_downward(found: Imports) -> None:
    assert upward(found) == []
    planted = {
        f"{RECIPE}.batch.plan": [f"{RECIPE}.proof.verify"],
        f"{RECIPE}.proof.verify": [f"{RECIPE}.recording.run"],
    }
    assert len(upward(planted)) == 2


@pytest.mark.parametrize("path", sources("recipe/offpolicy/correction"), ids=module_name)
def test_correction_imports_only_torch(path: Path) -> None:
    """It remains usable, and testable in milliseconds, without verl, Ray or vLLM."""
    allowed = {*sys.stdlib_module_names, "torch"}
    foreign = {
        name
        for name in imports(path)
        if name.split(".")[0] not in allowed and not name.startswith(f"{RECIPE}.correction")
    }
    assert foreign == set()


@pytest.mark.parametrize("path", sources("verl_patches"), ids=module_name)
def test_patches_know_nothing_of_the_recipe(path: Path) -> None:
    assert not any(name.split(".")[0] == "recipe" for name in imports(path))


@pytest.mark.parametrize(
    ("folder", "closed"),
    [("recipe", {"scripts", "tests"}), ("verl_patches", {"scripts", "tests"}), ("scripts", {"tests"})],
)
def test_nothing_installed_imports_scripts_or_tests(folder: str, closed: set[str]) -> None:
    """verl's own wheel installs packages with these names, so such an import would find verl's."""
    for path in sources(folder):
        taken = [name for name in imports(path) if name.split(".")[0] in closed]
        assert taken == [], f"{module_name(path)} imports {taken}"
