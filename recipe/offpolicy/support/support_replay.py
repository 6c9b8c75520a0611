"""Support replay of truncated sampling in a run: servers, a client, workers that replay supports, and the proof.

``verl_patches.truncated_sampling`` lists the patched functions of verl 0.9.1.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from omegaconf import DictConfig

from verl_patches import engine_loss, truncated_sampling

from ..batch.reports import take_reports
from ..extensions.add_on import AddOn
from ..proof.verify import LivenessError
from .fsdp_engine import FLAG, REPORT, SupportReport, install_support
from .support_server import note_supports, serve_supports
from .support_settings import SupportSettings

WORSE = 1.1
"""Largest accepted ratio of k3 over the support to k3 over the vocabulary."""
_ROUNDING = 1e-6
"""k3 per token between two engines that differ only by rounding."""


def judge(reports: Sequence[SupportReport], settings: SupportSettings, *, first: bool) -> tuple[dict[str, float], str]:
    """Judge the reports of one update, one per mini-batch and rank.

    Args:
        first: True for the first update of the run, in which the support must not increase k3(mu, pi).

    Returns:
        The metrics, named under ``offpolicy/support/``, and a sentence.

    Raises:
        LivenessError: nothing was replayed, or replay widens the mismatch.
    """
    if not reports:
        raise LivenessError(
            "correction.support=engine: the update returned no report, so no support was replayed. The run uses a "
            "worker or engine other than the one that replays."
        )
    tokens, known = (sum(getattr(each, name) for each in reports) for name in ("tokens", "known"))
    if tokens and not known:
        raise LivenessError(
            f"correction.support=engine: none of {tokens} tokens has a support of at most {settings.size} ids. "
            f"Fix: raise correction.support_size, or set correction.support=null."
        )
    k3, without = (math.fsum(getattr(each, name) for each in reports) for name in ("k3", "k3_without"))
    compared = sum(each.k3_tokens for each in reports)
    unknown = tokens - known
    size = sum(each.bytes for each in reports)
    metrics = {
        "unknown_token_share": unknown / tokens if tokens else math.nan,
        "size": sum(each.members for each in reports) / known if known else math.nan,
        "size_largest": float(max(each.largest for each in reports)),
        "mass_least": min(each.least_mass for each in reports),
        "unknown_mass": math.fsum(each.unknown_mass for each in reports) / unknown if unknown else math.nan,
        "bytes": float(size),
        "bytes_a_token": size / tokens if tokens else math.nan,
        "kl_k3": k3 / compared if compared else math.nan,
        "kl_k3_without": without / compared if compared else math.nan,
    }
    if first and k3 > WORSE * without + _ROUNDING * compared:
        raise LivenessError(
            f"correction.support=engine: KL(mu, pi) by k3 is {metrics['kl_k3']:.2e} over the support and "
            f"{metrics['kl_k3_without']:.2e} over the vocabulary, so mu was not sampled from this support. "
            f"Fix: run the same model in rollout and trainer, or set correction.support=null."
        )
    rows = sum(each.compared for each in reports)
    return (
        metrics,
        f"support of {known / tokens if tokens else 0.0:.1%} of tokens LIVE, {metrics['size']:.1f} ids per token: each "
        f"token is in its support, mu sums to 1 over it, checksums of {rows} rows as sampled, KL(mu, pi) by k3 "
        f"{metrics['kl_k3']:.1e} over it and {metrics['kl_k3_without']:.1e} over the vocabulary.",
    )


logger = logging.getLogger("verl.offpolicy")


class SupportReplay(AddOn):
    """Replay of the support by the actor's engine, for both trainers.

    Args:
        settings: settings of the replay.
    """

    def __init__(self, settings: SupportSettings) -> None:
        self._settings = settings
        self._metrics: dict[str, float] = {}
        self._proved = False

    def begin(self, config: DictConfig) -> None:
        engine_loss.check(truncated_sampling.SEAMS)
        serve_supports(self._settings)

    def engine_part(self) -> Callable[[Any], object]:
        return partial(install_support, unknown=self._settings.unknown)

    def rollout_client(self, client: Any) -> Any:
        return note_supports(client)

    def batch_flags(self) -> dict[str, Any]:
        # Rows from an extension were not sampled, so they have no support.
        return {FLAG: True}

    def on_update(self, metrics: dict[str, Any], batch: Any) -> None:
        self._metrics, proof = judge(take_reports(metrics, REPORT), self._settings, first=not self._proved)
        if not self._proved:
            logger.info(proof)
        self._proved = True

    def metrics(self) -> dict[str, float]:
        return {f"offpolicy/support/{name}": value for name, value in self._metrics.items()}
