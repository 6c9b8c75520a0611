"""Converter for verl's ``algorithm.rollout_correction``."""

from __future__ import annotations

import difflib
import math
from typing import Any, Final

from ..problem import SpecError
from ..validation import read_number
from .peer import Options, Peer, build_mask, read_ratio_bound, words

VERL_DEFAULTS: Final[dict[str, Any]] = {
    "rollout_is": None,
    "rollout_is_threshold": 2.0,
    "rollout_is_batch_normalize": False,
    "rollout_rs": None,
    "rollout_rs_threshold": None,
    "bypass_mode": False,
    "loss_type": "ppo_clip",
}
"""Default values under ``algorithm.rollout_correction`` in every supported release of verl."""
VERL_REJECTIONS: Final[dict[str, tuple[str, str]]] = {
    "token_k1": ("token", "product"),
    "token_k2": ("token", "k2_sum"),
    "token_k3": ("token", "k3_sum"),
    "seq_sum_k1": ("sequence", "product"),
    "seq_sum_k2": ("sequence", "k2_sum"),
    "seq_sum_k3": ("sequence", "k3_sum"),
    "seq_mean_k1": ("sequence", "geometric"),
    "seq_mean_k2": ("sequence", "k2_mean"),
    "seq_mean_k3": ("sequence", "k3_mean"),
    "seq_max_k2": ("sequence", "k2_max"),
    "seq_max_k3": ("sequence", "k3_max"),
}
_SECTION: Final = "algorithm.rollout_correction"
_BYPASS: Final = f"{_SECTION}.bypass_mode"
_NORMALIZE: Final = f"{_SECTION}.rollout_is_batch_normalize"
_LOSS_MODE: Final = "actor_rollout_ref.actor.policy_loss.loss_mode"
_YAML_UNDERSCORE: Final = (
    "YAML and Hydra read an unquoted 0.5_2 as the number 0.52 and 2_5 as 25, so quote a pair of bounds"
)


def _convert(options: Options) -> dict[str, Any]:
    bypass, normalize = options.flag(_BYPASS), options.flag(_NORMALIZE)
    loss_type = options.choice(f"{_SECTION}.loss_type", "ppo_clip", "reinforce")
    level = options.choice_or_null(f"{_SECTION}.rollout_is", "token", "sequence")
    if loss_type == "reinforce" and not bypass:
        fix = f"Set {_BYPASS}=true, or remove loss_type."
        raise options.refuse(f"{_SECTION}.loss_type", "verl reads loss_type only in bypass mode.", fix, _BYPASS)
    if normalize and level is None:
        fix = f"Set {_SECTION}.rollout_is=token, or remove rollout_is_batch_normalize."
        raise options.refuse(_NORMALIZE, "there is no weight to normalise.", fix, f"{_SECTION}.rollout_is")
    if options[_LOSS_MODE] == "bypass_mode" and not bypass:
        fix = f"Set {_BYPASS}=true, and configure the correction with its keys."
        raise options.refuse(_LOSS_MODE, "the correction keys of this loss are not read here.", fix)
    ratio, weight = "full" if bypass else "rollout", None
    if level is not None:
        key = f"{_SECTION}.rollout_is_threshold"
        lower, upper = read_verl_weight_bounds(options[key], key)
        if not bypass or loss_type == "reinforce":
            if normalize and bypass:
                reason = (
                    "verl divides by each micro-batch's own mean of pi / mu, so the loss depends on how a batch is "
                    "split."
                )
                raise options.refuse(_NORMALIZE, reason, f"Set {_NORMALIZE}=false.", _BYPASS)
            kind = "truncate" if lower is None else "reject"
            weight = {"level": level, "kind": kind, "lower": lower, "upper": upper, "ratio": ratio}
            weight["normalize"] = normalize
    rejections, thresholds = options[f"{_SECTION}.rollout_rs"], options[f"{_SECTION}.rollout_rs_threshold"]
    masks = {
        # The name becomes part of a metric's name, which must not contain "max".
        option.replace("max", "largest"): build_mask(*VERL_REJECTIONS[option], *bounds, ratio)
        for option, bounds in read_verl_rejections(rejections, thresholds, f"{_SECTION}.").items()
    }
    return {"weight": weight, "masks": masks, "proximal": "bypass" if bypass else "recompute"}


