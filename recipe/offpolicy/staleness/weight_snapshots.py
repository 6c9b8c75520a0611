"""Snapshots of the weights after recent updates, which allow a V1 run to identify the weights that sampled its rows.

Functions called in verl 0.9.1: ``save_model_to_cpu(n)``, ``restore_model_from_cpu(n)`` and ``clear_cpu_model(n)`` of
``DetachActorWorker``, which verl's own separate_async mode also uses.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from omegaconf import DictConfig, OmegaConf

from verl_patches import trainer_seams
from verl_patches.contract import check_all
from verl_patches.execution_path import USE_V1, live_path

from ..batch.declared_keys import Section, count, read_shipped_defaults
from ..correction import Problem
from ..correction.problem import Requirement, find_unmet, set_to
from ..extensions.add_on import AddOn
from ..extensions.setting_checks import declare_keys

if TYPE_CHECKING:
    from ..extensions.batch_view import BatchView

logger = logging.getLogger("verl.offpolicy")

SECTION = "offpolicy.late_weights"
SNAPSHOTS = f"{SECTION}.snapshots"
_V1, _FSDP = "trainer.v1", "actor_rollout_ref.actor.fsdp_config"
_MU = "rollout_log_probs"


@dataclass(frozen=True)
class SnapshotSettings:
    """Settings of a run that keeps weights to measure the lag of the rollout engine's weights.

    Attributes:
        snapshots: number of updates whose weights are kept.
        rows: number of rows per step that are scored again with each snapshot.
    """

    snapshots: Annotated[int, count("a number of updates, 1 or more, or null for none", null=True)]
    rows: Annotated[int, count("a number of rows, 1 or more")]

    @classmethod
    def from_config(cls, config: DictConfig) -> SnapshotSettings | None:
        """Read the settings of a checked configuration; None if no weights are kept."""
        given = OmegaConf.select(config, SECTION)
        values = {**read_shipped_defaults("late_weights"), **(given or {})}
        return None if values["snapshots"] is None else cls(**values)


KEYS = Section(SECTION, read_shipped_defaults("late_weights"), declare_keys(SnapshotSettings), hints={"snapshots": 8})


def find_problems(config: DictConfig) -> Iterator[Problem]:
    """Find invalid values of the keys, and settings under which weights cannot be kept or compared."""
    if found := list(KEYS.find_problems(config)):
        yield from found
    elif (snapshots := OmegaConf.select(config, SNAPSHOTS)) is not None:
        yield from _find_obstacles(config, snapshots)


_REQUIREMENTS = (
    Requirement(
        f"{_V1}.trainer_mode",
        ("sync",),
        "in this mode, several versions sample the rows of a step, and the versions are recorded per token.",
    ),
    Requirement(f"{_FSDP}.router_replay.mode", ("disabled",), "rows are scored again with the trainer's own routes."),
    Requirement("actor_rollout_ref.rollout.temperature", (1.0,), "rows are scored again at temperature 1."),
    Requirement(f"{_FSDP}.param_offload", (False,), "verl copies weights on the accelerator, not offloaded ones."),
)


def _find_obstacles(config: DictConfig, snapshots: int) -> Iterator[Problem]:
    path, off = live_path(config), set_to(SNAPSHOTS, None)
    if path.trainer != "v1" or not path.attributes.token_versions:
        where = f"verl {path.release} with its {path.trainer.upper()} trainer"
        reason = f"old weights can be kept only by the V1 trainer (tested with verl 0.9.1), but this run uses {where}."
        use = f"{USE_V1}=true" if path.release.startswith("0.9.1") else f"{USE_V1}=true with verl 0.9.1"
        yield Problem(SNAPSHOTS, snapshots, reason, f"Set {use}, or {off} to keep no weights.", parts=())
        return
    for each in find_unmet(_REQUIREMENTS, partial(OmegaConf.select, config), off, ()):
        # The problem is reported at this package's key, because only the user knows which of the two keys was intended.
        yield replace(each, key=SNAPSHOTS, value=snapshots, overrides=(), alongside={each.key: each.value})


TOLD = 0.5
"""A lag is identified if the older weights' distance from mu is at most this fraction of the current weights'
distance."""


def find_lag(apart: Sequence[float]) -> int | None:
    """Find the number of updates by which the engine's weights lag behind; None if the lag cannot be identified.

    Args:
        apart: mean |log mu - log pi| over a few tokens, under the current weights, the weights before them, and so on.
    """
    if not all(map(math.isfinite, apart)):
        return None
    nearest = min(range(len(apart)), key=apart.__getitem__)
    return nearest if nearest == 0 or apart[nearest] <= TOLD * apart[0] else None


class WeightSnapshots(AddOn):
    """The feature behind ``offpolicy.late_weights``, which keeps snapshots.

    Args:
        run: a run by the V1 trainer.
        settings: settings of the snapshots.
    """

    def __init__(self, run: Any, settings: SnapshotSettings) -> None:
        self._run, self._settings = run, settings
        self._kept: deque[str] = deque()  # names of the stored weights, the current weights last
        self._told: list[int] = []  # lags that were logged

    def actor_class(self, worker: type) -> type:
        from verl.experimental.separation.engine_workers import DetachActorWorker

        check_all(trainer_seams.SNAPSHOTS)
        kind: type = DetachActorWorker
        return kind

    def old_log_prob(self, compute: Callable[[Any], Any], batch: Any, metrics: dict[str, Any]) -> Any:
        metrics.update(self._find_lag(self._run.view(batch)))
        return compute(batch)

    def _find_lag(self, view: BatchView) -> dict[str, float]:
        """Score a few rows with the weights of each kept update, and return metrics.

        The weights after an update are stored under a name derived from the step, which differs from all names in
        verl's separate_async mode.
        """
        workers, kept = self._run.workers, self._kept
        kept.append(f"offpolicy-{self._run.global_steps}")
        workers.save_model_to_cpu(kept[-1])
        if len(kept) > self._settings.snapshots + 1:
            workers.clear_cpu_model(kept.popleft())
        rows = view.token_ids[: self._settings.rows]
        columns = view.rows("response_mask", _MU)
        mask, mu = (columns[name][: len(rows)] for name in ("response_mask", _MU))
        apart = []
        try:
            for name in reversed(kept):
                workers.restore_model_from_cpu(name)
                own = view.compute_log_probs(rows)
                gaps = [
                    abs(value - float(mu[row, place]))
                    for row, values in enumerate(own)
                    for place, value in enumerate(values)
                    if mask[row, place]
                ]
                apart.append(sum(gaps) / len(gaps) if gaps else math.nan)
        finally:
            workers.restore_model_from_cpu(kept[-1])
        lag = find_lag(apart)
        if lag and lag not in self._told:
            self._told.append(lag)
            logger.warning(
                "the rollout engine's weights lag by %d update%s: the mean |log mu - log pi| of %d sequences is %.2g "
                "nats per token under those weights, and %.2g under the current weights. verl's versions do not show "
                "the lag, because they count how often weights were sent.",
                *(lag, "" if lag == 1 else "s", len(rows), apart[lag], apart[0]),
            )
        known = math.nan if lag is None else float(lag)
        return {"offpolicy/late_weights/lag": known, "offpolicy/late_weights/apart": apart[0]}
