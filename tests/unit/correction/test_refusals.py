"""Invalid corrections are rejected with key, value and fix; the nearest valid corrections are accepted."""

from __future__ import annotations

import math
from typing import Any

import pytest

from recipe.offpolicy.correction import CorrectionSpec
from tests.support.corrections import GSM, M2PO, TIS, opsm
from tests.support.refusals import mask, refused, weight, without

BOTH = {"weight": TIS, "masks": {"gsm": GSM}}
NAMED = {"masks": {"gsm": GSM, "opsm": opsm(0.1)}}
NEGATIVE, POSITIVE = TIS | {"when": "negative"}, TIS | {"when": "positive"}
AFTER_TOOL = TIS | {"when": "post_tool"}
STALE: dict[str, Any] = {"aggregate": "staleness", "level": "token", "upper": 4}
GAMMA: dict[str, Any] = {"level": "sequence", "kind": "gamma", "power": 2.0, "rate": 3.0}
KEPT, EXCLUDE, SKYRL = {"denominator": "kept"}, {"baseline": "exclude"}, {"skyrl_compat": True}
HALF_WAY = {"proximal": "loglinear", "alpha": 0.5}
WIDTHS = [1.0, 2.0]
M, W = "correction.masks.m.", "correction.weight."


def named(**keys: Any) -> dict[str, Any]:
    """A mask named m that differs from GSM."""
    return {"masks": {"m": keys}}


def clip(lower: Any, upper: Any) -> dict[str, Any]:
    return {"kl_clip": {"lower": lower, "upper": upper}}


def of_rows(aggregate: str, lower: Any, upper: Any, **keys: Any) -> dict[str, Any]:
    return named(**GSM | {"aggregate": aggregate, "lower": lower, "upper": upper} | keys)


