"""Converter of OpenRLHF's arguments that concern the vLLM engine."""

from __future__ import annotations

from typing import Any, Final

from .mapping import build_mask, build_weight, read_choice, read_flag, read_ratio_bound, refuse
from .peer import Options, Peer, words

_IS: Final = "algo.advantage.is_correction_"
_TYPES: Final = ("tis", "icepop", "seq-mask-tis")
_LOSS: Final = "actor.policy_loss_type"


def _convert(options: Options) -> dict[str, Any]:
    named = {key: options[key] for key in options.given if key.startswith((_IS, "enable_vllm_is", "vllm_is"))}
    families = {
        "0.11.2": {f"{_IS}level", f"{_IS}mode", f"{_IS}gating"},
        "0.10.2 to 0.11.1": {f"{_IS}enable", f"{_IS}type"},
        "0.9.1 to 0.10.1": {"enable_vllm_is_correction", "vllm_is_truncated_threshold", "vllm_is_correction_type"},
    }
    used = {release: min(keys & set(named)) for release, keys in families.items() if keys & set(named)}
    if len(used) > 1:
        (_, first), (release, second) = list(used.items())[:2]
        raise refuse(f"it belongs to {release}, but {first} belongs to another release.", second, named[second])
    if "0.9.1 to 0.10.1" in used:
        threshold, kind = "vllm_is_truncated_threshold", options["vllm_is_correction_type"]
        on = read_flag(options["enable_vllm_is_correction"], "enable_vllm_is_correction")
        rule = _read_type(kind, "vllm_is_correction_type")
    elif f"{_IS}enable" in named or f"{_IS}type" in named:
        threshold = f"{_IS}threshold"
        on, rule = read_flag(options[f"{_IS}enable"], f"{_IS}enable"), _read_type(options[f"{_IS}type"], f"{_IS}type")
    else:
        threshold = f"{_IS}threshold"
        level = options[f"{_IS}level"]
        # YAML reads an unquoted off as false.
        level = "off" if level is False else read_choice(level, ("off", "token", "seq"), f"{_IS}level", optional=False)
        mode = read_choice(options[f"{_IS}mode"], ("mask", "clip"), f"{_IS}mode", optional=False)
        gating = read_choice(options[f"{_IS}gating"], ("ratio", "binary_kl", "tv"), f"{_IS}gating", optional=False)
        on, rule = level != "off", (str(level), str(mode), str(gating))
    plain: dict[str, Any] = {"proximal": "recompute"}
    # In OpenRLHF, unbiased KL is a straight-through estimate: its gradient treats w as a constant.
    if read_flag(options["algo.kl.unbiased_gradient"], "algo.kl.unbiased_gradient") and options["algo.kl.use_loss"]:
        reason = (
            "its gradient equals the gradient of w k2 with w = pi / pi_old held constant, which no KL weight here "
            "reproduces."
        )
        raise refuse(reason, "algo.kl.unbiased_gradient", True, "The nearest option is correction=kl_unbiased.")
    if not on:
        return plain
    loss = options[_LOSS] if _LOSS in options.given else options["policy_loss_type"]
    if loss == "gspo":
        # The loss's own ratio, pi / mu per row, is the correction.
        return {"proximal": "bypass"}
    if loss != "ppo":
        raise refuse("OpenRLHF corrects only under ppo.", _LOSS, loss, "Set it to ppo.")
    # Up to 0.11.1, there were two bounds; 0.9.0 had only a cap.
    bounds = _read_bounds(options[threshold], threshold, may_be_one=not {f"{_IS}enable", f"{_IS}type"} & set(named))
    return plain | _correct(rule, *bounds, threshold)


def _read_type(kind: Any, key: str) -> tuple[str, str, str]:
    rules = dict(
        zip(_TYPES, (("token", "clip", "ratio"), ("token", "mask", "ratio"), ("seq", "mask", "ratio")), strict=True)
    )
    return rules[str(read_choice(kind, _TYPES, key, optional=False))]


