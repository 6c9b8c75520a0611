"""Validation in rounds, around a stand-in for verl's loop and around verl's own metrics."""

from __future__ import annotations

import random
import uuid
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from recipe.offpolicy.extensions.pass_at_k.estimates import unbiased, unbiased_dynamic
from recipe.offpolicy.extensions.pass_at_k.pass_at_k import PassAtK

RATES = (0.0, 0.05, 0.5, 1.0, 0.1)


class Trainer:
    """verl's ``_validate``: names prompts by the uid that is there (V0), or by one of its own (V1)."""

    def __init__(self, *, v1: bool, n: int = 4, lost: Mapping[int, int] | None = None) -> None:
        self.v1, self.n, self.lost = v1, n, lost or {}
        self.config = OmegaConf.create(
            {
                "actor_rollout_ref": {"rollout": {"val_kwargs": {"n": n}}},
                "trainer": {"validation_data_dir": "dumps", "log_val_generations": 10},
            }
        )
        prompts = list(range(len(RATES)))
        self.val_dataloader: Any = [self._batch(prompts[:3]), self._batch(prompts[3:])]
        self.random = random.Random(0)
        self.rounds: list[tuple[list[int], Any, int]] = []
        self.hook: Any = None

    def _batch(self, prompts: list[int]) -> dict[str, Any]:
        sources = np.array(["easy" if RATES[prompt] > 0.3 else "hard" for prompt in prompts], dtype=object)
        return {"number": torch.tensor(prompts), "data_source": sources, "raw_prompt": [str(p) for p in prompts]}

    def validate(self) -> dict[str, float]:
        sources, uids, rewards, asked = [], [], [], []
        for batch in self.val_dataloader:
            if self.v1:
                batch["uid"] = np.array([str(uuid.uuid4()) for _ in batch["raw_prompt"]], dtype=object)
            for row, number in enumerate(batch["number"].tolist()):
                assert batch["raw_prompt"][row] == str(number)
                asked.append(number)
                for _ in range(self.n - self.lost.get(number, 0)):
                    sources.append(batch["data_source"][row])
                    uids.append(batch["uid"][row])
                    rewards.append(float(self.random.random() < RATES[number]))
        section = self.config.trainer
        self.rounds.append((asked, section.validation_data_dir, section.log_val_generations))
        np.random.seed(42)  # as verl's bootstrap does
        mean = sum(rewards) / len(rewards)
        return {"val-core/mean": mean} | dict(self.hook(sources, uids, {"reward": rewards}))


def run(trainer: Trainer, **settings: Any) -> dict[str, float]:
    metric = {"k": [1, 4], "extrapolate": []}
    extension = PassAtK("pass_at_k", {"objective": "none", "metric": metric} | settings)
    trainer.hook = extension.validation_metrics
    return extension.validate(trainer, trainer.validate)


@pytest.mark.parametrize("v1", [False, True])
def test_one_round_estimates_each_source(v1: bool) -> None:
    trainer = Trainer(v1=v1)
    loader = trainer.val_dataloader
    found = run(trainer)
    assert trainer.val_dataloader is loader
    assert "uid" not in loader[0]
    assert [asked for asked, _, _ in trainer.rounds] == [[0, 1, 2, 3, 4]]
    again = random.Random(0)
    counts = [sum(again.random() < rate for _ in range(4)) for rate in RATES]
    assert found["pass_at_k/val/easy/pass@1"] == pytest.approx((counts[2] + counts[3]) / 8)
    hard = [unbiased(4, counts[number], 4) for number in (0, 1, 4)]
    assert found["pass_at_k/val/hard/pass@4"] == pytest.approx(sum(hard) / 3)
    assert (found["pass_at_k/val/hard/prompts"], found["pass_at_k/val/hard/samples"]) == (3.0, 12.0)
    assert "val-core/mean" in found


