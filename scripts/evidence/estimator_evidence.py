"""All figures of one run, measured and asserted."""

from __future__ import annotations

from dataclasses import dataclass

import estimator_claims as claims
import keep_rates
from enumeration import World, build, policies
from estimator_catalogue import ESTIMATORS, NONE
from expectation import Measurement, measure
from option_table import list_options, measure_option

Shares = dict[tuple[str, keep_rates.LogRatio, int], float]
"""(aggregate, case, length) -> share of simulated rows kept."""


@dataclass(frozen=True)
class EvidenceSettings:
    """Settings of one run; 4^6 sequences take a few seconds.

    Attributes:
        mismatches: standard deviations of mu's logits, ascending; the two smallest give slopes.
        plane: the mismatch of the bias-variance picture, one of ``mismatches``.
        stalenesses: standard deviations of pi's parameters, at mismatch ``stale_mismatch``.
        stale: the one at which options are measured, at ``plane``.
        worlds: other policies and mismatches, of the seeds after ``seed``, measured at ``plane``.
        rows: simulated rows of each keep-rate.
    """

    vocabulary: int = 4
    length: int = 6
    mismatches: tuple[float, ...] = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
    plane: float = 0.3
    stalenesses: tuple[float, ...] = (0.0, 0.03, 0.1, 0.3)
    stale_mismatch: float = 0.1
    stale: float = 0.1
    lengths: tuple[int, ...] = keep_rates.LENGTHS
    worlds: int = 20
    rows: int = 2000
    seed: int = 0


@dataclass(frozen=True)
class Evidence:
    """Results of one run.

    Attributes:
        on_policy_variance: of one row's gradient at mu = pi_old = pi, the unit of variances.
        mismatches, stalenesses: level -> estimator's name -> measurement.
        biases: estimator's name -> its bias in each world, ``seed``'s own first.
        sentences: what was asserted, with figures.
        options, stale_options: every option of the group correction at ``plane``, with pi = pi_old, and with pi stale.
    """

    settings: EvidenceSettings
    on_policy_variance: float
    mismatches: dict[float, dict[str, Measurement]]
    stalenesses: dict[float, dict[str, Measurement]]
    biases: dict[str, list[float]]
    shares: Shares
    sentences: tuple[str, ...]
    options: dict[str, Measurement]
    stale_options: dict[str, Measurement]


def collect(settings: EvidenceSettings) -> Evidence:
    """Measure everything and assert what holds exactly.

    Raises:
        claims.ClaimError: where it does not hold.
    """
    world = build(settings.vocabulary, settings.length, settings.seed)
    on_policy = policies(world, mismatch=0.0, staleness=0.0)
    mismatches = {level: _measurements(world, level, 0.0) for level in settings.mismatches}
    stalenesses = {level: _measurements(world, settings.stale_mismatch, level) for level in settings.stalenesses}
    elsewhere = [
        _measurements(build(settings.vocabulary, settings.length, settings.seed + other), settings.plane, 0.0)
        for other in range(1, settings.worlds + 1)
    ]
    biases = {e.name: [row[e.name].bias for row in (mismatches[settings.plane], *elsewhere)] for e in ESTIMATORS}
    shares = {
        (aggregate, case, length): keep_rates.simulated(
            aggregate, case, length, rows=settings.rows if case.deviation else 1, seed=settings.seed
        )
        for aggregate in keep_rates.MASKS
        for case in keep_rates.CASES
        for length in settings.lengths
    }
    sentences = (
        claims.gradient_agrees(policies(world, mismatch=settings.stale_mismatch, staleness=max(settings.stalenesses))),
        claims.on_policy_is_unbiased(on_policy),
        claims.sequence_is_unbiased(mismatches, stalenesses),
        claims.baselines_stay_unbiased(mismatches),
        claims.token_is_is_first_order(mismatches),
        claims.clip_fractions(policies(world, mismatch=settings.plane, staleness=0.0)),
        claims.products(),
        claims.keep_rates_agree(keep_rates.CASES, settings.lengths, settings.rows, lambda *key: shares[key]),
    )
    return Evidence(
        settings=settings,
        on_policy_variance=measure(NONE, on_policy).variance,
        mismatches=mismatches,
        stalenesses=stalenesses,
        biases=biases,
        shares=shares,
        sentences=sentences,
        options=_measure_options(world, settings.plane, 0.0),
        stale_options=_measure_options(world, settings.plane, settings.stale),
    )


def _measure_options(world: World, mismatch: float, staleness: float) -> dict[str, Measurement]:
    setting = policies(world, mismatch=mismatch, staleness=staleness)
    return {option.name: measure_option(option, setting) for option in list_options()}


def _measurements(world: World, mismatch: float, staleness: float) -> dict[str, Measurement]:
    setting = policies(world, mismatch=mismatch, staleness=staleness)
    return {estimator.name: measure(estimator, setting) for estimator in ESTIMATORS}
