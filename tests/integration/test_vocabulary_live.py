"""Every word of the vocabulary is proved live, and a dead word is detected; on a real verl TrainingWorker.

The default command tests each word at least once; `--release` tests all pairs.
"""

from __future__ import annotations

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
BOUNDS = {name: entry.usual for name, entry in AGGREGATES.items() if entry.reduce not in ("batch", "oldest")}


def with_versions(rows: tw.Rollout) -> tw.Rollout:
    rows.versions = [0] * len(rows.prompts)
    return rows


def live(engine: Any, mapping: dict[str, Any], **kwargs: Any) -> dict[str, float]:
    verdict = first_update(engine, mapping, rollout=with_versions(tw.make_rollout()), **kwargs)
    assert verdict["proved"] == 1.0
    assert verdict["gradient_error"] < 1e-5
    assert verdict["shift_error"] < 1e-4
    return verdict


def bounded(aggregate: str, level: str, ratio: str = "rollout", **changes: Any) -> dict[str, Any]:
    """One mask with the usual bounds of its aggregate."""
    lower, upper = BOUNDS[aggregate]
    mask = {"ratio": ratio, "level": level, "aggregate": aggregate, "lower": lower, "upper": upper, "when": "any"}
    return {"masks": {"mask": mask | changes}}


@pytest.mark.parametrize(
    ("ratio", "level", "aggregate"), each_nth_by_default(21, product(["rollout", "full"], LEVELS, BOUNDS))
)
def test_masks(engine: Any, ratio: str, level: str, aggregate: str) -> None:
    live(engine, bounded(aggregate, level, ratio))


@pytest.mark.parametrize(
    ("ratio", "level", "aggregate"),
    each_nth_by_default(37, product(["rollout", "full", "ppo"], LEVELS[:4], BOUNDS)),
)
def test_masks_after_a_tools_result(engine: Any, ratio: str, level: str, aggregate: str) -> None:
    live(engine, bounded(aggregate, level, ratio, when="post_tool"))


@pytest.mark.parametrize(
    ("ratio", "level", "when", "sign"),
    each_nth_by_default(
        11, product(["rollout", "full", "ppo"], [*LEVELS[:3], "prefix"], ["negative", "positive"], ["row", "token"])
    ),
)
def test_masks_by_advantage(engine: Any, ratio: str, level: str, when: str, sign: str) -> None:
    # On pi / pi_old the side that PPO's own clip leaves a gradient on.
    side = {"lower": None, "upper": 1.1} if when == "negative" else {"lower": 0.9, "upper": None}
    live(engine, bounded("geometric", level, ratio, **side, when=when, sign=sign))


@pytest.mark.parametrize(
    ("aggregate", "level", "upper"),
    [
        ("binary_kl_forward", "token", 0.05),
        ("binary_kl_forward", "prefix", 4.0),
        ("binary_tv", "token", 0.8),
        ("binary_tv", "prefix", 0.99),
        ("binary_tv_sum", "sequence", 0.97),
        ("binary_tv_sum", "prefix", 0.9),
    ],
)
def test_a_wide_bound_on_a_difference(engine: Any, aggregate: str, level: str, upper: float) -> None:
    live(engine, bounded(aggregate, level, "full", lower=None, upper=upper))


@pytest.mark.parametrize(
    ("aggregate", "level", "sign"),
    each_nth_by_default(5, product(["tv_mean", "product", "binary_kl"], ["sequence", "prefix"], ["row", "token"])),
)
def test_masks_on_what_leads_away(engine: Any, aggregate: str, level: str, sign: str) -> None:
    live(engine, bounded(aggregate, level, when="outward", sign=sign))


@pytest.mark.parametrize(("level", "when"), each_nth_by_default(3, product(LEVELS, ["any", "negative"])))
def test_masks_on_age(engine: Any, level: str, when: str) -> None:
    live(engine, {"masks": {"stale": STALE | {"level": level, "when": when}}})


