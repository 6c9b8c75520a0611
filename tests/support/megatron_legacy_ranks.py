"""verl 0.7.1's real MegatronPPOActor in float32: megatron_legacy_ranks.py MODEL OUT PLAN, see megatron_program.py.

The optimizer does not step, so all updates begin at the model's weights.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

import verl  # noqa: F401  before Megatron: it loads the patches
from tests.support.megatron_parts import LOCAL_LAYERS, in_every_layout, loss_settings, share, whole_gradients
from tests.support.megatron_program import Job, Layout, Seen
from tests.support.parity_case import ROWS, TEMPERATURE, Case
from tests.support.parity_paths import Witness


class Legacy:
    """The actor's model in this rank, built as verl's Megatron worker builds it, but in float32."""

    def __init__(self, folder: Path, layout: Layout) -> None:
        from transformers import AutoConfig

        from verl.models.mcore.mbridge import AutoBridge
        from verl.utils.megatron_utils import McoreModuleWrapperConfig, make_megatron_module

        self.layout = layout
        self.case = Case.of(folder)
        self.hf_config = AutoConfig.from_pretrained(folder)
        self.bridge = AutoBridge.from_config(self.hf_config, dtype=torch.float32)
        self.bridge.set_extra_args(**LOCAL_LAYERS)
        wrapped = McoreModuleWrapperConfig(share_embeddings_and_output_weights=False, wrap_with_ddp=True)
        self.module, self.tf_config = make_megatron_module(
            wrapped, self.bridge.config, self.hf_config, self.bridge, override_ddp_config={"grad_reduce_in_fp32": True}
        )
        self.bridge.load_weights(self.module, str(folder))

    def __call__(self, job: Job) -> Seen:
        """Call ``make_minibatch_iterator`` and ``update_policy`` as the worker does."""
        import verl_patches
        from recipe.offpolicy.worker.metrics import take_packets
        from verl.workers.actor import megatron_actor  # noqa: F401

        if job.patched:
            verl_patches.install("legacy")
        witness = Witness(self.case.with_teacher(job.distilled))
        witness.register()
        actor, seen = self._actor(job), Seen()
        actor.actor_optimizer.step = lambda: (
            seen.gradients.append(whole_gradients(self.module, self.bridge)) or (True, 0.0, 0)
        )
        try:
            metrics = actor.update_policy(dataloader=actor.make_minibatch_iterator(data=self._data(job)))
        except Exception as error:
            seen.error = f"{type(error).__name__}: {error}"
            return seen
        seen.packets = take_packets(metrics)
        seen.factors, seen.losses = witness.factors, witness.losses
        return seen

    def _actor(self, job: Job) -> Any:
        from megatron.core.optimizer import OptimizerConfig

        from verl.utils.megatron.optimizer import get_megatron_optimizer
        from verl.utils.megatron_utils import register_megatron_training_hooks
        from verl.workers.actor.megatron_actor import MegatronPPOActor
        from verl.workers.config import McoreActorConfig, McoreEngineConfig

        values = loss_settings(job) | dict(
            ppo_mini_batch_size=ROWS // self.layout.data // job.mini_batches,
            ppo_micro_batch_size_per_gpu=job.micro_rows,
            rollout_n=1,
            use_dynamic_bsz=job.tokens is not None,
            ppo_max_token_len_per_gpu=job.tokens or 16384,
            megatron=McoreEngineConfig(
                use_remove_padding=False,
                tensor_model_parallel_size=self.layout.tensor,
                pipeline_model_parallel_size=self.layout.pipeline,
                virtual_pipeline_model_parallel_size=self.layout.stages,
            ),
        )
        optimizer_config = OptimizerConfig(lr=1.0, params_dtype=torch.float32, use_distributed_optimizer=True)
        optimizer = get_megatron_optimizer(model=self.module, config=optimizer_config)
        register_megatron_training_hooks(self.module, optimizer)
        config = McoreActorConfig(**(values | job.config))
        return MegatronPPOActor(config, None, self.hf_config, self.tf_config, self.module, optimizer)

    def _data(self, job: Job) -> Any:
        """This rank's rows, with the handover for all rows."""
        from recipe.offpolicy.worker.legacy_loss import Handover
        from verl import DataProto
        from verl_patches.legacy.handover import HANDOVER

        spec, plan, columns = share(self.case, job, self.layout)
        meta: dict[str, Any] = {"temperature": TEMPERATURE, "micro_batch_size": job.micro_rows}
        if job.correction is not None:
            extensions = self.case.with_teacher(job.distilled).extensions
            meta[HANDOVER] = Handover(spec, plan, job.prove, extensions=extensions)
        return DataProto.from_dict(columns, meta_info=meta)


if __name__ == "__main__":
    in_every_layout(Legacy, *sys.argv[1:])
