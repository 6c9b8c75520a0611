"""Shadow mode: report what inactive corrections would have done, without changing the gradient.

Inactive corrections go through the same two stages as the active correction.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from . import BatchConstants, CorrectionSpec, RolloutStage, Statistic, rollout_stage, step_stage
from .validation import rename_for_metrics

_KEEP = re.compile(
    r"keep/(?P<sign>(?:positive|negative)/)?(?P<share>token|sequence)_share"
    r"|length/\w+/keep_sequence_share"
    r"|turn/\w+/keep_token_share"
)
_WEIGHT = ("weight/mean", "weight/ess", "weight/truncated_share")


@torch.no_grad()
def compute_shadow_statistics(
    shadows: Mapping[str, CorrectionSpec],
    *,
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    segment_ids: Tensor | None = None,
    versions: Tensor | None = None,
    staleness: Tensor | None = None,
    constants: Mapping[str, BatchConstants] | None = None,
    alongside: RolloutStage | None = None,
) -> dict[str, Statistic]:
    """Compute each shadow's keep shares and weights, under ``shadow/<name>/``, see ``correction.statistics``.

    ``validation.rename_for_metrics`` adapts the names.

    Args:
        shadows: name -> correction.
        old_log_prob, rollout_log_prob, response_mask, log_prob, advantages: (B, T), see the stages.
        segment_ids, versions: (B, T) integers, for the levels that need them.
        staleness: (B,) or (B, T) integers, as for the stages.
        constants: name -> constants of the batch; None: these rows are the whole batch.
        alongside: measured stage of the active correction for the same tensors; results that the stages share are
            reused.

    Raises:
        ValueError: a stage raised an error (the message names the shadow), or ``constants`` has no entry for a
            correction that needs one.

    Example:
        >>> from .mask_spec import MaskSpec
        >>> token_mask = CorrectionSpec(masks=(("tm", MaskSpec("rollout", "token", "product", 0.5, 2.0, "any")),))
        >>> pi, ones = torch.zeros(1, 2), torch.ones(1, 2)
        >>> mu = torch.tensor([[0.0, -1.0]])  # r = 1 and 2.7
        >>> policies = dict(old_log_prob=pi, rollout_log_prob=mu, log_prob=pi)
        >>> statistics = compute_shadow_statistics({"tm": token_mask}, **policies, response_mask=ones, advantages=ones)
        >>> statistics["shadow/tm/keep_token_share"].value()
        0.5
    """
    statistics: dict[str, Statistic] = {}
    for name, spec in shadows.items():
        if constants is not None and spec.needs_constants and name not in constants:
            raise ValueError(f"shadow {name} needs constants of the whole batch: constants has no {name!r}.")
        try:
            stage = rollout_stage(
                spec,
                old_log_prob=old_log_prob,
                rollout_log_prob=rollout_log_prob,
                response_mask=response_mask,
                segment_ids=segment_ids,
                versions=versions,
                staleness=staleness,
                constants=(constants or {}).get(name),
                measure="decisions",
                alongside=alongside,
            )
            step = step_stage(spec, stage, log_prob=log_prob, advantages=advantages)
        except ValueError as error:
            raise ValueError(f"shadow {name}: {error}") from error
        label = f"shadow/{rename_for_metrics(name)}"
        statistics |= {f"{label}/{key}": s for key, s in _reported(spec, step.statistics)}
    return statistics


def _reported(spec: CorrectionSpec, statistics: Mapping[str, Statistic]) -> Iterable[tuple[str, Statistic]]:
    """Yield the statistics that a shadow reports, by key under the shadow's name."""
    for key, statistic in statistics.items():
        if found := _KEEP.fullmatch(key):
            share = found["share"]
            if found["sign"] and share == "sequence":
                continue
            yield (f"{found['sign'] or ''}keep_{share}_share" if share else key), statistic
        elif spec.all_weights and key in _WEIGHT:
            yield key, statistic
