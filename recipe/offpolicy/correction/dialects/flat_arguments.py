"""Converters for frameworks with flat arguments: ms-swift, open-instruct, slime, miles and TRL."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from ..ratios import EXP_CLAMP
from .peer import Options, Peer, build_mask, build_opsm, build_weight, words

_MODES: Final = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
_LEVEL: Final = "importance_sampling_level"


def _convert_ms_swift(options: Options) -> dict[str, Any]:
    key, delta = "rollout_importance_sampling_threshold", "off_policy_sequence_mask_delta"
    mode, threshold = options.choice_or_null("rollout_importance_sampling_mode", *_MODES), options.bound(key)
    if mode is not None and threshold is None:
        raise options.refuse(key, "it needs a threshold.", "Set it to 2.0 for example.")
    weight, masks = None, {}
    if mode == "sequence_mask":
        weight = build_weight("token", None, None)
        masks["geometric"] = build_mask("sequence", "geometric", None, threshold)
    elif mode == "sequence_truncate":
        weight = build_weight("sequence", None, threshold, aggregate="geometric")
    elif mode is not None:
        weight = build_weight("token", None, threshold, reject=mode == "token_mask")
    if options[delta] is not None:
        masks["opsm"] = build_opsm(options.width(delta))
    if options.choice(_LEVEL, "token", "sequence", "sequence_token") == "sequence":
        options.check_weight_of_rows(weight, "ms-swift", _LEVEL)
    if weight is None and not masks:
        return {"weight": None, "masks": {}}
    if options["loss_type"] in ("bnpo", ["bnpo"]) and "opsm" in masks:
        reason = (
            "this loss divides by the number of tokens in the rows that are kept, and weights do not change that "
            "number."
        )
        raise options.refuse("loss_type", reason)
    if options["loss_type"] in ("real", ["real"]):
        raise options.refuse("loss_type", "ms-swift does not apply weights to this loss.")
    in_reward = options["advantage_estimator"] in ("rloo", "reinforce_plus_plus")
    if options["kl_in_reward"] is not None:
        in_reward = options.flag("kl_in_reward")
    if (options["beta"] is None or options.number("beta")) and not in_reward:
        reason = (
            "ms-swift also multiplies the KL term by weights and masks, which kl_weight cannot express; beta is 0.1 "
            "by default."
        )
        raise options.refuse("beta", reason)
    return {"weight": weight, "masks": masks}


MS_SWIFT: Final = Peer(
    name="ms-swift",
    releases="4.6.0",
    sections=(),
    read={
        "rollout_importance_sampling_mode": None,
        "rollout_importance_sampling_threshold": 2.0,
        "off_policy_sequence_mask_delta": None,
        _LEVEL: "token",
        "loss_type": None,
        "beta": None,
        "kl_in_reward": None,
        "advantage_estimator": "grpo",
    },
    convert=_convert_ms_swift,
    plain=words("log_rollout_offpolicy_metrics advantage_reweight"),
    elsewhere=words("truncation_strategy rlsd_reweight_clip_range"),
    switches=words("rollout_importance_sampling_mode off_policy_sequence_mask_delta"),
    context=words(f"{_LEVEL} loss_type beta kl_in_reward advantage_estimator"),
)
"""ms-swift's rules, on pi_old / mu.

* ``*_mask`` keeps the ratio of each token as its weight, even at level sequence, where an upper bound applies to the
  row's geometric mean; ``sequence_truncate`` uses that mean as the weight.
