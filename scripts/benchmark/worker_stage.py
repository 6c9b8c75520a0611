"""Cost of a correction in the worker: forward and backward passes of an update with verl's loss, and with ours.

    python scripts/benchmark/worker_stage.py [--model quickstart] [--mini-batches 2] [--micro-batches 1] [--json FILE]
        [--rows 64] [--prompt 13] [--response 10] [--pairs 25] [--device cpu] [--shadow]

The model's forward pass, verl's ``ppo_loss`` (A) or the same with a correction in it (B), the backward pass, of each
micro-batch; the packets are pickled after each mini-batch, as verl gathers metrics, so that B's statistics are measured
and fetched after the last. Optimizer steps are left out, and so is what verl's engine does around a forward pass. The
quickstart's correction is on, with statistics and attribution; ``--shadow`` reports on another one as well; the proof
of the first update is off. A and B take turns, in turn first; medians. On a CPU: CPU seconds of one thread; on a GPU:
wall seconds between synchronisations.
"""

from __future__ import annotations

import pickle
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.benchmark.simulated_parts import CORRECTION, build_batch
from scripts.harness import add_counts, build_parser, find_median_ratio, take_turns, write_json

MODELS: dict[str, dict[str, Any]] = {
    "quickstart": {},
    "qwen2-0.5b": dict(
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        vocab_size=151936,
    ),
    "tiny": dict(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=32,
        pad_token_id=0,
    ),
}
"""Model -> what differs from the quickstart's."""
SHADOW = {"weight": {"level": "sequence", "kind": "truncate", "lower": None, "upper": 5.0}}
OBJECTS = 18
"""Columns of a row that are no tensors, as verl's V1 trainer ships them with the quickstart."""
Loss = Callable[..., tuple[Tensor, dict[str, Any]]]


@dataclass(frozen=True)
class Sizes:
    """Sizes of an update; by default those of the quickstart.

    Attributes:
        rows: of a micro-batch.
        prompt: tokens of each prompt.
        response: tokens of the longest response; the others have half of it or more.
        micro_batches: of a mini-batch.
        mini_batches: of the update.
    """

    rows: int = 64
    prompt: int = 13
    response: int = 10
    micro_batches: int = 1
    mini_batches: int = 2


class Spent(NamedTuple):
    """Seconds of one update: in all, and in calls of the loss and in packing its metrics."""

    whole: float
    loss: float


def build_model(name: str, device: str) -> Any:
    """Build a model with random weights: float32 on a CPU, bfloat16 on a GPU."""
    from scripts.quickstart.model import build_model, build_tokenizer

    model = build_model(build_tokenizer("Spell the word backward:"), **MODELS[name])
    return model.to(device=device, dtype=torch.float32 if device == "cpu" else torch.bfloat16)


def build_micro_batch(model: Any, sizes: Sizes, seed: int, *, last: bool = True) -> TensorDict:
    """Build rows as verl's V1 trainer ships them, with pi_old of the model and mu a little apart.

    Args:
        last: of the update's last mini-batch.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(max(1, sizes.response // 2), sizes.response + 1, (sizes.rows,), generator=generator)
    lengths[0] = sizes.response
    whole = [
        torch.randint(model.config.vocab_size, (sizes.prompt + int(length),), generator=generator).to(device)
        for length in lengths
    ]

    def nested(rows: Sequence[Tensor]) -> Tensor:
        return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)

    ids = nested(whole)
    with torch.no_grad():
        found = compute_log_probs(model, ids).unbind()
    old = [row[sizes.prompt - 1 : -1].float() for row in found]
    noise = [0.02 * torch.randn(row.shape, generator=generator).to(device) for row in old]
    data = build_batch(
        {
            "prompts": nested([row[: sizes.prompt] for row in whole]),
            "responses": nested([row[sizes.prompt :] for row in whole]),
            "input_ids": ids,
            "advantages": nested([torch.full_like(row, 1.0 if place % 2 else -1.0) for place, row in enumerate(old)]),
            "old_log_probs": nested(old),
            "rollout_log_probs": nested([row + apart for row, apart in zip(old, noise, strict=True)]),
        },
        micro_batches=sizes.micro_batches,
        last=last,
    )
    for column in range(OBJECTS):
        of_rows = [NonTensorData({"answer": str(row), "turns": [1, 2]}) for row in range(sizes.rows)]
        data[f"object_{column}"] = NonTensorStack(*of_rows)
    return data


def compute_log_probs(model: Any, ids: Any) -> Tensor:
    """Compute the log-prob of each next token, nested and shifted left by one as verl's engine returns them."""
    padded = ids.to_padded_tensor(0)
    logits = model(input_ids=padded, use_cache=False).logits.float()
    labels = padded.roll(-1, dims=-1)
    # Padding is on the right, where nothing before it attends to it.
    flat = logits.gather(-1, labels[..., None])[..., 0] - logits.logsumexp(-1)
    there = torch.arange(padded.shape[1], device=padded.device) < ids.offsets().diff()[:, None]
    return torch.nested.nested_tensor_from_jagged(flat[there], ids.offsets())


