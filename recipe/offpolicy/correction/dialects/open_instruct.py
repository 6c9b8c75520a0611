"""Converter of open-instruct's ``GRPOExperimentConfig``."""

from __future__ import annotations

from typing import Any, Final

from ..validation import read_number
from .mapping import build_mask, build_weight, read_flag, read_ratio_bound, refuse
from .peer import Options, Peer, words

_OLD: Final = "truncated_importance_sampling_ratio_cap"
_FLAGS: Final = ("use_vllm_logprobs", "use_rho_correction", "rho_mask_sequence_level", "rho_mask_tv_divergence")


def _convert(options: Options) -> dict[str, Any]:
    of_mu, corrects, by_row, by_divergence = (read_flag(options[key], key) for key in _FLAGS)
    newer = [key for key in options.given if key.startswith(("rho_", "use_rho_"))]
    if _OLD in options.given and newer:
        raise refuse(
            f"this is the key that 0.2.0 uses for {min(newer)}.", _OLD, options[_OLD], "Give the keys of one release."
        )
    if of_mu:
        if (corrects and "use_rho_correction" in options.given) or options[_OLD]:
            reason = "pi_old is mu, and open-instruct then refuses a correction."
            raise refuse(reason, "use_vllm_logprobs", True, "Set it to false, or the correction off.")
        return {"proximal": "bypass"}
    plain: dict[str, Any] = {"proximal": "recompute", "masks": {}}
    if _OLD in options.given:
        cap = read_ratio_bound(options[_OLD], _OLD, zero_opens=True)
        return {"proximal": "recompute"} if cap is None else plain | {"weight": build_weight("token", None, cap)}
    if not corrects:
        return {"proximal": "recompute"}
    level, aggregate = ("sequence", "geometric") if by_row else ("token", "product")
    clamp = [read_ratio_bound(options[key], key, zero_opens=True) for key in _name("clamp")]
    plain["weight"] = build_weight(level, *clamp, aggregate=aggregate)
    if by_divergence:
        given = (read_number(options[key], key) for key in _name("mask"))
        low, high = (bound / 2 if bound else None for bound in given)
        if low is not None or high is not None:
            mask = build_mask("sequence", "tv_mean", low, high)
            plain["masks"]["vaco"] = mask | {"when": "outward", "sign": "token"}
        return plain
    low, high = (read_ratio_bound(options[key], key, zero_opens=True) for key in _name("mask"))
    if low is not None or high is not None:
        # A band on tokens with one open side bounds each token separately.
        how = "any" if level == "token" and None in (low, high) else aggregate
        plain["masks"]["rho"] = build_mask(level, how, low, high)
    return plain


def _name(action: str) -> tuple[str, str]:
    return f"rho_{action}_lower_bound", f"rho_{action}_upper_bound"


_ICEPOP: Final = (
    (False, None),
    "not a known key of open-instruct 0.2.0 to 0.3.0; set rho_mask_lower_bound and _upper_bound.",
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
    convert=_convert,
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
    switches=frozenset({"use_rho_correction", _OLD}),
)
"""open-instruct's rules; a bound of 0 means no bound.

rho is clamped as a weight, and tokens outside the mask's bounds are dropped; with ``rho_mask_sequence_level`` the
weight and the mask use the row's geometric mean. With ``rho_mask_tv_divergence`` (VACO) the bounds are on the row's
mean of |rho - 1|, twice our ``tv_mean``, and tokens whose update moves the policies closer together are kept.
open-instruct clamps log-ratios to +-10; here they are clamped to +-20. With ``use_vllm_logprobs``, pi_old is mu, and
nothing is corrected. In 0.2.0, the cap ``truncated_importance_sampling_ratio_cap`` is the whole correction, and 0 means
no correction.
"""