Row = tuple[Any, str, str]
KEYS: list[Row] = [
    ({"weigth": TIS}, "correction.weigth=", "Did you mean"),
    (weight(cap=3.0), f"{W}cap=3.0", "unknown key"),
    ({"masks": {"gsm": GSM, "upper": 1.02}}, "correction.masks.upper=", "Did you mean correction.masks.gsm.upper?"),
    (BOTH | {"gsm": {"upper": 1.02}}, "correction.gsm=", "Did you mean correction.masks.gsm.upper?"),
    (BOTH | {"upper": 1.02}, "correction.upper=", "correction.weight.upper or correction.masks.gsm.upper?"),
    (NAMED | {"opsm": {"delta": 0.2}}, "correction.opsm=", "Did you mean correction.masks.opsm.delta?"),
    *((named(**without(GSM, key)), f"{M}{key}", "not set") for key in ("ratio", "level", "when")),
    (named(**without(GSM, "upper")), f"{M}upper", "null leaves that side open"),
    *((bad, "correction=", "mapping") for bad in ("gsm", 3, [GSM])),
    ({"weight": True}, "correction.weight=", "mapping"),
    ({"masks": [GSM]}, "correction.masks=", "mapping"),
    # verl takes the minimum or maximum of metrics by substring of the name, so these would change a reduction.
    *(({"masks": {name: GSM}}, f"correction.masks.{name}", "Rename the mask") for name in ("admin", "gsm_max", "a/b")),
    (weight(upper="???"), f"{W}upper=???: required and not set", f"Set {W}upper="),
    (named(**opsm("???")), f"{M}delta", "no published default"),  # type: ignore[arg-type]
]
WORDS: list[Row] = [
    (weight(level="row"), f"{W}level=row", "token, sequence, turn, version"),
    (weight(ratio="ppo"), f"{W}ratio=ppo", "rollout, full"),
    (weight(normalize=1), f"{W}normalize", "1"),
    (mask(aggregate="k4_sum"), "correction.masks.gsm.aggregate=k4_sum", "binary_tv, binary_tv_mean"),
    (mask(sign="group"), "correction.masks.gsm.sign=group", "row, token"),
    ({"baseline": "drop"}, "correction.baseline=drop", "include, exclude"),
    ({"allow_truncated_sampling": "yes"}, "correction.allow_truncated_sampling=yes", "true or false"),
]
NUMBERS: list[Row] = [
    *((weight(upper=bad), f"{W}upper=", "expected a") for bad in (math.nan, math.inf, "0.5_2.0", True, [1.0], 10**400)),
    *((mask(lower=bad), "correction.masks.gsm.lower=", "expected a") for bad in (-math.inf, "", False, {})),
    *((weight(upper=bad), f"{W}upper={bad}", "Set a bound > 0, or null") for bad in (0.0, -0.5)),
    *((mask(lower=bad), f"correction.masks.gsm.lower={bad}", "Set a bound > 0, or null") for bad in (0.0, -0.5)),
    # exp(+-20) = 2.06e-9 and 4.85e8 are the least and greatest weights; a bound beyond would never act.
    *((weight(upper=bad), f"{W}upper={bad}", "4.85e+08") for bad in (1e-9, 1e9)),
    (weight(lower=0.5), f"{W}lower=0.5", "kind=clip"),
    (weight(kind="clip"), f"{W}kind=clip", "kind=truncate"),
    (weight(kind="clip", lower=0.5, upper=None), f"{W}kind=clip", "upper=null"),
    (weight(kind="reject", upper=None), f"{W}kind=reject", "correction.weight.kind=truncate"),
    ({"weight": GAMMA | {"upper": 2.0}}, f"{W}upper=2.0", "no bounds"),
    ({"weight": GAMMA | {"rate": 0.0}}, f"{W}rate=0.0", "> 0"),
    ({"weight": without(GAMMA, "rate")}, f"{W}rate", "not set"),
    (weight(ratio="full", normalize=True), f"{W}normalize=true", "Set correction.weight.normalize=false"),
    (mask(lower=None, upper=None), "gsm.lower=null", "Set a bound, or remove the mask"),
    # What an aggregate never reaches.
    (of_rows("k2_sum", -0.1, None), f"{M}lower=-0.1", "Set a bound >= 0"),
    (of_rows("tv_max", None, -0.1), f"{M}upper=-0.1", "never negative"),
    (of_rows("binary_tv", -1.1, None), f"{M}lower=-1.1", "[-1, 1]"),
    (of_rows("binary_tv", -1.0, 1.0), f"{M}lower=-1.0", "has no effect"),
    (of_rows("k3_max", 0.0, None), f"{M}lower=0.0", "has no effect"),
    (of_rows("exp_abs_mean", None, 0.9), f"{M}upper=0.9", "Set a bound >= 1"),
    (of_rows("binary_kl", None, 14.0), f"{M}upper=14.0", "never lies outside"),
    (of_rows("product", None, 1.1, level="token"), f"{M}lower=null", "aggregate=any"),
    *((named(**opsm(bad)), f"{M}delta=", ">= 0") for bad in (-1e-12, None)),  # type: ignore[arg-type]
    *((named(**opsm(0.1, aggregate=each)), f"{M}delta=0.1", f"{M}aggregate={each}") for each in ("any", "k1_mean")),
    (named(**opsm(20.5)), f"{M}delta=20.5", "has no effect"),
    *((named(**M2PO | {"budget": bad}), f"{M}budget=", "> 0") for bad in (0.0, None)),
    (named(**M2PO | {"aggregate": "geometric"}), f"{M}aggregate=geometric", "budget"),
    (named(**without(M2PO, "budget"), lower=None, upper=0.2), f"{M}aggregate=second_moment", f"set {M}budget=0.04"),
    (mask(lower=None, upper="0.99_1.01"), "gsm.upper=0.99_1.01", "Set correction.masks.gsm.lower=0.99 and set"),
    ({"masks": {"m": GSM}, "gsm": GSM}, "correction.gsm=", f"{M}lower and {M}upper"),
    (named(**opsm(0.1, aggregate="second_moment")), f"{M}aggregate=second_moment", "delta"),
    *((named(**M2PO, **{key: 0.5}), f"{key}=0.5", "Set delta, or budget, or") for key in ("lower", "delta")),
    (named(**M2PO | {"level": "turn"}), f"{M}aggregate=second_moment", "level=turn"),
]
PREFIXES_AND_AGES: list[Row] = [
    *((weight(level="prefix", by_position=bad), f"{W}by_position={bad}", "[-1, 1]") for bad in (0.0, 1.5, -2.0)),
    (weight(by_position=0.5), f"{W}by_position=0.5", "correction.weight.level=prefix"),
    (weight(aggregate="minimum"), f"{W}aggregate=minimum", "correction.weight.level=prefix"),
    (weight(level="prefix", upper=None, by_position=0.5), "no bound", "correction.weight.by_position=null"),
    (weight(level="prefix", by_staleness=WIDTHS), f"{W}level=prefix", "weight.by_staleness=null"),
    (of_rows("k3_mean", None, 0.1, level="prefix", by_position=0.5), f"{M}by_position=0.5", "no log to multiply"),
    (of_rows("binary_tv_sum", None, 2.0, level="prefix"), f"{M}upper=2.0", "first token"),
    *(
        (named(**STALE | {key: value}), f"{M}{key}=", "only the bound upper can be set")
        for key, value in {"ratio": "rollout", "lower": None}.items()
    ),
    *((named(**STALE | {"upper": bad}), f"{M}upper=", f"Set {M}upper=4") for bad in (-1, 2.5, None, True, math.nan)),
    (named(**without(STALE, "upper")), f"{M}upper=???", f"Set {M}upper=4"),
    (named(**without(STALE, "level")), f"{M}level", "not set"),
    (named(**STALE, when="outward"), f"{M}when=outward", "no such choice"),
    *(
        (weight(by_staleness=bad), f"{W}by_staleness=", f"Set {W}by_staleness=[1.0,1.5,2.0]")
        for bad in ([], 1.0, [0.0], [math.inf], [True], ["1"], {}, [10**400])
    ),
    (mask(by_staleness=[-1.0]), "correction.masks.gsm.by_staleness=", "list of positive finite numbers"),
    (of_rows("k3_sum", None, 0.1, by_staleness=WIDTHS), f"{M}by_staleness=[1.0,2.0]", "no log to multiply"),
    (weight(upper=None, by_staleness=[1.0]), f"{W}by_staleness=", "no bound to multiply"),
    (weight(upper=math.exp(15), by_staleness=[1.0, 1.5]), f"{W}by_staleness=", "beyond the +-20 nats"),
    # Next to bypass, verl's loss has one clip for every age.
    (named(**opsm(0.1, by_staleness=WIDTHS)) | {"proximal": "bypass"}, f"{M}by_staleness=", "pi_old is mu"),
]
WEIGHTS: list[Row] = [
    *(
        ({"weights": {"a": one, "b": other}}, "correction.weights.b.when=", "a token can have only one weight")
        for one, other in (
            (NEGATIVE, NEGATIVE | {"upper": 3.0}),
            (TIS | {"when": "any"}, NEGATIVE),
            (NEGATIVE, POSITIVE | {"sign": "token"}),
            (AFTER_TOOL, NEGATIVE),
        )
    ),
    ({"weight": TIS, "weights": {"a": NEGATIVE}}, "correction.weight=", "weighted twice"),
    ({"weights": {"a": TIS}}, "correction.weights.a.when", "has no default"),
    ({"weights": [TIS]}, "correction.weights=", "mapping"),
    ({"weights": {"min": NEGATIVE}}, "correction.weights.min", "'min'"),
    ({"weights": {"a": NEGATIVE | {"normalize": True}}}, "correction.weights.a.normalize", "each gradient step"),
    ({"weights": {"a": TIS | {"when": "any", "sign": "token"}}}, "correction.weights.a.sign", "sign=row"),
    ({"weights": {"a": AFTER_TOOL | {"sign": "token"}}}, "correction.weights.a.sign", "sign=row"),
    ({"weights": {"a": AFTER_TOOL | {"by_staleness": WIDTHS}}}, "weights.a.when=post_tool", "depends on age"),
    (mask(when="post_tool", level="prefix"), "when=post_tool", "a prefix also contains"),
    ({"weights": {"a": NEGATIVE}, "proximal": "bypass"}, "correction.weights.a.ratio", "count the ratio twice"),
    (
        {"weights": {"a": NEGATIVE | {"kind": "reject"}}} | KEPT | mask(),
        "correction.denominator",
        "weights.a is decided",
    ),
]
TOGETHER: list[Row] = [
    (weight() | {"proximal": "bypass"}, f"{W}ratio=rollout", "correction.proximal=recompute"),
    (weight() | {"proximal": "same_engine"}, f"{W}ratio=rollout", "mu is checked to equal pi_old, so the weight is 1"),
    *(
        (mask(ratio=inert) | {"proximal": proximal}, f"correction.masks.gsm.ratio={inert}", "masks.gsm.ratio=full")
        for proximal, inert in (("bypass", "rollout"), ("same_engine", "rollout"), ("reuse", "ppo"))
    ),
    *((HALF_WAY | {"alpha": bad}, "correction.alpha=", "Set correction.alpha=0.5") for bad in (None, 0, 1, -0.5, 1.5)),
    *((HALF_WAY | {"alpha": bad}, "correction.alpha=", "expected a") for bad in (math.nan, "0.5", True, "by_token")),
    *((HALF_WAY | {"proximal": other}, "correction.alpha=0.5", "only loglinear") for other in ("recompute", "bypass")),
    *(
        (clip(*bounds), "correction.kl_clip={lower: ", "Set correction.kl_clip.lower=0.8")
        for bounds in ((1.0, 1.2), (0.8, 1.0), (1.1, 1.2), (None, 1.2), (0.8, None))
    ),
    ({"kl_clip": 0.2}, "correction.kl_clip=0.2", "mapping"),
    ({"kl_clip": {"lower": 0.8}}, "correction.kl_clip", "upper: null"),
    (clip(0.8, 1.2) | {"proximal": "reuse"}, "correction.kl_clip", "correction.proximal=recompute"),
    # What is fixed for a batch by a pi_old that is not known then, or by a part that is decided at each step.
    *(
        (mapping | source, key, f"correction.proximal={source['proximal']}")
        for source in ({"proximal": "reuse"}, HALF_WAY)
        for mapping, key in (
            (weight(normalize=True), f"{W}normalize=true"),
            (named(**M2PO), f"{M}budget=0.04"),
            (mask() | KEPT, "correction.denominator=kept"),
            (mask() | EXCLUDE, "correction.baseline=exclude"),
        )
    ),
    *(
        (late | counted, f"correction.{key}={value}", f"Set correction.{key}=")
        for counted in (KEPT, EXCLUDE)
        for (key, value) in counted.items()
        for late in (
            mask(when="negative"),
            mask(ratio="ppo"),
            weight(kind="reject", ratio="full") | mask(),
            {},
            weight(level="sequence"),
        )
    ),
    (mask(level="token") | EXCLUDE, "correction.baseline=exclude", "a sequence-level mask"),
    *(
        (part | SKYRL, "correction.skyrl_compat=true", said)
        for part, said in (
            (mask(when="negative"), "when: negative"),
            (weight(aggregate="geometric"), "aggregate: geometric"),
            (weight(by_staleness=[1.0]), "SkyRL has no such"),
            (weight(normalize=True), "Set correction.skyrl_compat=false"),
            (mask() | KEPT, "Set correction.skyrl_compat=false"),
            (named(**STALE), "SkyRL has no such"),
            (mask() | {"weights": {"a": NEGATIVE}}, "weights.a"),
        )
    ),
    ({"penalty": {"ratio": "full", "coefficient": 0.0}}, "correction.penalty.coefficient=0.0", "> 0"),
    ({"penalty": 0.1}, "correction.penalty=0.1", "such as log_ratio_penalty"),
    ({"nonfinite": "excluded"}, "correction.nonfinite=excluded", "no part of the correction reads mu"),
    (mask() | KEPT | {"nonfinite": "excluded"}, "correction.nonfinite=excluded", "correction.denominator=kept"),
]
TABLES = {
    "keys": KEYS,
    "words": WORDS,
    "numbers": NUMBERS,
    "prefixes and ages": PREFIXES_AND_AGES,
    "weights": WEIGHTS,
    "together": TOGETHER,
}
ROWS = [pytest.param(*row, id=f"{name}: {row[1]}") for name, rows in TABLES.items() for row in rows]


@pytest.mark.parametrize(("mapping", "key", "said"), ROWS)
def test_refused(mapping: Any, key: str, said: str) -> None:
    refused(mapping, key, said)


@pytest.mark.parametrize(
    "mapping",
    [
        weight(ratio="full") | {"proximal": "bypass"},
        mask(ratio="full") | {"proximal": "bypass"},
        mask(ratio="rollout") | {"proximal": "reuse"},
        named(**opsm(0.1, by_staleness=WIDTHS)) | {"proximal": "reuse"},
        named(**STALE) | {"proximal": "bypass"},
        clip(0.8, 1.2) | {"proximal": "bypass"},
        mask() | KEPT | EXCLUDE,
        weight(kind="reject", level="sequence") | KEPT,
        mask(level="token") | KEPT,
        of_rows("product", None, 1.1, level="token", when="negative"),
        of_rows("any", None, 1.1, level="token"),
        named(**opsm(20.5, aggregate="product")),
    ],
    ids=str,
)
def test_accepted(mapping: Any) -> None:
    """The nearest valid corrections, which also survive a round trip through their mappings."""
    correction = CorrectionSpec.from_mapping(mapping)
    assert CorrectionSpec.from_mapping(correction.to_mapping()) == correction
