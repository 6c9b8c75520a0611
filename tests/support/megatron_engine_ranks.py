"""verl 0.9.1's real TrainingWorker with its Megatron engine: megatron_engine_ranks.py MODEL OUT PLAN.

See megatron_program.py. The optimizer does not step, so all updates begin at the model's weights.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import verl  # noqa: F401  before Megatron: it loads the patches
from tests.support.megatron_parts import LOCAL_LAYERS, in_every_layout, loss_settings, share, whole_gradients
from tests.support.megatron_program import Job, Layout, Seen
from tests.support.parity_case import ROWS, TEMPERATURE, Case
from tests.support.parity_paths import Witness


class Engine:
    """The worker of this rank, built as ``ActorRolloutRefWorker.init_model`` builds it."""

    def __init__(self, folder: Path, layout: Layout) -> None:
        from verl.trainer.config import CheckpointConfig
        from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig
        from verl.workers.engine_workers import TrainingWorker, TrainingWorkerConfig

        self.layout = layout
        self.case = Case.of(folder)
        engine = McoreEngineConfig(
            vanilla_mbridge=True,
            use_remove_padding=layout.transformer_engine,
            tensor_model_parallel_size=layout.tensor,
            pipeline_model_parallel_size=layout.pipeline,
            virtual_pipeline_model_parallel_size=layout.stages,
            override_transformer_config={} if layout.transformer_engine else dict(LOCAL_LAYERS),
        )
        # The configuration admits 16 bits alone, the engine behind it any type.
        object.__setattr__(engine, "dtype", layout.dtype)
        self.worker = TrainingWorker(
            TrainingWorkerConfig(
                model_type="language_model",
                model_config=HFModelConfig(path=str(folder), use_remove_padding=layout.transformer_engine),
                engine_config=engine,
                optimizer_config=McoreOptimizerConfig(lr=1e-2, total_training_steps=10, lr_decay_steps=10),
                checkpoint_config=CheckpointConfig(),
            )
        )
        self.worker.reset()

    def __call__(self, job: Job) -> Seen:
        """Call ``set_loss_fn`` and ``train_mini_batch`` as the trainer does."""
        from recipe.offpolicy.worker.loss import OffPolicyLoss
        from recipe.offpolicy.worker.metrics import take_packets
        from verl.workers.config import McoreActorConfig

        case = self.case.with_teacher(job.distilled)
        witness = Witness(case)
        witness.register()
        seen, engine = Seen(), self.worker.engine
        config = McoreActorConfig(
            ppo_mini_batch_size=ROWS,
            ppo_micro_batch_size_per_gpu=job.micro_rows,
            rollout_n=1,
            **(loss_settings(job) | job.config),
        )
        spec, data = self._data(job)
        self.worker.set_loss_fn(OffPolicyLoss(spec, config, prove=job.prove, extensions=case.extensions))
        engine.optimizer_step = lambda: seen.gradients.append(whole_gradients(engine.module, engine.bridge)) or 0.0
        try:
            output = self.worker.train_mini_batch(data)
        except Exception as error:
            seen.error = f"{type(error).__name__}: {error}"
            return seen
        # The worker answers on the ranks that verl collects from.
        seen.packets = take_packets(output["metrics"]) if output is not None else []
        seen.factors, seen.losses = witness.factors, witness.losses
        return seen

    def _data(self, job: Job) -> tuple[Any, Any]:
        from recipe.offpolicy.batch.plan import PLAN
        from verl import DataProto
        from verl.utils import tensordict_utils as tu
        from verl.workers.utils.padding import left_right_2_no_padding

        spec, plan, columns = share(self.case, job, self.layout)
        data = left_right_2_no_padding(DataProto.from_dict(columns, meta_info={PLAN: plan}).to_tensordict())
        size = ROWS // job.mini_batches
        tu.assign_non_tensor(
            data,
            calculate_entropy=True,
            temperature=TEMPERATURE,
            global_batch_size=size,
            mini_batch_size=size,
            epochs=1,
            seed=1,
            dataloader_kwargs={"shuffle": False},
            use_dynamic_bsz=job.tokens is not None,
            max_token_len_per_gpu=job.tokens or 16384,
            micro_batch_size_per_gpu=job.micro_rows,
        )
        return spec, data


if __name__ == "__main__":
    in_every_layout(Engine, *sys.argv[1:])
