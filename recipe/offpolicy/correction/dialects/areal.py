"""Converter of AReaL's ``actor`` section about decoupled PPO."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from .mapping import (
    build_mask,
    build_weight,
    pick_options,
    read_choice,
    read_flag,
    read_options,
    read_ratio_bound,
    refuse,
)

_ACTOR: Final[dict[str, Any]] = {
    "use_decoupled_loss": False,
    "recompute_logprob": False,
    "prox_logp_method": "recompute",
    "rejection_sampling": None,
}
_REJECTION: Final[dict[str, Any]] = {
    "level": "token",
    "action": "mask",
    "metric": "ratio",
    "agg": "mean",
    "upper": 5.0,
    "lower": None,
}
_METRICS: Final = ("ratio", "kl_k1", "kl_k2", "kl_k3", "binary_kl")


def convert_areal(source: Mapping[str, Any] | Any) -> dict[str, Any]:
    """Convert the keys of AReaL's ``actor`` about its behaviour and proximal policies to our plain values.

    * Without ``use_decoupled_loss`` pi_old is mu, or with ``recompute_logprob`` a forward pass, and nothing weighs.
    * ``rejection_sampling`` weighs each token by prox / behave, or at level sequence with metric ratio each row by its
      geometric mean; ``mask`` rejects and leaves that weight as it is, ``clamp`` bounds it.
    * ``kl_k1`` is log r there, so that its bounds change sides; ``kl_k3`` is that of 1 / r, which no aggregate here is;
      ``binary_kl`` is KPop's, by token alone.

    A log-ratio that is not finite is 0 there, and here the token leaves the loss.

    Args:
        source: the actor section, or an object with its keys as attributes; other keys are not read.

    Raises:
        SpecError: malformed values, what AReaL would ignore, and what has no equivalent here.

    Example:
        >>> convert_areal({"use_decoupled_loss": True, "rejection_sampling": {"upper": 2.0}})["weight"]
        {'level': 'token', 'kind': 'reject', 'lower': None, 'upper': 2.0}
    """
    where = "actor"
    values = pick_options(source, _ACTOR, where, ("behave_imp_weight", "prox_logp_"))
    decoupled = read_flag(values, "use_decoupled_loss", where)
    method = read_choice(
        values["prox_logp_method"], ("recompute", "loglinear", "metrics"), f"{where}.prox_logp_method", optional=False
    )
    rejection = values["rejection_sampling"]
    if not decoupled:
        if rejection is not None:
            reason = "AReaL reads it with use_decoupled_loss alone."
            raise refuse(reason, f"{where}.rejection_sampling", rejection, f"Set {where}.use_decoupled_loss=true.")
        return {"proximal": "recompute" if read_flag(values, "recompute_logprob", where) else "bypass"}
    proximal: dict[str, Any] = {"proximal": "recompute"}
    if method == "loglinear":
        proximal = {"proximal": "loglinear", "alpha": "by_age"}
    return proximal | ({} if rejection is None else _convert_rejection(rejection, f"{where}.rejection_sampling"))


def _convert_rejection(source: Any, where: str) -> dict[str, Any]:
    values = read_options(source, _REJECTION, where, ignored={"_target_"})
    level = read_choice(values["level"], ("token", "sequence"), f"{where}.level", optional=False)
    action = read_choice(values["action"], ("mask", "clamp"), f"{where}.action", optional=False)
    metric = read_choice(values["metric"], _METRICS, f"{where}.metric", optional=False)
    agg = read_choice(values["agg"], ("sum", "mean", "max"), f"{where}.agg", optional=False)
    if metric != "ratio":
        if action == "clamp":
            raise refuse("clamp bounds ratios alone.", f"{where}.action", action, f"Set {where}.action=mask.")
        mask = _bound_divergence(str(metric), str(level), str(agg), values, where)
        return {"weight": build_weight("token", None, None), "masks": {"rejection": mask}}
    lower, upper = (
        None if values[side] in (None, 0, 0.0) else read_ratio_bound(values[side], f"{where}.{side}")
        for side in ("lower", "upper")
    )
    if level == "token":
        return {"weight": build_weight("token", lower, upper, reject=action == "mask")}
    if agg == "mean":
        return {"weight": build_weight("sequence", lower, upper, reject=action == "mask", aggregate="geometric")}
    if action == "clamp":
        reason = "it bounds the geometric mean of rows by another number of theirs, which no weight here does."
        raise refuse(reason, f"{where}.agg", agg, f"Set {where}.agg=mean.")
    if agg == "max" and lower is not None:
        raise refuse("no mask here bounds the greatest ratio from below.", f"{where}.lower", lower)
    mask = build_mask("sequence", "product" if agg == "sum" else "any", lower, upper)
    return {"weight": build_weight("sequence", None, None, aggregate="geometric"), "masks": {"rejection": mask}}


def _bound_divergence(metric: str, level: str, agg: str, values: Mapping[str, Any], where: str) -> dict[str, Any]:
    lower, upper = values["lower"], values["upper"]
    for side, bound in (("lower", lower), ("upper", upper)):
        if bound is not None and (isinstance(bound, bool) or not isinstance(bound, int | float)):
            raise refuse("expected a number.", f"{where}.{side}", bound)
    if metric == "kl_k3":
        reason = "AReaL's k3 is that of behave / prox, 1 / r - 1 + log r, which no aggregate here is."
        raise refuse(reason, f"{where}.metric", metric, f"Set {where}.metric=kl_k2.")
    how = "sum" if level == "token" else agg
    if metric == "binary_kl":
        if level == "sequence":
            reason = "the greater of two binary KLs has no sum or mean over a row here."
            raise refuse(reason, f"{where}.level", level, f"Set {where}.level=token.")
        return build_mask(level, metric, lower, upper)
    if metric == "kl_k2":
        return build_mask(level, f"k2_{how}", lower, upper)
    if how == "max":
        # The greatest log r is bounded where each is.
        if lower is not None:
            raise refuse("no mask here bounds the greatest log-ratio from below.", f"{where}.lower", lower)
        return build_mask(level, "any", None, math.exp(upper))
    return build_mask(level, f"k1_{how}", -upper, None if lower is None else -lower)
