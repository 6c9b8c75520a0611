"""Every override that README or a page offers for a launch is OK for this launch."""

from __future__ import annotations

import re
import shlex

import pytest
from _pytest.mark import ParameterSet

from tests.support.doctor_answer import Ask
from tests.support.paths import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.verl("==0.9.1")]

PAGES = {
    "README.md": "main_ppo",
    "docs/start.md": "main_ppo",
    "docs/symptoms.md": "main_ppo",
    "docs/migrate.md": "main_ppo",
    "docs/programs/main_ppo.md": "main_ppo",
    "docs/programs/fully_async.md": "fully_async",
    "docs/programs/one_step_off.md": "one_step_off",
    "docs/programs/own_main.md": "own_main",
}
"""Page -> the script whose launch its overrides follow."""
TO_RUN = re.compile(r"`('?\+correction@[^`]*)`|^(?:    |\+    )('?\+correction@.*?)(?: \\)?$", re.M)


def list_offered() -> list[ParameterSet]:
    """List script and override of each page; README's in every run, the others only in ``extended`` tests."""
    marks: dict[tuple[str, str], list[pytest.MarkDecorator]] = {}
    for page, script in PAGES.items():
        for match in TO_RUN.finditer((ROOT / page).read_text()):
            if not (offered := match[1] or match[2]).endswith("@correction="):
                marks.setdefault((script, offered), [] if page == "README.md" else [pytest.mark.extended])
    return [pytest.param(*case, marks=found) for case, found in marks.items()]


@pytest.mark.parametrize(("script", "offered"), list_offered())
def test_an_override_of_a_page_is_ok(script: str, offered: str, ask_launch: Ask) -> None:
    answer = ask_launch(script, *shlex.split(offered))
    assert answer.status == 0, answer.printed
    assert "NO-OP" not in answer.printed
