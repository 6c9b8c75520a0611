"""Converter of TRL's ``GRPOConfig``."""

from __future__ import annotations

from typing import Any, Final

from ..problem import SpecError
from ..ratios import EXP_CLAMP
from ..validation import read_number
from .mapping import build_weight, check_weight_of_rows, read_choice, read_flag, read_ratio_bound, refuse
from .peer import Options, Peer, words

TRL_DEFAULTS: Final[dict[str, Any]] = {
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_max": 3.0,
    "vllm_importance_sampling_clip_min": None,
    "off_policy_mask_threshold": None,
}
_STEM: Final = "vllm_importance_sampling"
_MODES: Final = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
_LOSSES: Final = ("dapo", "grpo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo")


def _convert(options: Options) -> dict[str, Any]:
    engine = options["use_vllm"] is None or read_flag(options["use_vllm"], "use_vllm")
    corrects = read_flag(options[f"{_STEM}_correction"], f"{_STEM}_correction") and engine
    plain: dict[str, Any] = {"weight": _convert_weight(options) if corrects else None, "masks": {}}
    if read_choice(options["loss_type"], _LOSSES, "loss_type", optional=False) == "vespo":
        reason = "it multiplies pi / pi_old by truncated ratios of tokens to mu; the nearest is correction=paper/vespo."
        raise refuse(reason, "loss_type", "vespo")
    level = options["importance_sampling_level"]
    if read_choice(level, ("token", "sequence"), "importance_sampling_level", optional=False) == "sequence":
        check_weight_of_rows(plain["weight"], "TRL", "importance_sampling_level", level)
    key = "off_policy_mask_threshold"
    threshold = read_number(options[key], key)
    if threshold is not None:
        if not 0 <= threshold <= EXP_CLAMP:
            raise SpecError(
                f"expected a mean log(mu/pi) in nats per token, between 0 and {EXP_CLAMP:g}.",
                f"Set {key}=0.5, or null for no mask.",
                key=key,
                value=threshold,
            )
        # Without a rollout engine, TRL compares pi_old with pi.
        ratio = "full" if engine else "ppo"
        opsm = {"ratio": ratio, "level": "sequence", "aggregate": "geometric", "delta": threshold, "when": "negative"}
        plain["masks"]["opsm"] = opsm
    if read_number(options["beta"], "beta"):
        plain |= _convert_kl(options)
    return plain


def _convert_weight(options: Options) -> dict[str, Any]:
    cap, upper_key, lower_key = (f"{_STEM}_{name}" for name in ("cap", "clip_max", "clip_min"))
    if options[cap] is not None:
        # TRL sets clip_max to the older key's value if that key is given.
        if upper_key in options.given and options[upper_key] != options[cap]:
            alongside = {upper_key: options[upper_key]}
            raise SpecError(
                "TRL uses the older name.", "Give one of them.", key=cap, value=options[cap], alongside=alongside
            )
        upper_key = cap
    lower, upper = (read_ratio_bound(options[key], key) for key in (lower_key, upper_key))
    mode = str(read_choice(options[f"{_STEM}_mode"], _MODES, f"{_STEM}_mode", optional=False))
    if lower is not None and upper is not None and lower > upper:
        raise SpecError("nothing lies between.", "Swap them.", key=lower_key, value=lower, alongside={upper_key: upper})
    if lower is None and upper is None:
        raise SpecError(
            f"{mode} has no bound.",
            f"Set {upper_key}=3.0, or {_STEM}_correction=false.",
            key=upper_key,
            alongside={lower_key: None},
        )
    level, action = mode.split("_")
    return build_weight(level, lower, upper, reject=action == "mask")


def _convert_kl(options: Options) -> dict[str, Any]:
    key = "use_bias_correction_kl"
    if options[key] is None:
        reason = "its default is false until 1.9.0 and true in 1.16.0, and beta adds a KL term."
        raise refuse(reason, key, None, "Set it to true or false.")
    if not read_flag(options[key], key):
        return {}
    if options["importance_sampling_level"] != "token":
        reason = "nothing here weights the KL of a token by the ratio of its row."
        raise refuse(reason, "importance_sampling_level", options["importance_sampling_level"])
    return {"kl_weight": {"ratio": "ppo", "upper": None}}


TRL: Final = Peer(
    name="TRL",
    releases="0.28.0 to 1.16.0",
    sections=(),
    read=TRL_DEFAULTS
    | {
        f"{_STEM}_cap": None,
        "use_vllm": None,
        "loss_type": "dapo",
        "beta": 0.0,
        "use_bias_correction_kl": None,
        "importance_sampling_level": "token",
    },
    convert=_convert,
    unsaid={},
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
    switches=frozenset({f"{_STEM}_correction", "use_vllm"}),
    context=words("loss_type beta importance_sampling_level use_bias_correction_kl"),
)
"""TRL's rules.

Inside the bounds, the ``*_mask`` modes keep the ratio as a weight. ``off_policy_mask_threshold`` is off-policy sequence
masking on pi / mu with the sign of the row's advantage. With ``beta`` above 0 and ``use_bias_correction_kl``, the KL
term has the weight pi / pi_old. TRL corrects only with ``use_vllm=True``, which is assumed if the key is missing, and
does not clamp log-ratios. If mu is NaN for a token, TRL uses a ratio of 1; here the token is excluded from the loss.
"""
