"""A real verl TrainingWorker in this process: FSDP2 on gloo, a tiny Qwen2, and micro-batches as the V1 trainer ships
them.

The worker, its engine, its loss call and its backward pass are verl's own; only the data are generated here.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tensordict import NonTensorStack, TensorDict

from tests.support.paths import ROOT

VOCABULARY = 32
Gradients = dict[str, torch.Tensor]
LAYOUTS: list[dict[str, Any]] = [
    {"strategy": "fsdp2", "use_remove_padding": False},
    {"strategy": "fsdp2", "use_remove_padding": True, "checkpointing": True},
    {"strategy": "fsdp", "use_remove_padding": True},
]
"""Settings of ``start_worker``: engines with padded and with packed rows."""


def save_tokenizer(folder: Path) -> None:
    """Save a tokenizer with one word per id of the vocabulary."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t0")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), eos_token="t1", pad_token="t2")
    tokenizer.save_pretrained(folder)


def tiny_model(folder: Path) -> Path:
    """A two-layer float32 Qwen2 with random weights, saved with its own tokenizer."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    save_tokenizer(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        initializer_range=0.2,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def join_process_group(rank: int = 0, world_size: int = 1, port: int | None = None) -> None:
    """Set by hand the variables that Ray sets for a worker."""
    if port is None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )


def run_two_ranks(kind: str, model: Path, out: Path) -> Any:
    """Run two ranks in new processes, and return what the first rank found; see two_ranks.py."""
    command = [sys.executable, "-m", "tests.support.two_ranks", kind, str(model), str(out)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return torch.load(out / "ranks.pt", weights_only=False)


def actor_config(*, strategy: str = "fsdp2", offload: bool = False, **changes: Any) -> Any:
    """verl's ActorConfig with a fixed global batch; ``changes`` are its fields."""
    from verl.workers.config import FSDPActorConfig, FSDPEngineConfig, FSDPOptimizerConfig

    values: dict[str, Any] = dict(
        strategy=strategy,
        ppo_mini_batch_size=8,
        ppo_micro_batch_size_per_gpu=8,
        rollout_n=1,
        use_torch_compile=False,
        optim=FSDPOptimizerConfig(lr=1e-2, total_training_steps=10),
        fsdp_config=FSDPEngineConfig(
            strategy=strategy,
            dtype="float32",
            model_dtype="float32",
            param_offload=offload,
            optimizer_offload=offload,
            use_torch_compile=False,
            # Under FSDP1, parameters by their own names, so that gradients can be compared by name.
            use_orig_params=True,
            # verl before 0.9 looks for it in a place that newer releases of transformers hold a set in.
            wrap_policy={"transformer_layer_cls_to_wrap": ["Qwen2DecoderLayer"]},
            mixed_precision={"param_dtype": "float32", "reduce_dtype": "float32", "buffer_dtype": "float32"},
        ),
    )
    return FSDPActorConfig(**(values | changes))


def start_worker(
    model: Path,
    *,
    strategy: str = "fsdp2",
    use_remove_padding: bool = False,
    attention: str = "sdpa",
    precision: str = "float32",
    offload: bool = False,
    checkpointing: bool = False,
    layer: str = "Qwen2DecoderLayer",
    kind: type | None = None,
    **model_keys: Any,
) -> Any:
    """The worker with its engine initialised, as ``ActorRolloutRefWorker.init_model`` builds it.

    ``precision`` is that of the forward pass; ``offload`` keeps weights and optimizer in host memory between calls;
    ``kind`` is a subclass of verl's TrainingWorker, ``layer`` the class of the model's decoder layers, ``model_keys``
    are keys of ``actor_rollout_ref.model``.
    """
    from verl.workers.config import HFModelConfig
    from verl.workers.engine_workers import TrainingWorker, TrainingWorkerConfig

    actor = actor_config(strategy=strategy, offload=offload)
    engine = actor.fsdp_config
    engine.wrap_policy["transformer_layer_cls_to_wrap"] = [layer]
    engine.mixed_precision["param_dtype"] = precision
    engine.use_dynamic_bsz = False
    worker = (kind or TrainingWorker)(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=HFModelConfig(
                path=str(model),
                use_remove_padding=use_remove_padding,
                enable_gradient_checkpointing=checkpointing,
                override_config={"attn_implementation": attention},
                **model_keys,
            ),
            engine_config=engine,
            optimizer_config=actor.optim,
            checkpoint_config=actor.checkpoint,
        )
    )
    worker.reset()
    return worker


