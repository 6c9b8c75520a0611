"""The table of faults in docs/evidence/faults.md: rows of inputs are generated from the faults that a test injects.

python -m tests.support.fault_table     rewrites them; rows of other tests are written by hand
"""

from __future__ import annotations

import re

from tests.support.input_faults import faults
from tests.support.paths import ROOT

PAGE = ROOT / "docs/evidence/faults.md"
INPUTS = "integration/test_input_faults.py"
WHERE = "in the worker, before the optimizer steps | each"


def render(page: str) -> str:
    """Return the page with the number of faults of inputs and their rows."""
    hows: dict[str, list[str]] = {}
    for fault in faults():
        hows.setdefault(fault.what if " " in fault.what else f"`{fault.what}`", []).append(fault.how)
    rows = "".join(f"| {what} | {', '.join(how)} | {WHERE} | `{INPUTS}` |\n" for what, how in hows.items())
    page = re.sub(r"^\d+(?= kinds of faults)", str(sum(map(len, hows.values()))), page, flags=re.M)
    return re.sub(rf"(?:^\|.*`{INPUTS}` \|\n)+", lambda _: rows, page, flags=re.M)


def find_missing_tests(page: str) -> list[str]:
    """Return the tests that the page names and that are not there."""
    named = re.findall(r"\| `([\w/]+\.py)(?:::(\w+))?` \|$", page, re.M)
    return [
        f"{path}::{name}"
        for path, name in named
        if not re.search(rf"^def {name or 'test_'}", (ROOT / "tests" / path).read_text(), re.M)
    ]


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text()))
