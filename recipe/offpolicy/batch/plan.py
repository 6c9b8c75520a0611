"""The plan that the trainer sends with each update, and the denominators of verl's loss.

The plan contains batch-level constants, which are computed before the first gradient step. It is sent with the batch:
values shared by all rows as a non-tensor, and per-row values as columns.

verl adds up the losses of micro-batches and ranks. ``agg_loss`` divides each loss by ``batch_num_tokens`` or by
``global_batch_size``, and multiplies it by ``dp_size``, because the engine averages gradients over the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from hashlib import blake2b
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict
from torch import Tensor

from verl_patches.contract import demand_release, installed_release
from verl_patches.releases import attributes_of

from ..correction import (
    BatchConstants,
    CorrectionSpec,
    RolloutStage,
    batch_constants,
    count_kept_by_row,
    rollout_stage,
    turns,
)
from ..correction.decisions import Columns, assign_mini_batches, compute_scale_of_counts, find_finite_tokens, regroup
from ..correction.row_layout import count_tokens_by_row
from ..correction.statistics import DeferredValue
from .seals import PLAN_HASH, PREFIX, LivenessError, SealError, build_seals, key_of, seal_constant
from .weight_versions import EXTRA_FIELDS, RowVersions, check_ages_known, compute_token_versions, read_versions

PLAN = "offpolicy_plan"
"""Key of the ``SharedPlan`` in the batch that reaches the loss."""
SCALE = "offpolicy_scale"
"""Key of the (B,) factors of ``denominator=kept`` and of ``nonfinite=excluded``."""
MINI_BATCH_TOKENS = "offpolicy_mini_batch_tokens"
"""Key of the (B,) number of counted response tokens in each row's mini-batch, over all ranks."""
PROVE = "offpolicy_prove"
"""Key of the (B,) int64 column that requests proofs: 1 if a row's micro-batch must be proved, 2 if it must also run
trials. The column is read only if ``SharedPlan.prove`` is true."""
PROVE_EVERY = "offpolicy.prove_every"
"""Configuration key for the number of updates between two proofs."""
UID = "offpolicy_uid"
"""Key of the (B, L) uint8 column with each row's uid in zero-padded UTF-8; sent only if verl sends no uid to the
loss."""
REWARD = "offpolicy_reward"
"""Key of the (B,) rewards; sent only if verl sends no rewards to the loss."""


COLUMNS = ("response_mask", "old_log_probs", "rollout_log_probs", EXTRA_FIELDS)
"""Columns from which a plan is built. ``VERSIONS`` is added if verl does not keep ``EXTRA_FIELDS``; either of these two
may be missing."""


@dataclass(frozen=True)
class UpdateRows:
    """Order in which the rows of one update reach the loss, for the recorder.

    Attributes:
        ranks: number of data-parallel ranks.
        rows: number of rows per rank.
        mini_batch_rows: number of rows per mini-batch of a rank.
        update: number of earlier updates in this step.
        updates: number of updates in this step.
        gradient_steps: number of gradient steps in this step before this update.
    """

    ranks: int
    rows: int
    mini_batch_rows: int
    update: int = 0
    updates: int = 1
    gradient_steps: int = 0


@dataclass(frozen=True)
class SharedPlan:
    """Values shared by every row of a batch.

    Attributes:
        step: the trainer's step; the age of a row's weights is counted back from this step.
        constants: constants of the correction.
        shadow_constants: constants of the shadow corrections, by name.
        update: order of the rows; set if the update must be recorded.
        bounds: part -> its bounds in this update, for all masks and the weight (``WEIGHT``) whose bounds move.
        sealed: columns whose checksums are sent with the batch, see ``seals``.
        prove: whether the micro-batches of the rows that ``PROVE`` marks must be proved.
    """

    step: int
    constants: BatchConstants = field(default_factory=BatchConstants)
    shadow_constants: dict[str, BatchConstants] = field(default_factory=dict)
    update: UpdateRows | None = None
    bounds: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)
    sealed: tuple[str, ...] = ()
    prove: bool = False

    def fingerprint(self) -> int:
        """Return a signed 64-bit hash of the whole plan."""
        return int.from_bytes(blake2b(repr(self).encode(), digest_size=8).digest(), signed=True)


