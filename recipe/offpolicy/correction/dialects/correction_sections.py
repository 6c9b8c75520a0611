"""Converters for frameworks that configure corrections in a separate section: AReaL, OpenRLHF and ROLL."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from ..problem import SpecError
from ..validation import check_known_keys
from .peer import Options, Peer, build_mask, build_weight, read_ratio_bound, words

_REJECTION: Final[dict[str, Any]] = {
    "level": "token",
    "action": "mask",
    "metric": "ratio",
    "agg": "mean",
    "upper": 5.0,
    "lower": None,
}
_AREAL: Final = "actor.rejection_sampling"


def _convert_areal(options: Options) -> dict[str, Any]:
    decoupled = options.flag("actor.use_decoupled_loss")
    method = options.choice("actor.prox_logp_method", "recompute", "loglinear", "metrics")
    corrections = _list_corrections(options)
    if len(corrections) > 1:
        first, key = list(corrections)[:2]
        raise options.refuse(key, f"this key belongs to a different release than {first}.")
    if not decoupled:
        for key in (*corrections, "actor.m2_threshold"):
            if key in corrections or options[key] is not None:
                fix = "Set actor.use_decoupled_loss=true."
                raise options.refuse(key, "AReaL reads this key only with use_decoupled_loss.", fix)
        return {"proximal": "recompute" if options.flag("actor.recompute_logprob") else "bypass"}
    plain: dict[str, Any] = {"proximal": "recompute"}
    if method == "loglinear":
        plain = {"proximal": "loglinear", "alpha": "by_age"}
    for rejection in corrections.values():
        plain |= _convert_rejection(rejection)
    key = "actor.importance_sampling_level"
    if options.choice(key, "token", "sequence") == "sequence":
        options.check_weight_of_rows(plain.get("weight"), "AReaL", key)
    budget = options.number("actor.m2_threshold")
    if budget is not None:
        reason = "AReaL computes M2PO's cutoff per micro-batch, whereas this package computes it over the whole batch."
        fix = f"The nearest option is paper/m2po, with correction.masks.m2po.budget={budget:g}."
        raise options.refuse("actor.m2_threshold", reason, fix)
    return plain


def _list_corrections(options: Options) -> dict[str, Options]:
    """List the configured rejections in the format of ``rejection_sampling``; AReaL has renamed these keys twice."""
    found: dict[str, Mapping[str, Any]] = {}
    if options.has_section(_AREAL):
        if options[f"{_AREAL}.upper"] is None:
            raise options.refuse(f"{_AREAL}.upper", "AReaL needs an upper bound.", "Set it to 5.0 for example.")
        found[_AREAL] = {key: options[f"{_AREAL}.{key}"] for key in _REJECTION}
    cap, mode = "actor.behave_imp_weight_cap", "actor.behave_imp_weight_mode"
    if {cap, mode} & options.given:
        modes = ("token_mask", "token_truncate", "sequence_mask", "sequence_truncate", "disabled")
        level, _, action = options.choice(mode, *modes).partition("_")
        if action:
            action = "mask" if action == "mask" else "clamp"
            found[cap] = {"level": level, "action": action, "upper": options.bound(cap)}
    oldest = "actor.behav_imp_weight_cap"
    if options[oldest] is not None:
        found[oldest] = {"upper": options.bound(oldest)}
    return {
        key: Options({f"{_AREAL}.{name}": value for name, value in {**_REJECTION, **rejection}.items()})
        for key, rejection in found.items()
    }


def _convert_rejection(options: Options) -> dict[str, Any]:
    level = options.choice(f"{_AREAL}.level", "token", "sequence")
    action = options.choice(f"{_AREAL}.action", "mask", "clamp")
    metric = options.choice(f"{_AREAL}.metric", "ratio", "kl_k1", "kl_k2", "kl_k3", "binary_kl")
    agg = options.choice(f"{_AREAL}.agg", "sum", "mean", "max")
    if metric != "ratio":
        if action == "clamp":
            raise options.refuse(f"{_AREAL}.action", "clamp bounds only ratios.", f"Set {_AREAL}.action=mask.")
        mask = _bound_divergence(options, metric, level, agg)
        return {"weight": build_weight("token", None, None), "masks": {"rejection": mask}}
    lower, upper = options.bound(f"{_AREAL}.lower"), options.bound(f"{_AREAL}.upper")
    rejects = action == "mask" and (lower is not None or upper is not None)
    if level == "token":
        return {"weight": build_weight("token", lower, upper, reject=rejects)}
    if agg == "mean":
        return {"weight": build_weight("sequence", lower, upper, reject=rejects, aggregate="geometric")}
    if action == "clamp":
        reason = (
            "this option bounds a row's geometric mean by another aggregate of the row, and no weight here supports "
            "that."
        )
        raise options.refuse(f"{_AREAL}.agg", reason, f"Set {_AREAL}.agg=mean.")
    if agg == "max" and lower is not None:
        raise options.refuse(f"{_AREAL}.lower", "no mask here bounds the greatest ratio from below.")
    mask = build_mask("sequence", "product" if agg == "sum" else "any", lower, upper)
    return {"weight": build_weight("sequence", None, None, aggregate="geometric"), "masks": {"rejection": mask}}


def _bound_divergence(options: Options, metric: str, level: str, agg: str) -> dict[str, Any]:
    lower, upper = (options[f"{_AREAL}.{side}"] for side in ("lower", "upper"))
    for side, bound in (("lower", lower), ("upper", upper)):
        if bound is not None and (isinstance(bound, bool) or not isinstance(bound, int | float)):
            raise options.refuse(f"{_AREAL}.{side}", "expected a number.")
    if metric == "kl_k3":
        reason = "AReaL computes k3 of behave / prox, 1 / r - 1 + log r, for which there is no aggregate here."
        raise options.refuse(f"{_AREAL}.metric", reason, f"Set {_AREAL}.metric=kl_k2.")
    how = "sum" if level == "token" else agg
    if metric == "binary_kl":
        if level == "sequence":
            reason = "no aggregate here computes the sum or mean over a row of the larger of two binary KLs."
            raise options.refuse(f"{_AREAL}.level", reason, f"Set {_AREAL}.level=token.")
        return build_mask(level, metric, lower, upper)
    if metric == "kl_k2":
        return build_mask(level, f"k2_{how}", lower, upper)
    if how == "max":
        # A bound on the greatest log r is a bound on every log r.
        if lower is not None:
            raise options.refuse(f"{_AREAL}.lower", "no mask here bounds the greatest log-ratio from below.")
        return build_mask(level, "any", None, math.exp(upper))
    return build_mask(level, f"k1_{how}", -upper, None if lower is None else -lower)


AREAL: Final = Peer(
    name="AReaL",
    releases="1.0.0 to 1.0.4",
    sections=(_AREAL, "actor"),
    mixed=("actor",),
    read={
        "actor.use_decoupled_loss": False,
        "actor.recompute_logprob": False,
        "actor.prox_logp_method": "recompute",
        "actor.importance_sampling_level": "token",
        "actor.m2_threshold": None,
        _AREAL: None,
        "actor.behave_imp_weight_cap": 5.0,
        "actor.behave_imp_weight_mode": "token_mask",
        "actor.behav_imp_weight_cap": None,
    }
    | {f"{_AREAL}.{key}": value for key, value in _REJECTION.items()},
    convert=_convert_areal,
    unsaid={
        "actor.use_sapo_loss": (
            (False, None),
            "here, SAPO is not a correction but a loss of verl: actor.policy_loss.loss_mode=sapo, with actor.tau_pos "
            "and actor.tau_neg.",
        ),
        "actor.use_m2po_loss": (
            (False, None),
            "AReaL 1.0.0 to 1.0.4 have no such key; their key for M2PO is actor.m2_threshold.",
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
    switches=frozenset({"actor.use_decoupled_loss", _AREAL, "actor.behav_imp_weight_cap"}),
)
"""AReaL's rules.

