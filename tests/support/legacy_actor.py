"""verl 0.7.1's real legacy FSDP actor in this process, and a plain reference of its update.

The optimizer is plain SGD without clipping, so the step of the parameters is the scaled gradient.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.support import reference

VOCABULARY = 32
PROMPT, WIDTH = 3, 7
TEMPERATURE = 0.8
ADVANTAGES = (1.0, -0.7, 0.4, -1.3, 0.9, -0.2, 1.6, -0.8)
LENGTHS = (7, 3, 5, 2, 6, 7, 4, 1)
MISMATCH = 0.2
LEARNING_RATE = 0.004
FLOAT32_LEARNING_RATE = 0.02
"""Learning rate; the step must be large compared with float32 rounding of the parameters."""
Parameters = dict[str, Tensor]


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """The process group of one process; the actor reads its rank."""
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def model(dtype: torch.dtype = torch.float64, attention: str = "sdpa") -> Any:
    """A Qwen2 of two layers, with the same weights in every call."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
        attn_implementation=attention,
    )
    return Qwen2ForCausalLM(config).to(dtype)


def actor_config(**changes: Any) -> Any:
    """verl's ActorConfig; ``changes`` are its fields, and those of ``fsdp_config`` under its name."""
    from verl.workers.config import FSDPActorConfig, FSDPEngineConfig

    values: dict[str, Any] = dict(
        strategy="fsdp",
        ppo_mini_batch_size=len(LENGTHS),
        ppo_micro_batch_size_per_gpu=4,
        rollout_n=1,
        use_torch_compile=False,
        grad_clip=1e9,
    )
    fsdp_config = FSDPEngineConfig(**({"dtype": "float32"} | changes.pop("fsdp_config", {})))
    return FSDPActorConfig(**(values | changes), fsdp_config=fsdp_config)


def actor(module: Any = None, *, learning_rate: float = LEARNING_RATE, **changes: Any) -> Any:
    """The actor with ``module``, see ``model`` and ``actor_config``."""
    from verl.workers.actor.dp_actor import DataParallelPPOActor

    module = model() if module is None else module
    optimizer = torch.optim.SGD(module.parameters(), lr=learning_rate)
    return DataParallelPPOActor(actor_config(**changes), module, optimizer)


def rollout(dtype: torch.dtype = torch.float64, lengths: tuple[int, ...] = LENGTHS) -> dict[str, Tensor]:
    """A batch as verl's trainer ships it, by column; the fourth token of a response of seven is a tool token.

    pi_old is close to the model's policy but differs, as after another update; mu differs more.
    """
    generator = torch.Generator().manual_seed(14)
    rows = len(lengths)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)

    ids = torch.randint(3, VOCABULARY, (rows, PROMPT + WIDTH), generator=generator)
    prompts = torch.arange(PROMPT) >= torch.tensor([i % PROMPT for i in range(rows)])[:, None]
    whole = torch.arange(WIDTH) < torch.tensor(lengths)[:, None]
    mask = whole.clone()
    mask[whole.all(-1), 3] = False
    attention = torch.cat([prompts, whole], dim=-1).long()
    batch = {
        "input_ids": ids,
        "responses": ids[:, PROMPT:].clone(),
        "attention_mask": attention,
        "position_ids": (attention.cumsum(-1) - 1).clamp(min=0),
        "response_mask": mask.long(),
    }
    advantages = torch.tensor(ADVANTAGES, dtype=torch.float64).repeat(rows)[:rows, None]
    with torch.no_grad():
        log_probs = forward(model(), batch)[0]
    old = log_probs + noise(0.1)
    columns = {
        "old_log_probs": old,
        "rollout_log_probs": old + noise(MISMATCH),
        "ref_log_prob": log_probs + noise(0.2),
        "advantages": advantages * mask,
    }
    return batch | {name: column.to(dtype) for name, column in columns.items()}


def proto(batch: Mapping[str, Tensor], handover: Any = None) -> Any:
    """The batch as verl's worker receives it."""
    from verl import DataProto
    from verl_patches.legacy.handover import HANDOVER

    meta = {"temperature": TEMPERATURE, "pad_token_id": 0}
    return DataProto.from_dict(dict(batch), meta_info=meta if handover is None else meta | {HANDOVER: handover})


