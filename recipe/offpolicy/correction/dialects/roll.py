"""Converter of ROLL's ``train_infer_correction``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ..problem import SpecError
from ..validation import read_number
from .mapping import (
    build_mask,
    build_weight,
    check_weight_of_rows,
    read_choice,
    read_flag,
    read_options,
    read_ratio_bound,
    refuse,
)
from .peer import Options, Peer, words

_SECTION: Final = "train_infer_correction"
_WEIGHT: Final = f"{_SECTION}.is_weight"
_FILTERS: Final = f"{_SECTION}.filters"
_FILTER: Final[dict[str, Any]] = {
    "enabled": False,
    "agg_type": "token",
    "ratio_enabled": True,
    "ratio_low": 0.8,
    "ratio_high": 1.2,
    "diff_enabled": False,
    "diff_low": -0.2,
    "diff_high": 0.2,
}
_TYPES: Final = ("token", "segment", "geometric", "sequence")
_RATIOS: Final = {
    "token": ("token", "product"),
    "segment": ("turn", "geometric"),
    "geometric": ("sequence", "geometric"),
    "sequence": ("sequence", "product"),
}
"""ROLL's granularity -> our level, and the aggregate of ratios."""
_DIFFERENCES: Final = {
    "token": ("token", "binary_tv"),
    "segment": ("turn", "binary_tv_mean"),
    "geometric": ("sequence", "binary_tv_mean"),
    "sequence": ("sequence", "binary_tv_sum"),
}
_VARIANTS: Final = ("vanilla", "ppo", "cispo")
_RECOMPUTE: Final = "enable_old_logprobs_recompute"
_FORCED: Final = "force_disable_old_logprobs_recompute"
_VARIANT: Final = "actor_train.pg_variant"
_LEVELS: Final = ("importance_sampling", "ratio_type")
"""Keys that set the ratio in PPO's clip to the ratio of a row (seq) or of a turn (segment)."""


def _convert(options: Options) -> dict[str, Any]:
    forced_off = read_flag(options[_FORCED], _FORCED)
    recompute = read_flag(options[_RECOMPUTE], _RECOMPUTE) and not forced_off
    plain: dict[str, Any] = {"proximal": "recompute" if recompute else "reuse", "masks": {}}
    for key in (_VARIANT, "pg_variant"):
        if (variant := options[key]) not in (None, *_VARIANTS):
            nearest = {"topr": "paper/topr", "kimi15": "log_ratio_penalty"}.get(str(variant))
            fix = f"The nearest option is correction={nearest}, on pi / mu." if nearest else ""
            raise refuse("it weighs by pi / pi_old, which no weight here does.", key, variant, fix)
    if read_flag(options[f"{_WEIGHT}.enabled"], f"{_WEIGHT}.enabled"):
        if not read_flag(options[f"{_WEIGHT}.detach"], f"{_WEIGHT}.detach"):
            raise refuse("weights are detached here.", f"{_WEIGHT}.detach", False, "Set it to true.")
        kind = read_choice(options[f"{_WEIGHT}.weight_type"], _TYPES, f"{_WEIGHT}.weight_type", optional=False)
        level, aggregate = _RATIOS[str(kind)]
        upper = read_ratio_bound(options[f"{_WEIGHT}.upper_bound"], f"{_WEIGHT}.upper_bound")
        plain["weight"] = build_weight(level, None, upper, aggregate=aggregate)
        for key in _LEVELS:
            if options[key] not in (None, "token"):
                check_weight_of_rows(plain["weight"], "ROLL", key, options[key])
    filters = options[_FILTERS]
    if filters is not None and not isinstance(filters, list | tuple):
        raise SpecError("expected a list of filters.", key=_FILTERS, value=filters)
    for place, each in enumerate(filters or ()):
        plain["masks"] |= _convert_filter(each, place, f"{_FILTERS}[{place}]")
    return plain


def _convert_filter(source: Any, place: int, where: str) -> dict[str, Any]:
    values = read_options(source, _FILTER, where)
    if isinstance(source, Mapping) and source and "enabled" not in source:
        raise SpecError("ROLL does not apply it.", "Set it to true, or to false.", key=f"{where}.enabled")
    enabled = {key: read_flag(values[key], f"{where}.{key}") for key in ("enabled", "ratio_enabled", "diff_enabled")}
    if not enabled["enabled"]:
        return {}
    kind = str(read_choice(values["agg_type"], _TYPES, f"{where}.agg_type", optional=False))
    masks = {}
    if enabled["ratio_enabled"]:
        low, high = (read_ratio_bound(values[f"ratio_{side}"], f"{where}.ratio_{side}") for side in ("low", "high"))
        masks[f"ratio_{place}"] = build_mask(*_RATIOS[kind], low, high)
    if enabled["diff_enabled"]:
        low, high = (read_number(values[f"diff_{side}"], f"{where}.diff_{side}") for side in ("low", "high"))
        masks[f"diff_{place}"] = build_mask(*_DIFFERENCES[kind], low, high)
    if not masks:
        reason = "it is enabled, but neither ratio_enabled nor diff_enabled is set, so it drops nothing."
        raise SpecError(reason, f"Set {where}.ratio_enabled=true.", key=f"{where}.enabled", value=True)
    return masks


ROLL: Final = Peer(
    name="ROLL",
    releases="0.2.0 to 0.3.0",
    sections=(_WEIGHT, _SECTION),
    read={
        _RECOMPUTE: False,
        _FORCED: False,
        _FILTERS: (),
        f"{_WEIGHT}.enabled": False,
        f"{_WEIGHT}.weight_type": "token",
        f"{_WEIGHT}.upper_bound": 1.2,
        f"{_WEIGHT}.detach": True,
        _VARIANT: None,
        "pg_variant": None,
        **dict.fromkeys(_LEVELS),
    },
    convert=_convert,
    unsaid={
        "use_topr_loss": ((False, None), "it weighs by pi / pi_old, which no weight here does."),
        "use_topr_neg_loss_coef": ((0.0, 0, None), "it weighs by pi / pi_old, which no weight here does."),
    },
    plain=frozenset(),
    elsewhere=words(
        "difficulty_mask dirty_data_mask is_num_return_sequences_expand"
        " is_offload_optimizer_states_in_train_step is_offload_states is_pure_opd is_use_additional_prompts logprobs"
        " mask_type max_len_mask router_replay use_policy_loss_type"
    ),
    context=frozenset({_VARIANT, "pg_variant", *_LEVELS}),
    switches=frozenset({f"{_WEIGHT}.enabled", _FILTERS, _RECOMPUTE, _FORCED}),
)
"""ROLL's rules.

``segment`` is the mean over a turn. By default, without ``enable_old_logprobs_recompute``, pi_old is the current
policy. ROLL removes filtered tokens from the response mask, and therefore also from KL and denominators; here they are
removed only from the policy term. The values vanilla, ppo and cispo of ``pg_variant`` are policy losses, which are set
by verl's own keys.
"""
