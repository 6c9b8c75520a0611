"""Every benchmark is run by its test, at a small size."""

from __future__ import annotations

import ast

import pytest

from tests.support.paths import ROOT

COMMANDS = sorted(
    path.stem for path in (ROOT / "scripts" / "benchmark").glob("*.py") if '__name__ == "__main__":' in path.read_text()
)


def test_there_are_commands() -> None:
    assert {"analysis", "paired_runs", "run_share", "simulated_scale", "worker_stage"} <= {*COMMANDS}


@pytest.mark.parametrize("command", COMMANDS)
def test_it_has_a_test_that_runs_it(command: str) -> None:
    """By its function ``main``, or as a program."""
    tree = ast.parse((ROOT / "tests" / "unit" / "scripts" / "benchmark" / f"test_{command}.py").read_text())
    called = {node.func for node in ast.walk(tree) if isinstance(node, ast.Call)}
    names = {node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "") for node in called}
    runs_program = any(
        isinstance(node, ast.Attribute) and node.attr == "run" and getattr(node.value, "id", "") == "subprocess"
        for node in called
    )
    assert "main" in names or runs_program
