"""The table of faults in docs/evidence/faults.md, built from the faults that the tests inject.

python -m tests.support.fault_table     rewrites it
"""

from __future__ import annotations

import re
from typing import NamedTuple

from tests.support.input_faults import faults
from tests.support.paths import ROOT

TABLE = "docs/evidence/faults.md"
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
_FIRST = "first, and at later proofs"
_BEFORE = "in the trainer, before the update"
SABOTAGE, AGAIN = "tests/integration/test_sabotage.py", "tests/integration/test_proved_again.py"
ROLLOUT, ROUTES = "tests/unit/proof/test_rollout_checks.py", "tests/unit/replay/test_batch_routes.py"
CLIENT = "tests/unit/staleness/test_client.py"
LEAVING = "tests/unit/trainer/test_rows_that_leave.py"
DELIVERY, BOTH_SIDES = "tests/integration/test_delivery.py", "tests/unit/delivery/test_both_sides.py"
STATISTICS = "tests/unit/delivery/test_probe_statistics.py"
EXTENSIONS = "tests/unit/extensions"
OPD, PREFIXES = f"{EXTENSIONS}/opd", f"{EXTENSIONS}/process_reward/test_prefix_value_rewards.py"
CENTERING = "tests/integration/test_centering_engine.py"
STATE = "tests/unit/fault_tolerance/test_state_schema.py"
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
        "a constant at single tokens",
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
        "replaced by verl's own",
        _TRAINER,
        "each",
        f"{SABOTAGE}::test_adapter_switched_off",
    ),
    Row(
        "weights handed to verl",
        "wrong values, or not detached",
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
        "computed from other inputs",
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
        "each, or at later proofs",
        f"{AGAIN}::test_faults_after_the_first_update",
    ),
    Row(
        "versions of tokens at the source",
        "other versions, other numbers of tokens, a turn lost",
        _BEFORE,
        "each",
        f"{CLIENT}::test_the_trainer_accepts_the_chunks_of_a_row_and_no_others",
    ),
    Row(
        "sequences of extensions",
        "changed, missing, duplicated, returned after removal",
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
    Row(
        "likeliest tokens of score centering",
        "missing, of another row, reordered, rounded",
        _WORKER,
        "each",
        f"{CENTERING}::test_likeliest_tokens_that_changed_stop_the_update",
    ),
    Row(
        "likeliest tokens of score centering",
        "of another mu",
        _WORKER,
        "each",
        f"{CENTERING}::test_another_mu_than_that_of_the_likeliest_stops_the_update",
    ),
    Row(
        "score centering",
        "dropped, of other sign or size",
        _TRAINER,
        _FIRST,
        f"{CENTERING}::test_a_term_that_is_lost_or_changed_fails_the_proof",
    ),
    Row(
        "supports of sampling",
        "missing, or wider than mu's",
        _TRAINER,
        "missing: each; wider: first",
        "tests/unit/support/test_support_verdict.py::test_a_support_that_widens_the_mismatch_stops_the_first_update",
    ),
    Row(
        "supports of sampling",
        "of other tokens",
        _WORKER,
        "first",
        "tests/integration/test_support_engine.py::test_supports_that_are_not_the_tokens_own_stop_the_first_update",
    ),
    Row(
        "replay of routes",
        "fewer tokens, other layers, no gradient in a gate, mismatch not reduced",
        _TRAINER,
        "each; gradient and mismatch: first",
        "tests/unit/replay/test_verdict.py::test_what_is_wrong_stops_the_run",
    ),
    Row(
        "the teacher's log-probs",
        "of other sequences, rounded, lost, disabled for a sequence",
        _TRAINER,
        "each",
        f"{OPD}/test_distillation.py::test_each_fault_on_the_way_stops_the_run",
    ),
    Row(
        "the teacher's log-probs",
        "zeros at the source",
        _BEFORE,
        "each",
        f"{OPD}/test_distillation.py::test_zeros_of_a_teacher_stop_the_run",
    ),
    Row(
        "the teacher's answers",
        "a position lost, duplicated, shifted or of another sequence",
        _BEFORE,
        "each",
        f"{OPD}/test_teacher_client.py::test_a_position_that_is_lost_repeated_shifted_or_foreign_stops",
    ),
    Row(
        "process rewards",
        "from an engine with other weights",
        _BEFORE,
        "first, the one after the first synchronisation, every `probe_every`",
        f"{PREFIXES}::test_an_engine_with_other_weights_stops_at_the_first_step_and_behind_a_synchronisation",
    ),
    Row(
        "process rewards",
        "zeros",
        _BEFORE,
        "each",
        f"{PREFIXES}::test_values_of_zero_are_put_to_the_trainer_at_once",
    ),
    Row(
        "advantages of the length penalty",
        "of another formula",
        _TRAINER,
        "each",
        f"{EXTENSIONS}/length_penalty/test_length_penalty.py::test_a_formula_that_went_wrong_is_found",
    ),
    Row(
        "advantages of pass@k",
        "of another formula",
        _TRAINER,
        "each",
        f"{EXTENSIONS}/pass_at_k/test_pass_at_k.py::test_a_formula_that_went_wrong_is_found",
    ),
    Row(
        "advantages of the optimal baseline",
        "of another formula",
        _TRAINER,
        "each",
        f"{EXTENSIONS}/optimal_baseline/test_optimal_baseline.py::test_a_formula_that_went_wrong_is_found",
    ),
    Row(
        "advantages by turn",
        "of another formula",
        _TRAINER,
        "each",
        f"{EXTENSIONS}/turn_credit/test_turn_credit.py::test_a_formula_that_went_wrong_is_found",
    ),
    Row(
        "learning rate by effective sample size",
        "the scheduler's, or of another factor",
        _TRAINER,
        "each",
        f"{EXTENSIONS}/ess_lr/test_ess_lr.py::test_a_step_at_another_rate_stops_the_run",
    ),
    Row(
        "weights in the rollout engine",
        "not sent, late by one, one layer missing, of another model",
        "at the synchronisation",
        "each",
        f"{DELIVERY}::test_weights_that_are_not_delivered_stop_the_synchronisation",
    ),
    Row(
        "weights in the rollout engine",
        "one expert stale",
        "at the synchronisation",
        "each",
        f"{BOTH_SIDES}::test_a_fault_stops_the_run_at_its_synchronisation",
    ),
    Row(
        "weights in the rollout engine",
        "trained parameters that are not sent",
        "at the synchronisation",
        "first",
        f"{BOTH_SIDES}::test_trained_parameters_that_are_never_sent",
    ),
    Row(
        "a LoRA adapter in the rollout engine",
        "not loaded, or a different one",
        "at the synchronisation",
        "each",
        "tests/unit/delivery/test_comparison.py::test_an_adapter_has_to_be_loaded_and_equal",
    ),
    Row(
        "weights in the rollout engine, probe only",
        "not sent",
        "in the trainer, before an update",
        "see [the table of powers](delivery.md#power-of-the-probe)",
        f"{STATISTICS}::test_an_engine_that_is_not_updated_fails",
    ),
    Row(
        "the rollout engine's prefix cache",
        "kept across synchronisations",
        "in the trainer, before an update",
        "the second probe in a row",
        f"{DELIVERY}::test_a_prefix_cache_that_is_kept",
    ),
    Row(
        "state of a checkpoint",
        "a value changed, lost, of another type",
        "in the trainer, on resume",
        "before the first update",
        f"{STATE}::test_no_mutation_raises_anything_but_a_checkpoint_error",
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
        "at a later one, and other faults:",
        "",
        "| what | fault | where the run stops | at which update | test |",
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
