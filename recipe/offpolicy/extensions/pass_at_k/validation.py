"""pass@k in verl's validation, computed from one round of samples, or from further rounds for unsolved prompts.

The code of verl that this module patches or reads is the same from 0.7.1 to 0.9.1. ``_validate`` iterates over
``trainer.val_dataloader``, which yields dictionaries of columns. It gives all samples of a prompt the same uid, and
passes (source, uid, reward) of each sample to ``_val_metrics_update``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf, open_dict
from torch import Tensor

from ...proof.rewards import check_rewards
from ..batch_view import round_threshold
from .estimates import Stopping, summarize
from .settings import PassAtKSettings

UID = "uid"


@dataclass
class Prompt:
    """One prompt of the data set: its position in the loader's batches, and its samples."""

    batch: int
    row: int
    source: str = "unknown"
    n: int = 0
    c: int = 0


class Validation:
    """Collects the samples of one run's validations and computes pass@k from them."""

    def __init__(self, settings: PassAtKSettings) -> None:
        self._settings = settings
        self._seen: dict[str, tuple[str, list[float]]] | None = None

    def collect(self, sources: Sequence[Any], uids: Sequence[Any], rewards: Sequence[float]) -> dict[str, float]:
        """Collect the samples of one validation of verl; outside ``run``, return their metrics immediately.

        Raises:
            RewardError: a reward is not finite.
        """
        check_rewards(torch.tensor(list(rewards), dtype=torch.float64), uids, "validation")
        seen: dict[str, tuple[str, list[float]]] = {}
        for source, uid, reward in zip(sources, uids, rewards, strict=True):
            seen.setdefault(str(uid), (str(source), []))[1].append(float(reward))
        if self._seen is not None:
            self._seen = seen
            return {}
        prompts = [Prompt(0, 0, source, len(scores), self._count(scores)) for source, scores in seen.values()]
        return build_metrics(prompts, self._settings, None)

    def _count(self, scores: Sequence[float]) -> int:
        least = round_threshold(self._settings.correct_at_least)
        return sum(score >= least for score in scores)

    def run(self, trainer: Any, run: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Run verl's validation, and further rounds for prompts that are not solved often enough.

        verl's own metrics come from the first round. verl reseeds numpy's random state at each validation; this method
        restores the previous state.
        """
        state = np.random.get_state()
        self._seen = {}
        try:
            return self._run(trainer, run)
        finally:
            self._seen = None
            np.random.set_state(state)

    def _run(self, trainer: Any, run: Callable[[], dict[str, float]]) -> dict[str, float]:
        dynamic, stopping = self._settings.dynamic, None
        batches = Batches(trainer.val_dataloader)
        with replaced(trainer, batches):
            metrics = run()
        if not self._seen:
            # verl merges the results of several trainers, and requests their metrics later.
            return metrics
        prompts = [
            Prompt(number, row) for number, batch in enumerate(batches.kept) for row in range(_count_rows(batch))
        ]
        each = int(OmegaConf.select(trainer.config, "actor_rollout_ref.rollout.val_kwargs.n") or 1)
        self._add(prompts, batches, each)
        if dynamic.successes is not None:
            rounds = max(min(dynamic.max_samples // each, dynamic.max_rounds), 1)
            stopping = Stopping(tuple(each * number for number in range(1, rounds + 1)), dynamic.successes)
            for number in range(2, rounds + 1):
                left = [prompt for prompt in prompts if prompt.c < dynamic.successes]
                if not left:
                    break
                again = batches.select(left)
                with replaced(trainer, again), apart(trainer, number):
                    run()
                self._add(left, again, each)
        return metrics | build_metrics(prompts, self._settings, stopping)

    def _add(self, prompts: Sequence[Prompt], batches: Batches, each: int) -> None:
        """Add the samples of the last round; a failed session counts as wrong."""
        seen, self._seen = self._seen or {}, {}
        uids = [str(uid) for batch in batches.kept for uid in batch[UID]]
        for prompt, uid in zip(prompts, uids, strict=True):
            prompt.source, scores = seen.get(uid, (prompt.source, []))
            prompt.n += each
            prompt.c += self._count(scores[:each])


class Batches:
    """A loader that keeps the validation batches, together with the uid that verl assigns to each prompt.

    verl's V0 trainer keeps an existing uid, and its V1 trainer replaces it in the same dictionary.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self.kept: list[dict[str, Any]] = []

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.kept = []
        for batch in self._loader:
            names = [f"pass-at-k-{len(self.kept)}-{row}" for row in range(_count_rows(batch))]
            kept = {**batch, UID: np.array(names, dtype=object)}
            self.kept.append(kept)
            yield kept

    def __len__(self) -> int:
        return len(self._loader)

    def select(self, prompts: Sequence[Prompt]) -> Batches:
        """Make a loader that yields only these prompts, batched as before."""
        chosen: dict[int, list[int]] = {}
        for prompt in prompts:
            chosen.setdefault(prompt.batch, []).append(prompt.row)
        return Batches([_select(self.kept[number], rows) for number, rows in sorted(chosen.items())])


def _count_rows(batch: Mapping[str, Any]) -> int:
    return len(next(values for name, values in batch.items() if name != UID))


def _select(batch: Mapping[str, Any], rows: Sequence[int]) -> dict[str, Any]:
    return {
        name: values[list(rows)] if isinstance(values, Tensor | np.ndarray) else [values[row] for row in rows]
        for name, values in batch.items()
        if name != UID
    }


@contextmanager
def replaced(trainer: Any, loader: Any) -> Iterator[None]:
    """Make verl's validation iterate over another loader inside the context."""
    own = trainer.val_dataloader
    trainer.val_dataloader = loader
    try:
        yield
    finally:
        trainer.val_dataloader = own


@contextmanager
def apart(trainer: Any, number: int) -> Iterator[None]:
    """Prevent a further round from overwriting the first round's dump and table of samples."""
    section = trainer.config.trainer
    folder, shown = section.get("validation_data_dir"), section.get("log_val_generations")
    with open_dict(section):
        section.log_val_generations = 0
        if folder:
            section.validation_data_dir = os.path.join(str(folder), f"round_{number}")
    try:
        yield
    finally:
        with open_dict(section):
            section.log_val_generations, section.validation_data_dir = shown, folder


def build_metrics(prompts: Sequence[Prompt], settings: PassAtKSettings, stopping: Stopping | None) -> dict[str, float]:
    """Build the metrics of each data source, ``pass_at_k/val/SOURCE/...``."""
    found: dict[str, float] = {}
    ks, beyond = settings.metric.k, settings.metric.extrapolate
    for source in sorted({prompt.source for prompt in prompts}):
        n, c = zip(*((prompt.n, prompt.c) for prompt in prompts if prompt.source == source), strict=True)
        summary = summarize(n, c, ks, extrapolate=beyond, stopping=stopping)
        named = {"prompts": float(summary.prompts), "samples": float(summary.samples)}
        named["unsolved_share"] = summary.unsolved
        points = {f"pass@{k}": point for k, point in summary.points.items()}
        if beyond:
            fit, unknown = summary.fit, (math.nan, math.nan, math.nan)
            named |= {"beta_a": fit.a if fit else math.nan, "beta_b": fit.b if fit else math.nan}
            points |= {f"extrapolated@{k}": fit.points[k] if fit else unknown for k in beyond}
        for name, (value, low, high) in points.items():
            named |= {name: value, f"{name}_low": low, f"{name}_high": high}
        found |= {f"pass_at_k/val/{source}/{name}": value for name, value in named.items()}
    return found