@dataclass(frozen=True)
class BatchSplit:
    """verl's split of a batch into ranks and mini-batches.

    Attributes:
        ranks: number of data-parallel ranks.
        mini_batch_rows: number of rows per mini-batch, over all ranks.
        loss_agg_mode: verl's ``actor.loss_agg_mode``, or the mode that its policy loss uses instead.
    """

    ranks: int
    mini_batch_rows: int
    loss_agg_mode: str

    @classmethod
    def of(cls, config: DictConfig, ranks: int) -> BatchSplit:
        """Build the split from a composed configuration."""
        actor = config.actor_rollout_ref.actor
        rows = actor.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n
        loss_mode = OmegaConf.select(actor, "policy_loss.loss_mode")
        release = attributes_of(installed_release("verl") or demand_release())
        return cls(ranks, rows, release.find_policy_aggregation(loss_mode, actor.loss_agg_mode))


def build_plan(
    spec: CorrectionSpec,
    shadows: Mapping[str, CorrectionSpec],
    *,
    step: int,
    rows: Callable[[], TensorDict],
    batch_split: Callable[[], BatchSplit],
    bounds: Mapping[str, Mapping[str, float | None]] | None = None,
) -> tuple[SharedPlan, dict[str, Tensor]]:
    """Build the plan of one batch and the columns to send with it.

    Args:
        step: the trainer's step.
        rows: function that returns the batch with ``COLUMNS``; called only if needed.
        batch_split: function that returns verl's split of the batch; called only if needed.
        bounds: bounds of parts whose bounds move; ``spec`` already contains them.
    """
    if not (spec.recounts or any(each.needs_constants for each in (spec, *shadows.values()))):
        return SharedPlan(step, bounds=bounds or {}), {}
    batch = rows()
    # The versions are read once for all corrections, because each read lists verl's fields of all rows.
    versions = cache(lambda: read_versions(batch, batch["response_mask"]))
    shadow_constants = {name: compute_constants(each, batch, step, versions) for name, each in shadows.items()}
    constants = compute_constants(spec, batch, step, versions)
    plan = SharedPlan(step, constants, shadow_constants, bounds=bounds or {})
    return plan, build_row_columns(spec, batch, batch_split(), step, constants, versions) if spec.recounts else {}


def seal_batch(plan: SharedPlan, rows: TensorDict, columns: Mapping[str, Tensor]) -> SharedPlan:
    """Seal all unsealed columns in ``rows``; return a plan that lists all seals and is itself sealed.

    Args:
        rows: contains "responses" and "response_mask".
        columns: columns of these rows to seal.
    """
    unsealed = {name: column for name, column in columns.items() if key_of(name) not in rows.keys()}
    for name, seal in build_seals(rows["responses"], rows["response_mask"], unsealed).items():
        rows[key_of(name)] = seal
    names = {name.removeprefix(PREFIX) for name in rows.keys() if name.startswith(PREFIX)}
    plan = replace(plan, sealed=(*sorted({*names, PLAN_HASH}),))
    rows[key_of(PLAN_HASH)] = seal_constant(plan.fingerprint(), len(rows))
    return plan


