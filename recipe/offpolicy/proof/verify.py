"""Trainer side of the liveness proof: checks the workers' evidence and stops the run if evidence is missing or wrong.

Every micro-batch must send a report, use the trainer's spec and the sampled mu, and show that each configured
correction affects the gradient.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Protocol

from ..batch.plan import PROVE, Shares, add_shares, check_shares
from ..batch.seals import INPUT, are_same_rows
from ..batch.seals import LivenessError as LivenessError
from ..batch.weight_versions import TOKEN_VERSIONS_SEALED
from ..correction import CorrectionSpec
from ..correction.spec import compute_fingerprint, read_bounds
from .gradient import Proof, isolate_parts

FOREIGN = 0.1
"""Mean |log pi - log pi_old|, in nats per token, below which pi and pi_old must come from one policy and the same
sequences."""
_BYPASSED = "the engine's backward pass did not go through the corrected loss, or scaled it by zero"
LEAST_INNER = 8
"""Minimum number of tokens with two neighbours to conclude that mu is off by one; fewer tokens can match by chance."""


class UpdateEvidence(Protocol):
    """Interface of the evidence from one micro-batch, see ``worker.metrics.Packet``."""

    fingerprint: int
    rows: list[int]
    plan: int
    bounds: dict[str, dict[str, float | None]]
    proof: Proof | None
    scales: dict[float, int]
    shares: Shares


def verify(
    packets: Sequence[UpdateEvidence],
    spec: CorrectionSpec,
    *,
    sampled_rows: Sequence[int],
    epochs: int = 1,
    allow_identical: bool = False,
    moving: Collection[str] = (),
    plan: int | None = None,
    marked: int | None = None,
    again: bool = False,
    steps: int = 0,
) -> dict[str, float]:
    """Check the evidence of an update that contains proofs.

    Args:
        packets: one packet per micro-batch, from every rank.
        spec: the trainer's spec, with the bounds of this update.
        sampled_rows: checksums of mu as the rollout returned it, see ``seals.compute_row_checksums``.
        epochs: number of times that the worker visits each row.
        allow_identical: True if mu may be bitwise identical to pi_old.
        moving: parts whose bounds are sent with each update; the fingerprint excludes them.
        plan: fingerprint of the plan sent with this update; None: plans are not compared.
        marked: sum of the marks that request proofs; None: all micro-batches must be proved.
        again: True if the correction was proved before, so that a few rows need not test all of its parts.
        steps: number of optimizer steps that the engine made; 0: unknown.

    Returns:
        Metrics for ``offpolicy/live/``. ``proved`` is 0.0 if the update had no gradient to check, for example because
        all advantages are zero. In that case, the next update is checked instead.

    Raises:
        LivenessError: evidence is missing or wrong.
    """
    verify_update(packets, spec, sampled_rows=sampled_rows, epochs=epochs, moving=moving, plan=plan, steps=steps)
    structure = float(compute_fingerprint(spec, moving))
    if spec.is_none:
        return {"fingerprint": structure}
    proofs = [packet.proof for packet in packets if packet.proof is not None]
    _verify_number(packets, None if marked is None else marked * epochs)
    if not again:
        _verify_alignment(proofs)
    proofs = [proof for proof in proofs if proof.tokens]
    if not proofs:
        return {"proved": 0.0, "fingerprint": structure}
    tokens, identical, moved = (
        sum(getattr(proof, name) for proof in proofs) for name in ("tokens", "identical_tokens", "gradient_tokens")
    )
    _verify_identity(spec, tokens, identical, allowed=allow_identical or again)
    gradient_error = _verify_gradient(proofs)
    tried = [proof for proof in proofs if proof.tried]
    # A base loss without a ratio does not read pi_old, so ``proximal`` cannot be proved, but all other parts must be
    # proved.
    unread = bool(spec.all_weights or spec.masks or spec.penalty) and not _seen(tried, "proximal")
    names = [name for name, _ in isolate_parts(spec) if not (unread and name == "proximal")]
    if again:
        names = [name for name in names if _seen(tried, name) or any(name not in proof.shifts for proof in tried)]
    shift_error = max((_verify_shift(tried, name) for name in names if tried), default=0.0)
    return {
        "proved": float(moved > 0 and bool(names) and bool(tried)),
        "fingerprint": structure,
        "rows": float(sum(len(packet.rows) for packet in packets)),
        "gradient_tokens": float(moved),
        "gradient_error": gradient_error,
        "shift_error": shift_error,
        "parts": float(len(names)),
        "identical_share": identical / tokens,
        "log_prob_bits": float(min(proof.log_prob_bits for proof in proofs)),
        "own_rows": float(any(other for _, other in (proof.row_distances for proof in proofs))),
        "factor": float(any(packet.scales for packet in packets)),
        "denominators": float(steps > 0 and any(packet.shares for packet in packets)),
    }


def verify_update(
    packets: Sequence[UpdateEvidence],
    spec: CorrectionSpec,
    *,
    sampled_rows: Sequence[int],
    epochs: int = 1,
    moving: Collection[str] = (),
    plan: int | None = None,
    steps: int = 0,
) -> None:
    """Check the evidence sent with every update: adapter, spec, bounds, mu, the engine's factor, verl's denominators.

    Each micro-batch must come from the adapter, and must use the trainer's spec and bounds as well as the sampled mu.
    The engine must have multiplied its loss by the correct factor. The micro-batches of an optimizer step must add up
    to the totals that verl uses as denominators.

    Raises:
        LivenessError: evidence is missing or wrong.
    """
    _verify_fingerprint(packets, spec, moving)
    if not spec.is_none:
        if plan is not None and (wrong := sum(packet.plan != plan for packet in packets)):
            absent = sum(not packet.plan for packet in packets)
            raise LivenessError(
                f"{wrong} of {len(packets)} micro-batches did not use the plan that the trainer sent with this update "
                f"({absent} had no plan), so their step, bounds or constants came from another update."
            )
        _verify_rows([row for packet in packets for row in packet.rows], sampled_rows, epochs)
        _verify_scales(packets)
        if steps:
            check_shares(add_shares(packet.shares for packet in packets), steps)


def _verify_fingerprint(packets: Sequence[UpdateEvidence], spec: CorrectionSpec, moving: Collection[str]) -> None:
    if not packets:
        raise LivenessError("the corrected loss returned no metrics, so the worker ran another loss function.")
    expected = compute_fingerprint(spec, moving)
    if wrong := {packet.fingerprint for packet in packets} - {expected}:
        raise LivenessError(
            f"a worker has a different spec: fingerprint {wrong.pop()} instead of the trainer's {expected}."
        )
    bounds = read_bounds(spec, moving)
    for packet in packets:
        if packet.bounds != bounds:
            raise LivenessError(f"a worker used the bounds {packet.bounds}, but the trainer sent {bounds}.")


def _verify_rows(rows: Sequence[int], sampled_rows: Sequence[int], epochs: int) -> None:
    if are_same_rows(sampled_rows, rows, epochs):
        return
    used, sampled = Counter(rows), Counter([*sampled_rows] * epochs)
    if used and not used - sampled:
        raise LivenessError(
            f"the update used {used.total()} of the {sampled.total()} sequences that the rollout sampled, and changed "
            "none of them. Fix: a trainer with its own fit() must drop sequences before compute_log_prob and "
            "compute_advantage, and pass a whole batch to one call of update_actor, which verl splits into "
            "mini-batches."
        )
    raise LivenessError(
        f"the loss did not use the mu that the rollout sampled: {(sampled - used).total()} of "
        f"{sampled.total()} sequences were not found with bitwise equal tokens and log-probs, and "
        f"{(used - sampled).total()} were not sampled. Code between rollout and loss replaces, shifts, "
        f"casts or permutes rollout_log_probs."
    )


def _verify_scales(packets: Sequence[UpdateEvidence]) -> None:
    scales = [each for packet in packets for each in packet.scales.items()]
    for scale, count in scales:
        of_all = f"{count} of {sum(each for _, each in scales)} micro-batches"
        if scale == 0:
            raise LivenessError(f"{_BYPASSED}, in {of_all}.")
        # The factor may arrive rounded to the dtype of the loss. With this form of the condition, NaN also fails.
        if not abs(scale - 1) <= 1e-3:
            raise LivenessError(
                f"the engine multiplied the corrected loss of {of_all} by {scale:.6g} times the expected factor. Code "
                f"between the loss and the backward pass scales it."
            )


def _verify_number(packets: Sequence[UpdateEvidence], marked: int | None) -> None:
    """Check that all requested proofs exist: their marks must add up, or every micro-batch must have a proof."""
    proofs = [packet.proof for packet in packets if packet.proof is not None]
    if marked is None and len(proofs) < len(packets):
        raise LivenessError(f"{len(packets) - len(proofs)} of {len(packets)} micro-batches have no proof.")
    if marked is not None and (seen := sum(proof.marked for proof in proofs)) != marked:
        raise LivenessError(
            f"the marks of the proofs add up to {seen} instead of {marked}. Fix: find the code that changes the column "
            f"{PROVE}."
        )


def _verify_alignment(proofs: Sequence[Proof]) -> None:
    """Check that mu belongs to its tokens, and that the engine's log-probs belong to the rows that it was given."""
    before, same, after = (sum(proof.distances[i] for proof in proofs) for i in range(3))
    if sum(proof.inner_tokens for proof in proofs) >= LEAST_INNER and 2.0 * min(before, after) < same:
        raise LivenessError(
            f"mu is off by one token: it differs from log pi_old by {same:.3g} nats in total, but mu of the token "
            f"{'before' if before < after else 'after'} differs by {min(before, after):.3g}. The component that "
            f"produces rollout_log_probs drops or repeats a token."
        )
    tokens = sum(proof.tokens for proof in proofs)
    own, other = (sum(proof.row_distances[i] for proof in proofs) for i in range(2))
    # After a few steps, pi is still close to pi_old.
    if own > FOREIGN * tokens and 2.0 * own > other:
        raise LivenessError(
            f"log pi of the training engine, or pi_old, belongs to other sequences: over {tokens} tokens log pi "
            f"differs from pi_old by {own:.3g} nats, but from pi_old of other sequences by {other:.3g}. Fix: find the "
            "code that permutes one of the two."
        )


