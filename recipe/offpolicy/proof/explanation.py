"""Log sentences that say what a proof has shown and what it has not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ..batch.micro_batch import TOKEN_VERSIONS_SEALED
from ..correction import CorrectionSpec
from .gradient import isolate_parts


def describe_proof(spec: CorrectionSpec, live: Mapping[str, float]) -> str:
    """Say in one sentence which parts were seen to act, from the metrics of ``verify``."""
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
    """Say what else was compared at this update, and what was not proved.

    Args:
        live: metrics of ``verify``.
        sealed: columns whose values in the loss were compared with those at their source.
        add_ons: name -> why it is not proved; None if it is proved.
    """
    proved = [f"{', '.join(sorted(sealed))} per sequence with the values at their source"] if sealed else []
    proved += [name for name, why in add_ons.items() if why is None]
    missing = [
        *_find_missing(spec, live, sealed),
        *(f"{name} ({why.rstrip('.')})" for name, why in add_ons.items() if why),
    ]
    return f"compared as well: {'; '.join(proved) or 'nothing'}. Not proved: {'; '.join(missing) or 'nothing'}."


def _find_missing(spec: CorrectionSpec, live: Mapping[str, float], sealed: Sequence[str]) -> Iterator[str]:
    if spec.is_none:
        yield "advantages, old_log_probs and all other columns of the loss (correction=none)"
        return
    for name in _find_unread(spec, live):
        yield f"{name} (verl's loss has the same gradient whatever pi_old is)"
    if spec.baseline == "exclude":
        yield "baseline=exclude (it changes advantages, before the loss)"
    if not sealed:
        yield "columns of the loss (no column arrived with a seal)"
    elif spec.reads_token_versions and TOKEN_VERSIONS_SEALED not in sealed:
        yield "versions of single tokens (only those of their sequences were)"
    if not live.get("own_rows"):
        yield "that log pi belongs to its own sequences (no micro-batch had two sequences, or pi_old is mu)"
    if not live.get("factor"):
        yield "the engine's factor of the loss (unknown for this engine)"


def _find_unread(spec: CorrectionSpec, live: Mapping[str, float]) -> list[str]:
    parts = [name for name, _ in isolate_parts(spec)]
    return ["proximal"] if "proximal" in parts and len(parts) != live["parts"] else []
