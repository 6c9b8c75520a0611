"""The table of faults in docs/liveness.md, made from the faults that tests inject.

python -m tests.support.fault_table     writes it anew
"""

from __future__ import annotations

import re
from typing import NamedTuple

from tests.support.input_faults import faults
from tests.support.paths import ROOT

TABLE = "docs/liveness.md"
BEGIN, END = "<!-- faults: begin -->", "<!-- faults: end -->"
INPUTS = "tests/integration/test_input_faults.py"


class Row(NamedTuple):
    """Kinds of faults that one test injects."""

    what: str
    how: str
    where: str
    when: str
    test: str


_WORKER, _TRAINER = "in the worker, before the optimizer steps", "in the trainer, after the update"
_FIRST = "first, and where it is proved again"
_BEFORE = "in the trainer, before the update"
SABOTAGE, AGAIN = "tests/integration/test_sabotage.py", "tests/integration/test_proved_again.py"
ROLLOUT, ROUTES = "tests/unit/proof/test_rollout_checks.py", "tests/unit/replay/test_batch_routes.py"
LEAVING = "tests/unit/trainer/test_rows_that_leave.py"
OTHERS = (
    Row(
        "the engine's log pi",
        "of other rows",
        _TRAINER,
        _FIRST,
        f"{SABOTAGE}::test_log_probs_of_the_engine_are_of_other_rows",
    ),
    Row(
        "`rollout_log_probs` at the source",
        "off by one token",
        _TRAINER,
        "first",
        f"{SABOTAGE}::test_mu_shifted_by_one_token_at_the_source",
    ),
    Row(
        "`rollout_log_probs` at the source",
        "pi_old under another name",
        _TRAINER,
        "first",
        f"{SABOTAGE}::test_mu_replaced_by_pi_old_at_the_source",
    ),
    Row(
        "`rollout_log_probs` at the source",
        "of other rows",
        _BEFORE,
        "each",
        f"{ROLLOUT}::test_rows_permuted_at_the_source",
    ),
    Row(
        "`rollout_log_probs` at the source",
        "zeros",
        _BEFORE,
        "each",
        f"{ROLLOUT}::test_zeros",
    ),
    Row(
        "`rollout_log_probs` at the source",
        "a number at single tokens",
        _BEFORE,
        "each",
        f"{ROLLOUT}::test_a_number_at_single_tokens",
    ),
    Row(
        "the correction on a worker",
        "without weight, without masks, another bound",
        _TRAINER,
        "each",
        f"{SABOTAGE}::test_spec_altered_on_the_worker",
    ),
    Row(
        "the loss",
        "verl's own in its place",
        _TRAINER,
        "each",
        f"{SABOTAGE}::test_adapter_switched_off",
    ),
    Row(
        "weights handed to verl",
        "wrong values, or a gradient of their own",
        _TRAINER,
        _FIRST,
        f"{SABOTAGE}::test_weights_handed_over_wrongly",
    ),
    Row(
        "weights handed to verl",
        "dropped by verl",
        _TRAINER,
        _FIRST,
        f"{SABOTAGE}::test_verl_drops_the_weights",
    ),
    Row(
        "the decision",
        "other bounds, levels, policies",
        _TRAINER,
        _FIRST,
        f"{SABOTAGE}::test_the_stages_decide_something_else",
    ),
    Row(
        "the decision",
        "by other values than those given",
        _TRAINER,
        _FIRST,
        f"{SABOTAGE}::test_the_decision_reads_something_else",
    ),
    Row(
        "a penalty",
        "another ratio or coefficient",
        _TRAINER,
        _FIRST,
        f"{SABOTAGE}::test_a_penalty_that_is_another",
    ),
    Row(
        "after the first update",
        "wrong or dropped weights, scaled loss",
        _TRAINER,
        "each, or where it is proved again",
        f"{AGAIN}::test_faults_after_the_first_update",
    ),
    Row(
        "rows of extensions",
        "changed, missing, twice, back",
        _TRAINER,
        "each",
        f"{LEAVING}::test_a_row_that_is_changed_missing_doubled_or_back_stops_the_run",
    ),
    Row(
        "routes of experts",
        "of other tokens",
        _WORKER,
        "each",
        f"{ROUTES}::test_checksums_show_routes_of_another_row",
    ),
)


def rows() -> list[Row]:
    """All rows: of each input of the loss, then the others."""
    hows: dict[str, list[str]] = {}
    for fault in faults():
        hows.setdefault(fault.what, []).append(fault.how)
    found = [
        Row(f"`{what}`" if " " not in what else what, ", ".join(how), _WORKER, "each", INPUTS)
        for what, how in hows.items()
    ]
    return [*found, *OTHERS]


def render() -> str:
    """Return the table, with how many kinds of faults between trainer and loss it has."""
    lines = [
        BEGIN,
        f"{sum(1 for _ in faults())} kinds of faults between trainer and loss, each injected at the first update and "
        "at a later one, and faults elsewhere:",
        "",
        "| what | how it is wrong | where it stops the run | at which update | test |",
        "|---|---|---|---|---|",
        *(
            f"| {row.what} | {row.how} | {row.where} | {row.when} | `{row.test.removeprefix('tests/')}` |"
            for row in rows()
        ),
        END,
    ]
    return "\n".join(lines)


def find_missing_tests() -> list[str]:
    """Return the tests that the table names and that are not there."""
    missing = []
    for row in rows():
        path, _, name = row.test.partition("::")
        text = (ROOT / path).read_text() if (ROOT / path).exists() else ""
        if not re.search(rf"^def {name or 'test_'}", text, re.M):
            missing.append(row.test)
    return missing


if __name__ == "__main__":
    page = ROOT / TABLE
    text = page.read_text()
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    page.write_text(before + render() + after)
