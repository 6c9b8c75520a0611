"""Counts of replayed routes over a mini-batch, and the proof in the trainer that routes were replayed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..proof.verify import LivenessError
from .batch_routes import BatchRoutes, Mode
from .expert_choice import ChoiceRecord, ReplayError, equal_sets

OLDEST_BUCKET = 3
"""The last age group, which includes all higher ages."""
AGES = ("is0", "is1", "is2", "ge3")


@dataclass
class FirstLook:
    """Values that are measured once, in the first update.

    Attributes:
        checksums: number of rows whose routes were compared with the client's notes.
        tokens: number of response tokens over which k3 is summed.
        k3, k3_without: sums of k3(mu, pi) from a forward with the routes, and from a forward without them.
    """

    checksums: int = 0
    tokens: int = 0
    k3: float = 0.0
    k3_without: float = 0.0


@dataclass(frozen=True)
class RoutingReport:
    """Report of one rank on the routes of one mini-batch, in plain Python.

    Attributes:
        layers: absolute numbers of the layers with experts.
        top_k: number of experts per token.
        tokens: number of tokens of all forwards, without padding.
        replayed, entered, equal: by layer, see ``RoutedModel.count_entered``.
        ages: for each of ``AGES``, over all layers: (number of choices replayed, number of these choices that equal the
            router's own choice).
        withheld: number of tokens whose routes were too old to be replayed.
        size: bytes of the routes, as received.
        gradients: sum of |gradient| of the routers' scores by layer; empty if gradients were not watched.
        first: measurements of the first update.
    """

    layers: tuple[int, ...]
    top_k: int
    tokens: int
    replayed: tuple[int, ...]
    entered: tuple[int, ...]
    equal: tuple[int, ...]
    ages: tuple[tuple[int, int], ...]
    withheld: int
    size: int
    gradients: tuple[float, ...] = ()
    first: FirstLook | None = None


@dataclass
class RoutingTally:
    """Counts of replayed routes, summed over micro-batches.

    Args:
        layers: absolute numbers of the layers with experts.
        top_k: number of experts per token.
    """

    layers: tuple[int, ...]
    top_k: int
    tokens: int = 0
    size: int = 0
    _sums: list[Tensor] = field(default_factory=list)

    def add(self, tokens: int, routes: BatchRoutes, counts: Tensor, records: Mapping[int, ChoiceRecord]) -> None:
        """Add the counts of one forward.

        Args:
            tokens: number of tokens, without padding.
            counts: (layers, 3) of ``RoutedModel.count_entered``.
            records: records by layer.
        """
        self.tokens += tokens
        self.size += routes.size
        self._sums.append(torch.cat([counts.flatten(), _count_by_age(routes, records), routes.withheld[None]]))

    def report(self) -> RoutingReport:
        """Copy the counts to the host.

        Raises:
            ReplayError: experts of a layer were called with ids that differ from the shipped ones.
        """
        width = len(self.layers)
        sums = torch.stack(self._sums).sum(0).tolist() if self._sums else [0] * (3 * width + 2 * len(AGES) + 1)
        replayed, entered, equal = (tuple(sums[place : 3 * width : 3]) for place in range(3))
        for layer, wanted, found in zip(self.layers, replayed, entered, strict=True):
            if found != wanted:
                raise ReplayError(
                    f"the experts of layer {layer} were called with ids other than the shipped ones for "
                    f"{wanted - found} of {wanted} tokens. Fix: find the code that changes the router's choice "
                    "between its forward and its experts, or turn routing replay off."
                )
        ages = sums[3 * width : -1]
        pairs = tuple(zip(ages[::2], ages[1::2], strict=True))
        return RoutingReport(
            *(self.layers, self.top_k, self.tokens, replayed, entered, equal, pairs),
            withheld=sums[-1],
            size=self.size,
        )


def _count_by_age(routes: BatchRoutes, records: Mapping[int, ChoiceRecord]) -> Tensor:
    """Count the choices replayed at each age, and how many of these equal the router's own choice: (2 * AGES,)."""
    replayed = torch.stack([record.replayed for record in records.values()])
    equal = torch.stack([equal_sets(record.ids, record.own) for record in records.values()]) & replayed
    pairs = torch.stack([replayed.sum(0), equal.sum(0)], -1)
    sums = pairs.new_zeros(len(AGES), 2)
    if routes.ages is not None:
        sums.index_add_(0, routes.ages.clamp(max=OLDEST_BUCKET), pairs)
    return sums.flatten()


WORSE = 1.1
"""Largest accepted ratio of k3 with the rollout engine's routes to k3 without these routes."""
_ROUNDING = 1e-6
"""k3 per token between two engines that differ only by rounding."""


def merge_reports(reports: Sequence[RoutingReport]) -> RoutingReport:
    """Sum the reports of one or several updates; there must be at least one report.

    Raises:
        LivenessError: ranks replay in different layers.
    """
    layers = reports[0].layers
    if any(report.layers != layers for report in reports):
        raise LivenessError(f"ranks replay routes in different layers: {sorted({each.layers for each in reports})}.")
    looks = [report.first for report in reports if report.first is not None]
    watched = [report.gradients for report in reports if report.gradients]
    sums: dict[str, Any] = {
        name: sum(getattr(each, name) for each in reports) for name in ("tokens", "withheld", "size")
    }
    sums |= {name: _add([getattr(each, name) for each in reports]) for name in ("replayed", "entered", "equal")}
    return replace(
        reports[0],
        **sums,
        ages=tuple(zip(*(_add([[pair[i] for pair in each.ages] for each in reports]) for i in (0, 1)), strict=True)),
        gradients=tuple(math.fsum(each) for each in zip(*watched, strict=True)),
        first=FirstLook(
            checksums=sum(look.checksums for look in looks),
            tokens=sum(look.tokens for look in looks),
            k3=math.fsum(look.k3 for look in looks),
            k3_without=math.fsum(look.k3_without for look in looks),
        ),
    )


def _add(counts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(map(sum, zip(*counts, strict=True)))


def judge(reports: Sequence[RoutingReport], mode: Mode, *, tokens: int) -> str:
    """Judge the reports of one update, one per mini-batch and rank.

    Args:
        tokens: number of tokens of the update, without padding, over all ranks and epochs.

    Returns:
        A sentence if the gates had a gradient; empty if this was not measured or there was no gradient.

    Raises:
        LivenessError: routes are missing, a gate has no gradient, or replay widens the mismatch.
    """
    if not reports:
        raise LivenessError(
            "routing replay: the update returned no report, so no route was replayed. The run uses a worker or "
            "engine other than the one that replays."
        )
    update = merge_reports(reports)
    look = update.first or FirstLook()
    if update.tokens != tokens:
        raise LivenessError(
            f"routing replay: {update.tokens} tokens were forwarded with routes, but the update has {tokens}."
        )
    if len(set(update.replayed)) > 1 or not (update.replayed[0] or update.withheld):
        counts = dict(zip(update.layers, update.replayed, strict=True))
        raise LivenessError(f"routing replay: the numbers of tokens replayed by layer are {counts}, but must be equal.")
    metrics = _measure(update)
    seen = _judge_gradients(update)
    if mode == "R3" and look.tokens and look.k3 > WORSE * look.k3_without + _ROUNDING * look.tokens:
        raise LivenessError(
            f"routing replay: KL(mu, pi) by k3 is {metrics['kl_k3']:.2e} with the rollout engine's routes and "
            f"{metrics['kl_k3_without']:.2e} without them, so mu was not sampled with these routes. "
            f"Fix: run the same model in rollout and trainer, or set router_replay.mode=disabled."
        )
    return _describe(mode, update, metrics) if seen else ""


def measure_routes(reports: Sequence[RoutingReport]) -> dict[str, float]:
    """Compute the metrics under ``offpolicy/routing/`` from the reports of one or several updates."""
    return _measure(merge_reports(reports))


def _measure(update: RoutingReport) -> dict[str, float]:
    choices = sum(update.replayed)
    shares = [equal / count for equal, count in zip(update.equal, update.replayed, strict=True) if count]
    metrics = {
        "replayed_token_share": update.replayed[0] / update.tokens,
        "withheld_token_share": update.withheld / update.tokens,
        "equal_share": sum(update.equal) / choices if choices else math.nan,
        "equal_share_worst_layer": min(shares, default=math.nan),
        "bytes": float(update.size),
    }
    for age, (count, equal) in zip(AGES, update.ages, strict=True):
        metrics[f"{age}/equal_share"] = equal / count if count else math.nan
    if update.gradients:
        metrics["gate_gradient"] = sum(value > 0 for value in update.gradients) / len(update.gradients)
    if (look := update.first) and look.tokens:
        metrics |= {"kl_k3": look.k3 / look.tokens, "kl_k3_without": look.k3_without / look.tokens}
    return metrics


def _judge_gradients(update: RoutingReport) -> bool:
    if not update.gradients:
        return False
    named = dict(zip(update.layers, update.gradients, strict=True))
    if broken := [layer for layer, value in named.items() if not math.isfinite(value)]:
        raise LivenessError(f"routing replay: the gates of layer(s) {broken} have gradients that are not finite.")
    silent = [layer for layer, value in named.items() if value == 0]
    # With one expert per token, the expert's weight may be 1 for any score.
    if silent and len(silent) < len(named) and update.top_k > 1:
        raise LivenessError(
            f"routing replay: the gates of layer(s) {silent} have no gradient, although the gates of other layers do, "
            "so the scores of the former do not reach the loss."
        )
    return len(silent) < len(named)


def _describe(mode: Mode, update: RoutingReport, metrics: dict[str, float]) -> str:
    parts = [
        f"routing replay {mode} LIVE in {len(update.layers)} layers: {metrics['replayed_token_share']:.1%} of tokens "
        f"replayed with the shipped ids",
        f"{metrics['equal_share']:.1%} of choices are the trainer's own",
    ]
    if update.first and update.first.checksums:
        parts.append(f"routes of {update.first.checksums} rows as sampled")
    if "kl_k3" in metrics:
        parts.append(f"KL(mu, pi) by k3 {metrics['kl_k3']:.1e} with them and {metrics['kl_k3_without']:.1e} without")
    return ", ".join(parts) + "."
