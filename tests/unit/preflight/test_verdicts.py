"""The verdict of each start-up check: overrides, what it names, and the override that fixes it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from recipe.offpolicy.preflight.checks import (
    CHECKS,
    REMARKS,
    base_loss,
    choices,
    correction,
    offpolicy_keys,
    path,
    remarks,
    replay,
    rollout,
    run_keys,
    staleness,
    verl_correction,
)
from recipe.offpolicy.preflight.checks.rows import Check
from recipe.offpolicy.preflight.composed import SHADOW, Composed, copy_config
from tests.support.applications import NEEDED, application
from verl_patches.execution_path import live_path

pytestmark = [pytest.mark.verl(">=0.9.1"), pytest.mark.usefixtures("each_actor_is_probed_once")]
SHORT = {
    "actor": "actor_rollout_ref.actor",
    "fsdp": "actor_rollout_ref.actor.fsdp_config",
    "megatron": "actor_rollout_ref.actor.megatron",
    "model": "actor_rollout_ref.model",
    "ref": "actor_rollout_ref.ref",
    "rollout": "actor_rollout_ref.rollout",
    "vllm": "actor_rollout_ref.rollout.engine_kwargs.vllm",
    "trtllm": "actor_rollout_ref.rollout.engine_kwargs.trtllm",
    "env": "ray_kwargs.ray_init.runtime_env.env_vars",
    "masks": "correction.masks",
    "weight": "correction.weight",
    "sampler": "trainer.v1.sampler",
    "v1": "trainer.v1",
    "verl": "algorithm.rollout_correction",
}
"""Sections as the table writes them; a key behind ^ is written in full."""
RECORDED = "rollout.enable_rollout_routing_replay=true"
CAPPED = "level: %s, kind: truncate, lower: null, upper: 2.0"
NAMED = {
    "shadows by version": (
        f"offpolicy.shadow={{v: {{weight: {{{CAPPED % 'version'}}}}}, w: {{weight: {{{CAPPED % 'token'}}}}}}}"
    ),
    "a shadow by age": f"offpolicy.shadow={{old: {{weight: {{{CAPPED % 'token'}, by_staleness: [1.0, 1.5]}}}}}}",
    "uncorrected": "correction.weight=null; correction.masks={}",
    "legacy worker": "trainer.use_v1=false; trainer.use_legacy_worker_impl=auto",
    "V0": "trainer.use_v1=false",
    "asynchronous": "v1.trainer_mode=separate_async",
    "colocated": "v1.trainer_mode=colocate_async",
    "one gradient step": "data.train_batch_size=256",
    "KL loss": "actor.use_kl_loss=true",
    "bounded": "offpolicy.staleness.eta=2",
    "a mask on age": "masks.stale={aggregate: staleness, level: token, upper: 1}",
    "R3 on FSDP": f"model.path=none; actor.strategy=fsdp2; fsdp.router_replay.mode=R3; {RECORDED}",
    "R2 on FSDP": f"model.path=none; actor.strategy=fsdp2; fsdp.router_replay.mode=R2; {RECORDED}",
    "R2 on Megatron": "actor.strategy=megatron; megatron.router_replay.mode=R2",
    "R3 on Megatron": "actor.strategy=megatron; megatron.router_replay.mode=R3",
    "a support": "correction.support=engine; rollout.top_p=0.9; actor.strategy=fsdp2",
    "centred": "correction.centering=20; actor.strategy=fsdp2",
    "bypass's loss": "actor.policy_loss.loss_mode=bypass_mode",
    "five rollouts": "rollout.n=5",
    "what was run": "trainer.device=cuda; algorithm.adv_estimator=grpo",
    "a clip": "correction.kl_clip={lower: 0.8, upper: 1.2}",
    "a KL weight": "correction.kl_weight={ratio: full, upper: 2.0}",
    "recorded": "offpolicy.record.without_replay=true",
    "routes recorded": RECORDED,
    "by age": "weight.by_staleness=[1.0,1.5]",
    "interpolated by age": "correction.proximal=loglinear; correction.alpha=by_age",
    "interpolated": "correction.proximal=loglinear; correction.alpha=0.5",
    "KL in reward": "algorithm.use_kl_in_reward=true",
    "our bypass": "correction.proximal=bypass",
    "verl's bypass": "verl.bypass_mode=true",
    "token weight of verl's": "verl.rollout_is=token",
    "grpo": "algorithm.adv_estimator=grpo",
    "short answers": "data.max_response_length=256",
    "dynamic": "actor.use_dynamic_bsz=true; rollout.log_prob_use_dynamic_bsz=true",
    "no mu": "rollout.calculate_log_probs=false",
    "at 0.7": "rollout.temperature=0.7",
}
CASES: dict[tuple[Check, str], list[tuple[str, ...]]] = {
    (correction.check_bounds, "0.9.1"): [
        ("",),
        ("masks.gsm.lower=1.005", "ERROR masks.gsm.lower: =1"),
        ("masks.gsm.upper=0.995", "ERROR masks.gsm.upper: =1"),
        ("weight.upper=0.9", "ERROR weight.upper: =1"),
        ("weight.upper=null; weight.lower=1.1", "ERROR weight.lower: =1"),
        (
            "masks.gsm={ratio: rollout, level: sequence, aggregate: k1_mean, lower: 0.1, upper: 0.2, when: any}",
            "ERROR masks.gsm.lower: =0",
        ),
        ("masks.gsm.upper=1e30", "ERROR masks.gsm.upper: =1.01"),
        ("masks.gsm.lower=1; masks.gsm.upper=1", "ERROR masks.gsm.upper: masks.gsm.lower=0.99; =1.01"),
        (
            "masks.m={ratio: rollout, level: token, aggregate: second_moment, budget: 500, when: any}",
            "ERROR masks.m.budget: =0.04",
        ),
        (
            "masks.k={ratio: rollout, level: sequence, aggregate: k3_mean, lower: null, upper: 0.0, when: any}",
            "ERROR masks.k.upper: =0.01",
        ),
    ],
    (correction.warn_bounds_never_seen, "0.9.1"): [
        ("",),
        (
            "masks.o={ratio: full, level: sequence, aggregate: geometric, delta: 19.0, when: negative}",
            "NO-OP masks.o.delta: =0.1",
        ),
        ("masks.gsm.upper=1e8", "NO-OP masks.gsm.upper: =1.01"),
    ],
    (correction.check_parts, "0.9.1"): [
        ("",),
        ("weight.lower=1; weight.upper=1; weight.kind=clip", "ERROR weight.upper: =2.0"),
        ("weight.aggregate=geometric", "ERROR weight.aggregate: =product"),
        ("weight.ratio=full", "ERROR weight.ratio"),
        ("weight.ratio=full; actor.policy_loss.loss_mode=gpg",),
        ("masks.gsm.level=token", "ERROR masks.gsm.aggregate: =product"),
        ("correction.masks={}; correction.skyrl_compat=true", "NO-OP correction.skyrl_compat"),
    ],
    (correction.check_proximal, "0.9.1"): [
        ("",),
        ("correction.proximal=reuse", "ERROR correction.proximal: =recompute"),
        ("one gradient step; correction.proximal=reuse",),
        ("one gradient step; actor.ppo_epochs=2; correction.proximal=reuse", "ERROR correction.proximal: =recompute"),
        ("uncorrected; correction.proximal=same_engine; asynchronous", "ERROR correction.proximal: =recompute"),
        (
            "uncorrected; correction.proximal=same_engine; v1.sync.parameter_sync_step=2",
            "ERROR correction.proximal: =recompute",
        ),
        ("uncorrected; correction.proximal=same_engine",),
        ("interpolated; KL in reward", "ERROR correction.proximal"),
        ("interpolated; algorithm.adv_estimator=optimal_token_baseline", "ERROR correction.proximal"),
        ("one gradient step; correction.proximal=reuse; KL in reward", "ERROR correction.proximal: =recompute"),
        ("uncorrected; our bypass; actor.policy_loss.loss_mode=gpg", "NO-OP correction.proximal"),
        ("uncorrected; our bypass",),
    ],
    (correction.check_ppo_ratio, "0.9.1"): [
        ("",),
        ("one gradient step; masks.gsm.ratio=ppo", "NO-OP masks.gsm.ratio: =rollout"),
        (
            "one gradient step; correction.penalty={ratio: ppo, coefficient: 0.1}",
            "NO-OP correction.penalty.ratio: =full",
        ),
        ("one gradient step; a clip", "NO-OP correction.kl_clip: actor.ppo_mini_batch_size=128"),
        (
            "data.train_batch_size=255; actor.ppo_mini_batch_size=255; a clip",
            "NO-OP correction.kl_clip: actor.ppo_epochs=2",
        ),
        ("masks.gsm.ratio=ppo",),
        ("one gradient step; masks.gsm.ratio=ppo; our bypass; uncorrected",),
    ],
    (correction.check_kl, "0.9.1"): [
        ("",),
        ("a clip", "NO-OP correction.kl_clip: actor.use_kl_loss=true"),
        ("a clip; KL loss",),
        ("a clip; actor.kl_loss_coef=0; KL loss", "NO-OP actor.kl_loss_coef: =0.001"),
        ("a clip; actor.kl_loss_type=kl; KL loss", 'NO-OP actor.kl_loss_type: ="k3+"'),
        ("correction.kl_weight={ratio: ppo, upper: 2.0}", "NO-OP correction.kl_weight: actor.use_kl_loss=true"),
        ("a KL weight; KL loss",),
        ("a KL weight; actor.kl_loss_coef=0; KL loss", "NO-OP actor.kl_loss_coef: =0.001"),
        ("a KL weight; actor.kl_loss_type=k3+; KL loss", "ERROR actor.kl_loss_type: =low_var_kl"),
    ],
    (correction.check_denominator, "0.9.1"): [
        ("correction.denominator=kept",),
        ("correction.denominator=kept; actor.loss_agg_mode=token-sum", "NO-OP actor.loss_agg_mode: =token-mean"),
        ("correction.denominator=kept; actor.shuffle=true", "ERROR actor.shuffle: =false"),
        ("correction.nonfinite=excluded; actor.loss_agg_mode=token-sum", "NO-OP actor.loss_agg_mode: =token-mean"),
        ("actor.loss_agg_mode=token-sum; actor.shuffle=true",),
    ],
    (correction.check_baseline, "0.9.1"): [
        ("correction.baseline=exclude", "NO-OP algorithm.adv_estimator: correction.baseline=include"),
        ("correction.baseline=exclude; rollout.n=8", "NO-OP algorithm.adv_estimator: correction.baseline=include"),
        ("correction.baseline=exclude; rollout.n=8; grpo",),
        ("correction.baseline=exclude; rollout.n=1; grpo", "NO-OP rollout.n: correction.baseline=include"),
    ],
    (correction.check_distillation, "0.9.1"): [
        ("",),
        ("distillation.enabled=true", "ERROR distillation.enabled"),
    ],
    (path.check_path, "0.9.1"): [
        ("",),
        ("trainer.use_legacy_worker_impl=on", "ERROR trainer.use_legacy_worker_impl: =auto"),
        ("trainer.use_legacy_worker_impl=enable", "ERROR trainer.use_legacy_worker_impl: =disable"),
        ("v1.trainer_mode=one_step_off", "ERROR v1.trainer_mode: =separate_async"),
        ("v1.trainer_mode=synch", "ERROR v1.trainer_mode: =sync"),
        (
            "asynchronous; trainer.device=cuda; actor.strategy=fsdp2; fsdp.param_offload=true",
            "ERROR fsdp.param_offload: =false",
        ),
        ("asynchronous; trainer.device=cpu; actor.strategy=fsdp2; fsdp.param_offload=true",),
        (
            "asynchronous; trainer.device=cuda; actor.strategy=fsdp2; fsdp.offload_policy=true; "
            "v1.separate_async.parameter_sync_step=1",
        ),
        ("actor.strategy=veomni", "ERROR actor.strategy"),
        (
            "actor.strategy=megatron; megatron.dynamic_context_parallel=true",
            "ERROR megatron.dynamic_context_parallel: =false",
        ),
        ("V0",),
        ("V0; actor.use_prefix_grouper=true",),
    ],
    (path.check_path, "0.9.0"): [
        ("asynchronous", "ERROR v1.trainer_mode: =colocate_async"),
        ("colocated",),
    ],
    (path.check_path, "0.8.0"): [
        ("trainer.use_v1=true", "ERROR trainer.use_v1: =false"),
        ("model.use_remove_padding=false; V0",),
        ("async_training={}; V0",),
    ],
    (path.check_path, "0.7.1"): [
        ("legacy worker",),
        ("legacy worker; actor.use_prefix_grouper=true", "ERROR actor.use_prefix_grouper: =false"),
        (
            "legacy worker; actor.strategy=megatron; "
            "megatron.override_transformer_config.overlap_moe_expert_parallel_comm=true",
            "ERROR megatron.override_transformer_config.overlap_moe_expert_parallel_comm: =false",
        ),
        (
            "V0; trainer.use_legacy_worker_impl=disable; model.use_remove_padding=false",
            "ERROR model.use_remove_padding: =true",
        ),
        ("V0; rollout_={}",),
    ],
    (path.check_program, "0.9.1"): [
        ("",),
        ("asynchronous; rollout.checkpoint_engine.backend=naive", "ERROR rollout.checkpoint_engine.backend: =nccl"),
        ("asynchronous; rollout.checkpoint_engine.backend=nccl",),
        ("async_training={}; correction.support=engine", "ERROR correction.support"),
        ("async_training={}; correction.centering=20", "ERROR correction.centering"),
        ("async_training={}; length_penalty={kind: anchor}",),
        ("async_training={}; length_penalty={kind: anchor, anchor: {per: source}}", "ERROR length_penalty.anchor.per"),
        (
            "async_training={}; rollout.agent.default_agent_loop=tool_agent",
            "ERROR rollout.agent.default_agent_loop: rollout.multi_turn.enable=true",
        ),
        ("^rollout.nnodes=1; length_penalty={kind: anchor}",),
    ],
    (path.check_version_level, "0.9.1"): [
        ("weight.level=version",),
        ("weight.level=version; asynchronous",),
    ],
    (path.check_version_level, "0.9.0"): [
        ("weight.level=version",),
        ("weight.level=version; asynchronous", "ERROR weight.level: =sequence"),
        ("masks.gsm.level=version; asynchronous", "ERROR masks.gsm.level: =sequence"),
        (
            "asynchronous; shadows by version",
            "ERROR offpolicy.shadow: =[w]",
        ),
        ("masks.gsm.level=version; async_training={partial_rollout: true}; V0", "ERROR masks.gsm.level: =sequence"),
        ("masks.gsm.level=version; async_training={partial_rollout: false}; V0",),
    ],
    (path.check_version_level, "0.8.0"): [
        ("weight.level=version; V0",),
    ],
    (path.check_workers_env, "0.9.1"): [
        ("",),
        ("ray_kwargs.ray_init.runtime_env=cpu", "ERROR ray_kwargs.ray_init.runtime_env: ={}"),
        ("ray_kwargs.ray_init.runtime_env={env_vars: {VERL_USE_EXTERNAL_MODULES: other}}",),
    ],
    (staleness.check_staleness, "0.9.1"): [
        ("asynchronous; bounded",),
        ("colocated; bounded",),
        ("bounded", "ERROR offpolicy.staleness.eta"),
        ("V0; bounded", "ERROR offpolicy.staleness.eta"),
        ("async_training={}; V0; bounded", "ERROR offpolicy.staleness.eta"),
        ("^rollout.nnodes=1; V0; bounded", "ERROR offpolicy.staleness.eta"),
        ("asynchronous; bounded; v1.separate_async.num_warmup_batches=2", "ERROR v1.separate_async.num_warmup_batches"),
        ("asynchronous; bounded; sampler.max_off_policy_threshold=4", "ERROR sampler.max_off_policy_threshold"),
        ("asynchronous; bounded; sampler.max_off_policy_strategy=wait", "ERROR sampler.max_off_policy_strategy"),
        (
            "asynchronous; bounded; sampler.custom_sampler={path: own.py, name: Own}",
            "ERROR sampler.custom_sampler.name",
        ),
        ("asynchronous; bounded; skip.rollout_tq.enable=true", "ERROR skip.rollout_tq.enable"),
        ("asynchronous; bounded; offpolicy.staleness.adapt.ess=0.9",),
        (
            "asynchronous; bounded; offpolicy.staleness.adapt.ess=0.9; correction.weight=null",
            "ERROR offpolicy.staleness.adapt.ess",
        ),
        ("asynchronous",),
    ],
    (staleness.check_staleness, "0.9.0"): [
        ("colocated; bounded", "ERROR offpolicy.staleness.eta"),
    ],
    (staleness.warn_verls_limit, "0.9.1"): [
        (
            "asynchronous; v1.separate_async.num_warmup_batches=8; sampler.max_off_policy_threshold=5; "
            "sampler.max_off_policy_strategy=wait",
            "NO-OP sampler.max_off_policy_strategy: v1.separate_async.num_warmup_batches=4",
        ),
        (
            "asynchronous; v1.separate_async.num_warmup_batches=4.5; sampler.max_off_policy_threshold=5; "
            "sampler.max_off_policy_strategy=wait",
            "NO-OP sampler.max_off_policy_strategy: v1.separate_async.num_warmup_batches=4",
        ),
        (
            "asynchronous; v1.separate_async.num_warmup_batches=8; sampler.max_off_policy_threshold=5; "
            "sampler.max_off_policy_strategy=drop",
            "NOTE sampler.max_off_policy_strategy: v1.separate_async.num_warmup_batches=4",
        ),
        (
            "asynchronous; v1.separate_async.num_warmup_batches=1; sampler.max_off_policy_threshold=1; "
            "sampler.max_off_policy_strategy=drop",
            "NOTE sampler.max_off_policy_strategy: v1.separate_async.num_warmup_batches=0",
        ),
        (
            "asynchronous; v1.separate_async.num_warmup_batches=4; sampler.max_off_policy_threshold=5; "
            "sampler.max_off_policy_strategy=wait",
        ),
        (
            "asynchronous; v1.separate_async.num_warmup_batches=null; sampler.max_off_policy_threshold=1; "
            "sampler.max_off_policy_strategy=drop",
        ),
        (
            "asynchronous; v1.separate_async.num_warmup_batches=2; sampler.max_off_policy_threshold=null; "
            "sampler.max_off_policy_strategy=drop",
            "NOTE sampler.max_off_policy_threshold",
        ),
        ("sampler.max_off_policy_threshold=null",),
        (
            "asynchronous; bounded; v1.separate_async.num_warmup_batches=8; "
            "sampler.max_off_policy_threshold=5; sampler.max_off_policy_strategy=wait",
        ),
    ],
    (staleness.warn_asynchronous, "0.9.1"): [
        ("asynchronous", "NOTE masks.gsm.lower"),
        ("asynchronous; uncorrected", "NOTE v1.trainer_mode"),
        ("uncorrected",),
        ("asynchronous; uncorrected; token weight of verl's",),
        ("asynchronous; correction.masks={}", "NOTE weight.upper"),
        ("asynchronous; correction.masks={}; offpolicy.staleness.eta=0",),
        ("asynchronous; correction.masks={}; weight.level=sequence",),
        ("asynchronous; masks.gsm.lower=0.5; masks.gsm.upper=2",),
        ("asynchronous; masks.gsm.level=token",),
        (
            "asynchronous; "
            "masks.gsm={ratio: rollout, level: sequence, aggregate: k3_mean, lower: null, upper: 0.001, when: any}",
            "NOTE masks.gsm.upper",
        ),
    ],
    (staleness.check_ages, "0.9.1"): [
        ("a mask on age",),
        ("a mask on age; asynchronous",),
        ("by age",),
    ],
    (staleness.check_ages, "0.9.0"): [
        ("a mask on age; colocated", "ERROR masks.stale.level: =sequence"),
        ("by age; colocated", "ERROR weight.by_staleness"),
        ("masks.stale={aggregate: staleness, level: sequence, upper: 1}; colocated",),
        ("a mask on age",),
        ("uncorrected; interpolated by age; colocated", "ERROR correction.alpha"),
    ],
    (staleness.check_ages, "0.8.0"): [
        ("a mask on age; V0",),
        ("by age; V0",),
        ("V0; a shadow by age",),
    ],
    (staleness.warn_ages, "0.9.1"): [
        ("asynchronous; bounded; a mask on age",),
        (
            "asynchronous; bounded; masks.stale={aggregate: staleness, level: token, upper: 2}",
            "NO-OP masks.stale.upper",
        ),
        (
            "asynchronous; offpolicy.staleness.eta=1.5; masks.stale={aggregate: staleness, level: token, upper: 2}",
            "NO-OP masks.stale.upper",
        ),
        ("asynchronous; offpolicy.staleness.eta=1.5; a mask on age",),
        (
            "colocated; offpolicy.staleness.eta=0; masks.stale={aggregate: staleness, level: token, upper: 0}",
            "NO-OP masks.stale.upper",
        ),
        ("asynchronous; offpolicy.staleness.eta=null; masks.stale={aggregate: staleness, level: token, upper: 9}",),
        (
            "v1.trainer_mode=sync; offpolicy.staleness.eta=null; "
            "masks.stale={aggregate: staleness, level: token, upper: 0}",
            "NO-OP masks.stale.upper",
        ),
        ("asynchronous; bounded; weight.by_staleness=[1.0]", "NO-OP weight.by_staleness"),
        ("asynchronous; offpolicy.staleness.eta=null; weight.by_staleness=[1.0,1.0,2.0]",),
        ("asynchronous; offpolicy.staleness.eta=1; weight.by_staleness=[1.0,1.0,2.0]", "NO-OP weight.by_staleness"),
        ("asynchronous; bounded; weight.by_staleness=[1.0,1.0,2.0]",),
        (
            "v1.trainer_mode=sync; offpolicy.staleness.eta=null; weight.by_staleness=[1.0,2.0]",
            "NO-OP weight.by_staleness",
        ),
        ("v1.trainer_mode=sync; offpolicy.staleness.eta=null; weight.by_staleness=[2.0]",),
        (
            "v1.trainer_mode=sync; offpolicy.staleness.eta=null; uncorrected; interpolated by age",
            "NO-OP correction.alpha",
        ),
        ("asynchronous; offpolicy.staleness.eta=1; uncorrected; interpolated by age", "NO-OP correction.alpha"),
        ("asynchronous; offpolicy.staleness.eta=1.5; uncorrected; interpolated by age",),
    ],
    (rollout.check_rollout_log_probs, "0.9.1"): [
        ("",),
        ("no mu", "NO-OP rollout.calculate_log_probs: =true"),
        ("rollout.name=hf", "ERROR rollout.name"),
        ("rollout.name=vlm", "ERROR rollout.name: =vllm"),
        ("rollout.name=dynamo",),
        ("rollout.name=sglang",),
        ("uncorrected; no mu; rollout.name=hf",),
        ("uncorrected; offpolicy.shadow=[gsm]; no mu", "NO-OP rollout.calculate_log_probs: =true"),
        ("uncorrected; correction.allow_truncated_sampling=true", "ERROR correction.allow_truncated_sampling: =false"),
        ("uncorrected; correction.proximal=same_engine; rollout.name=hf",),
    ],
    (rollout.check_logprobs_mode, "0.9.1"): [
        ("rollout.logprobs_mode=raw_logprobs", "ERROR rollout.logprobs_mode: =processed_logprobs"),
        ("vllm.logprobs_mode=raw_logprobs", "ERROR vllm.logprobs_mode: =processed_logprobs"),
        ("vllm.logprobs-mode=raw_logprobs", "ERROR vllm.logprobs-mode: =processed_logprobs"),
        ("uncorrected; rollout.logprobs_mode=raw_logprobs",),
        ("rollout.name=sglang; rollout.logprobs_mode=raw_logprobs; at 0.7",),
        ("rollout.name=trtllm; at 0.7; trtllm.sampler_type=TorchSampler", "ERROR trtllm.sampler_type: =TRTLLMSampler"),
        ("rollout.name=trtllm; trtllm.sampler_type=TorchSampler",),
        (
            "rollout.name=sglang; at 0.7; env.SGLANG_RETURN_ORIGINAL_LOGPROB='1'",
            "ERROR env.SGLANG_RETURN_ORIGINAL_LOGPROB: ~env.SGLANG_RETURN_ORIGINAL_LOGPROB",
        ),
    ],
    (rollout.check_sampling, "0.9.1"): [
        ("",),
        ("rollout.do_sample=false", "ERROR rollout.temperature: rollout.do_sample=true; =1.0"),
        ("rollout.temperature=0", "ERROR rollout.temperature: rollout.do_sample=true; =1.0"),
        ("rollout.top_p=0.9", "ERROR rollout.top_p"),
        ("rollout.top_k=50", "ERROR rollout.top_k"),
        ("rollout.top_k=0",),
        ("rollout.min_p=0.05", "ERROR rollout.min_p"),
        ("rollout.repetition_penalty=1.1", "ERROR rollout.repetition_penalty"),
        ("vllm.override_generation_config.top_p=0.9", "ERROR vllm.override_generation_config.top_p"),
        (
            "vllm.override_generation_config.temperature=0.6",
            "ERROR vllm.override_generation_config.temperature: rollout.temperature=0.6; "
            "~vllm.override_generation_config.temperature",
        ),
        ("at 0.7",),
        ("rollout.val_kwargs.top_p=0.7",),
        (
            "correction.allow_truncated_sampling=true; rollout.top_p=0.9; rollout.do_sample=false",
            "ERROR rollout.temperature: rollout.do_sample=true; =1.0",
        ),
        ("uncorrected; rollout.top_p=0.9",),
        ("uncorrected; token weight of verl's; rollout.top_p=0.9", "ERROR rollout.top_p"),
        ("rollout.name=sglang; rollout.top_p=0.9", "ERROR rollout.top_p"),
        ("correction.support=engine; rollout.top_k=5",),
        ("correction.support=engine; rollout.min_p=0.1", "ERROR rollout.min_p"),
        (
            "correction.support=engine; vllm.override_generation_config.top_k=5",
            "ERROR vllm.override_generation_config.top_k",
        ),
    ],
    (rollout.check_support, "0.9.1"): [
        ("rollout.top_p=0.9",),
        ("a support",),
        ("a support; model.use_fused_kernels=true", "ERROR model.use_fused_kernels: =false"),
        ("a support; model.lora_rank=8", "ERROR model.lora_rank: =0"),
        ("a support; actor.ulysses_sequence_parallel_size=2", "ERROR actor.ulysses_sequence_parallel_size: =1"),
        ("a support; KL in reward", "ERROR algorithm.use_kl_in_reward: =false; actor.use_kl_loss=true"),
        ("a support; actor.strategy=megatron", "ERROR actor.strategy"),
        ("a support; rollout.top_p=1.0", "NO-OP correction.support"),
        ("a support; rollout.top_p=1.0; rollout.top_k=5",),
        ("a support; rollout.top_p=1.0; correction.support_min_p=0.1",),
        ("centred",),
        ("centred; KL in reward",),
        ("centred; model.use_fused_kernels=true", "ERROR model.use_fused_kernels: =false"),
        ("centred; actor.strategy=megatron", "ERROR actor.strategy"),
        ("centred; rollout.name=vllm",),
        ("centred; rollout.name=sglang", "ERROR rollout.name: =vllm"),
        ("a support; rollout.name=trtllm", "ERROR rollout.name: =vllm"),
        (
            "centred; actor.policy_loss.loss_mode=sapo",
            "ERROR actor.loss_agg_mode: =seq-mean-token-mean",
        ),
        ("centred; actor.policy_loss.loss_mode=sapo; actor.loss_agg_mode=seq-mean-token-mean",),
        ("centred; actor.policy_loss.loss_mode=gspo",),
    ],
    (rollout.check_support, "0.9.0"): [
        ("a support; V0", "ERROR correction.support"),
        ("centred; V0", "ERROR correction.centering"),
    ],
    (replay.check_routing_replay, "0.9.1"): [
        ("",),
        ("R3 on FSDP",),
        ("R3 on FSDP; one gradient step", "NO-OP fsdp.router_replay.mode: actor.ppo_mini_batch_size=128"),
        (
            "R3 on FSDP; data.train_batch_size=255; actor.ppo_mini_batch_size=255",
            "NO-OP fsdp.router_replay.mode: actor.ppo_epochs=2",
        ),
        ("R3 on FSDP; model.use_fused_kernels=true", "ERROR model.use_fused_kernels: =false"),
        ("R3 on FSDP; model.mtp.enable=true", "ERROR model.mtp.enable: =false"),
        ("R3 on FSDP; model.lora.rank=8", "ERROR model.lora.rank: =0"),
        ("R3 on FSDP; actor.ulysses_sequence_parallel_size=2", "ERROR actor.ulysses_sequence_parallel_size: =1"),
        ("R3 on FSDP; rollout.name=sglang", "ERROR rollout.name: =vllm"),
        ("R2 on FSDP; rollout.name=sglang",),
        ("R3 on FSDP; V0; one gradient step",),
    ],
    (replay.check_megatron_replay, "0.9.1"): [
        ("R2 on Megatron; megatron.use_remove_padding=false", "ERROR megatron.use_remove_padding: =true"),
        ("R2 on Megatron; megatron.use_remove_padding=true",),
        ("actor.strategy=megatron; megatron.router_replay.mode=disabled; megatron.use_remove_padding=false",),
        ("actor.strategy=fsdp2; megatron.router_replay.mode=R2; megatron.use_remove_padding=false",),
    ],
    (replay.check_recorded_without_replay, "0.9.1"): [
        ("recorded; R3 on FSDP",),
        ("R3 on FSDP",),
        ("recorded; R2 on FSDP", "ERROR offpolicy.record.without_replay: =false"),
        ("recorded; R3 on FSDP; our bypass; uncorrected", "ERROR offpolicy.record.without_replay: =false"),
        ("recorded; R3 on FSDP; V0", "ERROR offpolicy.record.without_replay: =false"),
    ],
    (replay.check_router_replay, "0.9.1"): [
        ("",),
        (
            "actor.router_replay.mode=R2",
            "NO-OP actor.router_replay.mode: ~actor.router_replay; ++fsdp.router_replay.mode=R2",
        ),
        ("R2 on Megatron",),
        (
            "megatron.router_replay.mode=R2",
            "NO-OP megatron.router_replay.mode: ~megatron.router_replay; ++fsdp.router_replay.mode=R2",
        ),
        ("fsdp.router_replay.mode=R2",),
        ("ref.router_replay.mode=R3", "NO-OP ref.router_replay.mode"),
        ("R2 on Megatron; megatron.router_replay.record_file=routes.pt", "NO-OP megatron.router_replay.record_file"),
        ("R3 on Megatron", "ERROR megatron.router_replay.mode: rollout.enable_rollout_routing_replay=true"),
        ("R3 on Megatron; routes recorded",),
        (
            "R2 on Megatron; routes recorded",
            "ERROR rollout.enable_rollout_routing_replay: ++megatron.router_replay.mode=R3",
        ),
        ("routes recorded", "NO-OP rollout.enable_rollout_routing_replay: ++fsdp.router_replay.mode=R3"),
        (
            "R2 on Megatron; verl's bypass",
            "ERROR megatron.router_replay.mode: ++megatron.router_replay.mode=R3; "
            "rollout.enable_rollout_routing_replay=true",
        ),
        (
            "R2 on Megatron; our bypass; uncorrected",
            "ERROR megatron.router_replay.mode: ++megatron.router_replay.mode=R3; "
            "rollout.enable_rollout_routing_replay=true",
        ),
        ("fsdp.router_replay.mode=R3", "ERROR fsdp.router_replay.mode: rollout.enable_rollout_routing_replay=true"),
        ("fsdp.router_replay.mode=R3; V0", "NO-OP fsdp.router_replay.mode"),
        ("fsdp.router_replay.mode=R3; offpolicy=null", "NO-OP fsdp.router_replay.mode"),
    ],
    (replay.check_router_replay, "0.7.1"): [
        ("legacy worker; actor.strategy=megatron; actor.router_replay.mode=R2",),
        (
            "legacy worker; R2 on Megatron",
            "NO-OP megatron.router_replay.mode: ~megatron.router_replay; ++actor.router_replay.mode=R2",
        ),
        ("legacy worker; actor.router_replay={mode: R2, _target_: x}", "NO-OP actor.router_replay.mode"),
    ],
    (run_keys.check_engine_is_named, "0.9.1"): [
        ("",),
        ("rollout.name=null", "ERROR rollout.name: =vllm"),
    ],
    (choices.check_choices, "0.9.1"): [
        ("",),
        ("trainer.resume_mode=sometimes", "ERROR trainer.resume_mode: =auto"),
        ("trainer.resume_mode=resume-path", "ERROR trainer.resume_mode: =resume_path"),
        ("trainer.resume_mode=null", "ERROR trainer.resume_mode: =auto"),
        ("algorithm.adv_estimator=GRPO_", "ERROR algorithm.adv_estimator: =grpo"),
        ("algorithm.kl_ctrl.type=adaptiv", "ERROR algorithm.kl_ctrl.type: =adaptive"),
        ("actor.kl_loss_type=low_var", "ERROR actor.kl_loss_type: =low_var_kl"),
        ("data.truncation=rigth", "ERROR data.truncation: =right"),
        ("algorithm.adv_estimator=elliptical", "ERROR algorithm.adv_estimator"),
        ("actor.kl_loss_type=hellinger", "ERROR actor.kl_loss_type"),
        ("trainer.logger=[consol,wandb]", "ERROR trainer.logger: =[console, wandb]"),
        ("trainer.logger=console",),
        ("rollout.checkpoint_engine.backend=ncl", "ERROR rollout.checkpoint_engine.backend: =nccl"),
        (
            "rollout.checkpoint_engine={backend: mine, custom_backend_module: m}",
            "NOTE rollout.checkpoint_engine.backend",
        ),
        ("rollout.checkpoint_engine={backend: cpu_files, custom_backend_module: verl_patches.cpu.checkpoint_engine}",),
        ("rollout.load_format=dummyy", "ERROR rollout.load_format: =dummy"),
        ("rollout.load_format=dummyy; rollout.name=sglang",),
        ("rollout.load_format=mine; model.external_lib=loaders", "NOTE rollout.load_format"),
        ("fsdp.dtype=bf17", "ERROR fsdp.dtype: =bf16"),
        ("fsdp.dtype=16; fsdp.model_dtype=null",),
        ("fsdp.model_dtype=double", "ERROR fsdp.model_dtype"),
        ("rollout.mode=sync", "ERROR rollout.mode: =async"),
        ("rollout.dtype=bf16", "ERROR rollout.dtype"),
        ("actor.optim.optimizer=AdanW", "ERROR actor.optim.optimizer: =AdamW"),
        ("actor.optim.optimizer=AdanW; actor.optim.optimizer_impl=torchao.optim",),
        ("^reward.reward_manager.name=dapoo", "ERROR reward.reward_manager.name: =dapo"),
        ("actor.policy_loss.loss_mode=gsppo; actor.strategy=fsdp3; rollout.name=vlm",),
        (
            "uncorrected; actor.policy_loss.loss_mode=gsppo; actor.strategy=fsdp3; rollout.name=vlm",
            "ERROR actor.policy_loss.loss_mode: =gspo",
            "ERROR actor.strategy: =fsdp",
            "ERROR rollout.name: =vllm",
        ),
        ("uncorrected; v1.trainer_mode=null", "ERROR v1.trainer_mode"),
        ("uncorrected; token weight of verl's; verl.rollout_is=tokens", "ERROR verl.rollout_is: =token"),
    ],
    (run_keys.check_numbers, "0.9.1"): [
        ("",),
        ("correction.penalty.coefficient=1e31", "ERROR correction.penalty.coefficient"),
        ("correction.penalty.coefficient=9223372036854775808", "ERROR correction.penalty.coefficient"),
        ("data.x=[1.0,1e300]", "ERROR data.x.1"),
    ],
    (run_keys.check_micro_batches, "0.9.1"): [
        ("five rollouts",),
        ("five rollouts; actor.ppo_micro_batch_size_per_gpu=160",),
        ("five rollouts; actor.ppo_micro_batch_size_per_gpu=3", "ERROR actor.ppo_micro_batch_size_per_gpu: =2"),
        ("five rollouts; actor.ppo_micro_batch_size_per_gpu=64", "ERROR actor.ppo_micro_batch_size_per_gpu: =40"),
        ("five rollouts; actor.ppo_micro_batch_size_per_gpu=200", "ERROR actor.ppo_micro_batch_size_per_gpu: =160"),
        ("five rollouts; actor.ppo_micro_batch_size_per_gpu=7; dynamic",),
        ("dynamic; rollout.log_prob_use_dynamic_bsz=false", "ERROR rollout.log_prob_use_dynamic_bsz: =true"),
        (
            "actor.strategy=megatron; rollout.log_prob_use_dynamic_bsz=true",
            "ERROR rollout.log_prob_use_dynamic_bsz: =false",
        ),
        ("five rollouts; rollout.log_prob_micro_batch_size_per_gpu=128",),
        (
            "five rollouts; rollout.log_prob_micro_batch_size_per_gpu=96",
            "ERROR rollout.log_prob_micro_batch_size_per_gpu: =80",
        ),
        ("five rollouts; rollout.log_prob_micro_batch_size_per_gpu=96; dynamic",),
        ("five rollouts; rollout.log_prob_micro_batch_size_per_gpu=96; our bypass; uncorrected",),
        ("five rollouts; rollout.log_prob_micro_batch_size_per_gpu=96; verl's bypass",),
        ("five rollouts; ref.log_prob_micro_batch_size_per_gpu=96",),
        (
            "five rollouts; ref.log_prob_micro_batch_size_per_gpu=96; KL loss",
            "ERROR ref.log_prob_micro_batch_size_per_gpu: =80",
        ),
        (
            "five rollouts; rollout.log_prob_micro_batch_size_per_gpu=128; asynchronous",
            "ERROR rollout.log_prob_micro_batch_size_per_gpu: =80",
        ),
        ("five rollouts; actor.ppo_mini_batch_size=100", "ERROR actor.ppo_mini_batch_size: =96"),
        ("five rollouts; actor.ppo_mini_batch_size=1; trainer.nnodes=2", "ERROR actor.ppo_mini_batch_size: =16"),
        ("five rollouts; actor.ulysses_sequence_parallel_size=3; actor.ppo_micro_batch_size_per_gpu=3",),
        (
            "five rollouts; fsdp.ulysses_sequence_parallel_size=4; actor.ppo_micro_batch_size_per_gpu=3",
            "ERROR actor.ppo_micro_batch_size_per_gpu: =2",
        ),
        (
            "five rollouts; actor.strategy=megatron; megatron.tensor_model_parallel_size=2; "
            "megatron.pipeline_model_parallel_size=2; actor.ppo_micro_batch_size_per_gpu=256",
            "ERROR actor.ppo_micro_batch_size_per_gpu: =160",
        ),
    ],
    (run_keys.check_micro_batches, "0.7.1"): [
        (
            "five rollouts; actor.use_dynamic_bsz=true; actor.ppo_micro_batch_size_per_gpu=3; legacy worker",
            "ERROR actor.ppo_micro_batch_size_per_gpu: =2",
        ),
        ("five rollouts; actor.ppo_micro_batch_size_per_gpu=3; actor.strategy=megatron; legacy worker",),
        ("dynamic; rollout.log_prob_use_dynamic_bsz=false; actor.strategy=megatron; legacy worker",),
    ],
    (run_keys.check_by_verl, "0.9.1"): [
        ("",),
        ("actor.ppo_mini_batch_size=4096", "ERROR actor.ppo_mini_batch_size: =1024"),
        ("data.train_batch_size=1023", "ERROR data.train_batch_size: =1024"),
        ("actor.ppo_micro_batch_size_per_gpu=null", "ERROR actor.ppo_micro_batch_size_per_gpu: =1"),
        ("actor.ppo_micro_batch_size=2", "ERROR actor.ppo_micro_batch_size: =null"),
        ("model.lora_rank=-1",),
        ("async_training={}; actor.ppo_mini_batch_size=4096",),
    ],
    (remarks.warn_level_version, "0.9.1"): [
        ("",),
        ("weight.level=version", "NOTE level"),
        ("weight.level=version; asynchronous",),
    ],
    (remarks.warn_wide_caps, "0.9.1"): [
        ("weight.upper=10",),
        ("weight.upper=10.5", "NOTE weight.upper: =2.0"),
        ("weight.upper=null; weight.lower=0.5; weight.kind=reject", "NOTE weight.upper: =2.0"),
        ("weight.level=sequence; weight.upper=11", "NOTE weight.upper: =5.0"),
        ("token weight of verl's; verl.rollout_is_threshold=25", "NOTE verl.rollout_is_threshold: =2.0"),
        ("verl.rollout_is_threshold=25",),
    ],
    (remarks.warn_short_answers, "0.9.1"): [
        ("",),
        ("short answers", "NOTE masks.gsm.upper"),
        ("short answers; rollout.dtype=float32",),
        ("short answers; asynchronous",),
        ("short answers; masks.gsm.lower=0.95; masks.gsm.upper=1.05",),
        ("data.max_response_length=32; masks.gsm.lower=0.98; masks.gsm.upper=1.02", "NOTE masks.gsm.upper"),
        ("short answers; masks.gsm.ratio=ppo",),
    ],
    (remarks.warn_no_staleness, "0.9.1"): [
        ("one gradient step",),
        (
            "one gradient step; "
            "masks.o={ratio: full, level: sequence, aggregate: geometric, delta: 0.1, when: negative}",
            "NO-OP masks.o.ratio: =rollout",
        ),
        ("masks.o={ratio: full, level: sequence, aggregate: geometric, delta: 0.1, when: negative}",),
        (
            "one gradient step; asynchronous; "
            "masks.o={ratio: full, level: sequence, aggregate: geometric, delta: 0.1, when: negative}",
        ),
    ],
    (remarks.warn_unlike_micro_batches, "0.9.1"): [
        ("",),
        ("rollout.log_prob_micro_batch_size_per_gpu=8", "NOTE rollout.log_prob_micro_batch_size_per_gpu: =1"),
        ("actor.use_dynamic_bsz=true",),
        (
            "dynamic; rollout.log_prob_max_token_len_per_gpu=200",
            "NOTE rollout.log_prob_max_token_len_per_gpu: =16384",
        ),
        (
            "dynamic; rollout.log_prob_max_token_len_per_gpu=200; actor.strategy=megatron",
            "NOTE rollout.log_prob_max_token_len_per_gpu: =16384",
        ),
        ("uncorrected; rollout.log_prob_micro_batch_size_per_gpu=8",),
        ("rollout.log_prob_micro_batch_size_per_gpu=8; our bypass; uncorrected",),
        ("rollout.log_prob_micro_batch_size_per_gpu=null",),
    ],
    (remarks.warn_kl_left_out, "0.9.1"): [
        ("",),
        ("KL loss", "NOTE actor.use_kl_loss: ++correction.kl_clip={lower: 0.8, upper: 1.2}"),
        ("KL loss; one gradient step", "NOTE actor.use_kl_loss"),
        ("KL loss; actor.kl_loss_coef=0",),
        ("KL loss; a clip",),
        ("KL loss; uncorrected; token weight of verl's", "NOTE actor.use_kl_loss"),
        ("KL loss; uncorrected; verl.rollout_rs=token_k1; verl's bypass", "NOTE actor.use_kl_loss"),
        ("KL loss; uncorrected; verl.rollout_rs=token_k1",),
        ("uncorrected; verl's bypass; KL in reward", "NOTE algorithm.use_kl_in_reward: =false; actor.use_kl_loss=true"),
        ("KL in reward",),
    ],
    (remarks.warn_collapsed_rewards, "0.9.1"): [
        ("grpo; algorithm.gamma=0.9", "NOTE algorithm.gamma: =1.0"),
        ("grpo; algorithm.lam=0.9", "NOTE algorithm.lam: =1.0"),
        ("grpo; KL in reward", "NOTE algorithm.use_kl_in_reward: =false; actor.use_kl_loss=true"),
        ("grpo; KL in reward; algorithm.kl_ctrl.kl_coef=0",),
        ("algorithm.adv_estimator=gae; algorithm.gamma=0.9",),
    ],
    (remarks.warn_not_shown, "0.9.1"): [
        ("what was run",),
        (
            "trainer.device=npu; algorithm.adv_estimator=optimal_token_baseline",
            "NOTE trainer.device",
            "NOTE algorithm.adv_estimator",
        ),
        ("what was run; rollout.name=sglang", "NOTE rollout.name"),
        ("what was run; rollout.name=mine", "NOTE rollout.name"),
        ("what was run; megatron.context_parallel_size=2", "NOTE megatron.context_parallel_size"),
        ("what was run; actor.ulysses_sequence_parallel_size=4", "NOTE actor.ulysses_sequence_parallel_size"),
        ("what was run; model.use_fused_kernels=true", "NOTE model.use_fused_kernels"),
        ("what was run; model.lora_rank=32",),
        ("what was run; model.lora_rank=32; V0", "NOTE model.lora_rank"),
        ("what was run; model.lora_rank=32; V0; model.lora.merge=true",),
        ("what was run; model.lora_rank=32; V0; model.lora.merge=true; async_training={}", "NOTE model.lora_rank"),
        ("what was run; rollout.quantization=fp8", "NOTE rollout.quantization"),
        ("what was run; vllm.kv_cache_dtype=fp8_e5m2", "NOTE vllm.kv_cache_dtype"),
        ("what was run; rollout.expert_parallel_size=8", "NOTE rollout.expert_parallel_size"),
        ("what was run; uncorrected; rollout.quantization=fp8",),
        ("what was run; rollout.pipeline_model_parallel_size=1",),
    ],
    (remarks.warn_not_shown, "0.7.1"): [
        ("what was run; legacy worker; actor.ulysses_sequence_parallel_size=4",),
    ],
    (verl_correction.check_not_both, "0.9.1"): [
        ("",),
        ("token weight of verl's", "ERROR verl.rollout_is: =null"),
        ("verl.rollout_is=sequence", "ERROR verl.rollout_is"),
        (
            "token weight of verl's; verl.rollout_is_threshold=3.0",
            "ERROR verl.rollout_is: =null",
            "ERROR verl.rollout_is_threshold: =2.0; weight.upper=3.0",
        ),
        ("verl.rollout_is_threshold=3.0", "ERROR verl.rollout_is_threshold: =2.0; weight.upper=3.0"),
        ("verl.rollout_is_threshold=null",),
        ("verl's bypass", "ERROR verl.bypass_mode"),
        ("verl.new=1", "ERROR verl.new"),
        (
            "verl.rollout_rs=seq_mean_k1; verl.rollout_rs_threshold='0.99_1.01'",
            "ERROR verl.rollout_rs",
            "ERROR verl.rollout_rs_threshold",
        ),
        ("uncorrected; token weight of verl's",),
        ("correction.weight=null; token weight of verl's", "ERROR verl.rollout_is"),
    ],
    (verl_correction.check_trainer_mode, "0.9.1"): [
        ("asynchronous",),
        ("asynchronous; V0", "NO-OP v1.trainer_mode: ++trainer.use_v1=true"),
        ("V0",),
    ],
    (verl_correction.check_former_names, "0.9.1"): [
        (
            "uncorrected; verl.rollout_token_veto_threshold=0.0001",
            "NO-OP verl.rollout_token_veto_threshold: ~verl.rollout_token_veto_threshold",
        ),
        (
            "uncorrected; verl.rollout_is_threshold_lower=0.5",
            "NO-OP verl.rollout_is_threshold_lower: ~verl.rollout_is_threshold_lower",
        ),
        ("uncorrected; verl.rollout_si=token", "NO-OP verl.rollout_si: ~verl.rollout_si; verl.rollout_is=token"),
        ("uncorrected; verl.veto=1", "NO-OP verl.veto: ~verl.veto"),
        ("verl.veto=1",),
        (
            "uncorrected; algorithm.rollout_is_threshold=2.0",
            "NO-OP algorithm.rollout_is_threshold: ~algorithm.rollout_is_threshold; verl.rollout_is_threshold=2.0",
        ),
        (
            "uncorrected; algorithm.rollout_is=true",
            "NO-OP algorithm.rollout_is: ~algorithm.rollout_is; verl.rollout_is=token",
        ),
        (
            "uncorrected; algorithm.rollout_is_level=token",
            "NO-OP algorithm.rollout_is_level: ~algorithm.rollout_is_level; verl.rollout_is=token",
        ),
        (
            "uncorrected; actor.tis_imp_ratio_cap=3.0",
            "NO-OP actor.tis_imp_ratio_cap: ~actor.tis_imp_ratio_cap; verl.rollout_is=token; "
            "verl.rollout_is_threshold=3.0",
        ),
        (
            "uncorrected; algorithm.rollout_is_mode=truncate",
            "NO-OP algorithm.rollout_is_mode: ~algorithm.rollout_is_mode",
        ),
        (
            "algorithm.rollout_is_threshold=3.0",
            "NO-OP algorithm.rollout_is_threshold: ~algorithm.rollout_is_threshold; weight.upper=3.0",
        ),
        ("algorithm.rollout_is_level=token", "NO-OP algorithm.rollout_is_level: ~algorithm.rollout_is_level"),
        ("algorithm.rollout_is_veto_threshold=0.1", "NO-OP algorithm.rollout_is_veto_threshold"),
        ("correction.weight=null; algorithm.rollout_is_level=token", "NO-OP algorithm.rollout_is_level"),
    ],
    (verl_correction.check_decoupled, "0.9.1"): [
        ("uncorrected; verl.loss_type=reinforce", "NO-OP verl.loss_type"),
        ("uncorrected; verl.rollout_is_threshold=3.0", "NO-OP verl.rollout_is_threshold"),
        ("uncorrected; verl.rollout_is_batch_normalize=true", "NO-OP verl.rollout_is_batch_normalize"),
        ("uncorrected; verl.rollout_rs_threshold='0.5_2.0'", "NO-OP verl.rollout_rs_threshold"),
        (
            "uncorrected; token weight of verl's; verl.rollout_is_threshold=null",
            "NO-OP verl.rollout_is_threshold: =2.0",
        ),
        ("uncorrected; token weight of verl's; no mu", "NO-OP rollout.calculate_log_probs: =true"),
        ("uncorrected; token weight of verl's; verl.rollout_is_threshold='0.5_2.0'",),
        ("verl.rollout_is_threshold=3.0",),
        ("uncorrected; token weight of verl's",),
    ],
    (verl_correction.check_decoupled, "0.7.1"): [
        (
            "uncorrected; V0; token weight of verl's; verl.rollout_is_threshold='0.5_2.0'",
            "ERROR verl.rollout_is_threshold",
        ),
    ],
    (verl_correction.check_bypass, "0.9.1"): [
        ("uncorrected; verl's bypass",),
        (
            "uncorrected; verl's bypass; verl.rollout_rs=seq_mean_k1; verl.rollout_rs_threshold='0.99_1.01'",
            "NO-OP verl.rollout_rs: actor.policy_loss.loss_mode=bypass_mode; "
            "++actor.policy_loss.rollout_correction.rollout_rs=seq_mean_k1; "
            '++actor.policy_loss.rollout_correction.rollout_rs_threshold="0.99_1.01"',
            "NO-OP verl.rollout_rs_threshold: actor.policy_loss.loss_mode=bypass_mode; "
            "++actor.policy_loss.rollout_correction.rollout_rs=seq_mean_k1; "
            '++actor.policy_loss.rollout_correction.rollout_rs_threshold="0.99_1.01"',
        ),
        (
            "uncorrected; verl's bypass; verl.loss_type=reinforce",
            "NO-OP verl.loss_type: actor.policy_loss.loss_mode=bypass_mode; "
            "++actor.policy_loss.rollout_correction.loss_type=reinforce",
        ),
        (
            "uncorrected; verl's bypass; verl.loss_type=reinforce; V0",
            "NO-OP verl.loss_type: actor.policy_loss.loss_mode=bypass_mode; "
            "++actor.policy_loss.rollout_correction.loss_type=reinforce",
        ),
        (
            "uncorrected; verl's bypass; bypass's loss",
            "ERROR verl.rollout_is: ++actor.policy_loss.rollout_correction.rollout_is=null",
        ),
        (
            "uncorrected; verl's bypass; bypass's loss; "
            "actor.policy_loss.rollout_correction.loss_type=reinforce; verl.loss_type=reinforce",
        ),
        (
            "uncorrected; verl's bypass; bypass's loss; "
            "actor.policy_loss.rollout_correction.loss_type=reinforce; verl.loss_type=reinforce; "
            "verl.rollout_rs=token_k1",
            "ERROR verl.rollout_rs: ++actor.policy_loss.rollout_correction.rollout_rs=token_k1",
        ),
        ("uncorrected; bypass's loss", "ERROR actor.policy_loss.loss_mode: verl.bypass_mode=true"),
        (
            "uncorrected; actor.policy_loss.rollout_correction.rollout_is=token",
            "NO-OP actor.policy_loss.rollout_correction",
        ),
        ("verl's bypass; verl.loss_type=reinforce",),
    ],
    (verl_correction.check_legacy_mu, "0.9.1"): [
        ("uncorrected; actor.use_rollout_log_probs=true", "NO-OP actor.use_rollout_log_probs"),
        ("uncorrected; actor.use_rollout_log_probs=true; async_training={require_batches: 4}; V0",),
    ],
    (verl_correction.check_legacy_mu, "0.7.1"): [
        ("uncorrected; legacy worker; actor.use_rollout_log_probs=true",),
        (
            "uncorrected; verl's bypass; legacy worker; one gradient step",
            "NO-OP verl.bypass_mode: ++actor.use_rollout_log_probs=true",
        ),
        ("uncorrected; verl's bypass; legacy worker",),
        ("uncorrected; verl's bypass; legacy worker; one gradient step; actor.use_rollout_log_probs=true",),
    ],
    (verl_correction.check_misplaced, "0.9.1"): [
        (
            "uncorrected; algorithm.rollout_corection.rollout_is=asked",
            "ERROR algorithm.rollout_corection.rollout_is: ~algorithm.rollout_corection.rollout_is; "
            "verl.rollout_is=asked",
        ),
        (
            "uncorrected; algorithm.Rollout_Correction.rollout_rs=asked",
            "ERROR algorithm.Rollout_Correction.rollout_rs: ~algorithm.Rollout_Correction.rollout_rs; "
            "verl.rollout_rs=asked",
        ),
        (
            "uncorrected; algorithm.rollout_corr.rollout_iss=asked",
            "ERROR algorithm.rollout_corr.rollout_iss: ~algorithm.rollout_corr.rollout_iss; verl.rollout_is=asked",
        ),
        (
            "uncorrected; ^rollout_correction.loss_type=asked",
            "ERROR rollout_correction.loss_type: ~rollout_correction.loss_type; verl.loss_type=asked",
        ),
        (
            "uncorrected; ^actor_rollout_ref.rollout_correction.bypass_mode=asked",
            "ERROR actor_rollout_ref.rollout_correction.bypass_mode: "
            "~actor_rollout_ref.rollout_correction.bypass_mode; "
            "verl.bypass_mode=asked",
        ),
        ("uncorrected; trainer.rolout_is=asked", "ERROR trainer.rolout_is: ~trainer.rolout_is; verl.rollout_is=asked"),
        (
            "uncorrected; ^rollout_rs_treshold=asked",
            "ERROR rollout_rs_treshold: ~rollout_rs_treshold; verl.rollout_rs_threshold=asked",
        ),
        (
            "uncorrected; algorithm.policy_loss.loss_mode=asked",
            "ERROR algorithm.policy_loss.loss_mode: ~algorithm.policy_loss.loss_mode; "
            "actor.policy_loss.loss_mode=asked",
        ),
        ("uncorrected; ^loss_mode=asked", "ERROR loss_mode: ~loss_mode; actor.policy_loss.loss_mode=asked"),
        ("",),
        ("algorithm.rollout_corection.rollout_is=token", "ERROR algorithm.rollout_corection.rollout_is"),
        ("ray_kwargs.ray_init.rollout_is=1; trainer.rollout=1",),
        ("uncorrected; algorithm.rollout_corection.veto=1", "ERROR algorithm.rollout_corection.veto"),
        ("length_penalty={rollout_is: token}",),
    ],
    (verl_correction.check_thresholds, "0.9.1"): [
        (
            "uncorrected; verl.rollout_rs=seq_mean_k1; verl.rollout_rs_threshold='0.999_1.01'",
            'ERROR verl.rollout_rs_threshold: ="0.990099_1.001"',
        ),
        (
            "uncorrected; verl.rollout_rs=seq_mean_k1; verl.rollout_rs_threshold='0.99_1.001'",
            "NOTE verl.rollout_rs_threshold",
        ),
        ("uncorrected; verl.rollout_rs=token_k1; verl.rollout_rs_threshold='0.5_2.0'",),
        (
            "uncorrected; verl.rollout_rs='token_k1,seq_mean_k1'; verl.rollout_rs_threshold='0.5_2.0,0.9_1.5'",
            'ERROR verl.rollout_rs_threshold: ="0.5_2.0,0.666667_1.11111"',
        ),
        (
            "uncorrected; verl.rollout_rs=token_k1; verl.rollout_rs_threshold=abc",
            'ERROR verl.rollout_rs_threshold: ="0.5_2.0"',
        ),
        ("uncorrected; token weight of verl's; verl.rollout_is_threshold=abc", "ERROR verl.rollout_is_threshold: =2.0"),
        ("uncorrected; verl.rollout_rs=token_k3; verl.rollout_rs_threshold='0.1'",),
        ("verl.rollout_rs=token_k1; verl.rollout_rs_threshold=abc",),
    ],
    (base_loss.check_base_loss, "0.9.1"): [
        ("",),
        ("actor.policy_loss.loss_mode=geo_mean", "ERROR actor.policy_loss.loss_mode"),
        ("actor.policy_loss.loss_mode=vanila", "ERROR actor.policy_loss.loss_mode: =vanilla"),
        ("actor.ppo_micro_batch_size_per_gpu=null", "ERROR actor.ppo_micro_batch_size_per_gpu: =1"),
        ("actor.ppo_micro_batch_size=2", "ERROR actor.ppo_micro_batch_size_per_gpu: actor.ppo_micro_batch_size=null"),
        ("actor.loss_agg_mode=mean", "ERROR actor.loss_agg_mode"),
        ("actor.loss_agg_mode=token_mean", "ERROR actor.loss_agg_mode: =token-mean"),
        ("actor.policy_loss.no_such=1", "ERROR actor.policy_loss.no_such"),
        (
            "actor.policy_loss.clip_ratio_c=4.0",
            "ERROR actor.policy_loss.clip_ratio_c: ~actor.policy_loss.clip_ratio_c; actor.clip_ratio_c=4.0",
        ),
        (
            "actor.loss_agg_mode=seq-mean-token-sum-norm",
            "ERROR actor.policy_loss.loss_mode: actor.loss_scale_factor=512",
        ),
        ("actor.loss_agg_mode=seq-mean-token-sum-norm; actor.loss_scale_factor=64",),
        ("uncorrected; actor.policy_loss.loss_mode=geo_mean",),
        ("actor.policy_loss.loss_mode=gspo; actor.loss_agg_mode=seq-mean-token-mean",),
        ("actor.optim.lr=-1",),
        ("actor.clip_ratio=-0.2",),
    ],
    (base_loss.check_base_loss_of_verl, "0.9.1"): [
        (
            "uncorrected; token weight of verl's; actor.policy_loss.loss_mode=geo_mean",
            "ERROR actor.policy_loss.loss_mode",
        ),
        ("uncorrected; actor.policy_loss.loss_mode=geo_mean",),
        ("uncorrected; verl's bypass; token weight of verl's; actor.policy_loss.loss_mode=geo_mean",),
        ("token weight of verl's; actor.policy_loss.loss_mode=geo_mean",),
    ],
    (offpolicy_keys.check_own_keys, "0.9.1"): [
        ("",),
        ("offpolicy.recrod=true", "ERROR offpolicy.recrod"),
        ("offpolicy.recrod={dir: /tmp}", "ERROR offpolicy.recrod"),
        ("offpolicy.weight=3.0", "ERROR offpolicy.weight"),
        ("offpolicy.nothing_like_it=1", "ERROR offpolicy.nothing_like_it"),
        ("offpolicy=null", "ERROR offpolicy"),
        ("offpolicy.allow_identical_log_probs=yes", "ERROR offpolicy.allow_identical_log_probs: =false"),
        ("offpolicy.prove_every=-1", "ERROR offpolicy.prove_every: =50"),
        ("offpolicy.opd=loss", "ERROR offpolicy.opd"),
        ("offpolicy.upper=3.0", "ERROR offpolicy.upper"),
    ],
}
"""(check, release of verl) -> overrides, and the problems that it finds with them: verdict, key and fix, in which the
problem's own key is left out."""


