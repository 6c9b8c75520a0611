"""Measures of a replayed correction, and the steps of its replay, by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recipe.offpolicy.analysis.whatif import measures as module
from recipe.offpolicy.analysis.whatif.candidates import UNCORRECTED, Candidate
from recipe.offpolicy.analysis.whatif.measures import (
    Agreement,
    CorrectionMeasures,
    build_reference_block,
    compare_pairs,
    compute_agreement,
    weigh_advantages,
)
from recipe.offpolicy.analysis.whatif.replay import (
    Block,
    RecordedLoss,
    check_replayable,
    compute_pi_old,
    decide,
    iterate_blocks,
    pad_rows,
)
from recipe.offpolicy.analysis.whatif.study import Study, run_study
from recipe.offpolicy.correction import BatchConstants, CorrectionSpec, SpecError
from recipe.offpolicy.correction.correction_parts import PenaltySpec
from recipe.offpolicy.recording import Recording, Rows
from tests.support.acted import by_hand, recorded
from tests.support.corrections import TIS, band, spec
from tests.support.recordings import sampled_by

LOG2 = math.log(2.0)
# pi_old / mu by token: row 0 (A = 1): 4, 1, 1/2; row 1 (A = -2): 2, 2. All powers of two.
MU = [[-3.0, -2.0, -1.0], [-2.0, -2.0]]
OLD = [[-3.0 + 2 * LOG2, -2.0, -1.0 - LOG2], [-2.0 + LOG2, -2.0 + LOG2]]
A = np.array([1, 1, 1, -2, -2], dtype=np.float32)
TOKEN_TIS = spec(TIS)  # min(rho, 2)
BAND = spec(None, band=band(0.5, 1.7))  # geometric means: row 0 (4 * 1 * 1/2)^(1/3) = 1.26, row 1 2.0


def replayed(path: Path, rows: Rows, *specs: CorrectionSpec, acting: CorrectionSpec | None = None) -> Study:
    recording = Recording(recorded(path, acting or spec(), rows))
    named = [Candidate(f"#{place}", f"#{place}", {}, one) for place, one in enumerate(specs)]
    return run_study(recording, recording.steps, [Candidate(UNCORRECTED, UNCORRECTED), *named])


@pytest.fixture
def trust_two_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand, two rows serve as the reference."""
    monkeypatch.setattr(module, "FEW", 1.0)


def close(measured: CorrectionMeasures, **expected: Any) -> None:
    for name, value in expected.items():
        assert getattr(measured, name) == pytest.approx(value, rel=1e-6, abs=1e-9), name


@pytest.mark.usefixtures("trust_two_rows")
def test_truncated_weights(tmp_path: Path) -> None:
    """w = 2, 1, 1/2 | 2, 2 and A = 1, 1, 1 | -2, -2; rho by token 4, 1, 1/2 | 2, 2, by row 2, 2, 2 | 4, 4."""
    outcome = replayed(tmp_path, by_hand(OLD, MU, advantages=A), TOKEN_TIS).outcomes[1]
    close(
        outcome.overall,
        tokens=5,
        rows=2,
        kept_tokens=1.0,
        kept_rows=1.0,
        # sum w = 7.5, sum w^2 = 4 + 1 + 1/4 + 4 + 4 = 13.25.
        ess=7.5**2 / (5 * 13.25),
        # A weight rejects nothing.
        mismatch_left=1.0,
        # sum (w A)^2 = 4 + 1 + 1/4 + 16 + 16 = 37.25; sum A^2 = 3 + 8 = 11.
        lr_scale=math.sqrt(37.25 / 11),
        # rho_row = 2 and 4: (2 + 4)^2 / (4 + 16).
        reference_rows=36 / 20,
        # By token only the first differs, 2 against 4: sum ((w - rho) A)^2 = 4; sum (rho A)^2 = 16 + 1 + 1/4 + 32.
        bias_token=math.sqrt(4 / 49.25),
        # Both rows have T <= 16; cells by sign: A > 0 has the shift -2 over 3 tokens, A < 0 none. (-2)^2 / 3.
        bias_token_systematic=math.sqrt(4 / 3 / 49.25),
        # By row (w - rho) A = 0, -1, -3/2 | 4, 4: 0 + 1 + 2.25 + 32 = 35.25; sum (rho A)^2 = 3 * 4 + 2 * 64 = 140.
        bias_sequence=math.sqrt(35.25 / 140),
        # (-2.5)^2 / 3 + 8^2 / 2.
        bias_sequence_systematic=math.sqrt((6.25 / 3 + 32) / 140),
    )


