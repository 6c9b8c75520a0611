"""verl's training worker in this process: FSDP2 on gloo, batches in the V1 trainer's layout, the recipe's loss."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from recipe.offpolicy.batch.plan import PLAN, SharedPlan, compute_constants
from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.worker.loss import OffPolicyLoss
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPActorConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine_workers import TrainingWorker, TrainingWorkerConfig
from verl.workers.utils.padding import response_from_nested


@dataclass
class SampledRows:
    """Rows as they were sampled: lists of (length,) tensors, one a row."""

    prompts: Sequence[Tensor]
    responses: Sequence[Tensor]
    advantages: Sequence[Tensor]
    log_mu: Sequence[Tensor]
    pi_old: Sequence[Tensor] = ()

    def to_tensordict(self) -> TensorDict:
        """Lay the rows out as the V1 trainer does."""
        masks = [torch.ones(len(row), dtype=torch.int64) for row in self.responses]
        whole = [torch.cat(pair) for pair in zip(self.prompts, self.responses, strict=True)]
        columns = {
            "prompts": self.prompts,
            "responses": self.responses,
            "response_mask": masks,
            "loss_mask": masks,
            "input_ids": whole,
            "position_ids": [torch.arange(len(row)) for row in whole],
            "advantages": self.advantages,
            "rollout_log_probs": self.log_mu,
        }
        if self.pi_old:
            columns["old_log_probs"] = self.pi_old
        nested = {
            name: torch.nested.as_nested_tensor(list(rows), layout=torch.jagged) for name, rows in columns.items()
        }
        return TensorDict(nested, batch_size=len(whole))


def join_process_group() -> None:
    """Set what Ray sets for the only worker."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def build_actor_config(rate: float, *, prompts: int, rollouts: int) -> FSDPActorConfig:
    """Build verl's ActorConfig of a mini-batch of so many prompts."""
    precision = {"param_dtype": "float32", "reduce_dtype": "float32", "buffer_dtype": "float32"}
    return FSDPActorConfig(
        strategy="fsdp2",
        ppo_mini_batch_size=prompts,
        ppo_micro_batch_size_per_gpu=prompts * rollouts,
        rollout_n=rollouts,
        use_torch_compile=False,
        optim=FSDPOptimizerConfig(lr=rate, total_training_steps=10),
        fsdp_config=FSDPEngineConfig(
            strategy="fsdp2",
            dtype="float32",
            model_dtype="float32",
            use_torch_compile=False,
            wrap_policy={"transformer_layer_cls_to_wrap": ["Qwen2DecoderLayer"]},
            mixed_precision=precision,
        ),
    )


class Trainer:
    """One model under training.

    Args:
        model: its folder.
        actor: as ``build_actor_config`` builds it.
    """

    def __init__(self, model: Path, actor: FSDPActorConfig) -> None:
        engine = actor.fsdp_config
        engine.use_dynamic_bsz = False
        engine.micro_batch_size_per_gpu = actor.ppo_micro_batch_size_per_gpu
        self._config = actor
        self._worker = TrainingWorker(
            TrainingWorkerConfig(
                model_type="language_model",
                model_config=HFModelConfig(
                    path=str(model),
                    use_remove_padding=False,
                    enable_gradient_checkpointing=False,
                    override_config={"attn_implementation": "sdpa"},
                ),
                engine_config=engine,
                optimizer_config=actor.optim,
                checkpoint_config=actor.checkpoint,
            )
        )
        self._worker.reset()

    def copy_weights(self) -> dict[str, Tensor]:
        """Copy the weights, by their names in the model."""
        named = self._worker.engine.module.named_parameters()
        return {
            name: (weight.full_tensor() if hasattr(weight, "full_tensor") else weight).detach().clone()
            for name, weight in named
        }

    def compute_log_probs(self, rows: SampledRows) -> list[Tensor]:
        """Compute log-probs of the responses by the engine's own forward pass, a row each."""
        data = rows.to_tensordict()
        self._worker.engine_config.infer_micro_batch_size_per_gpu = len(data)
        tu.assign_non_tensor(data, calculate_entropy=False, compute_loss=False, temperature=1.0, global_token_num=None)
        found = self._worker.infer_batch(data)["log_probs"]
        return list(response_from_nested(found, data["response_mask"]).unbind())

    def update(self, loss: OffPolicyLoss, spec: CorrectionSpec, rows: SampledRows, step: int) -> dict[str, Any]:
        """Train on the rows, in mini-batches of the configured size and in their order; return the worker's metrics."""
        data = rows.to_tensordict()
        tu.assign_non_tensor(data, **{PLAN: SharedPlan(step=step, constants=compute_constants(spec, data))})
        size = self._config.ppo_mini_batch_size * self._config.rollout_n
        tu.assign_non_tensor(
            data,
            calculate_entropy=False,
            global_batch_size=size,
            mini_batch_size=size,
            epochs=1,
            seed=1,
            dataloader_kwargs={"shuffle": False},
            temperature=1.0,
        )
        self._worker.set_loss_fn(loss)
        metrics: dict[str, Any] = self._worker.train_mini_batch(data)["metrics"]
        return metrics