def _verify_identity(spec: CorrectionSpec, tokens: int, identical: int, *, allowed: bool) -> None:
    """Check that pi_old is mu if the correction requires this, and otherwise that mu and pi_old differ."""
    if spec.proximal != "recompute" and identical != tokens:
        raise LivenessError(
            f"correction.proximal={spec.proximal}: in the loss, old_log_probs must equal mu, but {tokens - identical} "
            f"of {tokens} tokens have another value. Fix: find the code that computes old_log_probs."
        )
    if spec.proximal == "recompute" and identical == tokens and not allowed:
        raise LivenessError(
            f"mu equals pi_old bitwise on all {tokens} tokens, so one of them is a copy of the other, all rollout "
            "ratios are 1, and nothing is corrected. If rollouts come from the trainer's own engine, set "
            "correction.proximal=same_engine; if this is intended for another reason, set "
            "offpolicy.allow_identical_log_probs=true."
        )


def _verify_gradient(proofs: Sequence[Proof]) -> float:
    """Check the gradient of the engine's own backward pass; return its largest relative error."""
    for proof in proofs:
        if proof.gradient_error is None:
            raise LivenessError("no gradient reached the log-probs in the engine's backward pass.")
        if proof.gradient_error == math.inf:
            raise LivenessError(f"{_BYPASSED}.")
        # This form also fails for NaN.
        if not proof.gradient_error <= proof.tolerance:
            raise LivenessError(
                f"the gradient with respect to the log-probs is not weight * keep * verl's gradient (plus extension "
                f"terms): relative error {proof.gradient_error:.3g}, tolerance {proof.tolerance:.3g}."
            )
    return max(proof.gradient_error or 0.0 for proof in proofs)


