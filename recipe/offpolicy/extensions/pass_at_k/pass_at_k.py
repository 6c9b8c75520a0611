"""pass@k as an extension: advantages that replace verl's estimator, group sizes, and validation."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from ...batch.declared_keys import Configured
from ...correction import Problem
from ...fault_tolerance.state_schema import PASS_RATES
from ...proof.rewards import mean
from ...proof.verify import LivenessError
from ..add_on import Advantages, read_state, write_state
from ..advantage_proof import AdvantageExtension, AdvantageWorker
from ..batch_view import BatchView, PromptView, Sessions, read_sessions, round_threshold
from .estimates import unbiased
from .settings import PassAtKSettings, find_problems
from .training import (
    NUMBER,
    BlockSampler,
    PassRates,
    advantages,
    allocate,
    compute_chances,
    find_impossible,
    identify_chat,
    replace_sampler,
)
from .validation import Validation

logger = logging.getLogger("verl.offpolicy")

FILE = "pass_rates.json"


class PassAtK(AdvantageExtension):
    """Extension that trains and validates pass@k; ``settings.PassAtKSettings`` describes its section."""

    title, prefix = "pass@k", "pass_at_k"

    def __init__(self, section: str, settings: Mapping[str, Any]) -> None:
        super().__init__(section, settings)
        self.pass_at_k = PassAtKSettings.from_mapping(section, settings)
        self._trains, mode = self.pass_at_k.objective != "none", self.pass_at_k.budget.mode
        self._deals, self._draws = mode == "group_size", mode == "upsample"
        self.rates = PassRates(self.pass_at_k.budget.decay)
        self._validation = Validation(self.pass_at_k)
        self._rollouts = self._block = 1
        self._chances = torch.empty(0)
        self._draws_proved = self._dealt_proved = False
        self._best = -math.inf
        self._k = self._get_budget_k(1)
        self._identities: dict[str, str] = {}
        self._sessions: Sessions | None = None

    # Before Ray starts --------------------------------------------------------------------------------------

    @property
    def meaning(self) -> str:
        settings, budget, dynamic = self.pass_at_k, self.pass_at_k.budget, self.pass_at_k.dynamic
        steps = ", ".join(f"{k} from step {step}" for step, k in settings.schedule or ())
        parts = (
            self._trains and f"{settings.objective}, k={settings.k}{f', then {steps}' if steps else ''}",
            self._deals and f"groups of {budget.least} to {budget.most}",
            self._draws and "prompts drawn in proportion to the learning signal of their groups",
            dynamic.successes and f"validation until {dynamic.successes} of {dynamic.max_samples} are correct",
        )
        return "; ".join(part for part in parts if part) or "validation"

    def problems(self, config: DictConfig) -> Iterable[Problem]:
        return find_problems(self.section, self.pass_at_k, Configured(config, self.section))

    # In the trainer -----------------------------------------------------------------------------------------

    @property
    def replaces_estimator(self) -> bool:
        return self._trains

    def begin(self, config: DictConfig) -> None:
        self._rollouts = int(OmegaConf.select(config, "actor_rollout_ref.rollout.n") or 1)
        self._block = int(OmegaConf.select(config, "data.train_batch_size") or 1)

    def load_prompts(self, loader: Any) -> Any:
        if not self._draws:
            return loader
        prompts, block = len(loader.dataset), max(self._block, loader.batch_size)
        sampler = BlockSampler(prompts, block, lambda: self._compute_chances(prompts), self.pass_at_k.seed)
        return replace_sampler(loader, sampler)

    def _compute_chances(self, prompts: int) -> Tensor:
        share = self.pass_at_k.budget.uniform_share
        self._chances = chances = compute_chances(self.rates, prompts, self._rollouts, share, self._k)
        if not self._draws_proved and bool((chances != chances[0]).any()):
            self._draws_proved = True
            least, most = (float(end) * prompts for end in (chances.min(), chances.max()))
            logger.info(
                "pass@k draws LIVE on %d prompts, at %.2f to %.2f times the uniform probability", prompts, least, most
            )
        return chances

    def next_batch(self, prompts: PromptView) -> None:
        """Identify the prompts, and set their group sizes.

        Raises:
            LivenessError: the prompts come from another data loader.
        """
        self._k = self._get_budget_k(prompts.step)
        if self._draws:
            try:
                numbers = prompts.rows(NUMBER)[NUMBER]
            except KeyError as error:
                reason = "prompts came from another data loader, which has no draw probabilities"
                raise LivenessError(f"{self.section}.budget: {reason}.") from error
            self._identities |= zip(prompts.uids, (str(int(number)) for number in numbers), strict=True)
        if not self._deals:
            return
        names = [identify_chat(prompt) for prompt in prompts.rows("raw_prompt")["raw_prompt"]]
        self._identities |= zip(prompts.uids, names, strict=True)
        budget = self.pass_at_k.budget
        rates = [self.rates.estimate(name) for name in names]
        sizes = allocate(rates, self._rollouts * len(names), least=budget.least, most=budget.most, k=self._k)
        self._dealt_proved = self._dealt_proved or len(set(sizes)) > 1
        prompts.put(__rollout_n__=sizes)

    def _get_budget_k(self, step: int) -> int:
        """Return the k from which budgets are computed: the objective's k at a step, or ``k`` with verl's estimator."""
        return self.pass_at_k.get_k(step) if self._trains else self.pass_at_k.k

    def estimate(self, batch: BatchView, rewards: Tensor) -> Tensor | None:
        self._sessions = sessions = read_sessions(batch)
        right = sessions.find_right(self.pass_at_k.correct_at_least)
        self._best = max(self._best, float(sessions.scores.max()))
        groups = sessions.groups()
        k = self.pass_at_k.get_k(batch.step)
        self._demanded = ""
        self._note(right, groups, k if self._trains else 1)
        if not self._trains or k == 1:
            return None
        dealt = torch.zeros(len(right), dtype=torch.float64)
        objective = self.pass_at_k.objective
        for name, members in groups.items():
            if find_impossible(len(members), k, objective) is not None:
                continue
            at = torch.tensor(members)
            dealt[at] = advantages(right[at], k, objective=objective, seed=self._seed(batch.step, name))
            if bool(dealt[at].any()) and not self._demanded:
                self._demanded = f"group {name}: {dealt[at].tolist()}"
        mask = batch.rows("response_mask")["response_mask"].bool()
        self._found["pass_at_k/winner_share"] = mean(dealt > 0)
        idle = sum(not bool(dealt[torch.tensor(members)].any()) for members in groups.values())
        self._found["pass_at_k/zero_groups"] = float(idle)
        return dealt[sessions.of_row].to(rewards.dtype)[:, None] * mask

    def _seed(self, step: int, uid: str) -> int:
        text = f"{self.pass_at_k.seed}/{step}/{uid}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")

    def shape_advantages(self, batch: BatchView, advantages: Tensor) -> Tensor | None:
        """Record the answers to each prompt, and weight groups of different sizes so that all prompts count equally."""
        if not self._deals and not self._draws:
            return None
        sessions = self._sessions
        assert sessions is not None
        right = sessions.find_right(self.pass_at_k.correct_at_least)
        groups = sessions.groups(with_silent=True)
        counts = {uid: (len(members), int(right[torch.tensor(members)].sum())) for uid, members in groups.items()}
        self.rates.add({self._identities.pop(uid): each for uid, each in counts.items() if uid in self._identities})
        self._found |= {
            "pass_at_k/budget/rows": float(len(sessions.of_row)),
            "pass_at_k/budget/padding_rows": float(sum(batch.is_padding)),
            "pass_at_k/budget/mixed_share": sum(0 < c < n for n, c in counts.values()) / len(counts),
        }
        if self._draws:
            if len(self._chances):
                effective = 1 / float(self._chances.square().sum())
                self._found["pass_at_k/budget/effective_share"] = effective / len(self._chances)
            self._found["pass_at_k/budget/seen_prompts"] = float(len(self.rates.counts))
            self._found["pass_at_k/budget/proved"] = float(self._draws_proved)
            return None
        sizes = [len(members) for members in groups.values()]
        self._found |= {
            "pass_at_k/budget/spread": float(torch.tensor(sizes).double().std(correction=0)),
            "pass_at_k/budget/least_rows": float(min(sizes)),
            "pass_at_k/budget/most_rows": float(max(sizes)),
        }
        if not self.pass_at_k.budget.equal_prompts:
            return None
        weights = torch.ones(len(right), dtype=torch.float64)
        for members in groups.values():
            weights[torch.tensor(members)] = self._rollouts / len(members)
        return advantages * weights[sessions.of_row].to(advantages.dtype)[:, None]

    def on_advantages(self, batch: BatchView, advantages: Advantages) -> None:
        if self.worker() is not None:
            super().on_advantages(batch, advantages)

    def worker(self) -> AdvantageWorker | None:
        return AdvantageWorker() if self._trains or self._deals else None

    def unproved(self) -> str | None:
        settings, key = self.pass_at_k, f"{self.section}.correct_at_least"
        if self._trains and not self._proved:
            if self._best < round_threshold(least := settings.correct_at_least):
                return f"the highest reward was {self._best:g}, but {key}={least:g}, so no answer counts as correct."
            return f"no group had an advantage other than 0 ({self.section}.k={settings.k})."
        idle = ""
        if self._draws and not self._draws_proved:
            idle = "all prompts are drawn with the same probability"
        elif self._deals and not self._dealt_proved:
            idle = "all groups have the same size"
        return f"{idle}, because all prompts have the same success rate ({key})." if idle else None

    def _note(self, right: Tensor, groups: Mapping[str, Sequence[int]], k: int) -> None:
        counts = [(len(members), int(right[torch.tensor(members)].sum())) for members in groups.values()]
        silent = sum(k > 1 and find_impossible(n, k, self.pass_at_k.objective) is not None for n, _ in counts)
        self._found = {
            "pass_at_k/k": float(k),
            "pass_at_k/right_share": mean(right),
            "pass_at_k/winner_share": math.nan,
            "pass_at_k/zero_groups": math.nan,
            "pass_at_k/silent_groups": float(silent),
        }
        for each in self.pass_at_k.metric.k:
            known = [unbiased(n, c, each) for n, c in counts if n >= each]
            self._found[f"pass_at_k/train/pass@{each}"] = sum(known) / len(known) if known else math.nan

    # Validation and checkpoints -----------------------------------------------------------------------------

    def validate(self, trainer: Any, run: Callable[[], dict[str, float]]) -> dict[str, float]:
        return self._validation.run(trainer, run)

    def validation_metrics(
        self, sources: Sequence[Any], uids: Sequence[Any], values: Mapping[str, Sequence[Any]]
    ) -> Mapping[str, float]:
        return self._validation.collect(sources, uids, values["reward"])

    @property
    def noted(self) -> Mapping[str, Any]:
        """All settings except those of validation."""
        return {name: value for name, value in self.settings.items() if name not in ("metric", "dynamic")}

    def state(self, folder: Path) -> Mapping[str, Any]:
        if self.pass_at_k.budget.mode == "none":
            return {}
        write_state(folder, FILE, self.rates.to_json())
        return {"prompts": len(self.rates.counts)}

    def restore(self, state: Mapping[str, Any], folder: Path) -> None:
        if not (self._deals or self._draws) or "prompts" not in state:
            return
        self.rates.restore(read_state(folder, FILE, self.section, PASS_RATES, "counts", state["prompts"]))

    @property
    def resumes(self) -> str | None:
        return f"{self.section}.budget.mode={self.pass_at_k.budget.mode}" if self._deals or self._draws else None