@dataclass
class Rollout:
    """Rows as the rollout returned them: lists of (length,) tensors, one per row."""

    prompts: list[torch.Tensor]
    responses: list[torch.Tensor]
    response_mask: list[torch.Tensor]
    advantages: list[torch.Tensor]
    rollout_log_probs: list[torch.Tensor] = field(default_factory=list)
    old_log_probs: list[torch.Tensor] = field(default_factory=list)
    ref_log_probs: list[torch.Tensor] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    chunks: list[list[list[tuple[int, int]]]] = field(default_factory=list)

    def rows(self, chosen: slice) -> Rollout:
        return replace(self, **{f.name: getattr(self, f.name)[chosen] for f in fields(self)})

    def to_tensordict(self) -> TensorDict:
        """Convert to the nested layout of the V1 trainer."""

        def nested(rows: list[torch.Tensor]) -> torch.Tensor:
            return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

        whole = [torch.cat(pair) for pair in zip(self.prompts, self.responses, strict=True)]
        columns = {
            "prompts": nested(self.prompts),
            "responses": nested(self.responses),
            "response_mask": nested(self.response_mask),
            "loss_mask": nested(self.response_mask),
            "input_ids": nested(whole),
            "position_ids": nested([torch.arange(len(row)) for row in whole]),
            "advantages": nested(self.advantages),
        }
        if self.old_log_probs:
            columns["old_log_probs"] = nested(self.old_log_probs)
        if self.rollout_log_probs:
            columns["rollout_log_probs"] = nested(self.rollout_log_probs)
        if self.ref_log_probs:
            columns["ref_log_prob"] = nested(self.ref_log_probs)
        if self.versions:
            spans = [{"min_global_steps": version, "max_global_steps": version} for version in self.versions]
            columns["extra_fields"] = NonTensorStack(*spans)
        if self.chunks:
            ends = [(turns[0][0][0], turns[-1][-1][0]) for turns in self.chunks]
            columns["extra_fields"] = NonTensorStack(
                *(
                    {"min_global_steps": first, "max_global_steps": last, "offpolicy_chunks": turns}
                    for (first, last), turns in zip(ends, self.chunks, strict=True)
                )
            )
        return TensorDict(columns, batch_size=len(whole))


def make_rollout(rows: int = 8, seed: int = 0, *, tool_tokens: bool = True) -> Rollout:
    """Rows of different lengths with advantages of both signs; every third row has two tool tokens inside."""
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    prompts = [integers(3, VOCABULARY, int(integers(2, 6, 1))) for _ in range(rows)]
    responses = [integers(3, VOCABULARY, int(integers(3, 9, 1))) for _ in range(rows)]
    masks = [torch.ones(len(response), dtype=torch.int64) for response in responses]
    if tool_tokens:
        for mask in masks[::3]:
            mask[1:3] = 0
    signs = [1.0 if row % 2 else -1.0 for row in range(rows)]
    sizes = [sign * (0.5 + torch.rand(1, generator=generator)) for sign in signs]
    advantages = [size.expand(len(row)).clone() for size, row in zip(sizes, responses, strict=True)]
    return Rollout(prompts, responses, masks, advantages)


def forward(
    worker: Any,
    data: TensorDict,
    micro_batch_size: int | None = None,
    *,
    entropy: bool = False,
    temperature: float = 1.0,
) -> TensorDict:
    """Run the engine's forward pass without a loss, as for pi_old, with all rows at once or in micro-batches."""
    from verl.utils import tensordict_utils as tu

    data = data.clone(recurse=False)
    worker.engine_config.use_dynamic_bsz = False  # an update of dynamic sizes leaves it set
    worker.engine_config.infer_micro_batch_size_per_gpu = micro_batch_size or len(data)
    asked = {"calculate_entropy": entropy, "compute_loss": False, "temperature": temperature, "global_token_num": None}
    tu.assign_non_tensor(data, **asked)
    output: TensorDict = worker.infer_batch(data)
    return output