@pytest.mark.parametrize("v1", [False, True])
def test_rounds_sample_only_prompts_that_are_not_solved(v1: bool) -> None:
    trainer = Trainer(v1=v1)
    found = run(trainer, dynamic={"successes": 1, "max_samples": 16})
    first = trainer.rounds[0][0]
    assert first == [0, 1, 2, 3, 4]
    assert 2 <= len(trainer.rounds) <= 4
    for (before, _, _), (after, folder, shown) in zip(trainer.rounds, trainer.rounds[1:], strict=False):
        assert set(after) <= set(before)
        assert 3 not in after
        assert 0 in after
        assert folder.startswith("dumps/round_")
        assert shown == 0
    samples = sum(4 * len(asked) for asked, _, _ in trainer.rounds)
    total = found["pass_at_k/val/easy/samples"] + found["pass_at_k/val/hard/samples"]
    assert total == samples <= 5 * 16
    assert len(trainer.rounds) == 4  # prompt 0 is never solved
    assert trainer.config.trainer == {"validation_data_dir": "dumps", "log_val_generations": 10}


def test_rounds_are_estimated_by_their_rule_and_verls_keys_are_the_first_rounds() -> None:
    """All right at once: 1; never: 0; the metrics of verl are those of 4 samples of each prompt."""
    trainer, plain = Trainer(v1=True), Trainer(v1=True)
    found = run(trainer, dynamic={"successes": 1, "max_samples": 12})
    assert found["val-core/mean"] == run(plain)["val-core/mean"]
    again = random.Random(0)
    first = [sum(again.random() < rate for _ in range(4)) for rate in RATES]
    assert first[2] >= 1  # so that both easy prompts ended at the first look
    wanted = [unbiased_dynamic([4, 8, 12], 4, first[number], 4, successes=1) for number in (2, 3)]
    assert found["pass_at_k/val/easy/pass@4"] == pytest.approx(sum(wanted) / 2)


def test_a_session_that_failed_counts_as_wrong() -> None:
    found = run(Trainer(v1=True, lost={3: 2}))
    again = random.Random(0)
    counts = [sum(again.random() < rate for _ in range(4)) for rate in RATES[:3]]
    assert found["pass_at_k/val/easy/pass@1"] == pytest.approx((counts[2] + 2) / 8)


@pytest.mark.parametrize("fails", [1, 2])
def test_what_was_replaced_is_back_after_a_failure(fails: int) -> None:
    trainer = Trainer(v1=True)
    loader, validate = trainer.val_dataloader, trainer.validate

    def failing() -> dict[str, float]:
        if len(trainer.rounds) + 1 == fails:
            raise RuntimeError("the engine is gone")
        return validate()

    trainer.validate = failing  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="engine"):
        run(trainer, dynamic={"successes": 1})
    assert trainer.val_dataloader is loader
    assert trainer.config.trainer == {"validation_data_dir": "dumps", "log_val_generations": 10}


def test_results_that_verl_merges_later_are_estimated_then() -> None:
    extension = PassAtK("pass_at_k", {"objective": "none", "metric": {"k": [1], "extrapolate": [8]}})
    found = extension.validation_metrics(["s"] * 4, ["a", "a", "b", "b"], {"reward": [1.0, 0.0, 0.0, 0.0]})
    assert found["pass_at_k/val/s/pass@1"] == 0.25
    assert found["pass_at_k/val/s/unsolved_share"] == 0.5
    assert found.keys() >= {"pass_at_k/val/s/beta_a", "pass_at_k/val/s/extrapolated@8"}


def test_beside_verls_own_metrics_of_several_sizes() -> None:
    """verl scatters prompts of 8 and of 32 samples over two names; ours cover each prompt once."""
    from verl.trainer.ppo.metric_utils import process_validation_metrics

    rewards = [1.0] * 8 + [0.0] * 31 + [1.0]
    uids = ["easy"] * 8 + ["hard"] * 32
    of_verl = process_validation_metrics(["s"] * 40, uids, {"reward": rewards})["s"]["reward"]
    assert of_verl["mean@8"] == 1.0
    assert of_verl["mean@32"] == pytest.approx(1 / 32)
    extension = PassAtK("pass_at_k", {"objective": "none", "metric": {"k": [1, 8], "extrapolate": []}})
    found = extension.validation_metrics(["s"] * 40, uids, {"reward": rewards})
    assert found["pass_at_k/val/s/pass@1"] == pytest.approx((1 + 1 / 32) / 2)
    assert found["pass_at_k/val/s/pass@8"] == pytest.approx((1 + 1 / 4) / 2)