* Without ``use_decoupled_loss``, there is no weight, and pi_old is mu, or the result of a forward pass if
  ``recompute_logprob`` is set.
* ``rejection_sampling`` weights each token by prox / behave, or, at level sequence with metric ratio, each row by its
  geometric mean. ``mask`` drops tokens or rows and leaves all weights unchanged, whereas ``clamp`` bounds the weight.
  The older keys ``behave_imp_weight_cap`` and ``_mode`` (1.0.1 to 1.0.3) and ``behav_imp_weight_cap`` (1.0.0) are
  converted to ``rejection_sampling``.
* ``kl_k1`` is log r in AReaL but -log r here, so its bounds are negated and swapped. ``kl_k3`` is the k3 of 1 / r, for
  which there is no aggregate here. ``binary_kl`` exists only in a branch of AReaL; it is KPop's divergence and works
  only per token.

AReaL replaces a non-finite log-ratio with 0, whereas this package excludes the token from the loss.
"""

_IS: Final = "algo.advantage.is_correction_"
_LOSS: Final = "actor.policy_loss_type"
_TYPES: Final = {
    "tis": ("token", "clip", "ratio"),
    "icepop": ("token", "mask", "ratio"),
    "seq-mask-tis": ("seq", "mask", "ratio"),
}
"""Value of ``_type`` in earlier releases -> level, mode and gating."""


def _convert_openrlhf(options: Options) -> dict[str, Any]:
    named = {key for key in options.given if key.startswith((_IS, "enable_vllm_is", "vllm_is"))}
    families = {
        "0.11.2": {f"{_IS}level", f"{_IS}mode", f"{_IS}gating"},
        "0.10.2 to 0.11.1": {f"{_IS}enable", f"{_IS}type"},
        "0.9.1 to 0.10.1": {"enable_vllm_is_correction", "vllm_is_truncated_threshold", "vllm_is_correction_type"},
    }
    used = {release: min(keys & named) for release, keys in families.items() if keys & named}
    if len(used) > 1:
        (_, first), (release, second) = list(used.items())[:2]
        raise options.refuse(second, f"this value belongs to {release}, but {first} belongs to another release.")
    threshold, oldest, older = f"{_IS}threshold", "0.9.1 to 0.10.1" in used, "0.10.2 to 0.11.1" in used
    if oldest or older:
        enable, kind = f"{_IS}enable", f"{_IS}type"
        if oldest:
            threshold = "vllm_is_truncated_threshold"
            enable, kind = "enable_vllm_is_correction", "vllm_is_correction_type"
        rule = _TYPES[options.choice(kind, *_TYPES)]
        on = options.flag(enable)
    else:
        # YAML reads an unquoted off as false.
        on = options[f"{_IS}level"] is not False and options.choice(f"{_IS}level", "off", "token", "seq") != "off"
        gating = options.choice(f"{_IS}gating", "ratio", "binary_kl", "tv")
        rule = str(options[f"{_IS}level"]), options.choice(f"{_IS}mode", "mask", "clip"), gating
    # In OpenRLHF, unbiased KL is a straight-through estimate: its gradient treats w as a constant.
    if options.flag("algo.kl.unbiased_gradient") and options["algo.kl.use_loss"]:
        reason = "its gradient equals that of w k2 with constant w = pi / pi_old, which no KL weight here reproduces."
        raise options.refuse("algo.kl.unbiased_gradient", reason, "The nearest option is correction=kl_unbiased.")
    if not on:
        return {"proximal": "recompute"}
    loss = options[_LOSS] if _LOSS in options.given else options["policy_loss_type"]
    if loss == "gspo":
        # The loss's own ratio, pi / mu per row, is the correction.
        return {"proximal": "bypass"}
    if loss != "ppo":
        raise SpecError("OpenRLHF corrects only under ppo.", "Set it to ppo.", key=_LOSS, value=loss)
    # Up to 0.11.1, there were two bounds; 0.9.0 had only a cap.
    pair = list(given) if isinstance(given := options[threshold], list | tuple) else [given]
    pair = [0.0, *pair] if len(pair) == 1 and not older else pair
    if len(pair) != 2 or any(isinstance(each, bool) or not isinstance(each, int | float) for each in pair):
        raise options.refuse(threshold, "expected a low and a high threshold.", f"Set {threshold}=[0.5,5.0].")
    return {"proximal": "recompute"} | _correct(rule, pair[0], pair[1], threshold)


def _correct(rule: tuple[str, str, str], low: float, high: float, key: str) -> dict[str, Any]:
    level, mode, gating = rule
    if mode == "clip" and (level, gating) != ("token", "ratio"):
        reason, fix = "OpenRLHF clips only per-token ratios.", f"Set {_IS}mode=mask."
        raise SpecError(reason, fix, key=f"{_IS}mode", value="clip")
    by_token = build_weight("token", None, None)
    if gating == "ratio":
        bounds = None if low == 0 else read_ratio_bound(low, key), read_ratio_bound(high, key)
        if level == "seq":
            return {"weight": by_token, "masks": {"geometric": build_mask("sequence", "geometric", *bounds)}}
        return {"weight": build_weight("token", *bounds, reject=mode == "mask")}
    if low > 0:
        reason, fix = "OpenRLHF bounds a divergence only from above.", f"Set {key}=[{high}]."
        raise SpecError(reason, fix, key=key, value=[low, high])
    if gating == "binary_kl" and level == "seq":
        mask = build_mask("sequence", "binary_kl_forward_mean", None, high)
    elif gating == "binary_kl":
        mask = build_mask("token", "binary_kl_forward", None, high)
    elif level == "seq":
        reason = "no aggregate here computes the mean of |p_old - p_mu|; binary_tv_mean averages signed differences."
        raise SpecError(reason, key=f"{_IS}gating", value=gating)
    else:
        mask = build_mask("token", "binary_tv", -high, high)
    return {"weight": by_token, "masks": {gating: mask}}


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
    convert=_convert_openrlhf,
    plain=words("estimator gamma lambd no_std_norm", "algo.advantage")
    | words("estimator horizon init_coef target", "algo.kl"),
    context=frozenset({"algo.kl.use_loss", _LOSS, "policy_loss_type"}),
    switches=frozenset({f"{_IS}level", f"{_IS}enable", "enable_vllm_is_correction"}),
)
"""OpenRLHF's rules, on pi_old / mu.