def handed(
    batch: Mapping[str, Tensor],
    mapping: Mapping[str, Any],
    *,
    prove: bool = True,
    mini_rows: int = len(LENGTHS),
    mode: str = "token-mean",
    ranks: int = 1,
    shadows: Mapping[str, Any] | None = None,
    record: str | None = None,
    extensions: Mapping[str, Any] | None = None,
) -> Any:
    """The batch as the trainer sends it with the correction ``mapping``, to be recorded in the directory ``record``."""
    from tensordict import TensorDict

    from recipe.offpolicy.batch.plan import (
        REWARD,
        UID,
        BatchSplit,
        SharedPlan,
        UpdateRows,
        build_row_columns,
        compute_constants,
    )
    from recipe.offpolicy.correction import CorrectionSpec
    from recipe.offpolicy.worker.legacy_loss import Handover

    spec = CorrectionSpec.from_mapping(mapping)
    if spec.proximal != "recompute":
        batch = {**batch, "old_log_probs": batch["rollout_log_probs"]}
    rows = TensorDict(dict(batch), batch_size=len(batch["responses"]))
    if spec.denominator == "kept":
        batch = {**batch, **build_row_columns(spec, rows, BatchSplit(ranks, mini_rows, mode))}
    plan = SharedPlan(1, compute_constants(spec, rows)) if spec.needs_constants else SharedPlan(1)
    others = {name: CorrectionSpec.from_mapping(shadow) for name, shadow in (shadows or {}).items()}
    if record is None:
        return proto(batch, Handover(spec, plan, prove, others, extensions=extensions or {}))
    from recipe.offpolicy.recording.run import RecordSettings

    count = len(rows)
    uids = torch.tensor([list(f"row{i}".encode()) for i in range(count)], dtype=torch.uint8)
    batch = {**batch, UID: uids, REWARD: torch.arange(count) / 2}
    plan = dataclasses.replace(plan, update=UpdateRows(ranks, count // ranks, mini_rows // ranks))
    return proto(batch, Handover(spec, plan, prove, others, RecordSettings.at(record)))


def moved(actor_: Any, data: Any, *, patched: bool = True) -> tuple[Parameters, dict[str, Any]]:
    """Run one ``update_policy``, and return the new parameters and the metrics."""
    update = type(actor_).update_policy
    metrics = (update if patched else inspect.unwrap(update))(actor_, data)
    return parameters(actor_.actor_module), metrics


def parameters(module: Any) -> Parameters:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def distance(one: Parameters, other: Parameters, start: Parameters) -> float:
    """Greatest difference between two updates that began at ``start``, relative to the greatest change."""
    move = max(float((one[name] - start[name]).abs().max()) for name in start)
    return max(float((one[name] - other[name]).abs().max()) for name in start) / move


Settings = dict[str, Any]
EXACT = 1e-10
"""Tolerance of updates in float64, relative to the greatest change of a parameter."""
KL: Settings = dict(use_kl_loss=True, kl_loss_coef=0.3, kl_loss_type="low_var_kl")
MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
TWO_STEPS: Settings = dict(ppo_mini_batch_size=4, ppo_micro_batch_size_per_gpu=2)
DYNAMIC: Settings = dict(use_dynamic_bsz=True, ppo_max_token_len_per_gpu=17)


def corrected(mapping: Settings, batch: Any = None, *, prove: bool = False, **config: Any) -> Parameters:
    """Return the parameters after the actor's update with the correction."""
    return update(mapping, batch, prove=prove, **config)[0]


def update(
    mapping: Settings, batch: Any = None, *, prove: bool = True, sent: Settings | None = None, **config: Any
) -> tuple[Parameters, Settings]:
    batch = rollout() if batch is None else batch
    made = actor(**config)
    mode, rows = made.config.loss_agg_mode, made.config.ppo_mini_batch_size
    data = handed(batch, mapping, prove=prove, mode=mode, mini_rows=rows, **(sent or {}))
    return moved(made, data)


def verdict(mapping: Settings, batch: Any = None, **config: Any) -> Settings:
    """Return the trainer's verdict on the first update."""
    from tensordict import TensorDict

    from recipe.offpolicy.correction import CorrectionSpec
    from recipe.offpolicy.proof.verify import verify
    from recipe.offpolicy.worker.metrics import take_packets
    from tests.support.sampled_rows import compute_sampled_checksums

    batch = rollout() if batch is None else batch
    sampled = compute_sampled_checksums(TensorDict(batch, batch_size=len(batch["responses"])))
    _, metrics = update(mapping, batch, **config)
    epochs = config.get("ppo_epochs", 1)
    return verify(take_packets(metrics), CorrectionSpec.from_mapping(mapping), sampled_rows=sampled, epochs=epochs)


# The plain update -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plain:
    """What the update is to be, in the words of a paper.

    Attributes:
        correction: plain mapping, see ``reference.expected``; None: no correction.
        pi_old: takes the rows' columns and log pi; what stands for log pi_old.
        kl: coefficient of the k3 estimate of KL(pi, pi_ref).
        kl_clip: bounds of the ratio that the KL term's slope is multiplied by.
    """

    correction: Mapping[str, Any] | None = None
    learning_rate: float = LEARNING_RATE
    mini_rows: int = len(LENGTHS)
    epochs: int = 1
    mode: str = "token-mean"
    norm: float = WIDTH
    entropy: float = 0.0
    kl: float = 0.0
    kl_clip: tuple[float, float] | None = None
    pi_old: Callable[[Mapping[str, Tensor], Tensor], Tensor] = field(default=lambda rows, pi: rows["old_log_probs"])


def plain_update(batch: Mapping[str, Tensor], what: Plain) -> Parameters:
    """Return the parameters after gradient descent over mini-batches, with one step per mini-batch."""
    module = copy.deepcopy(model())
    rows = len(batch["responses"])
    for _ in range(what.epochs):
        for start in range(0, rows, what.mini_rows):
            module.zero_grad()
            plain_loss(module, {k: v[start : start + what.mini_rows] for k, v in batch.items()}, what).backward()
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter -= what.learning_rate * parameter.grad
    return parameters(module)


def plain_loss(module: Any, rows: Mapping[str, Tensor], what: Plain) -> Tensor:
    """PPO's dual clip, with each token's term times weight x keep, minus entropy, plus KL."""
    log_prob, entropy = forward(module, rows)
    mask, advantages = rows["response_mask"].bool(), rows["advantages"]
    old = what.pi_old(rows, log_prob.detach())
    ratio = (log_prob - old).exp()
    term = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
    term = torch.where(advantages < 0, torch.minimum(term, -3.0 * advantages), term)
    if what.correction is not None:
        term = term * weight_and_keep(what.correction, rows, log_prob.detach(), old)
    token = term - what.entropy * entropy + what.kl * kl_term(log_prob, rows["ref_log_prob"], old, what.kl_clip)
    return mean(token * mask, mask, what)


def kl_term(log_prob: Tensor, ref: Tensor, old: Tensor, clip: tuple[float, float] | None) -> Tensor:
    if clip is None:
        return (ref - log_prob).exp() - (ref - log_prob) - 1
    slope, ratio = (1 - (ref - log_prob).exp()).detach(), (log_prob - old).exp()
    return torch.maximum(ratio * slope, ratio.clamp(*clip) * slope)


def mean(values: Tensor, mask: Tensor, what: Plain) -> Tensor:
    lengths = mask.sum(-1)
    match what.mode:
        case "token-mean":
            return values.sum() / lengths.sum()
        case "seq-mean-token-sum":
            return values.sum() / len(mask)
        case "seq-mean-token-mean":
            return (values.sum(-1) / (lengths + 1e-8)).sum() / len(mask)
        case "seq-mean-token-sum-norm":
            return values.sum() / len(mask) / what.norm
    raise ValueError(what.mode)


def forward(module: Any, rows: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return log pi and entropy of the responses, (B, T) each."""
    logits = module(rows["input_ids"], attention_mask=rows["attention_mask"], position_ids=rows["position_ids"]).logits
    all_log_probs = (logits[:, PROMPT - 1 : -1] / TEMPERATURE).log_softmax(-1)
    chosen = all_log_probs.gather(-1, rows["responses"][..., None])[..., 0]
    return chosen, -(all_log_probs.exp() * all_log_probs).sum(-1)


def weight_and_keep(mapping: Mapping[str, Any], rows: Mapping[str, Tensor], pi: Tensor, old: Tensor) -> Tensor:
    from recipe.offpolicy.correction import CorrectionSpec

    mask = rows["response_mask"].bool()
    batch = reference.Batch(
        mu=rows["rollout_log_probs"].tolist(),
        old=old.tolist(),
        pi=pi.tolist(),
        mask=mask.tolist(),
        advantages=rows["advantages"].tolist(),
        segments=torch.zeros_like(mask, dtype=torch.int64).tolist(),
        versions=torch.zeros_like(mask, dtype=torch.int64).tolist(),
    )
    decided = reference.expected(CorrectionSpec.from_mapping(mapping).to_mapping(), batch)
    assert decided.margin > 1e-6, "a value lies too near its bound to be decided alike"
    return torch.tensor(decided.weight, dtype=pi.dtype) * torch.tensor(decided.keep)