LEFT = {"trainer.use_legacy_worker_impl=on"}
"""Of whose fix the installed release takes another one."""


@pytest.fixture(scope="module")
def base() -> Iterator[DictConfig]:
    with application("correction=[tis_token,gsm]", *NEEDED) as config:
        yield config


def in_full(override: str) -> str:
    """Write a key of the table as Hydra takes it."""
    sign, bare = override[: len(override) - len(override.lstrip("+~"))], override.lstrip("+~")
    top, dot, below = bare.partition(".")
    return f"{sign}{bare[1:]}" if bare.startswith("^") else f"{sign}{SHORT.get(top, top) if dot else top}{dot}{below}"


def with_values(config: DictConfig, overrides: list[str]) -> DictConfig:
    """A copy with these overrides, whether the keys are there or not."""
    config = copy_config(config)
    OmegaConf.set_struct(config, False)
    for override in OverridesParser.create().parse_overrides(overrides):
        owner, _, name = override.key_or_group.rpartition(".")
        if override.is_delete():
            del (OmegaConf.select(config, owner) if owner else config)[name]
        else:
            OmegaConf.update(config, override.key_or_group, override.value(), merge=False, force_add=True)
    return config


def compose(base: DictConfig, release: str, overrides: list[str]) -> Composed:
    run = Composed(with_values(base, overrides))
    run.path = live_path(run.config, release)
    return run


