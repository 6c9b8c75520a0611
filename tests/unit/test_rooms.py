"""Tests stand in the rooms that they test, and each public function is tested in its own."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT

RECIPE, PATCHES, UNIT = ROOT / "recipe" / "offpolicy", ROOT / "verl_patches", ROOT / "tests" / "unit"
ROOMS = sorted(path.parent.name for path in RECIPE.glob("*/__init__.py"))
COMMANDS = "commands"
BESIDE = {"analysis": UNIT / COMMANDS, "verl_patches": ROOT / "tests" / "contract"}
"""Further folders of a room's tests: analysis is what its commands show, and patches are held against verl itself."""

EXCEPTIONS = {(COMMANDS, "run_update"), (COMMANDS, "train")}
"""Functions that run in a training run or a process of its own, where their tests are."""


def test_every_room_has_tests_and_every_folder_a_room() -> None:
    folders = {path.name for path in UNIT.iterdir() if path.is_dir() and any(path.rglob("test_*.py"))}
    assert folders == {*ROOMS, COMMANDS, "scripts", "verl_patches"}


def room_of(path: Path) -> str:
    if path.is_relative_to(PATCHES):
        return PATCHES.name
    parts = path.relative_to(RECIPE).parts
    return parts[0] if len(parts) > 1 else COMMANDS


def public_functions() -> Iterator[tuple[str, str]]:
    """(room, name) of every public function of a module."""
    for path in (*RECIPE.rglob("*.py"), *PATCHES.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                yield room_of(path), node.name


def names_used(folder: Path) -> set[str]:
    """Names that the code of a folder imports, calls or reads."""
    names: set[str] = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Name(id=name) | ast.Attribute(attr=name):
                    names.add(name)
                case ast.alias(name=name):
                    names.add(name.rpartition(".")[2])
    return names


def words_of_examples(folder: Path) -> set[str]:
    """Words of the examples in docstrings, which are run as tests."""
    lines = (line for path in folder.rglob("*.py") for line in path.read_text().splitlines())
    return {word for line in lines if re.match(r" *(>>>|\.\.\.) ", line) for word in re.findall(r"\w+", line)}


@functools.cache
def untested() -> set[tuple[str, str]]:
    tested = {room: names_used(UNIT / room) for room in (*ROOMS, COMMANDS, PATCHES.name)}
    for room in ROOMS:
        tested[room] |= words_of_examples(RECIPE / room)
    for room, folder in BESIDE.items():
        tested[room] |= names_used(folder)
    return {(room, name) for room, name in public_functions() if name not in tested[room]}


@pytest.mark.slow
def test_every_public_function_is_tested_in_its_room() -> None:
    assert untested() - EXCEPTIONS == set()


@pytest.mark.slow
def test_no_exception_is_left_over() -> None:
    """An exception is for a function that exists and that its room does not test."""
    assert EXCEPTIONS - untested() == set()
