"""docs/migrate.md: each row of keys is the same correction on both sides, and the named metrics are equal."""

from __future__ import annotations

import re
import shlex

import pytest
import torch
import yaml

from recipe.offpolicy.analysis.whatif.candidates import compose_correction, initialize_composer
from recipe.offpolicy.correction import CorrectionSpec
from tests.support.corrections import run, values
from tests.support.paths import ROOT

helper = pytest.importorskip("verl.trainer.ppo.rollout_corr_helper")
PAGE = (ROOT / "docs" / "migrate.md").read_text()
ROWS = re.findall(r"^\| `((?:rollout|bypass)_[^`]*=[^`]*)` \| `([^`]*)` \|$", PAGE, re.M)
METRICS = {
    "kl": "kl/k1",
    "k3_kl": "kl/k3",
    "chi2_token": "rollout_ratio/chi2",
    "chi2_seq": "rollout_ratio_sequence/chi2",
    "rollout_is_mean": "weight/mean",
    "rollout_is_std": "weight/std",
    "rollout_is_eff_sample_size": "weight/ess",
}


def parse(keys: str) -> dict[str, object]:
    """verl's keys, a pair of bounds or names as text."""
    pairs = (each.split("=") for each in keys.split())
    return {key: value if "_" in value else yaml.safe_load(value) for key, value in pairs}


@pytest.mark.parametrize(("keys", "overrides"), ROWS)
def test_a_row_is_the_same_correction(keys: str, overrides: str) -> None:
    """But for the names of masks, and for pi_old, which verl recomputes where ours may reuse the current policy."""
    wanted = CorrectionSpec.from_verl(parse(keys))
    words = [each.replace("+correction@", "") for each in shlex.split(overrides) if "loss_mode" not in each]
    with initialize_composer():
        found = CorrectionSpec.from_mapping(compose_correction(words))
    assert found.weight == wanted.weight
    assert [mask for _, mask in found.masks] == [mask for _, mask in wanted.masks]
    assert (found.proximal == "bypass") == (wanted.proximal == "bypass")
    assert ("loss_mode=gpg" in overrides) == wanted.weighs_full_ratio


def test_the_metrics_that_are_called_equal_are() -> None:
    assert len(ROWS) == 15
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(6, 9, dtype=torch.float64, generator=generator)
    mu = old + 0.3 * torch.randn(6, 9, dtype=torch.float64, generator=generator)
    mask = (torch.arange(9) < torch.tensor([[9], [5], [9], [7], [3], [9]])).long()
    keys = {"rollout_is": "token", "rollout_is_threshold": 1.5}
    *_, theirs = helper.compute_rollout_correction_and_rejection_mask(old, mu, mask, **keys)
    ours = values(run(CorrectionSpec.from_verl(keys), mu=mu, old=old, pi=old, mask=mask))
    for name, key in METRICS.items():
        assert f"`{name}`" in PAGE
        assert f"`{key}`" in PAGE
        assert float(theirs[f"rollout_corr/{name}"]) == pytest.approx(ours[key], rel=1e-4, abs=1e-7), name
    reject = {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.8_1.25"}
    *_, theirs = helper.compute_rollout_correction_and_rejection_mask(old, mu, mask, **reject)
    ours = values(run(CorrectionSpec.from_verl(reject), mu=mu, old=old, pi=old, mask=mask))
    assert 0.1 < ours["keep/token_share"] < 0.9
    assert float(theirs["rollout_corr/rollout_rs_masked_fraction"]) == pytest.approx(1 - ours["keep/token_share"])