* 0.11.2: ``is_correction_level`` token or seq, ``_mode`` mask or clip, ``_gating`` ratio, binary_kl or tv. ``clip``
  bounds the weights of tokens. ``mask`` drops the tokens or sequences outside the bounds and leaves the weights of all
  other tokens unchanged.
* Earlier releases (until 0.10.1 their keys begin with ``vllm_is_``): ``_type`` tis means token and clip, icepop means
  token and mask, and seq-mask-tis means seq and mask.
* OpenRLHF corrects only under ``actor.policy_loss_type=ppo``; under ``gspo`` the loss's own ratio becomes pi / mu.
"""

_ROLL: Final = "train_infer_correction"
_WEIGHT: Final = f"{_ROLL}.is_weight"
_FILTERS: Final = f"{_ROLL}.filters"
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
_KINDS: Final = {
    "token": ("token", "product", "binary_tv"),
    "segment": ("turn", "geometric", "binary_tv_mean"),
    "geometric": ("sequence", "geometric", "binary_tv_mean"),
    "sequence": ("sequence", "product", "binary_tv_sum"),
}
"""ROLL's granularity -> our level, and the aggregates of ratios and of differences."""
_RECOMPUTE: Final = "enable_old_logprobs_recompute"
_FORCED: Final = "force_disable_old_logprobs_recompute"
_VARIANTS: Final = ("actor_train.pg_variant", "pg_variant")
_LEVELS: Final = ("importance_sampling", "ratio_type")
"""Keys that set the level of PPO's clipped ratio: a token, a row (seq) or a turn (segment)."""