def _seen(proofs: Sequence[Proof], name: str) -> bool:
    return any(name in proof.shifts and not proof.shifts[name].vacuous for proof in proofs)


def _verify_shift(proofs: Sequence[Proof], name: str) -> float:
    """Check one correction on shifted log-probs; return its largest relative error."""
    for proof in proofs:
        if (shift := proof.shifts.get(name)) is None:
            raise LivenessError(f"{name} was not tested on every micro-batch.")
        # This form also fails for NaN.
        if not shift.error <= proof.tolerance:
            raise LivenessError(
                f"{name} has no effect: on log-probs shifted beyond its bound, the relative error of the gradient is "
                f"{shift.error:.3g}, tolerance {proof.tolerance:.3g}."
            )
    if not _seen(proofs, name):
        why = (
            "verl's loss has the same gradient for any pi_old."
            if name == "proximal"
            else "just beyond its bound, verl's loss has no gradient. Either verl's own clip is narrower and the "
            "correction changes nothing, or no sequence has two tokens."
        )
        raise LivenessError(f"there is no evidence that {name} acts: {why}")
    return max(proof.shifts[name].error for proof in proofs)


def describe_proof(spec: CorrectionSpec, live: Mapping[str, float]) -> str:
    """Describe in one sentence which parts were proved, according to the metrics of ``verify``."""
    if spec.is_none:
        return "no correction is configured; statistics only."
    names = ", ".join(name for name, _ in isolate_parts(spec) if name not in _find_unread(spec, live))
    return (
        f"{names} LIVE in the gradient of {live['gradient_tokens']:.0f} tokens (error {live['gradient_error']:.1e}), "
        f"mu of {live['rows']:.0f} rows as sampled, fingerprint {live['fingerprint']:.0f}."
    )