def _read_bounds(given: Any, key: str, *, may_be_one: bool) -> tuple[Any, Any]:
    pair = list(given) if isinstance(given, list | tuple) else [given]
    pair = [0.0, *pair] if len(pair) == 1 and may_be_one else pair
    if len(pair) != 2 or any(isinstance(each, bool) or not isinstance(each, int | float) for each in pair):
        raise refuse("expected a low and a high threshold.", key, given, f"Set {key}=[0.5,5.0].")
    return pair[0], pair[1]


def _correct(rule: tuple[str, str, str], low: float, high: float, key: str) -> dict[str, Any]:
    level, mode, gating = rule
    if mode == "clip" and (level, gating) != ("token", "ratio"):
        raise refuse("OpenRLHF clips only the ratio of tokens.", f"{_IS}mode", "clip", f"Set {_IS}mode=mask.")
    if gating == "ratio":
        lower, upper = read_ratio_bound(low, key, zero_opens=True), read_ratio_bound(high, key)
        if level == "seq":
            mask = build_mask("sequence", "geometric", lower, upper)
            return {"weight": build_weight("token", None, None), "masks": {"geometric": mask}}
        return {"weight": build_weight("token", lower, upper, reject=mode == "mask")}
    if low > 0:
        raise refuse("OpenRLHF bounds a divergence only from above.", key, [low, high], f"Set {key}=[{high}].")
    if gating == "binary_kl":
        aggregate = "binary_kl_forward_mean" if level == "seq" else "binary_kl_forward"
        mask = build_mask("sequence" if level == "seq" else "token", aggregate, None, high)
        return {"weight": build_weight("token", None, None), "masks": {"binary_kl": mask}}
    if level == "seq":
        reason = "no aggregate here is the mean of |p_old - p_mu|: binary_tv_mean has signs."
        raise refuse(reason, f"{_IS}gating", gating)
    mask = build_mask("token", "binary_tv", -high, high)
    return {"weight": build_weight("token", None, None), "masks": {"tv": mask}}


OPENRLHF: Final = Peer(
    name="OpenRLHF",
    releases="0.9.1 to 0.11.2",
    sections=("algo.advantage", "algo.kl"),
    read={
        f"{_IS}level": "off",
        f"{_IS}mode": "mask",
        f"{_IS}gating": "ratio",
        f"{_IS}threshold": (0.5, 5.0),
        f"{_IS}enable": False,
        f"{_IS}type": "tis",
        "enable_vllm_is_correction": False,
        "vllm_is_correction_type": "tis",
        "vllm_is_truncated_threshold": (0.5, 5.0),
        "algo.kl.unbiased_gradient": False,
        "algo.kl.use_loss": False,
        _LOSS: "ppo",
        "policy_loss_type": "ppo",
    },
    convert=_convert,
    unsaid={},
    plain=words("estimator gamma lambd no_std_norm", "algo.advantage")
    | words("estimator horizon init_coef target", "algo.kl"),
    context=frozenset({"algo.kl.use_loss", _LOSS, "policy_loss_type"}),
    switches=frozenset({f"{_IS}level", f"{_IS}enable", "enable_vllm_is_correction"}),
)
"""OpenRLHF's rules, on pi_old / mu.

* 0.11.2: ``is_correction_level`` token or seq, ``_mode`` mask or clip, ``_gating`` ratio, binary_kl or tv. ``clip``
  bounds the weights of tokens. ``mask`` drops the tokens or sequences outside the bounds and leaves the token weights
  of the rest unchanged.
* Earlier releases (until 0.10.1 their keys begin with ``vllm_is_``): ``_type`` tis means token and clip, icepop means
  token and mask, and seq-mask-tis means seq and mask.
* OpenRLHF corrects only under ``actor.policy_loss_type=ppo``; under ``gspo`` the loss's own ratio becomes pi / mu.
"""