@pytest.mark.parametrize(
    ("kind", "level", "aggregate"),
    each_nth_by_default(7, product(["truncate", "clip", "reject"], LEVELS, ["product", "geometric"])),
)
def test_weights(engine: Any, kind: str, level: str, aggregate: str) -> None:
    lower = None if kind == "truncate" else 0.5
    live(engine, {"weight": {"level": level, "kind": kind, "lower": lower, "upper": 1.5, "aggregate": aggregate}})


@pytest.mark.parametrize("sign", ["token", pytest.param("row", marks=pytest.mark.extended)])
def test_weights_by_advantage(engine: Any, sign: str) -> None:
    weights = {
        "down": {"level": "sequence", "kind": "truncate", "lower": None, "upper": 1.0, "when": "negative"},
        "up": {"level": "token", "kind": "reject", "lower": 0.5, "upper": 2.0, "when": "positive"},
    }
    live(engine, {"weights": {name: weight | {"sign": sign} for name, weight in weights.items()}})


@pytest.mark.parametrize("level", each_nth_by_default(3, LEVELS))
def test_self_normalised_weights(engine: Any, level: str) -> None:
    live(engine, {"weight": TIS_TOKEN | {"level": level, "normalize": True}})


@pytest.mark.parametrize("level", each_nth_by_default(4, LEVELS))
def test_weights_on_the_current_policy(engine: Any, level: str) -> None:
    weight = TIS_TOKEN | {"level": level, "ratio": "full"}
    live(engine, {"weight": weight, "proximal": "bypass"}, policy_loss=PolicyLossConfig(loss_mode="gpg"))


@pytest.mark.parametrize(
    ("power", "aggregate"), each_nth_by_default(5, product([0.5, -0.5], ["product", "geometric", "minimum"]))
)
def test_bounds_by_position(engine: Any, power: float, aggregate: str) -> None:
    weight = {"level": "prefix", "kind": "clip", "lower": 0.9, "upper": 1.2, "aggregate": aggregate}
    mask = {"level": "prefix", "ratio": "rollout", "aggregate": "geometric", "delta": 0.1, "when": "negative"}
    live(engine, {"weight": weight | {"by_position": power}, "masks": {"mask": mask | {"by_position": power}}})


@pytest.mark.parametrize("level", each_nth_by_default(3, LEVELS[:-1]))
def test_bounds_by_age(engine: Any, level: str) -> None:
    weight = TIS_TOKEN | {"level": level, "by_staleness": [1.0, 1.5]}
    mask = {"level": level, "aggregate": "product", "lower": 0.9, "upper": 1.1, "by_staleness": [1.0, 0.5, 2.0]}
    live(engine, {"weight": weight, "masks": {"mask": mask | {"ratio": "rollout", "when": "any"}}})


@pytest.mark.parametrize(
    "mapping", [{"proximal": "same_engine"}, {"proximal": "reuse"}, {"proximal": "loglinear", "alpha": "by_age"}]
)
def test_proximal_policies_beside_a_mask(engine: Any, mapping: dict[str, Any]) -> None:
    live(engine, mapping | {"masks": {"opsm": OPSM}})


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_denominator_of_what_is_kept(engine: Any, mode: str) -> None:
    live(engine, {"masks": {"gsm": GSM}, "denominator": "kept"}, loss_agg_mode=mode)


def with_reference(rows: tw.Rollout) -> None:
    rows.ref_log_probs = [old + 0.3 for old in rows.old_log_probs]


@pytest.mark.parametrize("kind", ["k3", "k2"])
def test_clipped_kl(engine: Any, kind: str) -> None:
    mapping = {"kl_clip": {"lower": 0.8, "upper": 1.2}, "masks": {"gsm": GSM}}
    live(engine, mapping, tamper=with_reference, use_kl_loss=True, kl_loss_coef=0.5, kl_loss_type=kind)


