"""Each place that refuses a configuration proposes an override, or it is said here why none can be proposed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from recipe.offpolicy.findings import named_overrides

PACKAGE = Path(__file__).parents[3] / "recipe" / "offpolicy"
UNMENDED = {
    "alarms/fallback.py": "which correction is safer is for the user to say",
    "alarms/settings.py": "of a program that was not prepared as main_offpolicy prepares it",
    "calibrate.py": "arguments of a tool, no launch",
    "calibration/": "arguments of a tool, no launch",
    "checks/loss.py": "a message of verl's that names no key, where no key at its default helps",
    "checks/path.py": "an installed verl that does not hold is no key",
    "checks/reading.py": "of a program that was not prepared as main_offpolicy prepares it",
    "checks/remarks.py": "notes",
    "checks/verls_own.py": "a note",
    "composition.py": "which of two options, or of those that there are, is for the user to say",
    "correction/dialects/": "arguments of a function; checks/verls_own.py proposes for verl's keys",
    "doctor/": "a program, a release, or what no check can read",
    "run_setup.py": "what a cluster looks like is for the user to say",
    "selector.py": "what a cluster looks like is for the user to say",
    "shadow.py": "names of options are for the user to say",
    "translate.py": "arguments of a function",
    "whatif/": "arguments of a tool, no launch",
}
"""Files, or folders, with a place that proposes nothing -> why."""


class Refusal(NamedTuple):
    """A place; ``mended``: whether it gives overrides, or its sentence names one."""

    file: str
    line: int
    mended: bool


def refusals() -> Iterator[Refusal]:
    """Every SpecError and Problem that the package makes."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            named = {keyword.arg for keyword in node.keywords}
            if node.func.id == "SpecError" and node.args:
                mended = bool(named & {"overrides", "removed"} or named_overrides(_sentence(node.args[0])))
            elif node.func.id == "Problem":
                mended = "overrides" in named or len(node.args) == 7
            else:
                continue
            yield Refusal(path.relative_to(PACKAGE).as_posix(), node.lineno, mended)


def _sentence(message: ast.expr) -> str:
    """The proposal of a message, with a key in the place of what is filled in."""
    parts = message.values if isinstance(message, ast.JoinedStr) else [message]
    text = "".join(str(part.value) if isinstance(part, ast.Constant) else "key.name" for part in parts)
    return text.rpartition(" Set ")[2] if " Set " in text else ""


FOUND = list(refusals())


def unmended(file: str) -> str | None:
    return next((place for place in UNMENDED if file == place or (place[-1] == "/" and file.startswith(place))), None)


def test_each_refusal_proposes_an_override() -> None:
    missing = [f"{file}:{line}" for file, line, mended in FOUND if not mended and unmended(file) is None]
    assert missing == []
    assert sum(mended for _, _, mended in FOUND) > 80


@pytest.mark.parametrize("place", UNMENDED)
def test_every_exception_is_needed(place: str) -> None:
    assert [file for file, _, mended in FOUND if not mended and unmended(file) == place]