def responses(output: TensorDict, data: TensorDict, name: str = "log_probs") -> list[torch.Tensor]:
    """Split a column of a forward pass into the rows' responses."""
    from verl.workers.utils.padding import response_from_nested

    return list(response_from_nested(output[name], data["response_mask"]).unbind())


def trainer_log_probs(worker: Any, rollout: Rollout, micro_batch_size: int | None = None) -> list[torch.Tensor]:
    """Compute pi_old with the engine's own forward pass, one tensor per row."""
    data = rollout.to_tensordict()
    return responses(forward(worker, data, micro_batch_size), data)


def measured(metrics: dict[str, Any]) -> dict[str, float]:
    """Return the statistics that an update reports."""
    from recipe.offpolicy.correction.statistics import merge_all
    from recipe.offpolicy.worker.metrics import take_packets

    return {name: each.value() for name, each in merge_all(p.statistics for p in take_packets(metrics)).items()}


def add_log_probs(worker: Any, rollout: Rollout, *, mismatch: float, seed: int = 1) -> Rollout:
    """Add pi_old from the engine, and mu = pi_old plus normal noise of ``mismatch`` nats per token."""
    generator = torch.Generator().manual_seed(seed)
    rollout.old_log_probs = trainer_log_probs(worker, rollout)
    rollout.rollout_log_probs = [
        row + mismatch * torch.randn(row.shape, generator=generator) for row in rollout.old_log_probs
    ]
    return rollout


def update(
    worker: Any,
    loss: Any,
    data: TensorDict,
    *,
    micro_batch_size: int | None = None,
    max_token_len: int | None = None,
    mini_batches: int = 1,
    calculate_entropy: bool = False,
    temperature: float = 1.0,
) -> dict[str, Any]:
    """Call ``train_mini_batch`` as the trainer does, and return the worker's metrics. ``max_token_len`` sets dynamic
    sizes.
    """
    from verl.utils import tensordict_utils as tu

    worker.set_loss_fn(loss)
    worker.engine_config.use_dynamic_bsz = max_token_len is not None
    worker.engine_config.max_token_len_per_gpu = max_token_len
    worker.engine_config.micro_batch_size_per_gpu = micro_batch_size or len(data) // mini_batches
    data = data.clone(recurse=False)
    world_size = int(os.environ["WORLD_SIZE"])
    size = len(data) * world_size // mini_batches
    tu.assign_non_tensor(
        data,
        calculate_entropy=calculate_entropy,
        global_batch_size=size,
        mini_batch_size=size,
        epochs=1,
        seed=1,
        dataloader_kwargs={"shuffle": False},
        temperature=temperature,
    )
    return worker.train_mini_batch(data)["metrics"]


def plain_loss(**changes: Any) -> Any:
    """verl's own loss, as its trainer hands it over; ``changes`` are fields of the ActorConfig."""
    from verl.workers.utils.losses import ppo_loss

    return partial(ppo_loss, config=actor_config(**changes))


def equal(one: Gradients, other: Gradients) -> bool:
    """Return True if gradients or weights are bitwise equal."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def close(one: Gradients, other: Gradients, relative: float = 1e-5) -> bool:
    """Return True if gradients differ by at most ``relative`` times the greatest element."""
    scale = max(float(gradient.abs().max()) for gradient in other.values())
    apart = max(float((one[name].double() - other[name].double()).abs().max()) for name in other)
    return scale > 0 and apart <= relative * scale


def parameters(worker: Any) -> dict[str, torch.Tensor]:
    """Full copies of the parameters."""
    return {name: _full(p).detach().clone() for name, p in worker.engine.module.named_parameters()}


def gradients(
    worker: Any, loss: Any, data: TensorDict, **kwargs: Any
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return metrics and gradients of one update; the optimizer does not step, so the weights stay."""
    engine, caught = worker.engine, {}

    def hold() -> float:
        named = {n.replace("_fsdp_wrapped_module.", ""): p.grad for n, p in engine.module.named_parameters()}
        caught.update({name: _full(g).detach().clone() for name, g in named.items() if g is not None})
        return 0.0

    step, engine.optimizer_step = engine.optimizer_step, hold
    try:
        metrics = update(worker, loss, data, **kwargs)
    finally:
        engine.optimizer_step = step
        engine.optimizer.zero_grad()
    return metrics, caught


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).cpu()