def describe_rest(
    spec: CorrectionSpec, live: Mapping[str, float], sealed: Sequence[str], add_ons: Mapping[str, str | None]
) -> str:
    """Describe in one sentence what else was compared at this update, and what was not proved.

    Args:
        live: metrics of ``verify``.
        sealed: columns whose values in the loss were compared with those at their source.
        add_ons: name of each add-on -> the reason why it is not proved; None if it is proved.
    """
    proved = [f"{', '.join(sorted(sealed))} per sequence with the values at their source"] if sealed else []
    proved += [name for name, why in add_ons.items() if why is None]
    missing = [*_find_missing(spec, live, sealed)]
    missing += [f"{name} ({why.rstrip('.')})" for name, why in add_ons.items() if why]
    return f"also compared: {'; '.join(proved) or 'nothing'}. Not proved: {'; '.join(missing) or 'nothing'}."


def _find_missing(spec: CorrectionSpec, live: Mapping[str, float], sealed: Sequence[str]) -> Iterator[str]:
    if spec.is_none:
        yield "advantages, old_log_probs and all other columns of the loss (correction=none)"
        return
    for name in _find_unread(spec, live):
        yield f"{name} (verl's loss has the same gradient for any pi_old)"
    if spec.baseline == "exclude":
        yield "baseline=exclude (it changes advantages, before the loss)"
    if not sealed:
        yield "columns of the loss (no column arrived with a checksum)"
    elif INPUT not in sealed:
        yield "the model's input (it arrived without a checksum)"
    elif spec.reads_token_versions and TOKEN_VERSIONS_SEALED not in sealed:
        yield "versions per token (only the versions of their sequences were compared)"
    if not live.get("own_rows"):
        yield "that log pi belongs to its own sequences (no micro-batch had two sequences, or pi_old is mu)"
    if not live.get("factor"):
        yield "the engine's factor of the loss (unknown for this engine)"
    if not live.get("denominators"):
        yield "verl's denominators of the loss (this engine reports none)"


def _find_unread(spec: CorrectionSpec, live: Mapping[str, float]) -> list[str]:
    parts = [name for name, _ in isolate_parts(spec)]
    return ["proximal"] if "proximal" in parts and len(parts) != live["parts"] else []