def update(model: Any, mini_batches: Sequence[Sequence[TensorDict]], loss: Loss) -> Spent:
    """Run one update: gradients of each mini-batch, and its metrics as they leave the worker."""
    from verl_patches.sent_metrics import complete

    clock = _clock(next(model.parameters()).device)
    in_loss, start = 0.0, clock()
    for micro_batches in mini_batches:
        model.zero_grad(set_to_none=True)
        metrics = []
        for data in micro_batches:
            output = {"log_probs": compute_log_probs(model, data["input_ids"])}
            called = clock()
            value, found = loss(model_output=output, data=data)
            in_loss += clock() - called
            metrics.append(found)
            value.backward()
        called = clock()
        for each in metrics:
            complete(each)
        pickle.dumps(metrics)
        in_loss += clock() - called
    return Spent(whole=clock() - start, loss=in_loss)


def compare(name: str, sizes: Sizes, pairs: int, device: str, *, shadow: bool = False) -> dict[str, Any]:
    """Measure the figures, with their units in their names."""
    from recipe.offpolicy.correction import CorrectionSpec
    from recipe.offpolicy.worker.loss import OffPolicyLoss
    from verl.workers.config import FSDPActorConfig
    from verl.workers.utils.losses import ppo_loss

    torch.set_num_threads(1)
    rows = sizes.rows * sizes.micro_batches
    config = FSDPActorConfig(
        strategy="fsdp2", rollout_n=1, ppo_mini_batch_size=rows, ppo_micro_batch_size_per_gpu=sizes.rows
    )
    model = build_model(name, device)
    batches = [
        [
            build_micro_batch(model, sizes, mini * sizes.micro_batches + micro, last=mini == sizes.mini_batches - 1)
            for micro in range(sizes.micro_batches)
        ]
        for mini in range(sizes.mini_batches)
    ]
    shadows = {"tis_sequence": CorrectionSpec.from_mapping(SHADOW)} if shadow else {}
    losses: dict[str, Loss] = {
        "verl": partial(ppo_loss, config),
        "ours": OffPolicyLoss(CorrectionSpec.from_mapping(CORRECTION), config, shadows=shadows),
    }
    spent = take_turns({who: partial(update, model, batches, loss) for who, loss in losses.items()}, pairs)
    each = sizes.micro_batches * sizes.mini_batches
    (verl, verl_loss), (ours, in_loss) = (
        (statistics.median(seconds) / each for seconds in zip(*spent[who], strict=True)) for who in losses
    )
    return {
        "model": name,
        "device": device if device == "cpu" else torch.cuda.get_device_name(),
        **asdict(sizes),
        "pairs": pairs,
        "shadow": shadow,
        "verl_seconds": verl,
        "seconds": ours,
        "verl_loss_seconds": verl_loss,
        "loss_seconds": in_loss,
        "time_ratio": find_median_ratio(*([one.whole for one in spent[who]] for who in ("ours", "verl"))),
        "share_in_loss": (in_loss - verl_loss) / verl,
    }


def format_figures(found: dict[str, Any]) -> str:
    """Format the figures as text."""
    return (
        f"{found['model']} on {found['device']}: updates of {found['mini_batches']} x {found['micro_batches']} "
        f"micro-batches of {found['rows']} rows, {found['prompt']} + {found['response']} tokens at most, "
        f"{found['pairs']} pairs\n"
        f"forward and backward of a micro-batch with verl's loss: {1e3 * found['verl_seconds']:.1f} ms, "
        f"with a correction: {1e3 * found['seconds']:.1f} ms, median ratio of a pair {found['time_ratio']:.3f}\n"
        f"of it in the loss and its metrics: {1e3 * found['verl_loss_seconds']:.2f} ms and "
        f"{1e3 * found['loss_seconds']:.2f} ms; the difference is {100 * found['share_in_loss']:.1f} % of A"
    )


def _clock(device: torch.device) -> Callable[[], float]:
    if device.type == "cpu":
        return time.process_time

    def synchronised() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    return synchronised


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = build_parser(__doc__)
    parser.add_argument("--model", choices=MODELS, default="quickstart")
    add_counts(parser, **asdict(Sizes()), pairs=25)
    parser.add_argument("--device", default="cpu", help="cpu, or a CUDA device")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--shadow", action="store_true", help="report on sequence weights next to the correction")
    given = parser.parse_args(arguments)
    sizes = Sizes(**{name: getattr(given, name) for name in asdict(Sizes())})
    found = compare(given.model, sizes, given.pairs, given.device, shadow=given.shadow)
    print(format_figures(found))
    write_json(given.json, found)
    return found


if __name__ == "__main__":
    main()