@pytest.mark.usefixtures("trust_two_rows")
def test_a_mask(tmp_path: Path) -> None:
    """Row 1 is rejected: f A = 1, 1, 1 | 0, 0."""
    outcome = replayed(tmp_path, by_hand(OLD, MU, advantages=A), BAND).outcomes[1]
    close(
        outcome.overall,
        kept_tokens=3 / 5,
        kept_rows=1 / 2,
        # Ones on what is kept: ESS is the kept share.
        ess=3 / 5,
        # k3 = rho - 1 - log rho: row 0 has 3 - 2 log 2, 0 and log 2 - 1/2, row 1 twice 1 - log 2.
        mismatch_left=(2.5 - LOG2) / (2.5 - LOG2 + 2 * (1 - LOG2)),
        lr_scale=math.sqrt(3 / 11),
        # (f - rho) A = -3, 0, 1/2 | 4, 4.
        bias_token=math.sqrt((9 + 0.25 + 32) / 49.25),
        # (-2.5)^2 / 3 + 8^2 / 2.
        bias_token_systematic=math.sqrt((6.25 / 3 + 32) / 49.25),
        # -1, -1, -1 | 8, 8.
        bias_sequence=math.sqrt((3 + 128) / 140),
        bias_sequence_systematic=math.sqrt((9 / 3 + 16**2 / 2) / 140),
    )
    assert outcome.groups["advantage/positive"].kept_tokens == 1.0
    assert outcome.groups["advantage/negative"].kept_tokens == 0.0
    assert outcome.groups["advantage/negative"].lr_scale == 0.0
    assert outcome.groups["advantage/negative"].ess == 0.0
    assert set(outcome.groups) == {"length/le16", "advantage/positive", "advantage/negative", "staleness/is0"}
    assert outcome.steps[1] == outcome.overall
    assert list(outcome.turns) == ["turn/is0"]


def test_the_base_loss_brings_its_own_ratio(tmp_path: Path) -> None:
    """pi / pi_old = 2 on the first token: its gradient weight is w 2 A, and the uncorrected weight is 2 A."""
    log_prob = np.concatenate([np.asarray(row, dtype=np.float32) for row in OLD])
    log_prob[0] += LOG2
    rows = by_hand(OLD, MU, advantages=A, log_prob=log_prob)
    full = CorrectionSpec.from_mapping({"weight": TIS | {"ratio": "full", "upper": 100.0}})
    _, tis, gpg = replayed(tmp_path, rows, TOKEN_TIS, full).outcomes
    # Uncorrected 4 + 1 + 1 + 4 + 4 = 14; corrected (2 * 2)^2 + 1 + 1/4 + 16 + 16.
    assert tis.overall.lr_scale == pytest.approx(math.sqrt(49.25 / 14))
    # A weight on pi / mu stands next to a loss without a ratio: f = 8, 1, 1/2 | 2, 2, the reference itself.
    assert gpg.overall.lr_scale == pytest.approx(math.sqrt((64 + 1 + 0.25 + 32) / 14))
    assert gpg.overall.bias_token == pytest.approx(0, abs=1e-6)


YES, NO = True, False
# Two rows of four tokens; the last token of row 1 is not compared.
COUNTED = torch.tensor([[YES, YES, YES, YES], [YES, YES, YES, NO]])
ALL = torch.ones(2, 4, dtype=torch.bool)


def agreement_of(*keep: torch.Tensor, weighed: list[torch.Tensor] | None = None) -> Agreement:
    return compute_agreement(compare_pairs(keep, weighed or [one.double() for one in keep], COUNTED))


def test_cosine() -> None:
    """The cosine of (1, 1) and (1, 0) is 1 / sqrt 2; without a gradient, there is no direction."""
    one = torch.tensor([[1.0, 1.0, 0, 0], [0, 0, 0, 0]], dtype=torch.float64)
    other = torch.tensor([[3.0, 0, 0, 0], [0, 0, 0, 0]], dtype=torch.float64)
    agreement = agreement_of(ALL, ALL, ALL, weighed=[one, other, one * 0])
    assert agreement.cosine[0, 1] == pytest.approx(math.sqrt(0.5))
    assert agreement.cosine[0, 0] == pytest.approx(1.0)
    assert math.isnan(agreement.cosine[0, 2])


