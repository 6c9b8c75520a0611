"""Converter of ms-swift's GRPO arguments."""

from __future__ import annotations

from typing import Any, Final

from ..validation import read_number
from .mapping import (
    build_mask,
    build_weight,
    check_weight_of_rows,
    read_choice,
    read_flag,
    read_ratio_bound,
    read_width,
    refuse,
)
from .peer import Options, Peer, words

_MODE: Final = "rollout_importance_sampling_mode"
_MODES: Final = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
_THRESHOLD: Final = "rollout_importance_sampling_threshold"
_DELTA: Final = "off_policy_sequence_mask_delta"
_LEVEL: Final = "importance_sampling_level"


def _convert(options: Options) -> dict[str, Any]:
    plain: dict[str, Any] = {"weight": None, "masks": {}}
    mode = read_choice(options[_MODE], _MODES, _MODE)
    threshold = read_ratio_bound(options[_THRESHOLD], _THRESHOLD)
    if mode is not None and threshold is None:
        raise refuse("it needs a threshold.", _THRESHOLD, None, "Set it to 2.0 for example.")
    if mode == "sequence_mask":
        plain["weight"] = build_weight("token", None, None)
        plain["masks"]["geometric"] = build_mask("sequence", "geometric", None, threshold)
    elif mode == "sequence_truncate":
        plain["weight"] = build_weight("sequence", None, threshold, aggregate="geometric")
    elif mode is not None:
        plain["weight"] = build_weight("token", None, threshold, reject=mode == "token_mask")
    if options[_DELTA] is not None:
        delta = read_width(options[_DELTA], _DELTA)
        opsm = {"ratio": "full", "level": "sequence", "aggregate": "geometric", "delta": delta, "when": "negative"}
        plain["masks"]["opsm"] = opsm
    level = read_choice(options[_LEVEL], ("token", "sequence", "sequence_token"), _LEVEL, optional=False)
    if level == "sequence":
        check_weight_of_rows(plain["weight"], "ms-swift", _LEVEL, level)
    if plain["weight"] is not None or plain["masks"]:
        _check_around(options)
    return plain


def _check_around(options: Options) -> None:
    loss = options["loss_type"]
    if loss in ("bnpo", ["bnpo"]) and options[_DELTA] is not None:
        reason = "it divides by the number of tokens in the rows that are kept, and weights leave that count unchanged."
        raise refuse(reason, "loss_type", loss)
    if loss in ("real", ["real"]):
        raise refuse("ms-swift does not weight it.", "loss_type", loss)
    in_reward = options["kl_in_reward"]
    if in_reward is None:
        in_reward = options["advantage_estimator"] in ("rloo", "reinforce_plus_plus")
    beta = 0.1 if options["beta"] is None else read_number(options["beta"], "beta")
    if beta and not read_flag(in_reward, "kl_in_reward"):
        reason = (
            "ms-swift also multiplies the KL term by weights and masks, which kl_weight cannot do; the default is 0.1."
        )
        raise refuse(reason, "beta", options["beta"])


MS_SWIFT: Final = Peer(
    name="ms-swift",
    releases="4.6.0",
    sections=(),
    read={
        _MODE: None,
        _THRESHOLD: 2.0,
        _DELTA: None,
        _LEVEL: "token",
        "loss_type": None,
        "beta": None,
        "kl_in_reward": None,
        "advantage_estimator": "grpo",
    },
    convert=_convert,
    unsaid={},
    plain=words("log_rollout_offpolicy_metrics advantage_reweight"),
    elsewhere=words("truncation_strategy rlsd_reweight_clip_range"),
    switches=frozenset({_MODE, _DELTA}),
    context=words(f"{_LEVEL} loss_type beta kl_in_reward advantage_estimator"),
)
"""ms-swift's rules, on pi_old / mu.

* ``*_mask`` keeps the ratio of each token as its weight, even at level sequence, where an upper bound applies to the
  row's geometric mean; ``sequence_truncate`` uses that mean as the weight.
* ``off_policy_sequence_mask_delta`` is off-policy sequence masking on pi / mu.
* The loss's KL term is weighted and masked like the policy term, so ``beta`` must be 0 or apply to the reward.
"""
