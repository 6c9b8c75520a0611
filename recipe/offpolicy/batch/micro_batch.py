"""Adapter that reads verl's micro-batch and writes weights to it; only this module depends on verl's keys and layouts.

verl 0.9.1 calls the engine's loss as ``loss_fn(model_output=..., data=TensorDict, dp_group=...)``. Response tensors
are nested by row on the V1 trainer and padded (B, T) on V0; ``model_output["log_probs"]`` is nested over prompt and
response.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from verl.utils import tensordict_utils as tu
from verl_patches.worker_seams import Padded, accept_padded

from ..correction import (
    CorrectionSpec,
    RolloutStage,
    Statistic,
    StepStage,
    proximal_log_prob,
    rollout_stage,
    step_stage,
    turns,
)
from ..correction.correction_parts import BY_AGE
from ..correction.stages import compute_shadow_statistics
from ..correction.statistics import DeferredValue, Reduction
from ..correction.telemetry import Measure
from .padding import Layout, flatten, nest_like, pad_column, values_of, with_tensors
from .plan import MINI_BATCH_TOKENS, PLAN, PROVE, SCALE, SharedPlan
from .seals import INPUT, SealError, compare, compare_engine, hash_model_input, key_of
from .weight_versions import (
    TOKEN_VERSIONS_SEALED,
    VERSIONS_SEALED,
    RowVersions,
    check_ages_known,
    compute_token_versions,
    read_versions,
)

ROLLOUT_LOG_PROBS = "rollout_log_probs"
WEIGHTS = "rollout_is_weights"  # verl's ppo_loss multiplies the policy term by this
PI_OLD = "offpolicy_pi_old"
"""Key in the loss's data: log pi_old for terms with their own ratio; may contain non-finite values."""
FULL_LOG_PROBS = "offpolicy_full_log_probs"
"""Key of a model output: log-probs over the whole vocabulary; set if ``log_probs`` cover only the replayed support."""
WITHHELD = "offpolicy_withheld"
"""Key of a model output: flags of tokens of unknown support, which the policy term omits; stored one position early."""
SUPPORT_SIZE = "offpolicy_support_size"
"""Key of a model output and of a recorded column: the size of each token's support, 0 if unknown."""
LIKELIEST_LOG_PROBS = "offpolicy_likeliest_log_probs"
"""Key of a model output: (tokens, K) log pi of the likeliest tokens, nested by row. Each value is stored one position
before its token."""
LIKELIEST_ROLLOUT_LOG_PROBS = "offpolicy_likeliest_rollout_log_probs"
"""Key of a model output: log mu of the likeliest tokens, 0 or less, -inf where there is no token."""
LAST = "update_lr_scheduler"
"""Flag that verl passes to the engine with each mini-batch: whether to update the learning rate afterwards. verl sets
the flag for the last mini-batch of an update."""
_NEEDED = ("responses", "response_mask", "old_log_probs", "advantages", ROLLOUT_LOG_PROBS)


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch: its padded (B, T) tensors, and the engine's arguments, which allow a loss to be recomputed.

    Gradients flow through ``log_prob``; ``responses`` are token ids.

    Attributes:
        old_log_prob: log pi_old as sent; ``choose_pi_old`` returns the log pi_old that a correction uses.
        versions: versions of the weights that sampled each row, or each token; None if verl does not record them.
        plan: the trainer's constants for the whole batch; None if the trainer sent none.
        scale: (B,) float64 factors of ``denominator=kept`` or ``nonfinite=excluded``; None if the trainer sent none.
        counted: a deferred value that raises an exception if ``scale`` was computed for other mini-batches than the
            engine's.
        withheld: (B, T) bool, tokens that are excluded from the policy term, masks and statistics; None if there are
            none.
        last: True if verl reports that the rows belong to the update's last mini-batch.
        marks: the trainer's request for a proof, see ``PROVE``: 1 or 2 for each marked row.
        layout: position of the responses in the model output; None if the responses have already been extracted and
            padded.
        model_output, data: arguments of the engine's call to its loss; empty for rows from ``detached``.
    """

    responses: Tensor
    response_mask: Tensor
    rollout_log_prob: Tensor
    old_log_prob: Tensor
    log_prob: Tensor
    advantages: Tensor
    versions: RowVersions | None = None
    plan: SharedPlan | None = None
    scale: Tensor | None = None
    counted: DeferredValue[None] | None = None
    withheld: Tensor | None = None
    last: bool = True
    marks: tuple[int, ...] = ()
    layout: Layout | None = None
    model_output: Mapping[str, Any] = field(default_factory=dict, repr=False)
    data: TensorDict = field(default_factory=TensorDict, repr=False)

    @property
    def width(self) -> int:
        """T, the padded number of response tokens."""
        return int(self.response_mask.shape[1])

    @cached_property
    def policy_mask(self) -> Tensor:
        """(B, T) bool, response tokens on which the correction decides; withheld tokens are excluded."""
        return self.response_mask if self.withheld is None else self.response_mask & ~self.withheld

    @cached_property
    def turns(self) -> Tensor:
        """(B, T) int64, see ``correction.turns``."""
        return turns(self.response_mask)

    def loss_columns(self) -> dict[str, Tensor]:
        """Return the per-token columns that every corrected loss reads, by verl's names."""
        return {
            ROLLOUT_LOG_PROBS: self.rollout_log_prob,
            "old_log_probs": self.old_log_prob,
            "advantages": self.advantages,
        }

    def detached(self) -> MicroBatch:
        """Return a copy of the rows that is detached and does not keep the engine's tensors alive."""
        return replace(self, log_prob=self.log_prob.detach(), layout=None, model_output={}, data=TensorDict())

    def padded_output(self) -> Mapping[str, Any]:
        """Pad the log-probs and entropy of the model output, in a form that verl's loss accepts.

        Raises:
            PatchError: verl's padding function is not where it is expected, see ``accept_padded``.
        """
        if self.layout is None:
            return self.model_output
        accept_padded()
        changed = {**self.model_output, "log_probs": Padded(self.log_prob)}
        if self.model_output.get("entropy") is not None:
            changed["entropy"] = Padded(self.layout.responses_of(flatten(self.model_output["entropy"])))
        return changed

    def leaf(self) -> tuple[dict[str, Any], Tensor]:
        """Copy and detach the model output; its log-probs become a new leaf tensor, and no token is withheld.

        Returns:
            The model output for a loss, and the (total tokens,) leaf at which the gradient must be taken.
        """
        log_probs = self.model_output["log_probs"]
        leaf = flatten(log_probs).detach().clone().requires_grad_()
        output = {key: value for key, value in self.model_output.items() if key != WITHHELD}
        copy = {key: value.detach() if isinstance(value, Tensor) else value for key, value in output.items()}
        copy["log_probs"] = nest_like(leaf, log_probs)
        return copy, leaf

    def spread(self, values: Tensor) -> Tensor:
        """Spread (B, T) values over the positions of their flat log-probs: (total tokens,)."""
        log_probs = self.model_output["log_probs"]
        values = values.to(log_probs.dtype)
        return values if self.layout is None else self.layout.place(values, len(flatten(log_probs)))

    def restate(self) -> MicroBatch:
        """Build the same rows with a detached model output that contains ``log_prob`` at the response tokens."""
        output, leaf = self.leaf()
        mask = self.data.select("response_mask").to_padded_tensor()["response_mask"].to(leaf.dtype)
        there, values = self.spread(mask), self.spread(mask * self.log_prob.detach().to(leaf.dtype))
        changed = torch.where(there > 0, values, leaf.detach())
        return replace(self, model_output=output | {"log_probs": nest_like(changed, self.model_output["log_probs"])})

    def data_with(self, plan: SharedPlan | None = None, /, **tensors: Tensor | None) -> TensorDict:
        """Copy verl's micro-batch with ``with_tensors``; ``plan``, if given, replaces the copy's plan."""
        changed = with_tensors(self.data, **tensors)
        if plan is not None:
            tu.assign_non_tensor(changed, **{PLAN: plan})
        return changed


