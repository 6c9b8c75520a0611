"""Tests stand in the rooms that they test, and each function that other rooms call is tested in its own."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.support.paths import ROOT

RECIPE, UNIT = ROOT / "recipe" / "offpolicy", ROOT / "tests" / "unit"
ROOMS = sorted(path.parent.name for path in RECIPE.glob("*/__init__.py"))
COMMANDS = "commands"
ELSEWHERE = {
    # By a real model's gradient, and on real batches of both trainers.
    *("prove", "verify", "verify_update", "planned", "dense", "groups_without_rejected", "handover"),
    *("find_problems", "find_zero_rows", "mini_batch_mean", "check_columns", "extension_states"),
    # By the commands that show or compose it.
    *("build_joint_table", "build_length_table", "build_overview_table", "build_json", "build_page"),
    *("list_overrides", "run_from_arguments", "write_result"),
    # By the launches that it decides about.
    "check_by_verl",
    # By the launch, which asks them.
    *("check_seams", "explain_unknown_keys"),
}
"""Functions whose tests stand in another folder: tests/integration, tests/unit/commands, doctor or monitor."""


def test_every_room_has_tests_and_every_folder_a_room() -> None:
    folders = {path.name for path in UNIT.iterdir() if path.is_dir() and any(path.rglob("test_*.py"))}
    assert folders == {*ROOMS, COMMANDS, "scripts", "verl_patches"}


def room_of(path: Path) -> str:
    parts = path.relative_to(RECIPE).parts
    return parts[0] if len(parts) > 1 else COMMANDS


def imported(path: Path) -> Iterator[tuple[tuple[str, ...], str]]:
    """Of each `from .module import name`: the module's path below the recipe, and the name."""
    folder = path.relative_to(RECIPE).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            origin = (*folder[: len(folder) - node.level + 1], *(node.module or "").split("."))
            yield from ((tuple(filter(None, origin)), alias.name) for alias in node.names)


def called_by_other_rooms() -> Iterator[tuple[str, str]]:
    """(room, function) of every public function that a module of another room imports."""
    sources = sorted(RECIPE.rglob("*.py"))
    used = {(origin, name) for path in sources for origin, name in imported(path) if origin[:1] != (room_of(path),)}
    for path in sources:
        module = path.relative_to(RECIPE).with_suffix("").parts
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
                continue
            # A package hands on what its modules define.
            if any((module[:depth], node.name) in used for depth in range(1, len(module) + 1)):
                yield room_of(path), node.name


def words_in(folder: Path, pattern: str = r".*") -> set[str]:
    """The words of lines that match the pattern."""
    lines = (line for path in folder.rglob("*.py") for line in path.read_text().splitlines())
    return {word for line in lines if re.match(pattern, line) for word in re.findall(r"\w+", line)}


def test_what_other_rooms_call_is_tested_in_its_room() -> None:
    # Examples of docstrings are run as tests, and analysis is what its commands show.
    named = {room: words_in(UNIT / room) | words_in(RECIPE / room, r" *(>>>|\.\.\.) ") for room in ROOMS}
    named["analysis"] |= words_in(UNIT / COMMANDS)
    found = {name for room, name in called_by_other_rooms() if room in ROOMS and name not in named[room]}
    assert found - ELSEWHERE == set()
