"""Data flows one way: who may import whom, read from the source.

    correction <- batch_plan <- micro_batch <- proof <- packet <- worker_loss <- checks, liveness <- trainers
    <- task_runner <- main <- scripts

A later layer may import an earlier one, never the reverse, at top level or inside a function. Imports under
`if TYPE_CHECKING` do not run and are not counted.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECIPE = "recipe.offpolicy"

# Each module may import those of earlier rows. A new module gets its place here.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("correction",),
    ("reading",),
    (
        "alignment",
        "arrival",
        "baseline",
        "command_line",
        "layout",
        "live_path",
        "logging_setup",
        "lost_workers",
        "model_card",
        "module_source",
        "pages",
        "redaction",
        "row_hash",
        "shadow",
        "shadow_options",
        "similar_keys",
        "step_cost",
        "training_noise",
        "usage",
        "verl_helper",
        "versions",
    ),
    ("batch_plan", "checkpoints", "composition", "primary", "run_setup", "translate", "verl_keys", "watchdog"),
    ("forward_passes", "micro_batch", "pairs", "selector"),
    ("base_loss_probe", "kl_term", "proof_trials", "recording"),
    ("whatif",),
    ("alarms", "attribution", "calibration"),
    ("measurement",),
    ("proof",),
    ("packet",),
    ("worker_loss",),
    ("legacy_loss",),
    ("checks", "handover", "liveness", "preparation", "sample_watch", "steering"),
    ("preflight", "smoke", "supervised_run", "supervision"),
    ("doctor",),
    ("trainer_v0", "trainer_v1"),
    ("task_runner_v0", "task_runner_v1"),
    ("attribute", "calibrate", "main_offpolicy", "report"),
)
RANK = {module: rank for rank, layer in enumerate(LAYERS) for module in layer}
MAY_IMPORT_PATCHES = {
    "checks",
    "doctor",
    "legacy_loss",
    "live_path",
    "main_offpolicy",
    "micro_batch",
    "preflight",
    "smoke",
    "task_runner_v0",
    "task_runner_v1",
    "trainer_v0",
    "trainer_v1",
}
OURS = ("recipe", "verl_patches", "scripts", "tests")


def sources(folder: str) -> list[Path]:
    return sorted(path for path in (ROOT / folder).rglob("*.py") if "outputs" not in path.parts)


def module_name(path: Path) -> str:
    """The dotted name from the checkout's root: recipe/offpolicy/correction/spec.py -> recipe.offpolicy..."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[str]:
    """Absolute names of everything that a file imports; `from . import x` counts as the module x."""
    module = module_name(path)
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in running_code(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = [*base, *(node.module.split(".") if node.module else [])]
            whole = ".".join(origin)
            # A package's attribute may be a submodule: name it in full, so that layers can tell.
            yield from (f"{whole}.{alias.name}" if is_package(origin) else whole for alias in node.names)


def running_code(node: ast.AST) -> Iterator[ast.AST]:
    """Every node below, without what only a type checker reads."""
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            continue
        yield from running_code(child)


def is_package(parts: list[str]) -> bool:
    return parts[:1] == ["recipe"] and (ROOT.joinpath(*parts)).is_dir()


def room(name: str) -> str | None:
    """The module of recipe.offpolicy that an absolute name belongs to, or None if it is not of ours."""
    if not name.startswith(f"{RECIPE}."):
        return None
    return name.removeprefix(f"{RECIPE}.").split(".")[0]


def test_every_module_has_a_place() -> None:
    rooms = {room(module_name(path)) for path in sources("recipe/offpolicy")} - {None}
    assert rooms - set(RANK) == set(), "give the new module its place in LAYERS"


@pytest.mark.parametrize("path", sources("recipe/offpolicy"), ids=module_name)
def test_imports_point_to_earlier_layers(path: Path) -> None:
    here = room(module_name(path))
    for name in imports(path):
        there = room(name)
        if there is None or there == here or there not in RANK:
            continue
        if here is None:
            assert there == "correction", f"the package itself imports {name}"
        else:
            assert RANK[there] < RANK[here], f"{here} imports {name}"


@pytest.mark.parametrize("path", sources("recipe/offpolicy/correction"), ids=module_name)
def test_correction_imports_only_torch(path: Path) -> None:
    """It stays usable, and testable in milliseconds, without verl, Ray or vLLM."""
    allowed = {*sys.stdlib_module_names, "torch"}
    foreign = {
        name
        for name in imports(path)
        if name.split(".")[0] not in allowed and not name.startswith(f"{RECIPE}.correction")
    }
    assert foreign == set()


@pytest.mark.parametrize("path", sources("recipe/offpolicy"), ids=module_name)
def test_only_what_touches_verl_knows_the_patches(path: Path) -> None:
    if any(name.split(".")[0] == "verl_patches" for name in imports(path)):
        assert room(module_name(path)) in MAY_IMPORT_PATCHES


@pytest.mark.parametrize("path", sources("verl_patches"), ids=module_name)
def test_patches_know_nothing_of_the_recipe(path: Path) -> None:
    assert not any(name.split(".")[0] == "recipe" for name in imports(path))


@pytest.mark.parametrize("folder", OURS)
def test_nothing_imports_scripts_or_tests(folder: str) -> None:
    """verl's own wheel installs packages of those names, so such an import would find theirs."""
    for path in sources(folder):
        taken = [name for name in imports(path) if name.split(".")[0] in ("scripts", "tests")]
        assert taken == [], f"{module_name(path)} imports {taken}"


def test_recipe_stays_a_namespace_package() -> None:
    """TransferQueue installs a folder `recipe` too; an __init__.py here would hide one of the two."""
    assert not (ROOT / "recipe" / "__init__.py").exists()
    for folder in ("tests", "tests/unit", "tests/contract", "tests/integration", "scripts"):
        assert not (ROOT / folder / "__init__.py").exists(), folder
