"""Every word of the vocabulary is proved live, and dead ones are seen; on a real verl TrainingWorker.

The default command takes each word at least once, `--release` each with each.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from recipe.offpolicy.correction.masks import AGGREGATES
from tests.support import training_worker as tw
from tests.support.examples import each_nth_by_default
from tests.support.first_update import adapter, first_update
from tests.support.specs import GSM, OPSM, TIS_TOKEN

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


@pytest.mark.parametrize(
    ("ratio", "level", "aggregate"), each_nth_by_default(7, product(["rollout", "full"], LEVELS, BOUNDS))
)
def test_masks(engine: Any, ratio: str, level: str, aggregate: str) -> None:
    lower, upper = BOUNDS[aggregate]
    mask = {"ratio": ratio, "level": level, "aggregate": aggregate, "lower": lower, "upper": upper, "when": "any"}
    live(engine, {"masks": {"mask": mask}})


@pytest.mark.parametrize(
    ("ratio", "level", "when", "sign"),
    each_nth_by_default(
        5, product(["rollout", "full", "ppo"], [*LEVELS[:3], "prefix"], ["negative", "positive"], ["row", "token"])
    ),
)
def test_masks_by_advantage(engine: Any, ratio: str, level: str, when: str, sign: str) -> None:
    # On pi / pi_old the side that PPO's own clip leaves a gradient on.
    side = {"lower": None, "upper": 1.1} if when == "negative" else {"lower": 0.9, "upper": None}
    mask = {"ratio": ratio, "level": level, "aggregate": "geometric", **side, "when": when, "sign": sign}
    live(engine, {"masks": {"mask": mask}})


@pytest.mark.parametrize("upper", [0.05, 4.0])
def test_a_wide_bound_on_the_forward_kl(engine: Any, upper: float) -> None:
    for level in ("token", "prefix"):
        mask = {"ratio": "full", "level": level, "aggregate": "binary_kl_forward", "lower": None, "upper": upper}
        live(engine, {"masks": {"mask": mask | {"when": "any"}}})


@pytest.mark.parametrize("aggregate", ["binary_tv", "binary_tv_sum"])
@pytest.mark.parametrize("upper", [0.8, 0.9, 0.97, 0.99])
def test_a_wide_bound_on_a_difference(engine: Any, upper: float, aggregate: str) -> None:
    for level in (
        ("token", "prefix") if aggregate == "binary_tv" else ("sequence", *(["prefix"] if upper <= 0.9 else []))
    ):
        mask = {"ratio": "full", "level": level, "aggregate": aggregate, "lower": None, "upper": upper}
        live(engine, {"masks": {"mask": mask | {"when": "any"}}})


@pytest.mark.parametrize("level", ["sequence", "prefix"])
@pytest.mark.parametrize("sign", ["row", "token"])
@pytest.mark.parametrize("aggregate", ["tv_mean", "product", "binary_kl"])
def test_masks_on_what_leads_away(engine: Any, aggregate: str, sign: str, level: str) -> None:
    lower, upper = BOUNDS[aggregate]
    mask = {"ratio": "rollout", "level": level, "aggregate": aggregate, "when": "outward", "sign": sign}
    live(engine, {"masks": {"mask": {**mask, "lower": lower, "upper": upper}}})


@pytest.mark.parametrize(
    ("ratio", "level", "aggregate"),
    each_nth_by_default(7, product(["rollout", "full", "ppo"], LEVELS[:4], BOUNDS)),
)
def test_masks_after_a_tools_result(engine: Any, ratio: str, level: str, aggregate: str) -> None:
    lower, upper = BOUNDS[aggregate]
    mask = {"ratio": ratio, "level": level, "aggregate": aggregate, "when": "post_tool"}
    live(engine, {"masks": {"mask": {**mask, "lower": lower, "upper": upper}}})


@pytest.mark.parametrize("level", LEVELS[:4])
@pytest.mark.parametrize("kind", ["clip", "reject"])
def test_weights_after_a_tools_result(engine: Any, kind: str, level: str) -> None:
    weight = {"level": level, "kind": kind, "lower": 0.5, "upper": 1.5, "when": "post_tool"}
    live(engine, {"weights": {"tool": weight}})


@pytest.mark.parametrize("sign", ["row", "token"])
def test_weights_by_advantage(engine: Any, sign: str) -> None:
    weights = {
        "down": {"level": "sequence", "kind": "truncate", "lower": None, "upper": 1.0, "when": "negative"},
        "up": {"level": "token", "kind": "reject", "lower": 0.5, "upper": 2.0, "when": "positive"},
    }
    live(engine, {"weights": {name: weight | {"sign": sign} for name, weight in weights.items()}})


@pytest.mark.parametrize(
    ("kind", "level", "aggregate"),
    each_nth_by_default(7, product(["truncate", "clip", "reject"], LEVELS, ["product", "geometric"])),
)
def test_weights(engine: Any, kind: str, level: str, aggregate: str) -> None:
    lower = None if kind == "truncate" else 0.5
    weight = {"level": level, "kind": kind, "lower": lower, "upper": 1.5, "aggregate": aggregate}
    live(engine, {"weight": weight})


@pytest.mark.parametrize("level", LEVELS)
def test_self_normalised_weights(engine: Any, level: str) -> None:
    live(engine, {"weight": TIS_TOKEN | {"level": level, "normalize": True}})


@pytest.mark.parametrize("level", LEVELS)
def test_weights_on_the_current_policy(engine: Any, level: str) -> None:
    from verl.workers.config import PolicyLossConfig

    weight = TIS_TOKEN | {"level": level, "ratio": "full"}
    live(engine, {"weight": weight, "proximal": "bypass"}, policy_loss=PolicyLossConfig(loss_mode="gpg"))


def test_second_moment_budget(engine: Any) -> None:
    mask = {"ratio": "rollout", "level": "token", "aggregate": "second_moment", "budget": 0.01, "when": "any"}
    live(engine, {"masks": {"m2po": mask}})


@pytest.mark.parametrize("when", ["any", "negative"])
@pytest.mark.parametrize("level", LEVELS)
def test_masks_on_age(engine: Any, level: str, when: str) -> None:
    live(engine, {"masks": {"stale": STALE | {"level": level, "when": when}}})


@pytest.mark.parametrize("aggregate", ["product", "geometric", "minimum"])
@pytest.mark.parametrize("power", [0.5, -0.5])
def test_bounds_by_position(engine: Any, power: float, aggregate: str) -> None:
    weight = {"level": "prefix", "kind": "clip", "lower": 0.9, "upper": 1.2, "aggregate": aggregate}
    mask = {"level": "prefix", "ratio": "rollout", "aggregate": "geometric", "delta": 0.1, "when": "negative"}
    live(engine, {"weight": weight | {"by_position": power}, "masks": {"mask": mask | {"by_position": power}}})


@pytest.mark.parametrize("level", LEVELS[:-1])
def test_bounds_by_age(engine: Any, level: str) -> None:
    weight = TIS_TOKEN | {"level": level, "by_staleness": [1.0, 1.5]}
    mask = {"level": level, "aggregate": "product", "lower": 0.9, "upper": 1.1, "by_staleness": [1.0, 0.5, 2.0]}
    live(engine, {"weight": weight, "masks": {"mask": mask | {"ratio": "rollout", "when": "any"}}})


@pytest.mark.parametrize(
    "mapping",
    [
        {"proximal": "bypass"},
        {"proximal": "same_engine"},
        {"proximal": "reuse"},
        {"proximal": "loglinear", "alpha": 0.3},
        {"proximal": "loglinear", "alpha": "by_age"},
    ],
)
@pytest.mark.parametrize("alongside", [{}, {"masks": {"opsm": OPSM}}], ids=["alone", "opsm"])
def test_proximal_policies(engine: Any, mapping: dict[str, Any], alongside: dict[str, Any]) -> None:
    live(engine, mapping | alongside)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_denominator_of_what_is_kept(engine: Any, mode: str) -> None:
    live(engine, {"masks": {"gsm": GSM}, "denominator": "kept"}, loss_agg_mode=mode)


@pytest.mark.parametrize("kind", ["k3", "k2", "k3+"])
def test_clipped_kl(engine: Any, kind: str) -> None:
    live(
        engine,
        {"kl_clip": {"lower": 0.8, "upper": 1.2}, "masks": {"gsm": GSM}},
        tamper=lambda rows: setattr(rows, "ref_log_probs", [old + 0.3 for old in rows.old_log_probs]),
        use_kl_loss=True,
        kl_loss_coef=0.5,
        kl_loss_type=kind,
    )


def stops(
    match: str, engine: Any, mapping: dict[str, Any], error: type[Exception] | None = None, **kwargs: Any
) -> None:
    from recipe.offpolicy.proof.verify import LivenessError

    with pytest.raises(error or LivenessError, match=match):
        first_update(engine, mapping, rollout=with_versions(tw.make_rollout()), **kwargs)


def wrong(mapping: dict[str, Any], runs: dict[str, Any], **config: Any) -> Any:
    """An adapter that says ``mapping`` and runs ``runs`` in its place."""
    from recipe.offpolicy.batch import micro_batch as mb
    from recipe.offpolicy.batch.padding import with_tensors
    from recipe.offpolicy.correction import CorrectionSpec
    from recipe.offpolicy.worker.loss import OffPolicyLoss

    said, run = CorrectionSpec.from_mapping(mapping), CorrectionSpec.from_mapping(runs)
    parts = {("masks", name): mask for name, mask in run.masks}

    class Wrong(OffPolicyLoss):
        def hand_over(self, batch: Any, step: Any) -> Any:
            from dataclasses import replace

            spec = self.spec
            if spec.weight is not None:
                spec = replace(spec, weight=run.weight)
            spec = replace(spec, masks=tuple((name, parts[("masks", name)]) for name, _ in spec.masks))
            return with_tensors(
                super().hand_over(batch, step),
                rollout_is_weights=mb.compute_factor(spec, batch, mb.decide(spec, batch)),
            )

    return Wrong(said, tw.actor_config(**config), prove=True)


TURN_MASK = GSM | {"level": "turn"}
SWAPS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "turn for sequence": ({"masks": {"m": GSM}}, {"masks": {"m": TURN_MASK}}),
    "sequence for turn": ({"masks": {"m": TURN_MASK}}, {"masks": {"m": GSM}}),
    "token for sequence": ({"masks": {"m": GSM | {"level": "token"}}}, {"masks": {"m": GSM}}),
    "any for geometric": ({"masks": {"m": GSM | {"aggregate": "any"}}}, {"masks": {"m": GSM}}),
    "k3 mean for max": (
        {"masks": {"m": GSM | {"aggregate": "k3_max", "lower": None, "upper": 0.05}}},
        {"masks": {"m": GSM | {"aggregate": "k3_mean", "lower": None, "upper": 0.05}}},
    ),
    "k2 for k3": (
        {"masks": {"m": GSM | {"aggregate": "k3_mean", "lower": None, "upper": 0.05}}},
        {"masks": {"m": GSM | {"aggregate": "k2_mean", "lower": None, "upper": 0.05}}},
    ),
    "row's sign for the token's": ({"masks": {"m": OPSM}}, {"masks": {"m": OPSM | {"sign": "token"}}}),
    "token's sign for the row's": ({"masks": {"m": OPSM | {"sign": "token"}}}, {"masks": {"m": OPSM}}),
    "inverted k1": (
        {"masks": {"m": GSM | {"aggregate": "k1_mean", "lower": -0.2, "upper": 0.1}}},
        {"masks": {"m": GSM | {"aggregate": "k1_mean", "lower": -0.1, "upper": 0.2}}},
    ),
    "truncate for reject": (
        {"weight": TIS_TOKEN | {"kind": "reject"}},
        {"weight": TIS_TOKEN},
    ),
    "geometric for product": (
        {"weight": TIS_TOKEN | {"level": "sequence"}},
        {"weight": TIS_TOKEN | {"level": "sequence", "aggregate": "geometric"}},
    ),
    "turn for sequence weights": (
        {"weight": TIS_TOKEN | {"level": "sequence"}},
        {"weight": TIS_TOKEN | {"level": "turn"}},
    ),
    "not normalised": ({"weight": TIS_TOKEN | {"normalize": True}}, {"weight": TIS_TOKEN}),
    "no limit of age": ({"masks": {"m": STALE}}, {"masks": {"m": STALE | {"upper": 99}}}),
    "age of the row for the token's": ({"masks": {"m": STALE}}, {"masks": {"m": STALE | {"level": "sequence"}}}),
    "a cap for every age": ({"weight": TIS_TOKEN | {"by_staleness": [1.0, 1.5]}}, {"weight": TIS_TOKEN}),
    "a band for every age": ({"masks": {"m": GSM | {"by_staleness": [1.0, 1.5]}}}, {"masks": {"m": GSM}}),
    "another budget's cut": (
        {
            "masks": {
                "m": {"ratio": "rollout", "level": "token", "aggregate": "second_moment", "budget": 0.01, "when": "any"}
            }
        },
        {"masks": {"m": GSM | {"level": "token", "lower": 0.5, "upper": 2.0}}},
    ),
}


@pytest.mark.parametrize("swap", SWAPS)
def test_another_correction_in_its_place(engine: Any, swap: str) -> None:
    said, runs = SWAPS[swap]
    stops(r"not weight \* keep|does not act", engine, said, loss=wrong(said, runs), mismatch=1e-6)


@pytest.mark.parametrize("proximal", [{"proximal": "bypass"}, {"proximal": "loglinear", "alpha": 0.5}])
def test_a_proximal_policy_that_is_not_used(engine: Any, proximal: dict[str, Any]) -> None:
    loss = adapter(proximal)
    hand_over = loss.hand_over

    def forgets(batch: Any, step: Any) -> Any:
        changed = hand_over(batch, step)
        changed["old_log_probs"] = batch.log_prob.detach()
        return changed

    loss.hand_over = forgets
    stops(r"not weight \* keep|does not act", engine, proximal, loss=loss)


@pytest.mark.parametrize("mapping", [{"proximal": "bypass"}, {"proximal": "loglinear", "alpha": 0.5}])
def test_a_base_loss_that_reads_no_pi_old(engine: Any, mapping: dict[str, Any]) -> None:
    """REINFORCE has no ratio: where pi_old comes from is nothing to it, and that is no correction."""
    from verl.workers.config import PolicyLossConfig

    gpg = dict(policy_loss=PolicyLossConfig(loss_mode="gpg"))
    stops("no evidence that proximal acts", engine, mapping, **gpg)
    # With a weight on pi / mu that does the work there is something to prove, and proximal is not counted.
    weighted = {"weight": TIS_TOKEN | {"ratio": "full"}, "proximal": "bypass"}
    assert live(engine, weighted, **gpg)["parts"] == 1.0
    assert live(engine, {"masks": {"opsm": OPSM}, "proximal": "bypass"})["parts"] == 2.0


@pytest.mark.parametrize(
    "mapping",
    [{"proximal": "bypass"}, {"proximal": "same_engine"}, {"weight": TIS_TOKEN, "proximal": "reuse"}],
)
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_mu_that_is_not_finite_is_no_tampering(engine: Any, mapping: dict[str, Any], value: float) -> None:
    def broken(rows: tw.Rollout) -> None:
        rows.rollout_log_probs[1][2] = value

    assert live(engine, mapping, tamper_source=broken)["proved"] == 1.0


@pytest.mark.parametrize("delta", [0.1, 0.5, 1.0, 2.0])
def test_responses_of_one_token(engine: Any, delta: float) -> None:
    rows = tw.make_rollout(tool_tokens=False)
    for name in ("responses", "response_mask", "advantages"):
        setattr(rows, name, [row[:1] for row in getattr(rows, name)])
    assert first_update(engine, {"masks": {"opsm": OPSM | {"delta": delta}}}, rollout=rows)["proved"] == 1.0


def test_old_log_probs_computed_after_all(engine: Any) -> None:
    def recomputed(data: Any) -> None:
        data["old_log_probs"] = torch.nested.as_nested_tensor(
            [row + 0.1 for row in data["rollout_log_probs"].unbind()], layout=torch.jagged
        )

    stops(
        "old_log_probs changed before it reached the loss",
        engine,
        {"proximal": "bypass"},
        tamper_data=recomputed,
    )


def test_kl_without_its_clip(engine: Any) -> None:
    mapping = {"kl_clip": {"lower": 0.8, "upper": 1.2}}
    config: dict[str, Any] = dict(use_kl_loss=True, kl_loss_coef=0.5, kl_loss_type="k3")
    loss = adapter(mapping, **config)
    loss.base_loss = loss.verl_loss
    stops(
        "kl_clip does not act",
        engine,
        mapping,
        loss=loss,
        tamper=lambda rows: setattr(rows, "ref_log_probs", [old + 0.3 for old in rows.old_log_probs]),
        **config,
    )


@pytest.mark.parametrize(
    ("mapping", "key", "error"),
    [
        ({"weight": TIS_TOKEN | {"normalize": True}}, "offpolicy_plan", KeyError),
        ({"masks": {"gsm": GSM}, "denominator": "kept"}, "offpolicy_scale", (KeyError, RuntimeError)),
    ],
)
def test_a_plan_that_does_not_arrive(engine: Any, mapping: dict[str, Any], key: str, error: Any) -> None:
    stops(key, engine, mapping, error, tamper_data=lambda data: data.pop(key))


def test_a_denominator_counted_over_other_mini_batches(engine: Any) -> None:
    def dealt_otherwise(data: Any) -> None:
        data["offpolicy_mini_batch_tokens"] = data["offpolicy_mini_batch_tokens"] - 1

    mapping = {"masks": {"gsm": GSM}, "denominator": "kept"}
    stops("split differently", engine, mapping, ValueError, tamper_data=dealt_otherwise)


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