def test_the_clip_is_that_of_ppo() -> None:
    """The result equals autograd's gradient of PPO's dual-clip loss."""
    log_ratio = torch.linspace(-2, 2, 41, dtype=torch.float64)
    for sign in (1.0, -1.0):
        advantages = torch.full_like(log_ratio, sign)
        leaf = log_ratio.clone().requires_grad_()
        ratio = leaf.exp()
        loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.28))
        loss = torch.where(advantages < 0, torch.minimum(loss, -advantages * 3.0), loss)
        (gradient,) = torch.autograd.grad(loss.sum(), leaf)
        factor = RecordedLoss("vanilla", 0.2, 0.28, 3.0).compute_factor(log_ratio[None], advantages[None])[0]
        torch.testing.assert_close(factor * -advantages, gradient)


ROWS = by_hand(OLD, MU, advantages=np.ones(5, dtype=np.float32))


@pytest.mark.parametrize(("ratio", "expected"), [("full", [2.0, 0.0, -1.0]), ("ppo", [0.0, 0.0, 0.0])])
def test_a_penalty_pulls_by_twice_its_log_ratio(ratio: str, expected: list[float]) -> None:
    """pi is pi_old here: log pi / mu of row 0 is 2, 0 and -1 in units of log 2, and log pi / pi_old is 0."""
    penalised = CorrectionSpec(penalty=PenaltySpec(ratio, 0.25))  # type: ignore[arg-type]
    rows = replace(ROWS, log_prob=ROWS.old_log_prob)
    block = next(block for block in iterate_blocks(rows) if 0 in block.rows)
    of = build_reference_block(block, RecordedLoss("gpg"))
    decision = decide(penalised, CorrectionSpec(), block, BatchConstants())
    plain = replace(penalised, penalty=None)
    pull = weigh_advantages(plain, decision, of) - weigh_advantages(penalised, decision, of)
    first = pull[list(block.rows).index(0), :3]
    torch.testing.assert_close(first, 2 * 0.25 * LOG2 * torch.tensor(expected, dtype=torch.float64))


# pi / pi_old: 2 on the first token, else 1.
PI = np.array([-3.0 + 3 * LOG2, -2.0, -1.0 - LOG2, -2.0 + LOG2, -2.0 + LOG2], dtype=np.float32)
NONE = spec()


def rows() -> Rows:
    return by_hand(OLD, MU, log_prob=PI, advantages=A)


def test_what_was_not_recorded_is_not_replayed() -> None:
    bypassed = replace(NONE, proximal="bypass")
    check_replayable(TOKEN_TIS, NONE, rows())
    check_replayable(bypassed, bypassed, rows())
    with pytest.raises(SpecError, match=r"correction\.proximal=recompute: the run used correction\.proximal=bypass"):
        check_replayable(TOKEN_TIS, bypassed, rows())
    by_version = spec(TIS | {"level": "version"})
    check_replayable(by_version, NONE, sampled_by(rows(), [3, 4]))
    with pytest.raises(SpecError, match="for 2 of 2 rows, the weight version that sampled"):
        check_replayable(by_version, NONE, sampled_by(rows(), [2, -1], [3, -1]))


def whole(of: Rows) -> Block:
    return pad_rows(of, np.arange(len(of)))


def test_mu_in_the_place_of_pi_old_is_replayed_where_the_run_would_have_gone_on() -> None:
    """rho is 4, 1, 1/2, and otherwise not 1 in two more tokens: four of five tokens differ. If all were equal, both
    engines would be one.
    """
    one_engine = replace(NONE, proximal="same_engine")
    with pytest.raises(SpecError, match=r"at 4 of 5 tokens mu differs from pi_old by more than 1e-06 nats, so the run"):
        check_replayable(one_engine, NONE, rows())
    alike = replace(rows(), old_log_prob=rows().rollout_log_prob)
    check_replayable(one_engine, NONE, alike)
    check_replayable(TOKEN_TIS, one_engine, alike)
    assert torch.equal(compute_pi_old(one_engine, NONE, whole(alike)), whole(alike).rollout_log_prob)


STALE = spec(stale={"aggregate": "staleness", "level": "token", "upper": 2})


def test_a_token_of_an_unknown_version_is_as_old_as_its_row() -> None:
    mixed = sampled_by(replace(rows(), step=np.full(2, 5)), [3, 1], [4, 3])
    check_replayable(STALE, NONE, mixed)
    assert decide(STALE, NONE, whole(mixed), BatchConstants()).keep.any(-1).tolist() == [True, False]
    with pytest.raises(SpecError, match="depends on the age of the weights, which is unknown for 1 of 2 rows"):
        check_replayable(STALE, NONE, sampled_by(mixed, [3, -1], [4, -1]))