def read(model_output: Mapping[str, Any], data: TensorDict) -> MicroBatch:
    """Read the tensors of a correction, padded with zeros to the longest response of the micro-batch.

    Raises:
        KeyError: mu or another key is missing from the micro-batch; the message names the setting that adds the key.
    """
    for key in _NEEDED:
        if key not in data.keys():
            of_mu = "set actor_rollout_ref.rollout.calculate_log_probs=true"
            fix = of_mu if key == ROLLOUT_LOG_PROBS else "this path of verl does not send the key to the loss"
            raise KeyError(f"{key} is not in the micro-batch that reached the loss: {fix}")
    # Legacy actors pad all rows, and omit the prompts.
    layout = None if _is_padded(model_output["log_probs"]) else Layout.of(data)
    columns = {key: data[key] if layout is None else pad_column(data[key], layout, key) for key in _NEEDED}
    response_mask = columns["response_mask"].bool()
    plan = tu.get_non_tensor_data(data, PLAN, None)
    withheld = model_output.get(WITHHELD)
    marked = plan is not None and plan.prove and PROVE in data.keys()
    return MicroBatch(
        responses=columns["responses"],
        response_mask=response_mask,
        rollout_log_prob=columns[ROLLOUT_LOG_PROBS],
        old_log_prob=columns["old_log_probs"],
        log_prob=pad_log_probs(model_output, data, layout),
        advantages=columns["advantages"],
        versions=read_versions(data, response_mask),
        plan=plan,
        scale=data[SCALE] if SCALE in data.keys() else None,
        counted=_counted(data),
        withheld=None if withheld is None else (layout or Layout.of(data)).responses_of(flatten(withheld)),
        last=bool(tu.get_non_tensor_data(data, LAST, True)),
        marks=tuple(filter(None, data[PROVE].tolist())) if marked else (),
        layout=layout,
        model_output=model_output,
        data=data,
    )