* ``off_policy_sequence_mask_delta`` is off-policy sequence masking on pi / mu.
* The loss's KL term is weighted and masked like the policy term, so ``beta`` must be 0 or apply to the reward.
"""

_OLD: Final = "truncated_importance_sampling_ratio_cap"


def _convert_open_instruct(options: Options) -> dict[str, Any]:
    names = ("use_vllm_logprobs", "use_rho_correction", "rho_mask_sequence_level", "rho_mask_tv_divergence")
    of_mu, corrects, by_row, by_divergence = map(options.flag, names)
    newer = [key for key in options.given if key.startswith(("rho_", "use_rho_"))]
    if _OLD in options.given and newer:
        reason = f"open-instruct 0.2.0 uses this key for {min(newer)}."
        raise options.refuse(_OLD, reason, "Give the keys of one release.")
    if of_mu:
        if (corrects and "use_rho_correction" in options.given) or options[_OLD]:
            reason = "if pi_old is mu, open-instruct rejects any correction."
            raise options.refuse("use_vllm_logprobs", reason, "Set it to false, or switch the correction off.")
        return {"proximal": "bypass"}
    plain: dict[str, Any] = {"proximal": "recompute", "masks": {}}
    if _OLD in options.given:
        cap = options.bound(_OLD, zero_opens=True)
        return {"proximal": "recompute"} if cap is None else plain | {"weight": build_weight("token", None, cap)}
    if not corrects:
        return {"proximal": "recompute"}
    level, aggregate = ("sequence", "geometric") if by_row else ("token", "product")
    clamp = [options.bound(f"rho_clamp_{side}_bound", zero_opens=True) for side in ("lower", "upper")]
    plain["weight"] = build_weight(level, *clamp, aggregate=aggregate)
    keys = ("rho_mask_lower_bound", "rho_mask_upper_bound")
    if by_divergence:
        low, high = (bound / 2 if (bound := options.number(key)) else None for key in keys)
        mask = build_mask("sequence", "tv_mean", low, high) | {"when": "outward", "sign": "token"}
    else:
        low, high = (options.bound(key, zero_opens=True) for key in keys)
        # Bounds on tokens with one open side apply to each token separately.
        mask = build_mask(level, "any" if level == "token" and None in (low, high) else aggregate, low, high)
    if low is not None or high is not None:
        plain["masks"]["vaco" if by_divergence else "rho"] = mask
    return plain


_ICEPOP: Final = (
    (False, None),
    "open-instruct 0.2.0 to 0.3.0 have no such key; set rho_mask_lower_bound and _upper_bound.",
)

OPEN_INSTRUCT: Final = Peer(
    name="open-instruct",
    releases="0.2.0 to 0.3.0",
    sections=(),
    read={
        "use_vllm_logprobs": False,
        "use_rho_correction": True,
        "rho_clamp_lower_bound": 0.0,
        "rho_clamp_upper_bound": 2.0,
        "rho_mask_lower_bound": 0.0,
        "rho_mask_upper_bound": 0.0,
        "rho_mask_sequence_level": False,
        "rho_mask_tv_divergence": False,
        _OLD: 0.0,
    },
    convert=_convert_open_instruct,
    unsaid=dict.fromkeys(("use_icepop", "icepop_sequence_level"), _ICEPOP),
    plain=words(
        "alpha backend_timeout beta cache_dataset_only checkpoint_state_dir checkpoint_state_freq clip_higher"
        " clip_lower deepspeed_checkpoint_load_universal deepspeed_offload_optimizer deepspeed_offload_param"
        " deepspeed_stage deepspeed_zpg enable_queue_dashboard eval_on_step_0 eval_pass_at_k eval_priority eval_top_p"
        " eval_workspace fsdp_num_replicas fsdp_shard_degree gather_whole_model gs_bucket_path"
        " gs_checkpoint_state_dir hf_entity hf_repo_id hf_repo_revision hf_repo_url kl_estimator load_ref_policy"
        " local_eval_every loss_denominator loss_fn model_dtype num_learners_per_node num_mini_batches num_nodes"
        " num_training_steps oe_eval_beaker_image oe_eval_gpu_multiplier oe_eval_max_length oe_eval_tasks push_to_hub"
        " queue_dashboard_port record_entropy ref_policy_update_freq save_freq send_slack_alerts"
        " sequence_parallel_size set_weight_decay_on_bias_and_norm single_gpu_mode total_episodes"
        " try_auto_save_to_beaker try_launch_beaker_eval_jobs_on_weka verbose world_size"
    ),
    elsewhere=words("cache_logprobs_only loss_type mask_tool_use mask_truncated_completions"),
    switches=words(f"use_rho_correction {_OLD}"),
)
"""open-instruct's rules; a bound of 0 means no bound.

