"""The trainer's verdict on the evidence of an update, and the text that describes it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.correction.spec import compute_fingerprint
from recipe.offpolicy.proof.gradient import Proof, ShiftResult, isolate_parts
from recipe.offpolicy.proof.verify import LivenessError, describe_proof, describe_rest, verify, verify_update
from recipe.offpolicy.trainer.supervision import ENOUGH, draw_rows
from recipe.offpolicy.worker.metrics import Packet
from tests.support.corrections import GSM, TIS, spec

BOTH = spec(TIS, gsm=GSM)
ALIVE = ShiftResult(1e-6, vacuous=False)
PROOF = Proof(
    tokens=10,
    identical_tokens=2,
    tolerance=1e-4,
    log_prob_bits=32,
    distances=(5.0, 1.0, 5.0),
    inner_tokens=8,
    shifts={"weight": ALIVE, "masks.gsm": replace(ALIVE, error=2e-6)},
    gradient_tokens=7,
    gradient_error=1e-5,
)


def packets(correction: CorrectionSpec = BOTH, proof: Proof = PROOF) -> list[Packet]:
    """The packets of two micro-batches, with rows 1 and 2, and row 3."""
    fingerprint = compute_fingerprint(correction, [])
    return [Packet(fingerprint, rows=[1, 2], proof=proof), Packet(fingerprint, rows=[3], proof=proof)]


def test_complete_evidence() -> None:
    assert verify(packets(), BOTH, sampled_rows=[3, 2, 1]) == {
        "proved": 1.0,
        "fingerprint": float(compute_fingerprint(BOTH, [])),
        "rows": 3.0,
        "gradient_tokens": 14.0,
        "gradient_error": 1e-5,
        "shift_error": 2e-6,
        "parts": 2.0,
        "identical_share": 0.2,
        "log_prob_bits": 32.0,
        "own_rows": 0.0,
        "factor": 0.0,
        "denominators": 0.0,
    }


def test_an_update_without_a_gradient_is_not_judged_proved() -> None:
    assert verify(packets(proof=replace(PROOF, gradient_tokens=0)), BOTH, sampled_rows=[1, 2, 3])["proved"] == 0.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gradient_error": None}, "no gradient reached the log-probs"),
        ({"gradient_error": math.inf}, "did not go through the corrected loss"),
        ({"gradient_error": math.nan}, r"not weight \* keep"),
        ({"gradient_error": 2e-4}, "relative error 0.0002, tolerance 0.0001"),
        ({"identical_tokens": 10}, "mu equals pi_old bitwise on all 20 tokens"),
        ({"distances": (5.0, 3.0, 1.0)}, "but mu of the token after differs by 2"),
        ({"distances": (1.0, 3.0, 5.0)}, "but mu of the token before differs by 2"),
        ({"distances": (1.0, 3.0, 5.0), "inner_tokens": 4}, "but mu of the token before differs by 2"),
        ({"row_distances": (9.0, 15.0)}, "differs from pi_old by 18 nats, but from pi_old of other sequences by 30"),
        ({"shifts": {"weight": ALIVE}}, "masks.gsm was not tested"),
        ({"shifts": PROOF.shifts | {"weight": ShiftResult(0.5, vacuous=False)}}, "weight has no effect"),
        ({"shifts": PROOF.shifts | {"weight": ShiftResult(math.nan, vacuous=False)}}, "weight has no effect"),
        ({"shifts": PROOF.shifts | {"masks.gsm": ShiftResult(0.0, vacuous=True)}}, "no evidence that masks.gsm acts"),
    ],
)
def test_faulty_evidence(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LivenessError, match=message):
        verify(packets(proof=replace(PROOF, **changes)), BOTH, sampled_rows=[1, 2, 3])


def test_identical_log_probs_may_be_meant() -> None:
    same = packets(proof=replace(PROOF, identical_tokens=10))
    assert verify(same, BOTH, sampled_rows=[1, 2, 3], allow_identical=True)["identical_share"] == 1.0


def test_a_policy_that_moved_is_nearer_to_its_own_rows() -> None:
    moved = packets(proof=replace(PROOF, row_distances=(9.0, 20.0)))
    assert verify(moved, BOTH, sampled_rows=[1, 2, 3])["proved"] == 1.0


@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_few_tokens_are_not_judged_off_by_one(tokens: int) -> None:
    """In short answers, few tokens have two neighbours, and one of them may agree better with a neighbour by chance."""
    proof = replace(PROOF, distances=(0.1, 0.3, 2.0), inner_tokens=tokens // 2)
    last = replace(proof, inner_tokens=tokens - tokens // 2)
    first, second = packets()
    parts = [replace(first, proof=proof), replace(second, proof=last)]
    assert verify(parts, BOTH, sampled_rows=[1, 2, 3])["proved"] == 1.0


@pytest.mark.parametrize(
    ("tamper", "message"),
    [
        (lambda found: [], "the corrected loss returned no metrics"),
        (lambda found: [replace(found[0], fingerprint=5), found[1]], "fingerprint 5 instead of the trainer's"),
        (
            lambda found: [replace(found[0], bounds={"gsm": {"upper": 9.0}}), found[1]],
            "but the trainer sent",
        ),
        (lambda found: found[:1], "used 2 of the 3 sequences"),
        (lambda found: [replace(found[0], rows=[1, 4]), found[1]], "1 of 3 sequences were not found .* and 1 were not"),
    ],
)
def test_every_update_is_held_against_what_was_sent(
    tamper: Callable[[list[Packet]], list[Packet]], message: str
) -> None:
    verify_update(packets(), BOTH, sampled_rows=[1, 2, 3])
    with pytest.raises(LivenessError, match=message):
        verify_update(tamper(packets()), BOTH, sampled_rows=[1, 2, 3])


def test_a_micro_batch_without_a_proof() -> None:
    first, second = packets()
    with pytest.raises(LivenessError, match="1 of 2 micro-batches have no proof"):
        verify([first, replace(second, proof=None)], BOTH, sampled_rows=[1, 2, 3])


NUMBERS = {"gradient_tokens": 6.0, "gradient_error": 1e-7, "rows": 4.0, "fingerprint": 5.0}
LIVE = NUMBERS | {"own_rows": 1.0, "factor": 1.0, "denominators": 1.0}
PARTS = {"weight": TIS, "masks": {"gsm": GSM}}


@pytest.mark.parametrize(
    ("mapping", "changes", "sealed", "said"),
    [
        (PARTS, {}, [], "columns of the loss"),
        (PARTS, {"own_rows": 0.0}, ["plan"], "that log pi belongs to its own sequences"),
        (PARTS, {"factor": 0.0}, ["plan"], "the engine's factor"),
        (PARTS, {"denominators": 0.0}, ["plan"], "verl's denominators"),
        ({"weight": TIS | {"level": "version"}}, {}, ["model_input", "versions"], "versions per token"),
        (PARTS, {}, ["plan"], "the model's input"),
        (PARTS | {"baseline": "exclude"}, {}, ["plan"], "baseline=exclude"),
        (
            {"masks": {"gsm": GSM | {"ratio": "full"}}, "proximal": "bypass"},
            {"parts": 1.0},
            ["plan"],
            "proximal (verl's loss",
        ),
    ],
)
def test_what_was_not_proved_is_named(mapping: Any, changes: dict[str, float], sealed: list[str], said: str) -> None:
    live = LIVE | {"parts": 2.0} | changes
    correction = CorrectionSpec.from_mapping(mapping)
    found = describe_rest(correction, live, sealed, {"delivery": "offpolicy.delivery is off."})
    missing = found.partition("Not proved: ")[2]
    assert said in missing
    assert missing.endswith("delivery (offpolicy.delivery is off).")
    assert "proximal" not in describe_proof(correction, live)


def test_weights_by_sign_and_a_penalty_are_parts() -> None:
    weights = {"up": TIS | {"when": "positive"}, "down": TIS | {"when": "negative"}}
    penalty = {"ratio": "full", "coefficient": 0.1}
    correction = CorrectionSpec.from_mapping({"weights": weights, "penalty": penalty})
    parts = dict(isolate_parts(correction))
    assert list(parts) == ["weights.down", "weights.up", "penalty"]
    assert [name for name, _ in parts["weights.up"].weights] == ["up"]
    assert parts["penalty"] == CorrectionSpec(penalty=correction.penalty)


def test_a_first_proof_sees_the_first_the_last_and_the_longest_row_of_each_rank() -> None:
    tokens = torch.tensor([300, 1, 1, 900, 1, 1, 300, 1, 0, 5, 1, 1, 1, 2, 1, 400])
    drawn = draw_rows(tokens, 2, seed="1", first=True)
    # Of rank 0 rows 0, 7 and 3; of rank 1 rows 9, 15, which is the longest too; and one at random of each.
    assert {0, 3, 7, 9, 15} <= set(drawn.nonzero().flatten().tolist())
    assert 5 <= int((drawn > 0).sum()) <= 7
    assert (drawn == 2).nonzero().flatten().tolist() == [3, 15]
    assert drawn[8] == 0  # no response


def test_short_rows_are_drawn_until_they_are_enough() -> None:
    tokens = torch.full((1000,), 10)
    assert int((draw_rows(tokens, 1, seed="1", first=True) > 0).sum()) == -(-ENOUGH // 10)
    assert int(draw_rows(tokens[:7], 1, seed="1", first=True).sum()) == 8  # one of them with trials


def test_a_rank_without_a_response_is_asked_nevertheless() -> None:
    assert draw_rows(torch.tensor([0, 0, 4, 4]), 2, seed="1", first=False)[:2].sum() == 2


def test_with_bypass_mu_has_to_stand_in_pi_olds_place() -> None:
    bypass = replace(BOTH, proximal="bypass")
    proof = replace(PROOF, identical_tokens=10, shifts=PROOF.shifts | {"proximal": ALIVE})
    assert verify(packets(bypass, proof), bypass, sampled_rows=[1, 2, 3])["parts"] == 3.0
    with pytest.raises(LivenessError, match="16 of 20 tokens have another value"):
        verify(packets(bypass, replace(proof, identical_tokens=2)), bypass, sampled_rows=[1, 2, 3])