def _convert_roll(options: Options) -> dict[str, Any]:
    forced_off = options.flag(_FORCED)
    recompute = options.flag(_RECOMPUTE) and not forced_off
    plain: dict[str, Any] = {"proximal": "recompute" if recompute else "reuse", "masks": {}}
    for key in _VARIANTS:
        if (variant := options[key]) not in (None, "vanilla", "ppo", "cispo"):
            nearest = {"topr": "paper/topr", "kimi15": "log_ratio_penalty"}.get(str(variant))
            fix = f"The nearest option is correction={nearest}, which uses pi / mu." if nearest else ""
            raise options.refuse(key, "this option weights by pi / pi_old, and no weight here uses that ratio.", fix)
    if options.flag(f"{_WEIGHT}.enabled"):
        if not options.flag(f"{_WEIGHT}.detach"):
            raise options.refuse(f"{_WEIGHT}.detach", "weights are detached here.", "Set it to true.")
        level, aggregate, _ = _KINDS[options.choice(f"{_WEIGHT}.weight_type", *_KINDS)]
        plain["weight"] = build_weight(level, None, options.bound(f"{_WEIGHT}.upper_bound"), aggregate=aggregate)
        for key in _LEVELS:
            if options[key] not in (None, "token"):
                options.check_weight_of_rows(plain["weight"], "ROLL", key)
    filters = options[_FILTERS]
    if filters is not None and not isinstance(filters, list | tuple):
        raise options.refuse(_FILTERS, "expected a list of filters.")
    for place, each in enumerate(filters or ()):
        plain["masks"] |= _convert_filter(each, place, f"{_FILTERS}[{place}]")
    return plain


