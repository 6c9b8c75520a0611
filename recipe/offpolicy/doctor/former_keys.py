"""Keys that verl's programs no longer have: the last release with each, and its replacement."""

from __future__ import annotations

from fnmatch import fnmatchcase

from verl_patches.releases import TESTED

from ..preflight.checks.verl_correction import OBSOLETE

_REWARD_MODEL = (
    *("forward_max_token_len_per_gpu", "launch_reward_fn_async", "load_weight", "max_length", "megatron"),
    *("micro_batch_size*", "model.fsdp_config", "model.input_tokenizer", "model.use_*", "nccl_timeout", "profiler"),
    *("sandbox_fusion", "strategy", "ulysses_sequence_parallel_size", "use_*"),
)
_ROLLOUT = "actor_rollout_ref.rollout"
LAST = {
    "0.9.0": ("*.megatron.grad_offload", "data.continuous_token"),
    "0.8.0": ("actor_rollout_ref.*.load_weight", "critic.load_weight", f"{_ROLLOUT}.skip"),
    "0.7.1": (
        *("critic.model.fsdp_config", "data.datagen", "data.sampler", "trainer.use_legacy_worker_impl"),
        *(f"{_ROLLOUT}.{name}" for name in ("layer_name_map", "multi_turn.interaction_config_path")),
        *(f"{_ROLLOUT}.{name}" for name in ("skip_rollout", "skip_dump_dir")),
    ),
    "0.7.0": (
        *(f"reward_model.{name}" for name in _REWARD_MODEL),
        *("algorithm.rollout_correction.rollout_rs_threshold_lower", "reward_manager"),
        *("algorithm.rollout_correction.rollout_token_veto_threshold", f"{_ROLLOUT}.update_weights_bucket_megabytes"),
        "async_training.use_rollout_log_probs",
    ),
    "0.5.0": (
        *("actor_rollout_ref.*.profile", "ray_init", "trainer.*_nsight_options", "trainer.npu_profile"),
        *("trainer.profile_steps", f"{_ROLLOUT}.multi_turn.completion_callback"),
    ),
    "0.4.1": ("*.gradient_checkpointing_kwargs", "critic.kl_ctrl", f"{_ROLLOUT}.use_fire_sampling"),
    "0.4.0": ("*.checkpoint.contents", f"{_ROLLOUT}.chat_scheduler", f"{_ROLLOUT}.multi_turn.max_turns"),
    "0.3.0": ("actor_rollout_ref.ref.param_offload", "trainer.val_generations_to_log_to_wandb"),
    "0.2.0": (
        *("*.fsdp_config.grad_offload", "*.num_layers_per_virtual_pipeline_stage"),
        "trainer.remove_previous_ckpt_in_save",
    ),
}
"""Release -> patterns of keys or sections that no later release has."""

_CRITIC = "critic.model.fsdp_config."


def find_last_release(key: str) -> str | None:
    """Return the last release of verl that has a key; None if unknown."""
    for release, patterns in LAST.items():
        if any(fnmatchcase(key, pattern) or fnmatchcase(key, f"{pattern}.*") for pattern in patterns):
            return release
    return None


def find_successor(key: str, value: str, last: str) -> str:
    """Explain how to replace an override of a key that releases after ``last`` do not have."""
    if key.endswith(".grad_offload"):
        return "Delete this override: param_offload frees the gradients' memory too."
    if key == "trainer.use_legacy_worker_impl":
        return "Delete this override: verl now has only engine workers, which `disable` selects."
    if key == "async_training.use_rollout_log_probs" and value.lower() == "true":
        return (
            "Write algorithm.rollout_correction.bypass_mode=True; with a correction, write correction.proximal=bypass."
        )
    if key.startswith(_CRITIC):
        return f"Write critic.fsdp.{key.removeprefix(_CRITIC)}={value}."
    if value in ("null", "None"):
        return "Delete this override: null has no effect."
    if instead := OBSOLETE.get(key.rpartition(".")[2]):
        return f"Instead: {instead}."
    return f"Launch with verl {last}." if last in TESTED else f"The program was written for verl {last} or older."
