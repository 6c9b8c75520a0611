"""A small extension that uses every hook, for tests; several of it can be on under different sections.

    offpolicy.extensions.nudge=nudge:Nudge nudge.bonus=0.5

It rewards each token of a response, tilts advantages, and pulls log-probs up where the correction's weight is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, open_dict
from torch import Tensor

from recipe.offpolicy.correction import Problem, SpecError
from recipe.offpolicy.correction.problem import set_to
from recipe.offpolicy.extensions.add_on import BoundLoss, Extension, WorkerExtension
from recipe.offpolicy.extensions.batch_view import BatchView, LossRows, PromptView, last_outputs
from recipe.offpolicy.proof.verify import LivenessError


@dataclass(frozen=True)
class NudgeWorker(WorkerExtension):
    column: str
    coef: float

    @property
    def columns(self) -> Mapping[str, str]:
        return {self.column: "1.0 on the model's own tokens"}

    def wrap_loss(self, base_loss: BoundLoss, actor_config: Any) -> BoundLoss:
        def with_term(model_output: Any, data: Any, dp_group: Any = None) -> tuple[Tensor, dict[str, Any]]:
            loss, metrics = base_loss(model_output, data, dp_group)
            rows = LossRows(model_output, data)
            term = rows.mean(-rows.log_prob * rows.weights * rows.column(self.column), actor_config)
            return loss + self.coef * term, metrics

        return with_term

    def report(self, rows: LossRows) -> tuple[int, float]:
        return len(rows.response_mask), float(rows.column(self.column).sum())


class Nudge(Extension):
    def __init__(self, section: str, settings: Mapping[str, Any]) -> None:
        super().__init__(section, {"bonus": 0.5, "tilt": 0.25, "coef": 0.125, "pi_old": False} | dict(settings))
        if self.settings["bonus"] < 0:
            raise SpecError("below 0.", "Set one of at least 0.", key=f"{section}.bonus", value=self.settings["bonus"])
        self.column = f"offpolicy_{section}"
        self.updates = self.prompts = self.sessions = self.validations = 0
        self.shipped = (0, 0.0)
        self.ended = False

    @property
    def reads_old_log_prob(self) -> bool:
        return bool(self.settings["pi_old"])

    def configure(self, config: DictConfig) -> Sequence[str]:
        if (label := self.settings.get("experiment_name")) is None:
            return ()
        with open_dict(config):
            config.trainer.experiment_name = label
        return (f"{self.section}: trainer.experiment_name is {label}.",)

    def problems(self, config: DictConfig) -> Sequence[Problem]:
        if self.settings["tilt"] != 0 or self.settings["bonus"] != 0:
            return ()
        key, fix = f"{self.section}.tilt", "Set another."
        return (Problem(key, 0, "nothing is shaped.", fix, "NO-OP", (self.section,), (set_to(key, 0.25),)),)

    def end(self) -> None:
        self.ended = True

    def next_batch(self, prompts: PromptView) -> None:
        self.prompts += len(prompts.uids)

    def on_rollout(self, batch: BatchView) -> None:
        self.sessions = len(last_outputs(batch))
        mask = batch.rows("response_mask")["response_mask"].float()
        batch.put(**{self.column: mask})
        self.shipped = (len(mask), float(mask.sum()))

    def shape_rewards(self, batch: BatchView, rewards: Tensor) -> Tensor:
        rewards[:, 0] += self.settings["bonus"] * batch.rows("response_mask")["response_mask"].sum(-1)
        return rewards

    def shape_advantages(self, batch: BatchView, advantages: Tensor) -> Tensor:
        return advantages + self.settings["tilt"] * batch.rows("response_mask")["response_mask"]

    def worker(self) -> NudgeWorker:
        return NudgeWorker(self.column, self.settings["coef"])

    def judge(self, reports: Sequence[tuple[int, float]]) -> Mapping[str, float]:
        seen = (sum(rows for rows, _ in reports), sum(total for _, total in reports))
        if seen != self.shipped:
            raise LivenessError(f"{self.section}: {self.shipped} was shipped and the loss saw {seen}.")
        self.updates += 1
        return {f"{self.section}/live/rows": float(seen[0])}

    def metrics(self) -> Mapping[str, float]:
        return {f"{self.section}/updates": float(self.updates), f"{self.section}/prompts": float(self.prompts)}

    def validate(self, trainer: Any, run: Callable[[], dict[str, float]]) -> dict[str, float]:
        self.validations += 1
        return run() | {f"{self.section}/validations": float(self.validations)}

    def validation_metrics(
        self, sources: Sequence[Any], uids: Sequence[Any], values: Mapping[str, Sequence[Any]]
    ) -> Mapping[str, float]:
        return {f"{self.section}/samples": float(len(uids))}

    def state(self, folder: Path) -> Mapping[str, Any]:
        folder.mkdir(parents=True)
        torch.save(torch.tensor(self.prompts), folder / "prompts.pt")
        return {"updates": self.updates}

    def restore(self, state: Mapping[str, Any], folder: Path) -> None:
        self.updates, self.prompts = state["updates"], int(torch.load(folder / "prompts.pt"))
