"""The extension on verl's own batches: what the workers receive, the proof, draws, and validation in rounds."""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor
from torchdata.stateful_dataloader import StatefulDataLoader

from recipe.offpolicy.extensions.length_penalty.length_penalty import LengthPenalty
from recipe.offpolicy.extensions.pass_at_k import pass_at_k
from recipe.offpolicy.extensions.pass_at_k.estimates import unbiased, unbiased_dynamic
from recipe.offpolicy.extensions.pass_at_k.pass_at_k import PassAtK
from recipe.offpolicy.extensions.pass_at_k.training import NUMBER, advantages
from recipe.offpolicy.fault_tolerance.state_schema import CheckpointError
from recipe.offpolicy.proof.verify import LivenessError
from tests.support.shaped import Rows, make_batch, shape

ONE: Rows = [("a", 3 + row, float(row == 2)) for row in range(8)]
TWO: Rows = [("b", 4, float(row < 2)) for row in range(8)]


def made(objective: str, **settings: Any) -> PassAtK:
    extension = PassAtK("pass_at_k", {"objective": objective} | settings)
    extension.begin(OmegaConf.create({"actor_rollout_ref": {"rollout": {"n": 8}}}))
    return extension


def wanted(rows: Rows, k: int, objective: str) -> Tensor:
    return advantages([score >= 1 for _, _, score in rows], k, objective=objective)


@pytest.mark.parametrize("objective", ["loo", "loo_minus_one", "analytic"])
def test_each_group_gets_its_own_objective(objective: str) -> None:
    found = shape(make_batch([*ONE, *TWO]), made(objective))
    torch.testing.assert_close(found[:8], wanted(ONE, 4, objective), atol=1e-6, rtol=0)
    torch.testing.assert_close(found[8:], wanted(TWO, 4, objective), atol=1e-6, rtol=0)


def test_a_graded_score_is_right_from_the_threshold_on() -> None:
    graded: Rows = [("a", 3, score) for score in (0.9, 0.5, 0.89, 0.0)]
    found = shape(make_batch(graded), made("loo", k=2, correct_at_least=0.9))
    torch.testing.assert_close(found, advantages([1, 0, 0, 0], 2, objective="loo"), atol=1e-6, rtol=0)


def test_the_schedule_goes_back_to_verls_own_to_the_bit() -> None:
    extension = made("loo", k=4, schedule=[[5, 2], [9, 1]])
    for step, k in ((1, 4), (4, 4), (5, 2), (8, 2)):
        found = shape(make_batch(TWO, step=step), extension)
        torch.testing.assert_close(found, wanted(TWO, k, "loo"), atol=1e-6, rtol=0)
    again = made("loo", k=4, schedule=[[5, 2], [9, 1]])
    for one in (extension, again):  # also after a resume
        assert torch.equal(shape(make_batch(TWO, step=9), one), shape(make_batch(TWO)))
    assert extension.metrics()["pass_at_k/k"] == 1.0


def test_groups_that_are_too_small_are_silent_and_counted() -> None:
    """A padding row in a group of one, and a group that has lost rows."""
    extension = made("loo")
    found = shape(make_batch([*TWO, ("pad", 1, 0.0), *[("c", 3, 1.0)] * 2, *[("c", 3, 0.0)] * 2]), extension)
    torch.testing.assert_close(found[:8], wanted(TWO, 4, "loo"), atol=1e-6, rtol=0)
    assert not bool(found[8:].any())
    assert extension.metrics()["pass_at_k/silent_groups"] == 2.0


def test_metrics_of_training() -> None:
    """1 and 2 of 8 correct: pass@1 (1/8 + 2/8) / 2, pass@4 (1/2 + 11/14) / 2; pass@16 has no group."""
    extension = made("loo", metric={"k": [1, 4, 16]})
    shape(make_batch([*ONE, *TWO, *[("c", 2, 1.0)] * 8]), extension)
    found = extension.metrics()
    assert found["pass_at_k/train/pass@1"] == pytest.approx((1 / 8 + 2 / 8 + 1) / 3)
    assert found["pass_at_k/train/pass@4"] == pytest.approx((1 / 2 + 11 / 14 + 1) / 3)
    assert found["pass_at_k/train/pass@16"] != found["pass_at_k/train/pass@16"]
    assert found["pass_at_k/right_share"] == pytest.approx(11 / 24)
    assert found["pass_at_k/winner_share"] == pytest.approx(3 / 24)
    assert found["pass_at_k/zero_groups"] == 1.0


def test_length_comes_after_it_and_its_shift_is_not_divided() -> None:
    """Together, they equal their composition by hand."""
    length = LengthPenalty("length_penalty", {"kind": "uniform", "coefficient": 0.01})
    objective = {"objective": "loo"}
    length.begin(OmegaConf.create({"algorithm": {"adv_estimator": "grpo"}, "pass_at_k": objective}))
    found = shape(make_batch(ONE), length, made("loo"))
    tokens = torch.arange(3, 11).double()
    torch.testing.assert_close(found, wanted(ONE, 4, "loo") - 0.01 * (tokens - 6.5), atol=1e-6, rtol=0)


class Prompts(SimpleNamespace):
    def rows(self, name: str) -> dict[str, Any]:
        return {name: self.chats}

    def put(self, **columns: Any) -> None:
        self.sizes = columns["__rollout_n__"]