def stops(match: str, engine: Any, mapping: dict[str, Any], **kwargs: Any) -> None:
    with pytest.raises(LivenessError, match=match):
        first_update(engine, mapping, rollout=with_versions(tw.make_rollout()), **kwargs)


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


@pytest.mark.parametrize("proximal", [{"proximal": "bypass"}, {"proximal": "loglinear", "alpha": 0.5}])
def test_a_proximal_policy_that_is_not_used(engine: Any, proximal: dict[str, Any]) -> None:
    loss = adapter(proximal)
    hand_over = loss.hand_over

    def forgets(batch: Any, step: Any) -> Any:
        changed = hand_over(batch, step)
        changed["old_log_probs"] = batch.log_prob.detach()
        return changed

    loss.hand_over = forgets
    stops(r"not weight \* keep|has no effect", engine, proximal, loss=loss)


@pytest.mark.parametrize("mapping", [{"proximal": "bypass"}, {"proximal": "loglinear", "alpha": 0.5}])
def test_a_base_loss_that_reads_no_pi_old(engine: Any, mapping: dict[str, Any]) -> None:
    """REINFORCE has no ratio, so the source of pi_old has no effect, and a key that changes it is no correction."""
    gpg = dict(policy_loss=PolicyLossConfig(loss_mode="gpg"))
    stops("no evidence that proximal acts", engine, mapping, **gpg)
    # With a weight on pi / mu that does the work there is something to prove, and proximal is not counted.
    weighted = {"weight": TIS_TOKEN | {"ratio": "full"}, "proximal": "bypass"}
    assert live(engine, weighted, **gpg)["parts"] == 1.0
    assert live(engine, {"masks": {"opsm": OPSM}, "proximal": "bypass"})["parts"] == 2.0


@pytest.mark.parametrize(
    ("mapping", "value"),
    [
        ({"proximal": "bypass"}, float("nan")),
        ({"proximal": "same_engine"}, float("-inf")),
        ({"weight": TIS_TOKEN, "proximal": "reuse"}, float("nan")),
    ],
)
def test_a_mu_that_is_not_finite_is_no_tampering(engine: Any, mapping: dict[str, Any], value: float) -> None:
    def broken(rows: tw.Rollout) -> None:
        rows.rollout_log_probs[1][2] = value

    assert live(engine, mapping, tamper_source=broken)["proved"] == 1.0


@pytest.mark.parametrize("delta", [0.1, 2.0])
def test_responses_of_one_token(engine: Any, delta: float) -> None:
    rows = tw.make_rollout(tool_tokens=False)
    for name in ("responses", "response_mask", "advantages"):
        setattr(rows, name, [row[:1] for row in getattr(rows, name)])
    assert first_update(engine, {"masks": {"opsm": OPSM | {"delta": delta}}}, rollout=rows)["proved"] == 1.0


def test_kl_without_its_clip(engine: Any) -> None:
    mapping = {"kl_clip": {"lower": 0.8, "upper": 1.2}}
    config: dict[str, Any] = dict(use_kl_loss=True, kl_loss_coef=0.5, kl_loss_type="k3")
    loss = adapter(mapping, **config)
    loss.base_loss = loss.verl_loss
    stops(
        "kl_clip has no effect",
        engine,
        mapping,
        loss=loss,
        tamper=with_reference,
        **config,
    )


def test_a_scale_that_is_ignored(engine: Any) -> None:
    mapping = {"masks": {"gsm": GSM}, "denominator": "kept"}
    loss = adapter(mapping)
    hand_over = loss.hand_over

    def without_scale(batch: Any, step: Any) -> Any:
        changed = hand_over(batch, step)
        changed["rollout_is_weights"] = step.weight * step.keep
        return changed

    loss.hand_over = without_scale
    stops(r"not weight \* keep", engine, mapping, loss=loss)