def decide(spec: CorrectionSpec, batch: MicroBatch, *, measure: Measure = "all") -> StepStage:
    """Run both stages on one micro-batch, and compute the statistics that ``measure`` selects.

    Raises:
        KeyError: the correction needs a batch-level constant, but the trainer's plan did not arrive.
        ValueError: the correction uses level ``version`` or has an age-dependent part, but verl does not record the
            versions.
    """
    return step_stage(spec, _first_stage(spec, batch, measure), log_prob=batch.log_prob, advantages=batch.advantages)


def decide_with_shadows(
    spec: CorrectionSpec, shadows: Mapping[str, CorrectionSpec], batch: MicroBatch
) -> tuple[dict[str, Statistic], dict[str, Statistic]]:
    """Run ``decide``, and measure the effect that the shadow corrections would have on this micro-batch.

    The shadow corrections use the pi_old of ``spec``.
    """
    for shadow in shadows.values():
        _check_ages(shadow, batch)
    by_version = any("version" in shadow.levels for shadow in shadows.values())
    stage = _first_stage(spec, batch, "all", by_version)
    step = step_stage(spec, stage, log_prob=batch.log_prob, advantages=batch.advantages)
    statistics = step.statistics | count_unknown_versions(batch)
    needy = any(spec.needs_constants for spec in shadows.values())
    return statistics, compute_shadow_statistics(
        shadows,
        stage,
        log_prob=batch.log_prob,
        advantages=batch.advantages,
        constants=_plan(batch).shadow_constants if needy else None,
    )


def _first_stage(spec: CorrectionSpec, batch: MicroBatch, measure: Measure, by_version: bool = False) -> RolloutStage:
    _check_ages(spec, batch)
    by_version = by_version or "version" in spec.levels
    return rollout_stage(
        spec,
        old_log_prob=choose_pi_old(spec, batch),
        rollout_log_prob=batch.rollout_log_prob,
        response_mask=batch.policy_mask,
        segment_ids=batch.turns if measure != "nothing" or spec.needs_turns else None,
        versions=compute_token_versions(batch.versions, batch.response_mask) if by_version else None,
        constants=_plan(batch).constants if spec.needs_constants else None,
        staleness=compute_staleness(batch),
        measure=measure,
    )


def _check_ages(spec: CorrectionSpec, batch: MicroBatch) -> None:
    check_ages_known(spec, batch.versions, None if batch.plan is None else batch.plan.step)


def compute_factor(spec: CorrectionSpec, batch: MicroBatch, step: StepStage) -> Tensor:
    """Compute the factor of each token's policy term: weight * keep, (B, T), including the denominator's scale.

    Raises:
        KeyError: ``denominator=kept`` or ``nonfinite=excluded`` is set, but the trainer's scale did not arrive.
    """
    weight = step.weight * step.keep
    return weight if not spec.recounts else weight * read_scale(spec, batch)[:, None].to(weight.dtype)


def read_scale(spec: CorrectionSpec, batch: MicroBatch) -> Tensor:
    """Read each row's factor, (B,), for ``denominator=kept`` or ``nonfinite=excluded``."""
    if batch.scale is None:
        asked = "denominator=kept" if spec.denominator == "kept" else "nonfinite=excluded"
        raise KeyError(f"{SCALE} is not in the micro-batch that reached the loss, but {asked} needs this column.")
    return batch.scale


def choose_pi_old(spec: CorrectionSpec, batch: MicroBatch) -> Tensor:
    """Choose log pi_old according to ``spec.proximal``, (B, T)."""
    return proximal_log_prob(
        spec.proximal,
        spec.alpha,
        old_log_prob=batch.old_log_prob,
        rollout_log_prob=batch.rollout_log_prob,
        log_prob=batch.log_prob,
        ages=compute_staleness(batch) if spec.alpha == BY_AGE else None,
    )


def compute_staleness(batch: MicroBatch) -> Tensor | None:
    """Compute each row's or token's age in steps, at the start of this step: int64 on the batch's device.

    The result is (B, T) if versions are recorded per token, and (B,) otherwise. It is None if verl does not record
    versions or the trainer sent no plan.
    """
    if batch.plan is None or batch.versions is None:
        return None
    return batch.versions.compute_ages(batch.plan.step, batch.response_mask)