def budgeted(**budget: Any) -> PassAtK:
    return made("loo", k=2, budget={"mode": "group_size", "least": 3, "most": 16} | budget)


CHATS = [[{"role": "user", "content": text}] for text in "xyz"]


def test_group_sizes_go_by_the_rates_that_were_seen_and_prompts_count_alike() -> None:
    extension = budgeted()
    first = Prompts(step=1, uids=list("abc"), chats=CHATS)
    extension.next_batch(first)
    assert sum(first.sizes) == 24
    rows: Rows = [
        *[("a", 2, float(r < 4)) for r in range(8)],
        *[("b", 2, float(r < 1)) for r in range(12)],
        *[("c", 2, 1.0) for r in range(12)],
    ]
    plain = made("loo", k=2)
    found, without = shape(make_batch(rows), extension), shape(make_batch(rows), plain)
    weights = torch.tensor([1.0] * 8 + [8 / 12] * 24).double()
    torch.testing.assert_close(found, without * weights, atol=1e-6, rtol=0)
    metrics = extension.metrics()
    assert (metrics["pass_at_k/budget/least_rows"], metrics["pass_at_k/budget/most_rows"]) == (8.0, 12.0)
    again = Prompts(step=2, uids=list("def"), chats=CHATS)
    extension.next_batch(again)
    assert sum(again.sizes) == 24
    assert again.sizes[1] > again.sizes[0]
    assert again.sizes[1] > again.sizes[2]


def upsampled(prompts: int = 3, **settings: Any) -> tuple[PassAtK, Any]:
    extension = PassAtK("pass_at_k", {"objective": "none", "budget": {"mode": "upsample"} | settings})
    extension.begin(OmegaConf.create({"actor_rollout_ref": {"rollout": {"n": 8}}, "data": {"train_batch_size": 2}}))
    chats = [[{"role": "user", "content": str(prompt)}] for prompt in range(prompts)]
    verls = StatefulDataLoader(
        dataset=chats,
        batch_size=1,
        drop_last=True,
        collate_fn=lambda rows: {"raw_prompt": np.array(rows, dtype=object)},
    )
    return extension, extension.load_prompts(verls)


class Loaded(SimpleNamespace):
    """Prompts of a batch as the loader created it."""

    def rows(self, name: str) -> dict[str, Any]:
        return {name: self.batch[name]}


def answer(extension: PassAtK, batch: dict[str, Any], right: int, step: int = 1) -> str:
    """Sample a batch of one prompt, score its 8 rows, and return its number."""
    extension.next_batch(Loaded(step=step, uids=["u"], batch=batch))
    rows: Rows = [("u", 2, float(row < right)) for row in range(8)]
    assert torch.equal(shape(make_batch(rows), extension), shape(make_batch(rows)))
    return str(batch[NUMBER][0])


def test_answers_change_the_chances_of_the_next_draws(caplog: pytest.LogCaptureFixture) -> None:
    """Solved: p = (a + 8) / (a + b + 8) is nearly 1, and a mixed group of 8 is less likely than for a new prompt."""
    extension, loader = upsampled()
    batches = iter(loader)
    first = answer(extension, next(batches), right=8)
    assert extension.metrics()["pass_at_k/budget/proved"] == 0.0
    second = answer(extension, next(batches), right=4)  # of the same block
    assert first != second
    with caplog.at_level("INFO", logger="verl.offpolicy"):
        answer(extension, next(batches), right=0)
    assert "pass@k draws LIVE on 3 prompts" in caplog.text
    found = extension.metrics()
    assert found["pass_at_k/budget/proved"] == 1.0
    assert found["pass_at_k/budget/rows"] == 8.0
    assert found["pass_at_k/budget/padding_rows"] == 0.0
    chances = extension._chances.tolist()
    effective = 1 / sum(chance**2 for chance in chances)
    assert found["pass_at_k/budget/effective_share"] == pytest.approx(effective / len(chances))
    assert float(extension._chances[int(first)]) < float(extension._chances[int(second)])
    assert extension.worker() is None


def test_prompts_of_another_loader_stop_the_run() -> None:
    extension, _ = upsampled()
    with pytest.raises(LivenessError, match="prompts came from another data loader"):
        extension.next_batch(Loaded(step=1, uids=["a"], batch={"raw_prompt": CHATS[:1]}))


def test_a_checkpoint_carries_the_rates(tmp_path: Path) -> None:
    first, again = budgeted(), budgeted()
    first.next_batch(Prompts(step=1, uids=["a"], chats=CHATS[:1]))
    shape(make_batch(ONE), first)
    state = json.loads(json.dumps(first.state(tmp_path / "x")))
    assert state == {"prompts": 1}
    again.restore(state, tmp_path / "x")
    assert again.rates == first.rates
    (tmp_path / "x" / pass_at_k.FILE).unlink()
    with pytest.raises(CheckpointError, match="records 1 pass_rates"):
        again.restore(state, tmp_path / "x")
    assert made("loo").state(tmp_path) == {}
    assert "metric" not in made("loo", metric={"k": [2]}).noted


# Validation in rounds, around a stand-in for verl's loop and around verl's own metrics


RATES = (0.0, 0.05, 0.5, 1.0, 0.1)


class Trainer:
    """verl's ``_validate``, which names prompts by the existing uid (V0), or by a new one (V1)."""

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
    """All correct at once: 1; never: 0; verl's metrics are those of 4 samples per prompt."""
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
