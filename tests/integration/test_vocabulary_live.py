"""Every word of the vocabulary is proved live, and a dead word is detected; on a real verl TrainingWorker.

The default command tests each word at least once; `--release` tests all pairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.correction.masks import AGGREGATES
from recipe.offpolicy.proof.verify import LivenessError
from tests.support import training_worker as tw
from tests.support.examples import each_nth_by_default
from tests.support.first_update import acting_by, adapter, first_update
from tests.support.specs import GSM, OPSM, TIS_TOKEN
from verl.workers.config import PolicyLossConfig

STALE: dict[str, Any] = {"aggregate": "staleness", "level": "token", "upper": 1}
LEVELS = ["token", "sequence", "turn", "version", "prefix"]
RATIOS = ["rollout", "full", "ppo"]
BOUNDS = {name: entry.usual for name, entry in AGGREGATES.items() if entry.reduce not in ("batch", "oldest")}
GPG: dict[str, Any] = dict(policy_loss=PolicyLossConfig(loss_mode="gpg"))


def update(engine: Any, mapping: dict[str, Any], **kwargs: Any) -> dict[str, float]:
    """The first update of rows that were all sampled by one version."""
    rows = tw.make_rollout()
    rows.versions = [0] * len(rows.prompts)
    return first_update(engine, mapping, rollout=rows, **kwargs)


def live(engine: Any, mapping: dict[str, Any], **kwargs: Any) -> dict[str, float]:
    verdict = update(engine, mapping, **kwargs)
    assert verdict["proved"] == 1.0
    assert verdict["gradient_error"] < 1e-5
    assert verdict["shift_error"] < 1e-4
    return verdict


def stops(match: str, engine: Any, mapping: dict[str, Any], **kwargs: Any) -> None:
    with pytest.raises(LivenessError, match=match):
        update(engine, mapping, **kwargs)


def bounded(aggregate: str, level: str, ratio: str = "rollout", **changes: Any) -> dict[str, Any]:
    """One mask with the usual bounds of its aggregate."""
    lower, upper = BOUNDS[aggregate]
    mask = {"ratio": ratio, "level": level, "aggregate": aggregate, "lower": lower, "upper": upper, "when": "any"}
    return {"masks": {"mask": mask | changes}}


def by_sign(when: str, sign: str, ratio: str, level: str) -> dict[str, Any]:
    # On pi / pi_old the side that PPO's own clip leaves a gradient on.
    side = {"lower": None, "upper": 1.1} if when == "negative" else {"lower": 0.9, "upper": None}
    return bounded("geometric", level, ratio, **side, when=when, sign=sign)


def by_position(power: float, aggregate: str) -> dict[str, Any]:
    weight = {"level": "prefix", "kind": "clip", "lower": 0.9, "upper": 1.2, "aggregate": aggregate}
    mask = {"level": "prefix", "ratio": "rollout", "aggregate": "geometric", "delta": 0.1, "when": "negative"}
    return {"weight": weight | {"by_position": power}, "masks": {"mask": mask | {"by_position": power}}}


def by_age(level: str) -> dict[str, Any]:
    mask = bounded("product", level, lower=0.9, upper=1.1, by_staleness=[1.0, 0.5, 2.0])
    return mask | {"weight": TIS_TOKEN | {"level": level, "by_staleness": [1.0, 1.5]}}


def weigh_by_sign(sign: str) -> dict[str, Any]:
    weights = {
        "down": {"level": "sequence", "kind": "truncate", "lower": None, "upper": 1.0, "when": "negative"},
        "up": {"level": "token", "kind": "reject", "lower": 0.5, "upper": 2.0, "when": "positive"},
    }
    return {"weights": {name: weight | {"sign": sign} for name, weight in weights.items()}}


def weigh(kind: str, level: str, aggregate: str) -> dict[str, Any]:
    lower = None if kind == "truncate" else 0.5
    return {"weight": {"level": level, "kind": kind, "lower": lower, "upper": 1.5, "aggregate": aggregate}}


WIDE = [("binary_kl_forward", "prefix", 4.0), ("binary_tv", "token", 0.8), ("binary_tv_sum", "sequence", 0.97)]
"""Bounds far from agreement on differences of probabilities."""
SIGNS = product(["negative", "positive"], ["row", "token"], RATIOS, [*LEVELS[:3], "prefix"])
PROXIMAL = [{"proximal": "same_engine"}, {"proximal": "reuse"}, {"proximal": "loglinear", "alpha": "by_age"}]


def vocabulary() -> Iterator[Any]:
    """Corrections with each word; each step divides none of the numbers of words that it goes over."""
    pairs: list[tuple[int, Any]] = [
        (21, (bounded(name, level, ratio) for ratio, level, name in product(RATIOS[:2], LEVELS, BOUNDS))),
        (37, (bounded(name, level, ratio, when="post_tool") for ratio, level, name in product(
            RATIOS, LEVELS[:4], BOUNDS))),
        (11, (by_sign(*words) for words in SIGNS)),
        (2, (bounded(name, level, "full", lower=None, upper=upper) for name, level, upper in WIDE)),
        (5, (bounded(name, level, when="outward", sign=sign) for name, level, sign in product(
            ["tv_mean", "product", "binary_kl"], ["sequence", "prefix"], ["row", "token"]))),
        (3, ({"masks": {"stale": STALE | {"level": level, "when": when}}} for level, when in product(
            LEVELS, ["any", "negative"]))),
        (7, (weigh(*words) for words in product(["truncate", "clip", "reject"], LEVELS, ["product", "geometric"]))),
        (2, (weigh_by_sign(sign) for sign in ("token", "row"))),
        (3, ({"weight": TIS_TOKEN | {"level": level, "normalize": True}} for level in LEVELS)),
        (5, (by_position(*words) for words in product([0.5, -0.5], ["product", "geometric", "minimum"]))),
        (3, (by_age(level) for level in LEVELS[:-1])),
        (1, (proximal | {"masks": {"opsm": OPSM}} for proximal in PROXIMAL)),
    ]  # fmt: skip
    for step, mappings in pairs:
        yield from each_nth_by_default(step, mappings)


@pytest.mark.parametrize("mapping", [*vocabulary()], ids=str)
def test_each_word_is_live(engine: Any, mapping: dict[str, Any]) -> None:
    live(engine, mapping)


@pytest.mark.parametrize("level", each_nth_by_default(4, LEVELS))
def test_weights_on_the_current_policy(engine: Any, level: str) -> None:
    live(engine, {"weight": TIS_TOKEN | {"level": level, "ratio": "full"}, "proximal": "bypass"}, **GPG)


@pytest.mark.parametrize("mode", each_nth_by_default(2, ["seq-mean-token-mean", "token-mean", "seq-mean-token-sum"]))
def test_denominator_of_what_is_kept(engine: Any, mode: str) -> None:
    live(engine, {"masks": {"gsm": GSM}, "denominator": "kept"}, loss_agg_mode=mode)


KL_CLIP = {"kl_clip": {"lower": 0.8, "upper": 1.2}}
KL: dict[str, Any] = dict(use_kl_loss=True, kl_loss_coef=0.5)


def with_reference(rows: tw.Rollout) -> None:
    rows.ref_log_probs = [old + 0.3 for old in rows.old_log_probs]


@pytest.mark.parametrize("kind", ["k3", "k2"])
def test_clipped_kl(engine: Any, kind: str) -> None:
    live(engine, KL_CLIP | {"masks": {"gsm": GSM}}, tamper=with_reference, kl_loss_type=kind, **KL)


SWAPS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sequence for turn": ({"masks": {"m": GSM | {"level": "turn"}}}, {"masks": {"m": GSM}}),
    "any for geometric": ({"masks": {"m": GSM | {"aggregate": "any"}}}, {"masks": {"m": GSM}}),
    "token's sign for the row's": ({"masks": {"m": OPSM | {"sign": "token"}}}, {"masks": {"m": OPSM}}),
    "truncate for reject": ({"weight": TIS_TOKEN | {"kind": "reject"}}, {"weight": TIS_TOKEN}),
    "not normalised": ({"weight": TIS_TOKEN | {"normalize": True}}, {"weight": TIS_TOKEN}),
    "age of the row for the token's": ({"masks": {"m": STALE}}, {"masks": {"m": STALE | {"level": "sequence"}}}),
    "a band for every age": ({"masks": {"m": GSM | {"by_staleness": [1.0, 1.5]}}}, {"masks": {"m": GSM}}),
}


@pytest.mark.parametrize("swap", SWAPS)
def test_another_correction_in_its_place(engine: Any, swap: str) -> None:
    said, runs = SWAPS[swap]
    loss = acting_by(CorrectionSpec.from_mapping(runs))
    loss = loss(CorrectionSpec.from_mapping(said), tw.actor_config(), prove=True)
    stops(r"not weight \* keep|has no effect", engine, said, loss=loss, mismatch=1e-6)


def without_pi_old(batch: Any, step: Any, changed: Any) -> None:
    changed["old_log_probs"] = batch.log_prob.detach()


def without_scale(batch: Any, step: Any, changed: Any) -> None:
    changed["rollout_is_weights"] = step.weight * step.keep


@pytest.mark.parametrize(
    ("mapping", "forget"),
    [
        ({"proximal": "bypass"}, without_pi_old),
        ({"proximal": "loglinear", "alpha": 0.5}, without_pi_old),
        ({"masks": {"gsm": GSM}, "denominator": "kept"}, without_scale),
    ],
    ids=["bypass", "loglinear", "kept"],
)
def test_what_is_not_handed_over(engine: Any, mapping: dict[str, Any], forget: Any) -> None:
    loss = adapter(mapping)
    hand_over = loss.hand_over

    def forgets(batch: Any, step: Any) -> Any:
        changed = hand_over(batch, step)
        forget(batch, step, changed)
        return changed

    loss.hand_over = forgets
    stops(r"not weight \* keep|has no effect", engine, mapping, loss=loss)


@pytest.mark.parametrize("mapping", [{"proximal": "bypass"}, {"proximal": "loglinear", "alpha": 0.5}])
def test_a_base_loss_that_reads_no_pi_old(engine: Any, mapping: dict[str, Any]) -> None:
    """REINFORCE has no ratio, so the source of pi_old has no effect, and a key that changes it is no correction."""
    stops("no evidence that proximal acts", engine, mapping, **GPG)
    # With a weight on pi / mu that does the work there is something to prove, and proximal is not counted.
    weighted = {"weight": TIS_TOKEN | {"ratio": "full"}, "proximal": "bypass"}
    assert live(engine, weighted, **GPG)["parts"] == 1.0
    assert live(engine, {"masks": {"opsm": OPSM}, "proximal": "bypass"})["parts"] == 2.0


@pytest.mark.parametrize(
    ("mapping", "value"),
    [({"proximal": "same_engine"}, float("-inf")), ({"weight": TIS_TOKEN, "proximal": "reuse"}, float("nan"))],
)
def test_a_mu_that_is_not_finite_is_no_tampering(engine: Any, mapping: dict[str, Any], value: float) -> None:
    def broken(rows: tw.Rollout) -> None:
        rows.rollout_log_probs[1][2] = value

    assert live(engine, mapping, tamper_source=broken)["proved"] == 1.0


def test_responses_of_one_token(engine: Any) -> None:
    rows = tw.make_rollout(tool_tokens=False)
    for name in ("responses", "response_mask", "advantages"):
        setattr(rows, name, [row[:1] for row in getattr(rows, name)])
    assert first_update(engine, {"masks": {"opsm": OPSM | {"delta": 0.1}}}, rollout=rows)["proved"] == 1.0


def test_kl_without_its_clip(engine: Any) -> None:
    config: dict[str, Any] = dict(KL, kl_loss_type="k3")
    loss = adapter(KL_CLIP, **config)
    loss.base_loss = loss.verl_loss
    stops("kl_clip has no effect", engine, KL_CLIP, loss=loss, tamper=with_reference, **config)