def columns_to_seal(columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Remove the columns that need no seal: the proofs report ``PROVE``, and the loss checks the counts."""
    return {name: column for name, column in columns.items() if name not in (PROVE, MINI_BATCH_TOKENS)}


ReadVersions = Callable[[], RowVersions | None]
"""Reader of the rows' versions, which several corrections may share."""


def compute_constants(
    spec: CorrectionSpec, rows: TensorDict, step: int | None = None, versions: ReadVersions | None = None
) -> BatchConstants:
    """Compute the constants of ``spec`` for the batch ``rows``, which contains ``COLUMNS``, nested or padded.

    Args:
        step: the trainer's step, for age-dependent parts.
    """
    if not spec.needs_constants:
        return BatchConstants()
    return batch_constants(spec, **_read_columns(spec, rows, step, versions))


def count_kept(
    spec: CorrectionSpec,
    rows: TensorDict,
    step: int | None = None,
    constants: BatchConstants | None = None,
    versions: ReadVersions | None = None,
) -> tuple[Tensor, Tensor]:
    """Count each row's response tokens, and the tokens that the rollout stage of ``spec`` keeps: (B,) float64 each.

    Args:
        rows: contains ``COLUMNS``, nested or padded.
        step: the trainer's step, for age-dependent parts.
        constants: the constants of ``spec`` for these rows, if they are already known.
    """
    constants = constants or compute_constants(spec, rows, step, versions)
    return count_kept_by_row(spec, constants, **_read_columns(spec, rows, step, versions))


def decide_rollout(spec: CorrectionSpec, rows: TensorDict, step: int) -> RolloutStage:
    """Run the rollout stage of ``spec``, with its statistics, on the batch ``rows``, which contains ``COLUMNS``."""
    return rollout_stage(spec, **_read_columns(spec, rows, step), constants=compute_constants(spec, rows, step))


@dataclass(frozen=True)
class Groups:
    """The groups of a batch with ``baseline=exclude``.

    Attributes:
        uids: uid of each row, for verl's estimator.
        silent: True if a row's advantage is 0, see ``regroup``.
        metrics: metrics for the user's logger.
    """

    uids: list[str]
    silent: list[bool]
    metrics: dict[str, float]


def regroup_without_rejected(
    spec: CorrectionSpec, rows: TensorDict, uids: Sequence[str], step: int | None = None
) -> Groups:
    """Regroup the batch ``rows``, which contains ``COLUMNS``, without the rows that ``spec`` rejects."""
    tokens, kept = count_kept(spec, rows, step)
    rejected = (tokens > 0) & (kept == 0)
    regrouped, silent = regroup(uids, rejected)
    counts = {"excluded": float(rejected.sum()), "silent": float(sum(silent))}
    return Groups(regrouped, silent, {f"offpolicy/baseline/{name}_sequences": n for name, n in counts.items()})


def build_row_columns(
    spec: CorrectionSpec,
    rows: TensorDict,
    batch_split: BatchSplit,
    step: int | None = None,
    constants: BatchConstants | None = None,
    versions: ReadVersions | None = None,
) -> dict[str, Tensor]:
    """Build the columns of ``denominator=kept`` or ``nonfinite=excluded`` for the batch ``rows``.

    The columns are in the order in which verl splits the batch.
    """
    if spec.denominator == "kept":
        tokens, kept = count_kept(spec, rows, step, constants, versions)
    else:
        mask = rows["response_mask"].bool()
        tokens = count_tokens_by_row(mask)
        kept = count_tokens_by_row(find_finite_tokens(mask, rows["rollout_log_probs"]))
    size = batch_split.mini_batch_rows
    group = assign_mini_batches(len(tokens), ranks=batch_split.ranks, rows_a_mini_batch=size)
    of_group = torch.zeros(int(group.max()) + 1, dtype=torch.int64).index_add_(0, group, tokens.long())
    scale = compute_scale_of_counts(
        batch_split.loss_agg_mode, tokens=tokens, kept=kept, mini_batch=group, mini_batch_rows=size
    )
    return {SCALE: scale, MINI_BATCH_TOKENS: of_group[group]}


def _read_columns(
    spec: CorrectionSpec, rows: TensorDict, step: int | None, read: ReadVersions | None = None
) -> Columns:
    """Read the arguments of a rollout stage of ``spec`` from rows with ``COLUMNS``."""
    mask, by_version = rows["response_mask"], "version" in spec.levels
    read = read or partial(read_versions, rows, mask)
    versions = read() if spec.age_parts or by_version else None
    check_ages_known(spec, versions, step)
    return {
        "old_log_prob": rows["old_log_probs"],
        "rollout_log_prob": rows["rollout_log_probs"],
        "response_mask": mask,
        "segment_ids": turns(mask) if spec.needs_turns else None,
        "versions": compute_token_versions(versions, mask) if by_version else None,
        "staleness": versions.compute_ages(step, mask) if spec.age_parts and versions and step is not None else None,
    }


Shares = dict[str, float]
"""Maps each of verl's denominators to the share that some micro-batches contribute to it. The shares of all
micro-batches of an optimizer step, over all ranks, add up to 1."""
_TOKENS, _ROWS = "batch_num_tokens", "global_batch_size"


def mini_batch_mean(values: Tensor, response_mask: Tensor, actor_config: Any, data: TensorDict) -> Tensor:
    """Aggregate (B, T) values by ``loss_agg_mode``, with the denominators of the mini-batch over all ranks.

    Args:
        actor_config: verl's ActorConfig.
        data: the micro-batch that the engine passes to its loss.
    """
    from verl.trainer.ppo.core_algos import agg_loss

    return agg_loss(
        values,
        response_mask,
        actor_config.loss_agg_mode,
        dp_size=data["dp_size"],
        # In a mini-batch without tokens, every sum is 0, so the mean is 0 too.
        batch_num_tokens=max(data["batch_num_tokens"], 1),
        global_batch_size=data["global_batch_size"],
        loss_scale_factor=actor_config.loss_scale_factor,
    )


def check_ranks(data: TensorDict, dp_group: Any) -> None:
    """Check that ``dp_size`` is the size of the engine's group of data-parallel ranks, if both are known.

    Raises:
        SealError: the two differ.
    """
    from verl.utils import tensordict_utils as tu

    sent = tu.get_non_tensor_data(data, "dp_size", None)
    if dp_group is None or sent is None or sent == (ranks := torch.distributed.get_world_size(dp_group)):
        return
    raise SealError(
        f"verl multiplies the loss by dp_size, which is {sent} in a micro-batch of {ranks} data-parallel ranks. Code "
        f"between engine and loss changed it. The optimizer has not stepped."
    )


def defer_shares(response_mask: Tensor, data: TensorDict) -> DeferredValue[Shares]:
    """Compute the share of each denominator that this micro-batch contributes; empty if verl sent none (legacy actors).

    The share of a denominator of 0 is infinite, or NaN for a mini-batch without tokens.
    """
    from verl.utils import tensordict_utils as tu

    rows = len(response_mask)
    sent = {name: tu.get_non_tensor_data(data, name, None) for name in (_TOKENS, _ROWS)}

    def divide(tokens: list[int]) -> Shares:
        filled = {_TOKENS: tokens[0], _ROWS: rows}
        known = {name: of for name, of in sent.items() if of is not None}
        return {name: filled[name] / of if of else math.inf if filled[name] else math.nan for name, of in known.items()}

    return DeferredValue(response_mask.sum()[None], divide)


def add_shares(parts: Iterable[Shares]) -> Shares:
    """Add the shares of micro-batches; the sum is infinite if any share is, even if another share is NaN."""
    found: dict[str, list[float]] = {}
    for part in parts:
        for name, share in part.items():
            found.setdefault(name, []).append(share)
    return {name: math.inf if math.inf in shares else math.fsum(shares) for name, shares in found.items()}


def check_shares(shares: Shares, steps: int) -> None:
    """Check that an update's micro-batches add up to each denominator once per optimizer step.

    Raises:
        LivenessError: they do not.
    """
    for name, share in shares.items():
        if not (math.isnan(share) or abs(share - steps) <= 1e-6 * max(steps, 1)):
            raise LivenessError(
                f"verl divides the loss by {name}, but the micro-batches of {steps} optimizer steps add up to "
                f"{share:.6g} times {name} instead of {steps} times. Code between trainer and loss changed it."
            )


def take_reports(metrics: dict[str, Any], key: str) -> list[Any]:
    """Remove the reports of one update, from every rank, mini-batch and micro-batch, from the workers' metrics."""

    def flatten(value: Any) -> Iterator[Any]:
        # verl nests lists by rank and mini-batch, except with a single rank.
        if isinstance(value, list | tuple):
            for item in value:
                yield from flatten(item)
        else:
            yield value

    return list(flatten(metrics.pop(key, [])))
