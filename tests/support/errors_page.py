"""docs/errors.md, generated from the start-up checks and the error classes.

Usage: ``python -m tests.support.errors_page`` rewrites the page.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator, Sequence

from recipe.offpolicy.preflight.examination import CHECKS, REMARKS, Check
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "errors.md"
READ = {
    "analysis": "analysis",
    "batch": "liveness",
    "centering": "centering",
    "correction": "correction_keys",
    "cpu": "delivery",
    "doctor": "liveness",
    "extensions": "extensions",
    "extensions/length_penalty": "length",
    "extensions/opd": "teacher",
    "extensions/pass_at_k": "pass_at_k",
    "extensions/process_reward": "process_rewards",
    "fault_tolerance": "monitoring",
    "monitor": "monitoring",
    "proof": "liveness",
    "recording": "recording",
    "replay": "routing",
    "staleness": "staleness",
    "support": "sampling",
    "trainer": "paths",
    "verl_patches": "paths",
}
"""Folder below recipe/offpolicy or verl_patches -> the page that explains its errors."""
HEAD = """# Errors

Every message of this package says what is wrong, with key and value, and what to do, in this order:

    actor_rollout_ref.rollout.calculate_log_probs=false: without the engine's log-probs, there is no mu to correct with.
    Set it to true.

The [doctor](liveness.md#before-the-launch) prints the start-up messages before a launch, with the override to paste.
`python -m tests.support.errors_page` generates this page from the code.
"""
DURING = """## Errors of a run and of the tools

The traceback names the class; the message names the cause.

| class | meaning | read |
|---|---|---|"""


def read_first_sentence(text: str | None) -> str:
    """Return the first line of a docstring as Markdown, without its final full stop."""
    return (text or "").strip().partition("\n")[0].replace("``", "`").removesuffix(".").replace("|", "\\|")


def list_checks(checks: Sequence[Check]) -> Iterator[str]:
    """List the checks in the order in which they run: one heading per topic, one item per check."""
    topics: dict[str, list[Check]] = {}
    for check in checks:
        topics.setdefault(check.__module__, []).append(check)
    for module, found in topics.items():
        title = read_first_sentence(sys.modules[module].__doc__)
        yield from (f"**{title}**", "")
        for check in found:
            yield f"* {read_first_sentence(inspect.getdoc(check))}."
        yield ""


def list_errors() -> Iterator[tuple[str, str, str]]:
    """List the error classes: folder, name and meaning."""
    for root in ("recipe/offpolicy", "verl_patches"):
        for path in sorted((ROOT / root).rglob("*.py")):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef) and re.search(r"Error$", node.name):
                    folder = path.parent.relative_to(ROOT / root).as_posix()
                    yield (root if folder == "." else folder), node.name, read_first_sentence(ast.get_docstring(node))


def find_page(folder: str) -> str:
    """Find the page for a folder, or for the nearest folder above it that has a page; otherwise ``architecture``."""
    parts = folder.split("/")
    around = ("/".join(parts[:end]) for end in range(len(parts), 0, -1))
    return next((READ[name] for name in around if name in READ), "architecture")


def build_page() -> str:
    """Build the whole page."""
    rows = [
        f"| `{name}` | {text} | [{page}]({page}.md) |" for at, name, text in list_errors() for page in [find_page(at)]
    ]
    lines = [HEAD, "## At start-up: these stop the launch", "", *list_checks(CHECKS)]
    lines += ["## At start-up: these are remarks", "", *list_checks(REMARKS), DURING, *sorted(rows)]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(build_page(), encoding="utf-8")
