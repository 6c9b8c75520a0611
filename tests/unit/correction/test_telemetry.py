"""What the two stages report: names and worked numbers; measuring must change nothing."""

from __future__ import annotations

import pytest
import torch

from recipe.offpolicy.correction import CorrectionSpec
from tests.support.corrections import band, run, spec, values
from tests.support.telemetry_cases import CORRECTIONS, NAN, random_batch, stages


@pytest.mark.parametrize("name", CORRECTIONS)
def test_measuring_decides_nothing(name: str) -> None:
    """Only keys are left out; weight and keep equal those of a full measurement."""
    batch = random_batch(5)
    stepped = {
        measure: stages(CORRECTIONS[name], batch, measure=measure) for measure in ("all", "decisions", "nothing")
    }
    everything = values(stepped["all"][1])
    some = values(stepped["decisions"][1])
    assert stepped["nothing"][0].statistics == stepped["nothing"][1].statistics == {}
    assert some == pytest.approx({key: everything[key] for key in some}, nan_ok=True)
    assert {"keep/token_share", "turn/first/keep_token_share", "weight/ess"} <= set(some) < set(everything)
    for _, step in stepped.values():
        assert torch.equal(step.weight, stepped["all"][1].weight)
        assert torch.equal(step.keep, stepped["all"][1].keep)


def test_autocast_takes_no_digits() -> None:
    """The loss runs under autocast; a matrix product in bfloat16 would count only to 256."""
    batch = random_batch(6)
    plain = values(stages(CORRECTIONS["token"], batch)[1])
    with torch.autocast("cpu", torch.bfloat16):
        cast = values(stages(CORRECTIONS["token"], batch)[1])
    assert cast == pytest.approx(plain, rel=0, abs=0, nan_ok=True)


@pytest.mark.parametrize(
    ("tokens", "bucket"),
    [(1, "le16"), (16, "le16"), (17, "le64"), (64, "le64"), (65, "le256"), (257, "le1024"), (4097, "gt4096")],
)
def test_the_edges_of_length_buckets(tokens: int, bucket: str) -> None:
    ones = torch.ones(1, tokens)
    result = values(run(spec(), mu=ones, old=ones))
    found = {name for name, value in result.items() if name.endswith("/sequences") and value == 1.0}
    assert found == {f"length/{bucket}/sequences"}
    assert result[f"length/{bucket}/keep_sequence_share"] == 1.0


def test_a_mask_that_does_not_read_mu_counts_tokens_without_it() -> None:
    """pi / pi_old is e at both tokens, and mu is known only at the first: both are rejected and counted, also
    by sign.
    """
    narrow = band(0.9, 1.1, ratio="ppo", level="token", aggregate="product")
    result = values(
        run(spec(narrow=narrow), mu=[[0.0, NAN]], old=[[0.0, 0.0]], pi=[[1.0, 1.0]], advantages=[[-1.0, 3.0]])
    )
    assert result["mask/narrow/masked_token_share"] == result["mask/narrow/masked_sequence_share"] == 1.0
    assert result["mask/narrow/positive/masked_token_share"] == 1.0
    assert result["keep/token_share"] == 0.0
    unknown = values(run(spec(narrow=narrow), mu=[[NAN, NAN]], old=[[0.0, 0.0]], pi=[[1.0, 0.0]]))
    assert unknown["mask/narrow/masked_token_share"] == 0.5
    assert unknown["mask/narrow/masked_sequence_share"] == 0.0


def test_a_penalty_on_pi_old_counts_tokens_without_mu() -> None:
    """log pi / pi_old is 1 and 3: (1 + 9) / 2."""
    penalised = CorrectionSpec.from_mapping({"penalty": {"ratio": "ppo", "coefficient": 0.1}})
    result = values(run(penalised, mu=[[0.0, NAN]], old=[[0.0, 0.0]], pi=[[1.0, 3.0]]))
    assert result["penalty/mean"] == pytest.approx(5.0)