def read_verl_weight_bounds(threshold: Any, key: str) -> tuple[float | None, float]:
    """Read verl's ``rollout_is_threshold`` as bounds on a weight: a cap, or "lo_hi" for a weight of 0 outside [lo, hi].

    Returns:
        (lower, upper); lower is None for a cap.

    Raises:
        SpecError: the threshold is malformed, missing, or outside the clamp of +-20 nats.

    Example:
        >>> read_verl_weight_bounds(2.0, "rollout_is_threshold")
        (None, 2.0)
        >>> read_verl_weight_bounds("0.5_2.0", "rollout_is_threshold")
        (0.5, 2.0)
    """
    if threshold is None:
        raise SpecError("verl ignores a weight that has no threshold.", key=key, proposed={key: 2.0})
    lower, upper = _pair(threshold, key)
    if lower is None and upper < 1 and not isinstance(threshold, str):
        raise SpecError(
            f"a cap below 1 scales down every on-policy token. {_YAML_UNDERSCORE}, {key}='0.5_2'.",
            f"Set {key}=2.0, or pass the cap as a string if you want it below 1.",
            key=key,
            value=threshold,
            proposed={key: 2.0},
        )
    read_ratio_bound(upper, key)
    return read_ratio_bound(lower, key), upper


def read_verl_rejections(rollout_rs: Any, threshold: Any, prefix: str) -> dict[str, tuple[float | None, float]]:
    """Read verl's rejection options with their bounds, in the order given.

    Args:
        rollout_rs: None, or options separated by commas; a repeated option counts once.
        threshold: one threshold for all options, or one for each, separated by commas.
        prefix: prefix of verl's keys in error messages.

    Returns:
        option -> (lower, upper). For k1, the bounds apply to the ratio of the trainer's policy to mu, the inverse of
        verl's ratio. For k2 and k3, they are in nats, and lower is None.

    Raises:
        SpecError: an option is unknown, or a threshold is malformed or missing.

    Example:
        >>> read_verl_rejections("token_k1,seq_mean_k3", "0.5_4.0,0.01", "")  # token_k1: mu / pi_old in [0.5, 4]
        {'token_k1': (0.25, 2.0), 'seq_mean_k3': (None, 0.01)}
    """
    rs, ts = f"{prefix}rollout_rs", f"{prefix}rollout_rs_threshold"
    if rollout_rs is None:
        if threshold is not None:
            raise SpecError(
                "verl ignores it.", f"Set {rs}, or remove {ts}.", key=ts, value=threshold, alongside={rs: None}
            )
        return {}
    names = rollout_rs.split(",") if isinstance(rollout_rs, str) else []
    options = list(dict.fromkeys(name.strip() for name in names if name.strip()))
    known = ", ".join(VERL_REJECTIONS)
    if not options:
        fix = f"Set options separated by commas, or null. Known: {known}."
        raise SpecError("expected names of rejections.", fix, key=rs, value=rollout_rs)
    if unknown := [option for option in options if option not in VERL_REJECTIONS]:
        near = ",".join(difflib.get_close_matches(each, VERL_REJECTIONS, 1, cutoff=0)[0] for each in options)
        reason, fix = f"{unknown[0]!r} is unknown.", f"Known: {known}."
        raise SpecError(reason, fix, key=rs, value=rollout_rs, proposed={rs: near})
    if threshold is None:
        fix = "Set a threshold for each option, or one for all."
        raise SpecError("nothing is rejected.", fix, key=ts, alongside={rs: rollout_rs})
    parts = [part for part in threshold.split(",") if part.strip()] if isinstance(threshold, str) else [threshold]
    if len(parts) not in (1, len(options)):
        reason = f"there are {len(parts)} thresholds for {len(options)} options."
        fix = "Set one for all, or one each, separated by commas."
        raise SpecError(reason, fix, key=ts, value=threshold, alongside={rs: rollout_rs})
    parts = parts * len(options) if len(parts) == 1 else parts
    return {option: _rejection_bounds(option, part, ts) for option, part in zip(options, parts, strict=True)}