The clamped rho is the weight, and tokens outside the mask's bounds are dropped. With ``rho_mask_sequence_level``, the
weight and the mask use the row's geometric mean. With ``rho_mask_tv_divergence`` (VACO) the bounds are on the row's
mean of |rho - 1|, twice our ``tv_mean``, and tokens whose update moves the policies closer together are kept.
open-instruct clamps log-ratios to +-10; here they are clamped to +-20. With ``use_vllm_logprobs``, pi_old is mu, and
nothing is corrected. In 0.2.0, the cap ``truncated_importance_sampling_ratio_cap`` is the whole correction, and 0 means
no correction.
"""

_ARGUMENTS: Final[dict[str, Any]] = {
    "use_rollout_logprobs": False,
    "use_tis": False,
    "tis_clip": 2.0,
    "tis_clip_low": 0.0,
    "custom_tis_function_path": None,
    "get_mismatch_metrics": False,
    "use_opsm": False,
    "opsm_delta": 1e-4,
    "use_kl_loss": False,
    "kl_loss_coef": 0.0,
    "use_unbiased_kl": False,
    "advantage_estimator": "grpo",
    "calculate_per_token_loss": False,
}
_MIS: Final[dict[str, Any]] = {
    "tis_level": "token",
    "tis_mode": "truncate",
    "tis_lower_bound": None,
    "tis_upper_bound": 2.0,
    "tis_batch_normalize": False,
    "use_rs": False,
    "rs_level": "token",
    "rs_lower_bound": None,
    "rs_upper_bound": None,
    "rs_veto_threshold": None,
}
_LEVELS: Final = {
    "token": ("token", "product"),
    "sequence": ("sequence", "product"),
    "geometric": ("sequence", "geometric"),
}


def _convert_common(options: Options) -> dict[str, Any]:
    flags = {key: options.flag(key) for key, value in _ARGUMENTS.items() if value is False}
    bypass, tis, path = flags["use_rollout_logprobs"], flags["use_tis"], options["custom_tis_function_path"]
    name = str(path).rpartition(".")[2].rpartition(":")[2]
    of_mis = name.startswith("compute_mis_weights")
    # get_mismatch_metrics alone also calls a weight function, and only the function in mis.py leaves the loss
    # unchanged.
    tis |= flags["get_mismatch_metrics"] and path is not None and not of_mis
    plain: dict[str, Any] = {"proximal": "bypass" if bypass else "recompute", "masks": {}}
    of_file = sorted(key for key, value in _MIS.items() if options[key] != value)
    if of_file and (tis or options["use_rs"]) and not (tis and of_mis):
        fix = "Set use_tis=true, and set custom_tis_function_path to compute_mis_weights_with_cp of mis.py."
        raise options.refuse(of_file[0], "only mis.py reads this key, and only if use_tis is set.", fix)
    if bypass and tis:
        reason = "with use_rollout_logprobs, pi_old is mu, so a weight would be 1 or would count its ratio twice."
        raise options.refuse("use_tis", reason, "Set use_rollout_logprobs=false.")
    if tis and (path is None or name.startswith("icepop")):
        bounds = options.bound("tis_clip_low", zero_opens=True), options.bound("tis_clip")
        plain["weight"] = build_weight("token", *bounds, reject=path is not None)
    elif tis and of_mis:
        plain |= _convert_mis(options)
    elif tis:
        reason = (
            "the effect of a custom function is unknown; the known functions are compute_mis_weights_with_cp and "
            "icepop_function."
        )
        raise options.refuse("custom_tis_function_path", reason)
    if options["advantage_estimator"] == "gspo":
        options.check_weight_of_rows(plain.get("weight"), "slime", "advantage_estimator")
    ratio = "full" if bypass else "ppo"
    if flags["use_opsm"]:
        plain["masks"] = plain["masks"] | {"opsm": build_opsm(options.width("opsm_delta"), ratio, "token")}
    if flags["use_unbiased_kl"] and flags["use_kl_loss"] and options.number("kl_loss_coef"):
        plain["kl_weight"] = {"ratio": ratio, "upper": None}
    return plain


def _convert_slime(options: Options) -> dict[str, Any]:
    top_p = options.number("rollout_top_p")
    return _convert_common(options) | ({} if top_p in (None, 1.0) else {"support": "engine"})


def _convert_miles(options: Options) -> dict[str, Any]:
    plain = _convert_common(options)
    reuse = options.flag("skip_actor_forward_only") and plain["proximal"] == "recompute"
    return plain | ({"proximal": "reuse"} if reuse else {})


def _convert_mis(options: Options) -> dict[str, Any]:
    mode = options.choice("tis_mode", "truncate", "clip", "mask")
    kind, upper = options.choice("tis_level", *_LEVELS), options.bound("tis_upper_bound")
    if upper is None:
        raise options.refuse("tis_upper_bound", "it has no default.", "Set it to 2.0 for example.")
    lower = options.bound("tis_lower_bound") or 1 / upper
    normalize = options.flag("tis_batch_normalize")
    if normalize and kind == "geometric":
        raise options.refuse("tis_batch_normalize", "mis.py computes no mean of geometric weights.")
    if normalize and mode == "mask":
        reason = "mis.py includes rejected tokens' weights in the mean by which it divides; here they count as 0."
        raise options.refuse("tis_batch_normalize", reason, "Set it to false.")
    level, aggregate = _LEVELS[kind]
    weight = build_weight(level, None if mode == "truncate" else lower, upper, reject=mode == "mask")
    masks: dict[str, Any] = {}
    rejects = options.flag("use_rs")
    for key, acts in (("tis_level", mode == "mask"), ("rs_level", rejects)):
        if acts and options[key] == "token" and not options.flag("calculate_per_token_loss"):
            reason = (
                "this framework divides a row's loss by its number of kept tokens, and still counts a row without "
                "kept tokens; the nearest option is correction.denominator=kept."
            )
            raise options.refuse(key, reason)
    if rejects:
        band = _LEVELS[options.choice("rs_level", *_LEVELS)]
        low, high = options.bound("rs_lower_bound") or lower, options.bound("rs_upper_bound") or upper
        masks["rejection"] = build_mask(*band, low, high)
        if (veto := options.bound("rs_veto_threshold")) is not None:
            masks["veto"] = build_mask("sequence", "any", veto, None)
    return {"weight": weight | {"aggregate": aggregate, "normalize": normalize}, "masks": masks}


_STALE: Final = (
    (False, None),
    "this framework removes tokens that older weights sampled from the loss mask; the nearest option is "
    "correction.masks.stale={aggregate: staleness, level: token, upper: 0}.",
)

SLIME: Final = Peer(
    name="slime",
    releases="0.2.4 to 0.3.1",
    sections=(),
    read=_ARGUMENTS | _MIS | {"rollout_top_p": 1.0},
    convert=_convert_slime,
    unsaid={
        "mask_offpolicy_in_partial_rollout": _STALE,
        "custom_config_path": ((None,), "the file may set arguments, but is not read here: pass them directly."),
        "custom_loss_function_path": ((None,), "the effect of a custom loss is unknown."),
    },
    elsewhere=words(
        "custom_megatron_before_log_prob_hook_path kl_loss_type log_probs_chunk_size log_probs_max_tokens_per_gpu"
        " loss_mask_type loss_type use_rollout_routing_replay use_routing_replay"
        # Keys of Megatron.
        " attention_mask_in_dataloader attention_softmax_in_fp32 create_attention_mask_in_dataloader eod_mask_loss"
        " mask_factor mask_prob mask_type masked_softmax_fusion no_create_attention_mask_in_dataloader"
        " no_masked_softmax_fusion reset_attention_mask"
    ),
    switches=words("use_tis use_opsm use_rs use_kl_loss"),
    context=words("advantage_estimator calculate_per_token_loss use_kl_loss kl_loss_coef get_mismatch_metrics"),
)
"""slime's rules.

