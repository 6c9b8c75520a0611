"""Converter of prime-rl's ``trainer.loss``."""

from __future__ import annotations

from typing import Any, Final

from .mapping import build_dppo_masks, build_mask, build_weight, read_choice, read_flag, read_width, refuse
from .peer import SCORE_CENTERING, Options, Peer, words

_SECTION: Final = "trainer.loss"
_LOSSES: Final[dict[str, dict[str, Any]]] = {
    "default": {"dppo_mask_low": 0.2, "dppo_mask_high": 0.2, "adv_tau": 1.0, "kl_tau": 1e-3},
    "ipo": {"ipo_threshold": 0.1, "adv_tau": 1.0, "kl_tau": 1e-3},
    "kpop": {"kpop_threshold": 0.1, "adv_tau": 1.0, "kl_tau": 1e-3},
    "kimi_k15": {"tau": 0.2, "adv_tau": 1.0, "sequence_regularizer": False},
}


def _convert(options: Options) -> dict[str, Any]:
    key = f"{_SECTION}.type"
    if options[key] == "custom":
        raise refuse("it is not known what your own loss does.", key, "custom")
    kind = str(read_choice(options[key], tuple(_LOSSES), key, optional=False))
    for path in sorted(options.given - {key}):
        if path.rpartition(".")[2] not in _LOSSES[kind]:
            known = ", ".join(_LOSSES[kind])
            raise refuse(f"no key of type {kind}.", path, options[path], f"Known: {known}.")
    values = {name: options[f"{_SECTION}.{name}"] for name in _LOSSES[kind]}
    names = [name for name in values if name != "sequence_regularizer"]
    numbers = {name: read_width(values[name], f"{_SECTION}.{name}") for name in names}
    if numbers["adv_tau"] != 1:
        raise refuse("advantages are used unscaled.", f"{_SECTION}.adv_tau", numbers["adv_tau"], "Set it to 1.0.")
    plain: dict[str, Any] = {"proximal": "bypass", "masks": {}}
    if kind == "kimi_k15":
        if read_flag(values["sequence_regularizer"], f"{_SECTION}.sequence_regularizer"):
            reason = "the squared sum of a row has no equivalent here."
            raise refuse(reason, f"{_SECTION}.sequence_regularizer", True, "Set it to false.")
        return plain | _penalty(numbers["tau"] / 2)
    plain["weight"] = build_weight("token", None, None, ratio="full")
    if kind == "default":
        plain["masks"] = build_dppo_masks(numbers["dppo_mask_low"], numbers["dppo_mask_high"])
    elif kind == "ipo":
        if (far := numbers["ipo_threshold"]) < 1:  # no difference of probabilities is greater
            plain["masks"]["ipo"] = build_mask("token", "binary_tv", -far, far, "full")
    else:
        plain["masks"]["kpop"] = build_mask("token", "binary_kl", None, numbers["kpop_threshold"], "full")
    return plain | _penalty(numbers["kl_tau"])


def _penalty(coefficient: float) -> dict[str, Any]:
    return {"penalty": {"ratio": "full", "coefficient": coefficient}} if coefficient else {}


PRIME_RL: Final = Peer(
    name="prime-rl",
    releases="0.6.0 to 0.8.0",
    sections=(_SECTION,),
    read={
        f"{_SECTION}.type": "default",
        **{f"{_SECTION}.{key}": value for loss in _LOSSES.values() for key, value in loss.items()},
    },
    convert=_convert,
    unsaid={f"{_SECTION}.score_centering": SCORE_CENTERING},
    # Keys of custom losses. Such losses are refused because of their type.
    plain=words("import_path kwargs", _SECTION),
    elsewhere=words("enable_router_replay logprob_offset loss_mask max_off_policy_steps"),
)
"""prime-rl's rules, for ``actor.policy_loss.loss_mode=gpg``; ``kpop`` and ``kimi_k15`` come from branches.

The policy term is -A pi / mu per token, unbounded, over the tokens that the mask keeps (``kimi_k15``: -A log pi over
all tokens). ``kl_tau`` (``tau`` / 2) times the squared log-ratio of all tokens is added to the policy term. Tokens with
A = 0 have no gradient here, whereas prime-rl masks them like tokens with A < 0.
"""