def _convert_filter(source: Any, place: int, where: str) -> dict[str, Any]:
    if isinstance(source, Mapping):
        check_known_keys(source, _FILTER, where)
        if source and "enabled" not in source:
            raise SpecError(
                "ROLL ignores a filter without this key.", "Set it to true or false.", key=f"{where}.enabled"
            )
        given = {key: source[key] for key in _FILTER if key in source}
    else:
        given = {key: getattr(source, key) for key in _FILTER if hasattr(source, key)}
        if not given:
            raise SpecError("expected a mapping with keys such as enabled.", key=where, value=source)
    options = Options({f"{where}.{key}": value for key, value in {**_FILTER, **given}.items()})
    enabled, ratio, difference = (
        options.flag(f"{where}.{key}") for key in ("enabled", "ratio_enabled", "diff_enabled")
    )
    if not enabled:
        return {}
    level, of_ratio, of_difference = _KINDS[options.choice(f"{where}.agg_type", *_KINDS)]
    masks = {}
    if ratio:
        bounds = options.bound(f"{where}.ratio_low"), options.bound(f"{where}.ratio_high")
        masks[f"ratio_{place}"] = build_mask(level, of_ratio, *bounds)
    if difference:
        bounds = options.number(f"{where}.diff_low"), options.number(f"{where}.diff_high")
        masks[f"diff_{place}"] = build_mask(level, of_difference, *bounds)
    if not masks:
        reason = "the filter is enabled, but neither ratio_enabled nor diff_enabled is set, so it drops nothing."
        raise options.refuse(f"{where}.enabled", reason, f"Set {where}.ratio_enabled=true.")
    return masks


ROLL: Final = Peer(
    name="ROLL",
    releases="0.2.0 to 0.3.0",
    sections=(_WEIGHT, _ROLL),
    read={
        _RECOMPUTE: False,
        _FORCED: False,
        _FILTERS: (),
        f"{_WEIGHT}.enabled": False,
        f"{_WEIGHT}.weight_type": "token",
        f"{_WEIGHT}.upper_bound": 1.2,
        f"{_WEIGHT}.detach": True,
        **dict.fromkeys((*_VARIANTS, *_LEVELS)),
    },
    convert=_convert_roll,
    unsaid={
        "use_topr_loss": ((False, None), "this option weights by pi / pi_old, and no weight here uses that ratio."),
        "use_topr_neg_loss_coef": (
            (0.0, 0, None),
            "this option weights by pi / pi_old, and no weight here uses that ratio.",
        ),
    },
    elsewhere=words(
        "difficulty_mask dirty_data_mask is_num_return_sequences_expand"
        " is_offload_optimizer_states_in_train_step is_offload_states is_pure_opd is_use_additional_prompts logprobs"
        " mask_type max_len_mask router_replay use_policy_loss_type"
    ),
    context=frozenset({*_VARIANTS, *_LEVELS}),
    switches=frozenset({f"{_WEIGHT}.enabled", _FILTERS, _RECOMPUTE, _FORCED}),
)
"""ROLL's rules.

``segment`` is the mean over a turn. Unless ``enable_old_logprobs_recompute`` is set, pi_old is the current policy. ROLL
removes filtered tokens from the response mask, and therefore also from KL and denominators; here they are removed only
from the policy term. The values vanilla, ppo and cispo of ``pg_variant`` are policy losses; set them with verl's own
keys.
"""
