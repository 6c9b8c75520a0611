"""verl 0.9.1's real Megatron engine with a mixture of experts and routing replay, in one rank on a CPU: MODEL OUT.

Each case writes the report of an update, or its error. Micro-batches of one row, all of one length, are the only ones
in which padded tokens are laid out like packed ones; packed sequences need Transformer Engine's attention, and
therefore a GPU.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import verl  # noqa: F401  before Megatron: it loads the patches
from tests.support import replaying_worker as rw
from tests.support import training_worker as tw
from tests.support.megatron_parts import LOCAL_LAYERS

ROWS, PROMPT, WIDTH = 4, 4, 6
MIXTURE = {"moe_token_dispatcher_type": "alltoall", "moe_grouped_gemm": False, "moe_permute_fusion": False}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def without_cuda() -> None:
    """Skip what Megatron's mixture of experts needs CUDA for; the drawn weights are kept."""
    import mbridge.core.bridge
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher as Dispatcher

    moe_utils.te_general_gemm = None
    Dispatcher.cuda_dtoh_stream = object()
    Dispatcher._maybe_dtoh_and_synchronize = lambda self, point, tokens_per_expert=None: tokens_per_expert
    mbridge.core.bridge.Bridge.load_weights = lambda self, *args, **kwargs: None


def start(model: Path) -> Any:
    """Start the worker and record its routes."""
    from recipe.offpolicy.replay.megatron_engine import watch_actor
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig
    from verl.workers.config.engine import EngineRouterReplayConfig
    from verl.workers.engine_workers import TrainingWorker, TrainingWorkerConfig

    engine = McoreEngineConfig(
        vanilla_mbridge=True,
        use_remove_padding=False,
        router_replay=EngineRouterReplayConfig(mode="R3"),
        override_transformer_config={**LOCAL_LAYERS, **MIXTURE, **RECOMPUTED},
    )
    object.__setattr__(engine, "dtype", "float32")
    worker = TrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=HFModelConfig(path=str(model), use_remove_padding=False),
            engine_config=engine,
            optimizer_config=McoreOptimizerConfig(lr=0.0, total_training_steps=99, lr_decay_steps=99),
            checkpoint_config=CheckpointConfig(),
        )
    )
    worker.reset()
    worker.watched = watch_actor(SimpleNamespace(actor=worker), "R3")
    return worker


class Cases:
    """Updates of one worker."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker

    def rollout(self, width: int = WIDTH) -> tw.Rollout:
        """Draw rows of one length; the last rows are shorter if ``width`` says so."""
        made = tw.make_rollout(ROWS)
        generator = torch.Generator().manual_seed(1)
        sizes = [WIDTH] * (ROWS - 1) + [width]
        made.prompts = [torch.randint(3, tw.VOCABULARY, (PROMPT,), generator=generator) for _ in sizes]
        made.responses = [torch.randint(3, tw.VOCABULARY, (size,), generator=generator) for size in sizes]
        made.response_mask = [torch.ones(size, dtype=torch.int64) for size in sizes]
        made.advantages = [torch.ones(size) for size in sizes]
        made.old_log_probs = [torch.zeros(size) for size in sizes]
        return made

    def set_mode(self, mode: str) -> None:
        self.worker.watched.mode = mode
        object.__setattr__(self.worker.engine.engine_config.router_replay, "mode", mode)

    def tell(self, data: Any) -> Any:
        from verl.utils import tensordict_utils as tu

        tu.assign_non_tensor(
            data,
            calculate_entropy=False,
            compute_loss=False,
            temperature=1.0,
            global_token_num=None,
            global_batch_size=ROWS,
            mini_batch_size=ROWS,
            epochs=1,
            seed=1,
            dataloader_kwargs={"shuffle": False},
            use_dynamic_bsz=False,
            micro_batch_size_per_gpu=1,
            enable_routing_replay=True,
        )
        return data

    def update(self, mode: str, width: int = WIDTH) -> dict[str, Any]:
        """Run an update with the trainer's own routes or with drawn routes."""
        from recipe.offpolicy.batch.plan import take_reports
        from recipe.offpolicy.replay.megatron_engine import REPORT
        from verl.workers.config import McoreActorConfig
        from verl.workers.utils.losses import ppo_loss

        self.set_mode(mode)
        rows = self.rollout(width)
        data = rows.to_tensordict()
        if mode == "R2":
            data["routed_experts"] = self.worker.infer_batch(self.tell(rows.to_tensordict()))["routed_experts"]
        else:
            data = rw.with_routes(data, rw.draw_routes(sum(len(row) for row in rows.responses) + ROWS * PROMPT))
        config = McoreActorConfig(ppo_mini_batch_size=ROWS, ppo_micro_batch_size_per_gpu=1, rollout_n=1)
        self.worker.set_loss_fn(partial(ppo_loss, config=config))
        try:
            output = self.worker.train_mini_batch(self.tell(data))
        except Exception as error:
            self.worker.engine.optimizer_zero_grad()
            return {"error": f"{type(error).__name__}: {error}"}
        (report,) = take_reports(output["metrics"], REPORT)
        return asdict(report)


def spoil(owner: Any, name: str, how: Callable[[Any], Any], run: Callable[[], Any]) -> Any:
    """Run with one of verl's functions replaced."""
    original = getattr(owner, name)
    setattr(owner, name, how(original))
    try:
        return run()
    finally:
        setattr(owner, name, original)


def turned_layers(original: Any) -> Any:
    def scatter(routes: Any, *args: Any, **kwargs: Any) -> Any:
        turned = torch.nested.nested_tensor_from_jagged(routes.values().flip(1), routes.offsets())
        return original(turned, *args, **kwargs)

    return scatter


def native(original: Any) -> Any:
    def choose(self: Any, scores: Any, topk: Any, num_groups: Any, group_topk: Any, default_compute_topk: Any) -> Any:
        return default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)

    return choose


def other_backward(original: Any) -> Any:
    def keep(self: Any, topk_indices: Any, replay_mask: Any = None) -> None:
        original(self, topk_indices, replay_mask)
        self.replay_backward_list[-1] = (topk_indices + 1) % rw.EXPERTS

    return keep


def main(model: Path, out: Path) -> None:
    tw.join_process_group()
    torch.distributed.init_process_group("gloo")
    from megatron.core import parallel_state as mpu
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from verl.utils.megatron.router_replay_patch import RouterReplay
    from verl.workers.engine.megatron import transformer_impl

    mpu.initialize_model_parallel(1, 1)
    model_parallel_cuda_manual_seed(0, force_reset_rng=True)
    without_cuda()
    cases = Cases(start(model))
    r3 = partial(cases.update, "R3")
    found = {
        "R2": cases.update("R2"),
        "R3": r3(),
        "other layers": spoil(transformer_impl, "set_router_replay_data", turned_layers, r3),
        "native": spoil(RouterReplay, "get_replay_topk", native, r3),
        "other backward": spoil(RouterReplay, "set_target_indices", other_backward, r3),
        "padded": cases.update("R2", WIDTH - 2),
    }
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