def _rejection_bounds(option: str, threshold: Any, key: str) -> tuple[float | None, float]:
    lower, upper = _pair(threshold, key)
    if not option.endswith("k1"):
        if lower is not None:
            raise SpecError(f"{option} has only an upper bound.", key=key, value=threshold, proposed={key: upper})
        return None, upper
    if lower is None and upper < 1:
        reason = (
            f"a single bound u of {option} means [1/u, u], which is empty below 1. {_YAML_UNDERSCORE}, {key}='0.5_2'."
        )
        raise SpecError(reason, "Set a bound above 1.", key=key, value=threshold)
    return 1 / upper, upper if lower is None else 1 / lower


def _pair(threshold: Any, key: str) -> tuple[float | None, float]:
    """Read bounds from a number, or from a string "upper" or "lower_upper"; all numbers must be positive."""
    if isinstance(threshold, str):
        try:
            bounds = [float(part) for part in threshold.split("_")]
        except ValueError:
            bounds = []
        if len(bounds) not in (1, 2) or not all(map(math.isfinite, bounds)):
            fix = "Set one bound such as 2.0, or two such as '0.5_2.0'."
            raise SpecError("no number.", fix, key=key, value=threshold)
    else:
        number = read_number(threshold, key)
        assert number is not None, "a missing threshold has already been rejected"
        bounds = [number]
    if any(bound <= 0 or math.isinf(1 / bound) for bound in bounds):
        raise SpecError("bounds are positive numbers.", "Set one above 0.", key=key, value=threshold)
    if bounds[0] > bounds[-1]:
        raise SpecError("nothing lies between.", "Swap the bounds.", key=key, value=threshold)
    return (None if len(bounds) == 1 else bounds[0]), bounds[-1]


_OLDER: Final = (
    "this key belongs to an older verl; set algorithm.rollout_correction.rollout_is=token and .rollout_is_threshold."
)

VERL: Final = Peer(
    name="verl",
    releases="0.7.0 to 0.9.1",
    sections=(_SECTION,),
    read={f"{_SECTION}.{key}": value for key, value in VERL_DEFAULTS.items()} | {_LOSS_MODE: "vanilla"},
    convert=_convert,
    unsaid={
        "actor_rollout_ref.actor.tis_imp_ratio_cap": ((None, -1, -1.0), _OLDER),
        "tis_imp_ratio_cap": ((None, -1, -1.0), _OLDER),
    },
    plain=words("_target_", _SECTION),
    elsewhere=words(
        "loss_mode policy_loss_mode reset_attention_mask rollout_n"
        " calculate_log_probs enable_rollout_routing_replay ignore_input_ids_mismatch kl_loss_type"
        " log_prob_max_token_len_per_gpu log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu"
        " log_prob_min_clamp log_prob_use_dynamic_bsz logprobs logprobs_mode max_off_policy_strategy reweight_method"
        " max_off_policy_threshold replay_file router_replay use_rollout_log_probs"
    ),
    context=frozenset({_LOSS_MODE}),
    switches=frozenset({f"{_SECTION}.rollout_is", f"{_SECTION}.rollout_rs", f"{_SECTION}.bypass_mode"}),
)
"""verl's rules.

* k1 is -log r, so verl bounds mu / pi_old: "lo_hi" keeps pi_old / mu in [1/hi, 1/lo], and a single u in [1/u, u].
* With ``bypass_mode``, verl decides by pi / mu at every gradient step. ``loss_type=ppo_clip`` uses its weights only for
  metrics, so no weight is set here. ``loss_type=reinforce`` is a weight on a loss without a ratio of its own: set
  ``actor_rollout_ref.actor.policy_loss.loss_mode=gpg`` too.
* verl clamps a token's log-ratio to +-20 nats before summation; this package clamps before exponentiation.
* The attributes of a ``RolloutCorrectionConfig`` are read unchanged: its ``rollout_is`` is "sequence" by default,
  whereas a key that is missing from a mapping is null, as in the YAML.
"""