def list_overrides(words: str) -> list[str]:
    return [in_full(each) for word in words.split("; ") for each in NAMED.get(word, word).split("; ") if each]


def read_expected(written: str) -> tuple[str, str, tuple[str, ...]]:
    head, _, fixes = written.partition(": ")
    verdict, key = head.split(" ", 1)
    key = in_full(key)
    written_out = (f"{key}{each}" if each.startswith("=") else in_full(each) for each in fixes.split("; ") if each)
    return verdict, key, tuple(written_out)


@pytest.mark.parametrize(("check", "release"), CASES, ids=[f"{check.__name__}-{release}" for check, release in CASES])
def test_the_verdicts_of_a_check(check: Check, release: str, base: DictConfig) -> None:
    for words, *expected in CASES[check, release]:
        found = list(check(compose(base, release, list_overrides(words))))
        assert [(each.verdict, each.key, each.overrides) for each in found] == list(map(read_expected, expected)), words


@pytest.mark.slow
@pytest.mark.parametrize(("check", "release"), CASES, ids=[f"{check.__name__}-{release}" for check, release in CASES])
def test_what_fixes_a_problem_leaves_none_of_its_key(check: Check, release: str, base: DictConfig) -> None:
    for words, *_ in CASES[check, release]:
        run = compose(base, release, list_overrides(words))
        for problem in check(run):
            assert problem.reason.endswith("."), words
            if problem.overrides and words not in LEFT and problem.key != SHADOW:  # which takes names in a launch
                fixed = compose(run.config, release, list(problem.overrides))
                assert [
                    each for each in check(fixed) if (each.key, each.verdict) == (problem.key, problem.verdict)
                ] == [], words


def test_every_check_of_a_launch_is_in_the_table() -> None:
    inside = {replay.check_router_replay, verl_correction.check_trainer_mode, verl_correction.check_former_names}
    inside |= {verl_correction.check_decoupled, verl_correction.check_bypass, verl_correction.check_legacy_mu}
    inside |= {verl_correction.check_misplaced, run_keys.check_by_verl}
    elsewhere = {path.check_seams, path.check_lora, run_keys.check_resume, run_keys.check_folders, rollout.check_bucket}
    elsewhere |= {
        replay.check_model_runner,
        rollout.check_agent_loops,
        offpolicy_keys.check_extensions,
        offpolicy_keys.warn_extensions,
    }
    asked = {check for check, _ in CASES} - inside | elsewhere | {verl_correction.check_dead_keys}
    assert asked == {*CHECKS, *REMARKS}
