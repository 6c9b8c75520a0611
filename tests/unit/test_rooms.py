"""Tests stand in the rooms that they test, and each public function is tested in its own."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

from tests.support.paths import ROOT

RECIPE, PATCHES, UNIT = ROOT / "recipe" / "offpolicy", ROOT / "verl_patches", ROOT / "tests" / "unit"
ROOMS = sorted(path.parent.name for path in RECIPE.glob("*/__init__.py"))
COMMANDS = "commands"
BESIDE = {"analysis": UNIT / COMMANDS, "verl_patches": ROOT / "tests" / "contract"}
"""Further folders of a room's tests: analysis is what its commands show, and patches are held against verl itself."""
MEASURED_WHOLE = "monitor/bounds/"
"""Files whose functions are steps of one measurement: its tests work out every number of it."""

EXCEPTIONS: dict[str, dict[str, str]] = {
    "A page, table or figure of a command, whose tests read all of what it shows.": {
        "analysis": """add_sections build_agreement_tables build_causes_table build_document build_failure_table
            build_group_table build_joint_table build_json build_length_table build_not_found
            build_overall_table build_overview_table build_page build_profile_table build_rows_table
            build_step_table build_table build_tokens_table build_versions_table collect_kept_shares
            describe_fidelity draw_overview list_fixes list_groups list_overrides render_template
            run_from_arguments write_page write_result""",
        "doctor": "describe_failure format_command show to_json",
    },
    "A step of a study, whose tests work out its result by hand.": {
        "analysis": """build_grouping build_reference_block check_replayable compare_with_record compute_constants
            compute_gradient_weight compute_measures compute_turn_shares decide drop_drift estimate_noise_floor
            has_unnoticed_staleness merge_backend_and_staleness select_scored_rows""",
        "translate": "measure_rows",
    },
    "Asked of a composed configuration: by launch, --check and doctor, whose tests meet each of its refusals.": {
        "doctor": "explain_unknown_keys find_unknown_keys",
        "preflight": """check_base_loss check_base_loss_of_verl check_beside check_by_verl check_dead_keys
            check_own_keys check_path check_seams check_version_level check_workers_env
            compose_without""",
    },
    "A step of the Bash reader, whose tests read whole scripts.": {"doctor": "expand_parameter parse_parameter"},
    "Runs in a training run or a process of its own, where its tests are.": {
        COMMANDS: "run_update train",
        "trainer": "install_trainer install_trainers put_columns read_columns set_up_logger",
        "verl_patches": "before_any contracts installed_has load main show status substitute waiting",
    },
}
"""Why a function is not named by the tests of its room -> room -> functions."""


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
        if path.is_relative_to(RECIPE / MEASURED_WHOLE):
            continue
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


def exceptions() -> set[tuple[str, str]]:
    rooms = (each for rooms in EXCEPTIONS.values() for each in rooms.items())
    return {(room, name) for room, names in rooms for name in names.split()}


def test_every_public_function_is_tested_in_its_room() -> None:
    assert untested() - exceptions() == set()


def test_no_exception_is_left_over() -> None:
    """An exception is for a function that exists and that its room does not test."""
    assert exceptions() - untested() == set()