* ``use_tis`` clamps pi_old / mu to [tis_clip_low, tis_clip]; with ``use_rollout_logprobs`` pi_old is mu.
* With ``custom_tis_function_path`` set to ``mis.py``, the keys of ``mis.yaml`` are read: level and mode of the weight,
  a rejection (``use_rs``), and a veto of rows with a token below ``rs_veto_threshold``. With ``icepop_function``,
  tokens outside the bounds are dropped.
* If ``mis.py`` rejects tokens, the loss of a row is divided by its number of kept tokens, so rejections are read only
  with ``calculate_per_token_loss``. Token weights cannot be combined with ``advantage_estimator=gspo``.
* ``use_opsm`` masks tokens with negative advantage in rows with mean log(pi_old / pi) > opsm_delta.
* ``use_unbiased_kl`` weights the KL loss by pi / pi_old.
* With ``rollout_top_p`` below 1, log-probs are normalised over the sampled support, whose size is unlimited. Here they
  are normalised over the support of ``correction.support=engine``, which masks a token whose support has more members
  than were requested from vLLM.
"""
MILES: Final = replace(
    SLIME,
    name="miles",
    releases="0.0.2 to 0.1.0",
    read=_ARGUMENTS | _MIS | {"skip_actor_forward_only": False},
    convert=_convert_miles,
    elsewhere=SLIME.elsewhere
    | words(
        "ci_disable_logprobs_checker opd_log_prob_top_k recompute_logprobs_via_prefill use_indexer_replay"
        " use_rollout_indexer_replay"
    ),
)
"""miles' rules: the same as slime's, and with ``skip_actor_forward_only``, pi_old comes from the gradient step."""

_STEM: Final = "vllm_importance_sampling"
_LOSSES: Final = ("dapo", "grpo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo")


def _convert_trl(options: Options) -> dict[str, Any]:
    engine = options["use_vllm"] is None or options.flag("use_vllm")
    corrects = options.flag(f"{_STEM}_correction") and engine
    plain: dict[str, Any] = {"weight": _convert_trl_weight(options) if corrects else None, "masks": {}}
    if options.choice("loss_type", *_LOSSES) == "vespo":
        reason = (
            "this loss multiplies pi / pi_old by truncated per-token ratios to mu; the nearest option is "
            "correction=paper/vespo."
        )
        raise options.refuse("loss_type", reason)
    by_row = options.choice(_LEVEL, "token", "sequence") == "sequence"
    if by_row:
        options.check_weight_of_rows(plain["weight"], "TRL", _LEVEL)
    key = "off_policy_mask_threshold"
    threshold = options.number(key)
    if threshold is not None:
        if not 0 <= threshold <= EXP_CLAMP:
            reason = f"expected a mean log(mu/pi) in nats per token, between 0 and {EXP_CLAMP:g}."
            raise options.refuse(key, reason, f"Set {key}=0.5, or null for no mask.")
        # Without a rollout engine, TRL compares pi_old with pi.
        plain["masks"]["opsm"] = build_opsm(threshold, "full" if engine else "ppo")
    if options.number("beta"):
        key = "use_bias_correction_kl"
        if options[key] is None:
            reason = "beta adds a KL term, and the default of this key is false up to 1.9.0 but true in 1.16.0."
            raise options.refuse(key, reason, "Set it to true or false.")
        if options.flag(key):
            if by_row:
                raise options.refuse(_LEVEL, "no KL weight here uses a row's ratio.")
            plain["kl_weight"] = {"ratio": "ppo", "upper": None}
    return plain


def _convert_trl_weight(options: Options) -> dict[str, Any]:
    cap, upper_key, lower_key = (f"{_STEM}_{name}" for name in ("cap", "clip_max", "clip_min"))
    if options[cap] is not None:
        # TRL sets clip_max to the older key's value if that key is given.
        if upper_key in options.given and options[upper_key] != options[cap]:
            raise options.refuse(cap, "TRL uses the older name.", "Give one of them.", upper_key)
        upper_key = cap
    lower, upper = options.bound(lower_key), options.bound(upper_key)
    mode = options.choice(f"{_STEM}_mode", *_MODES)
    if lower is not None and upper is not None and lower > upper:
        raise options.refuse(lower_key, "nothing lies between.", "Swap them.", upper_key)
    if lower is None and upper is None:
        reason, fix = f"{mode} has no bound.", f"Set {upper_key}=3.0, or {_STEM}_correction=false."
        raise options.refuse(upper_key, reason, fix, lower_key)
    level, action = mode.split("_")
    return build_weight(level, lower, upper, reject=action == "mask")


TRL: Final = Peer(
    name="TRL",
    releases="0.28.0 to 1.16.0",
    sections=(),
    read={
        f"{_STEM}_correction": True,
        f"{_STEM}_mode": "sequence_mask",
        f"{_STEM}_clip_max": 3.0,
        f"{_STEM}_clip_min": None,
        "off_policy_mask_threshold": None,
        f"{_STEM}_cap": None,
        "use_vllm": None,
        "loss_type": "dapo",
        "beta": 0.0,
        "use_bias_correction_kl": None,
        _LEVEL: "token",
    },
    convert=_convert_trl,
    plain=words(
        "bf16 cache_implementation cast_lm_head_to_fp32 chat_template_kwargs delta disable_dropout"
        " ds3_gather_for_generation entropy_coef entropy_coef_delta entropy_coef_max entropy_coef_min entropy_target"
        " epsilon epsilon_high generation_batch_size generation_kwargs gradient_checkpointing learning_rate"
        " log_completions log_completions_hub_repo log_multimodal log_unique_prompts logging_steps"
        " lr_scheduler_kwargs mask_truncated_completions max_completion_length max_tool_calling_iterations min_p"
        " model_init_kwargs multi_objective_aggregation num_completions_to_print num_generations num_generations_eval"
        " num_iterations pad_to_multiple_of ref_model_mixup_alpha ref_model_sync_steps remove_unused_columns"
        " repetition_penalty reward_weights router_aux_loss_coef sapo_temperature_neg sapo_temperature_pos"
        " scale_rewards shuffle_dataset steps_per_generation sync_ref_model temperature top_entropy_quantile top_k"
        " top_p transformers_continuous_batching_config trust_remote_code use_adaptive_entropy"
        " use_transformers_continuous_batching use_transformers_paged vespo_k_neg vespo_k_pos vespo_lambda_neg"
        " vespo_lambda_pos vllm_enable_sleep_mode vllm_gpu_memory_utilization vllm_group_port vllm_max_model_length"
        " vllm_mode vllm_model_impl vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout"
        " vllm_structured_outputs_regex vllm_tensor_parallel_size"
    ),
    switches=words(f"{_STEM}_correction use_vllm"),
    context=words("loss_type beta importance_sampling_level use_bias_correction_kl"),
)
"""TRL's rules.

Inside the bounds, the ``*_mask`` modes keep the ratio as a weight. ``off_policy_mask_threshold`` is off-policy sequence
masking on pi / mu with the sign of the row's advantage. With ``beta`` above 0 and ``use_bias_correction_kl``, the KL
term has the weight pi / pi_old. TRL corrects only with ``use_vllm=True``, which is assumed if the key is missing, and
does not clamp log-ratios. If mu is NaN for a token, TRL uses a ratio of 1; here the token is excluded from the loss.
"""
