"""Converter of the decoupled-PPO keys in AReaL's ``actor`` section."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from ..validation import read_number
from .mapping import build_mask, build_weight, check_weight_of_rows, read_choice, read_flag, read_ratio_bound, refuse
from .peer import Options, Peer, words

_REJECTION: Final[dict[str, Any]] = {
    "level": "token",
    "action": "mask",
    "metric": "ratio",
    "agg": "mean",
    "upper": 5.0,
    "lower": None,
}
_METRICS: Final = ("ratio", "kl_k1", "kl_k2", "kl_k3", "binary_kl")
_SECTION: Final = "actor.rejection_sampling"
_MODES: Final = ("token_mask", "token_truncate", "sequence_mask", "sequence_truncate", "disabled")


def _convert(options: Options) -> dict[str, Any]:
    decoupled = read_flag(options["actor.use_decoupled_loss"], "actor.use_decoupled_loss")
    method = read_choice(
        options["actor.prox_logp_method"],
        ("recompute", "loglinear", "metrics"),
        "actor.prox_logp_method",
        optional=False,
    )
    corrections = _list_corrections(options)
    if len(corrections) > 1:
        (first, _), (key, _) = list(corrections.items())[:2]
        raise refuse(f"it belongs to a different release than {first}.", key, options[key])
    if not decoupled:
        for key in (*corrections, "actor.m2_threshold"):
            if key in corrections or options[key] is not None:
                fix = "Set actor.use_decoupled_loss=true."
                raise refuse("AReaL reads it only with use_decoupled_loss.", key, options.values.get(key, {}), fix)
        recompute = read_flag(options["actor.recompute_logprob"], "actor.recompute_logprob")
        return {"proximal": "recompute" if recompute else "bypass"}
    plain: dict[str, Any] = {"proximal": "recompute"}
    if method == "loglinear":
        plain = {"proximal": "loglinear", "alpha": "by_age"}
    for rejection in corrections.values():
        plain |= _convert_rejection(rejection)
    key = "actor.importance_sampling_level"
    if read_choice(options[key], ("token", "sequence"), key, optional=False) == "sequence":
        check_weight_of_rows(plain.get("weight"), "AReaL", key, options[key])
    budget = read_number(options["actor.m2_threshold"], "actor.m2_threshold")
    if budget is not None:
        reason = "AReaL computes M2PO's cutoff per micro-batch, and this package over the whole batch."
        fix = f"The nearest option is paper/m2po, with correction.masks.m2po.budget={budget:g}."
        raise refuse(reason, "actor.m2_threshold", budget, fix)
    return plain


def _list_corrections(options: Options) -> dict[str, dict[str, Any]]:
    """List the configured rejections as values of ``rejection_sampling``, whose keys have had three names in AReaL."""
    found: dict[str, dict[str, Any]] = {}
    if options.has_section(_SECTION):
        if options[f"{_SECTION}.upper"] is None:
            raise refuse("AReaL needs an upper bound.", f"{_SECTION}.upper", None, "Set it to 5.0 for example.")
        found[_SECTION] = {key: options[f"{_SECTION}.{key}"] for key in _REJECTION}
    cap, mode = "actor.behave_imp_weight_cap", "actor.behave_imp_weight_mode"
    if {cap, mode} & options.given:
        kind = str(read_choice(options[mode], _MODES, mode, optional=False))
        if kind != "disabled":
            level, action = kind.split("_")
            action = "mask" if action == "mask" else "clamp"
            found[cap] = _REJECTION | {"level": level, "action": action, "upper": read_ratio_bound(options[cap], cap)}
    oldest = "actor.behav_imp_weight_cap"
    if options[oldest] is not None:
        found[oldest] = _REJECTION | {"upper": read_ratio_bound(options[oldest], oldest)}
    return found


def _convert_rejection(values: Mapping[str, Any]) -> dict[str, Any]:
    where = _SECTION
    level = read_choice(values["level"], ("token", "sequence"), f"{where}.level", optional=False)
    action = read_choice(values["action"], ("mask", "clamp"), f"{where}.action", optional=False)
    metric = read_choice(values["metric"], _METRICS, f"{where}.metric", optional=False)
    agg = read_choice(values["agg"], ("sum", "mean", "max"), f"{where}.agg", optional=False)
    if metric != "ratio":
        if action == "clamp":
            raise refuse("clamp bounds only ratios.", f"{where}.action", action, f"Set {where}.action=mask.")
        mask = _bound_divergence(str(metric), str(level), str(agg), values, where)
        return {"weight": build_weight("token", None, None), "masks": {"rejection": mask}}
    lower, upper = (read_ratio_bound(values[side], f"{where}.{side}") for side in ("lower", "upper"))
    rejects = action == "mask" and (lower is not None or upper is not None)
    if level == "token":
        return {"weight": build_weight("token", lower, upper, reject=rejects)}
    if agg == "mean":
        return {"weight": build_weight("sequence", lower, upper, reject=rejects, aggregate="geometric")}
    if action == "clamp":
        reason = "it bounds a row's geometric mean by another aggregate of the row, which no weight here does."
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
        reason = "AReaL computes k3 of behave / prox, 1 / r - 1 + log r, and no aggregate here computes that."
        raise refuse(reason, f"{where}.metric", metric, f"Set {where}.metric=kl_k2.")
    how = "sum" if level == "token" else agg
    if metric == "binary_kl":
        if level == "sequence":
            reason = "no aggregate here is the sum or the mean of the greater of two binary KLs over a row."
            raise refuse(reason, f"{where}.level", level, f"Set {where}.level=token.")
        return build_mask(level, metric, lower, upper)
    if metric == "kl_k2":
        return build_mask(level, f"k2_{how}", lower, upper)
    if how == "max":
        # A bound on the greatest log r is a bound on every log r.
        if lower is not None:
            raise refuse("no mask here bounds the greatest log-ratio from below.", f"{where}.lower", lower)
        return build_mask(level, "any", None, math.exp(upper))
    return build_mask(level, f"k1_{how}", -upper, None if lower is None else -lower)


AREAL: Final = Peer(
    name="AReaL",
    releases="1.0.0 to 1.0.4",
    sections=(_SECTION, "actor"),
    mixed=("actor",),
    read={
        "actor.use_decoupled_loss": False,
        "actor.recompute_logprob": False,
        "actor.prox_logp_method": "recompute",
        "actor.importance_sampling_level": "token",
        "actor.m2_threshold": None,
        _SECTION: None,
        "actor.behave_imp_weight_cap": 5.0,
        "actor.behave_imp_weight_mode": "token_mask",
        "actor.behav_imp_weight_cap": None,
    }
    | {f"{_SECTION}.{key}": value for key, value in _REJECTION.items()},
    convert=_convert,
    unsaid={
        "actor.use_sapo_loss": (
            (False, None),
            "SAPO is not a correction here but a loss of verl: actor.policy_loss.loss_mode=sapo, with actor.tau_pos and"
            " actor.tau_neg.",
        ),
        "actor.use_m2po_loss": (
            (False, None),
            "not a known key of AReaL 1.0.0 to 1.0.4, where M2PO is actor.m2_threshold.",
        ),
    },
    plain=words(
        "_target_ _version admin_api_key adv_norm archon attn_impl backend c_clip disable_dropout discount dtype"
        " enable_tree_training eps_clip eps_clip_higher experiment_name fsdp gae_lambda grad_reduce_dtype"
        " gradient_checkpointing group_size init_from_scratch is_critic kl_ctl kl_estimator"
        " log_agent_stats log_agent_stats_keys log_level lora_alpha lora_rank mask_no_eos_with_zero max_new_tokens"
        " mb_spec megatron offload optimizer optimizer_dtype overlong_penalty_factor overlong_reward_penalty"
        " overlong_tokens pad_to_maximum path peft_type ppo_n_minibatches request_timeout reward_bias reward_clip"
        " reward_norm reward_scaling rejection_sampling._target_ sapo_tau_neg sapo_tau_pos scheduling_spec"
        " scheduling_strategy setup_timeout target_modules temperature trial_name use_kernels use_lora"
        " weight_update_mode",
        "actor",
    ),
    elsewhere=words("loss_type max_head_offpolicyness std_unbiased"),
    context=frozenset({"actor.importance_sampling_level"}),
    switches=frozenset({"actor.use_decoupled_loss", _SECTION, "actor.behav_imp_weight_cap"}),
)
"""AReaL's rules.

* Without ``use_decoupled_loss``, pi_old is mu, or comes from a forward pass with ``recompute_logprob``, and there is no
  weight.
* ``rejection_sampling`` weights each token by prox / behave, or, at level sequence with metric ratio, each row by its
  geometric mean. ``mask`` rejects and leaves that weight unchanged, whereas ``clamp`` bounds the weight.
  ``behave_imp_weight_cap`` and ``_mode`` of 1.0.1 to 1.0.3 and ``behav_imp_weight_cap`` of 1.0.0 are read as
  equivalents.
* ``kl_k1`` is log r in AReaL, so its bounds change sides. ``kl_k3`` is the k3 of 1 / r, for which there is no aggregate
  here. ``binary_kl``, which comes from a branch, is KPop's and works only per token.

AReaL replaces a log-ratio that is not finite with 0; here the token is excluded from the loss.
"""
