"""Converter of prime-rl's ``trainer.loss``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ..validation import read_number
from .mapping import build_mask, build_weight, read_choice, read_flag, read_options, refuse

_LOSSES: Final[dict[str, dict[str, Any]]] = {
    "default": {"dppo_mask_low": 0.2, "dppo_mask_high": 0.2, "adv_tau": 1.0, "kl_tau": 1e-3},
    "ipo": {"ipo_threshold": 0.1, "adv_tau": 1.0, "kl_tau": 1e-3},
    "kpop": {"kpop_threshold": 0.1, "adv_tau": 1.0, "kl_tau": 1e-3},
    "kimi_k15": {"tau": 0.2, "adv_tau": 1.0, "sequence_regularizer": False},
}


def convert_prime_rl(source: Mapping[str, Any] | Any) -> dict[str, Any]:
    """Convert prime-rl's ``trainer.loss`` to our plain values, for ``actor.policy_loss.loss_mode=gpg``.

    The policy term is -A pi / mu by token, unbounded, of what the mask keeps (``kimi_k15``: -A log pi of all); beside
    it stands ``kl_tau`` (``tau`` / 2) times the squared log-ratio of all tokens.

    Args:
        source: the section, with ``type``; left out it is ``default``.

    Raises:
        SpecError: unknown keys, malformed values, and what has no equivalent here.

    Example:
        >>> convert_prime_rl({"type": "kpop"})["masks"]["kpop"]["upper"]
        0.1
    """
    where = "trainer.loss"
    given = dict(source) if isinstance(source, Mapping) else {"type": getattr(source, "type", "default")}
    kind = str(read_choice(given.pop("type", "default"), tuple(_LOSSES), f"{where}.type", optional=False))
    values = read_options(given if isinstance(source, Mapping) else source, _LOSSES[kind], where)
    numbers = {
        key: read_number(value, f"{where}.{key}") for key, value in values.items() if not isinstance(value, bool)
    }
    if numbers["adv_tau"] != 1:
        raise refuse("advantages are taken as they are.", f"{where}.adv_tau", numbers["adv_tau"], "Set it to 1.0.")
    plain: dict[str, Any] = {"proximal": "bypass", "masks": {}}
    if kind == "kimi_k15":
        if read_flag(values, "sequence_regularizer", where):
            reason = "the squared sum of a row has no equivalent here."
            raise refuse(reason, f"{where}.sequence_regularizer", True, "Set it to false.")
        return plain | _penalty((numbers["tau"] or 0.0) / 2)
    plain["weight"] = build_weight("token", None, None, ratio="full")
    if kind == "default":
        up = build_mask("token", "binary_tv", None, numbers["dppo_mask_high"], "full")
        down = build_mask("token", "binary_tv", -(numbers["dppo_mask_low"] or 0.0), None, "full")
        plain["masks"]["dppo_positive"] = up | {"when": "positive", "sign": "token"}
        plain["masks"]["dppo_negative"] = down | {"when": "negative", "sign": "token"}
    elif kind == "ipo":
        far = numbers["ipo_threshold"] or 0.0
        plain["masks"]["ipo"] = build_mask("token", "binary_tv", -far, far, "full")
    else:
        plain["masks"]["kpop"] = build_mask("token", "binary_kl", None, numbers["kpop_threshold"], "full")
    return plain | _penalty(numbers["kl_tau"])


def _penalty(coefficient: float | None) -> dict[str, Any]:
    return {"penalty": {"ratio": "full", "coefficient": coefficient}} if coefficient else {}