def count_unknown_versions(batch: MicroBatch) -> dict[str, Statistic]:
    """Count the rows without per-token versions; empty if verl records no versions."""
    if batch.versions is None:
        return {}
    unknown = batch.versions.find_unknown(batch.response_mask).sum(dtype=torch.float64)
    return {"staleness/unknown_by_token": Statistic(Reduction.SUM, (unknown,))}


def check_seals(batch: MicroBatch) -> DeferredValue[None] | None:
    """Compare the values that arrived with each column's seal (checksum); None if the plan lists no seals.

    Raises:
        SealError: a seal or a sealed column is missing, or a column has changed (raised when the result is fetched).
    """
    if batch.plan is None or not batch.plan.sealed:
        return None
    came = {name: batch.data[key_of(name)] for name in batch.plan.sealed if key_of(name) in batch.data.keys()}
    # TransferQueue returns every column with more than one number per row as a nested tensor.
    seals = {name: flatten(seal).view(len(batch.responses), -1) for name, seal in came.items()}
    if lost := set(batch.plan.sealed) - set(seals):
        raise SealError(f"the checksums of {', '.join(sorted(lost))} did not reach the loss with these sequences.")
    by_token, by_row = batch.loss_columns(), {}
    if batch.versions is not None:
        by_row[VERSIONS_SEALED] = torch.stack((batch.versions.oldest, batch.versions.newest), dim=-1)
        if TOKEN_VERSIONS_SEALED in seals:
            by_token[TOKEN_VERSIONS_SEALED] = batch.versions.column_to_seal(batch.response_mask)
    if INPUT in seals:
        by_row[INPUT] = hash_model_input(batch.data)
    for name in seals.keys() & set(batch.data.keys()) - set(by_token):
        column = batch.data[name] if batch.layout is None else pad_column(batch.data[name], batch.layout, name)
        (by_token if column.shape == batch.response_mask.shape else by_row)[name] = column
    return compare(
        seals,
        tokens=batch.responses,
        mask=batch.response_mask,
        by_token=by_token,
        by_row={name: column.to(batch.response_mask.device) for name, column in by_row.items()},
        plan=batch.plan.fingerprint(),
    )


def check_engine(batch: MicroBatch) -> DeferredValue[None]:
    """Compare tokens and mask with the columns that only the engine reads: the model input and the counted mask.

    Raises:
        SealError: when fetched, they differ.
    """
    ids, counted = (batch.data.get(name, None) for name in ("input_ids", "loss_mask"))
    fed = None
    if batch.layout is not None and ids is not None and ids.is_nested:
        fed = batch.layout.input_of(values_of(ids))
    counted = None if counted is None else values_of(counted)
    return compare_engine(batch.responses, batch.response_mask, fed=fed, counted=counted)


def read_bounds(batch: MicroBatch, names: Collection[str]) -> Mapping[str, Mapping[str, float | None]]:
    """Return part -> the bounds that the trainer sent with this update.

    Raises:
        KeyError: the trainer sent bounds for other parts than ``names``, the parts with moving bounds.
    """
    sent = _plan(batch).bounds
    if set(sent) != set(names):
        raise KeyError(
            f"the {PLAN} that reached the loss contains bounds for {sorted(sent)} instead of bounds for "
            f"{sorted(names)}."
        )
    return sent


def pad_log_probs(model_output: Mapping[str, Any], data: TensorDict, layout: Layout | None = None) -> Tensor:
    """Pad log pi of the responses to (B, T), zeros on padding; differentiable.

    Args:
        layout: layout of ``data``, if it is already known.
    """
    log_probs = model_output["log_probs"]
    if isinstance(log_probs, Padded):
        return log_probs.tensor
    if _is_padded(log_probs):
        return log_probs
    return (layout or Layout.of(data)).responses_of(flatten(log_probs))


def _is_padded(log_probs: Tensor) -> bool:
    """Return True if the forward pass has already padded the responses, as for legacy actors."""
    return not log_probs.is_nested and log_probs.dim() == 2


def _plan(batch: MicroBatch) -> SharedPlan:
    if batch.plan is None:
        raise KeyError(f"{PLAN} is not in the micro-batch that reached the loss, so batch-level constants are missing.")
    return batch.plan


def _counted(data: TensorDict) -> DeferredValue[None] | None:
    """Check that ``denominator=kept`` used the engine's token counts."""
    if SCALE not in data.keys():
        return None
    engine = tu.get_non_tensor_data(data, "batch_num_tokens", None)

    def judge(counted: list[int]) -> None:
        if any(one != engine for one in counted):
            raise ValueError(
                f"the loss's denominator was computed for mini-batches of {sorted(set(counted))} response tokens, but "
                f"the engine's mini-batch has {engine}: the batch was split differently than expected."
            )

    return DeferredValue(data[MINI_BATCH_TOKENS].long(), judge)
