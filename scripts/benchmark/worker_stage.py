"""Measures a correction's cost in the worker: forward and backward passes of an update with verl's loss, and with ours.

    python scripts/benchmark/worker_stage.py [--model quickstart] [--mini-batches 2] [--micro-batches 1] [--rows 64]
        [--prompt 13] [--response 10] [--pairs 25] [--device cpu] [--centering K] [--vocabulary V]

Each micro-batch consists of the model's forward pass, verl's ``ppo_loss`` (A) or the same loss with a correction (B),
and the backward pass. The packets are pickled after each mini-batch, as verl gathers metrics, so B's statistics are
measured and fetched after the last mini-batch. Optimizer steps, and the work of verl's engine around a forward pass,
are excluded. The quickstart's correction is on, with statistics and attribution; the proof of the first update is off.
A and B take turns, and the side that runs first alternates. Figures are medians: of one thread's CPU seconds on a CPU,
and of wall seconds between synchronisations on a GPU.

With ``--centering K``, A is the correction alone, and B is the same correction with score centering over K tokens,
including the notes and checks of each micro-batch. On a CPU, the growth of the resident set in an update is also
measured.
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
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from recipe.offpolicy.batch.weight_versions import EXTRA_FIELDS
from recipe.offpolicy.support.token_supports import NOTE
from scripts.benchmark.simulated_parts import CORRECTION, build_actor_config, build_batch, build_note
from scripts.harness import add_counts, build_parser, find_median_ratio, measure_growth, take_turns

SHAPE = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    "vocab_size",
)
MODELS: dict[str, dict[str, Any]] = {
    "quickstart": {},
    "qwen2-0.5b": dict(zip(SHAPE, (896, 4864, 24, 14, 2, 151936), strict=True)),
    "tiny": dict(zip(SHAPE, (16, 16, 1, 2, 1, 32), strict=True)) | {"pad_token_id": 0},
}
"""Model -> how it differs from the quickstart's model."""
OBJECTS = 18
"""Number of columns of a row that are not tensors, in the batches that verl's V1 trainer sends in the quickstart."""
Loss = Callable[..., tuple[Tensor, dict[str, Any]]]


@dataclass(frozen=True)
class Sizes:
    """Sizes of an update; the defaults are those of the quickstart.

    Attributes:
        rows: number of rows in a micro-batch.
        prompt: number of tokens in each prompt.
        response: number of tokens of the longest response; the other responses have at least half as many.
        micro_batches: number of micro-batches in a mini-batch.
        mini_batches: number of mini-batches in the update.
    """

    rows: int = 64
    prompt: int = 13
    response: int = 10
    micro_batches: int = 1
    mini_batches: int = 2


class Spent(NamedTuple):
    """Seconds of one update: in total, and in the loss and the packing of its metrics."""

    whole: float
    loss: float


def build_model(name: str, device: str, vocabulary: int | None = None) -> Any:
    """Build a model with random weights, float32 on a CPU, bfloat16 on a GPU; with the given ``vocabulary``, if any."""
    from scripts.quickstart.model import build_model, build_tokenizer

    changes = MODELS[name] | ({} if vocabulary is None else {"vocab_size": vocabulary})
    model = build_model(build_tokenizer("Spell the word backward:"), **changes)
    return model.to(device=device, dtype=torch.float32 if device == "cpu" else torch.bfloat16)


class Engine:
    """The methods of verl's engine that score centering wraps, for a model whose micro-batches are mini-batches."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def prepare_model_outputs(
        self, output: Any, output_args: dict[str, Any], micro_batch: TensorDict, logits_processor_func: Any
    ) -> dict[str, Any]:
        """Compute log-probs from logits."""
        return {"log_probs": take_log_probs(output.logits, micro_batch["input_ids"])}

    def forward_backward_batch(self, data: TensorDict, loss_function: Loss, forward_only: bool = False) -> Any:
        """Run the forward pass, the loss and, unless ``forward_only``, the backward pass."""
        output = SimpleNamespace(logits=compute_logits(self.model, data["input_ids"]))
        temperature = torch.ones(len(data), device=output.logits.device)
        found = self.prepare_model_outputs(
            output=output, output_args={"temperature": temperature}, micro_batch=data, logits_processor_func=None
        )
        del output
        value, metrics = loss_function(model_output=found, data=data)
        if not forward_only:
            value.backward()
        return {"metrics": metrics}


def build_micro_batch(
    model: Any, sizes: Sizes, seed: int, *, last: bool = True, centering: int | None = None
) -> TensorDict:
    """Build rows in the form that verl's V1 trainer sends, with pi_old from the model and a slightly different mu.

    Args:
        last: whether the rows belong to the update's last mini-batch.
        centering: K; each token is accompanied by the K likeliest tokens of a mu over the whole vocabulary. None to
            leave them out.
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
        logits = compute_logits(model, ids)
        found = take_log_probs(logits, ids).unbind()
    old = [row[sizes.prompt - 1 : -1].float() for row in found]
    noise = [0.02 * torch.randn(row.shape, generator=generator).to(device) for row in old]
    mu, notes = [row + apart for row, apart in zip(old, noise, strict=True)], []
    if centering is not None:
        for place, (tokens, row) in enumerate(zip(whole, logits, strict=True)):
            prompt, response = tokens.split([sizes.prompt, len(tokens) - sizes.prompt])
            of_response = row[sizes.prompt - 1 : len(tokens) - 1].float()
            apart = 0.02 * torch.randn(of_response.shape, generator=generator).to(device)
            mu[place], note = build_note(prompt.tolist(), response, (of_response + apart).log_softmax(-1), centering)
            notes.append({NOTE: note.to_plain()})
    data = build_batch(
        {
            "prompts": nested([row[: sizes.prompt] for row in whole]),
            "responses": nested([row[sizes.prompt :] for row in whole]),
            "input_ids": ids,
            "advantages": nested([torch.full_like(row, 1.0 if place % 2 else -1.0) for place, row in enumerate(old)]),
            "old_log_probs": nested(old),
            "rollout_log_probs": nested(mu),
        },
        micro_batches=sizes.micro_batches,
        last=last,
    )
    for column in range(OBJECTS):
        of_rows = [NonTensorData({"answer": str(row), "turns": [1, 2]}) for row in range(sizes.rows)]
        data[f"object_{column}"] = NonTensorStack(*of_rows)
    if notes:
        data[EXTRA_FIELDS] = NonTensorStack(*(NonTensorData(note) for note in notes))
    return data


def compute_logits(model: Any, ids: Any) -> Tensor:
    """Compute the logits of a forward pass, (B, S, V), padded on the right; no token attends to the padding."""
    logits: Tensor = model(input_ids=ids.to_padded_tensor(0), use_cache=False).logits
    return logits


def take_log_probs(logits: Tensor, ids: Any) -> Tensor:
    """Compute the log-prob of each next token, nested and shifted left by one, in the form of verl's engine."""
    logits, padded = logits.float(), ids.to_padded_tensor(0)
    labels = padded.roll(-1, dims=-1)
    flat = logits.gather(-1, labels[..., None])[..., 0] - logits.logsumexp(-1)
    there = torch.arange(padded.shape[1], device=padded.device) < ids.offsets().diff()[:, None]
    return torch.nested.nested_tensor_from_jagged(flat[there], ids.offsets())


def update(engine: Engine, mini_batches: Sequence[Sequence[TensorDict]], loss: Loss) -> Spent:
    """Run one update, which computes gradients and packs the metrics of each mini-batch; return the times."""
    from verl_patches.worker_seams import complete

    clock = _clock(next(engine.model.parameters()).device)
    in_loss, start = 0.0, clock()

    def timed_loss(**given: Any) -> tuple[Tensor, dict[str, Any]]:
        nonlocal in_loss
        called = clock()
        found = loss(**given)
        in_loss += clock() - called
        return found

    for micro_batches in mini_batches:
        engine.model.zero_grad(set_to_none=True)
        metrics = [engine.forward_backward_batch(data, timed_loss)["metrics"] for data in micro_batches]
        called = clock()
        for each in metrics:
            complete(each)
        pickle.dumps(metrics)
        in_loss += clock() - called
    return Spent(whole=clock() - start, loss=in_loss)


def compare(
    name: str, sizes: Sizes, pairs: int, device: str, *, centering: int | None = None, vocabulary: int | None = None
) -> dict[str, Any]:
    """Measure the figures, whose names contain their units; those of side B have no prefix."""
    from recipe.offpolicy.centering.score_centering import FLAG, CenteringEngine
    from recipe.offpolicy.correction import CorrectionSpec
    from recipe.offpolicy.worker.loss import OffPolicyLoss
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.losses import ppo_loss

    torch.set_num_threads(1)
    config = build_actor_config(sizes.rows)
    model = build_model(name, device, vocabulary)
    batches: list[list[TensorDict]] = [[] for _ in range(sizes.mini_batches)]
    for seed in range(sizes.mini_batches * sizes.micro_batches):
        batch = batches[seed // sizes.micro_batches]
        batch.append(build_micro_batch(model, sizes, seed, last=batch is batches[-1], centering=centering))
    corrected = OffPolicyLoss(CorrectionSpec.from_mapping(CORRECTION), config)
    if centering is None:
        a = partial(update, Engine(model), batches, partial(ppo_loss, config))
        b = partial(update, Engine(model), batches, corrected)
    else:
        a = partial(update, Engine(model), batches, corrected)
        flagged = [[data.copy() for data in micro_batches] for micro_batches in batches]
        for data in (data for micro_batches in flagged for data in micro_batches):
            tu.assign_non_tensor(data, **{FLAG: True})
        centred = Engine(model)
        CenteringEngine(centred)
        spec = CorrectionSpec.from_mapping(CORRECTION | {"centering": centering})
        b = partial(update, centred, flagged, OffPolicyLoss(spec, config))
    other = "verl" if centering is None else "uncentred"
    spent = take_turns({other: a, "ours": b}, pairs)
    each = sizes.micro_batches * sizes.mini_batches
    (base, in_base), (whole, in_loss) = (
        (statistics.median(seconds) / each for seconds in zip(*spent[who], strict=True)) for who in spent
    )
    found = {
        f"{other}_seconds": base,
        "seconds": whole,
        f"{other}_loss_seconds": in_base,
        "loss_seconds": in_loss,
        "time_ratio": find_median_ratio(*([one.whole for one in spent[who]] for who in ("ours", other))),
        "share_in_loss": (in_loss - in_base) / base,
    }
    if centering is not None:
        found |= {"centering": centering, "vocabulary": model.config.vocab_size}
        if device == "cpu":
            found |= {"uncentred_growth_bytes": measure_growth(a), "ours_growth_bytes": measure_growth(b)}
    where = device if device == "cpu" else torch.cuda.get_device_name()
    return {"model": name, "device": where, **asdict(sizes), "pairs": pairs, **found}


def format_figures(found: dict[str, Any]) -> str:
    """Format the figures as text."""
    centred = "centering" in found
    other, ours = ("without centering", "with it") if centred else ("with verl's loss", "with a correction")
    base, in_base = (found[f"{'uncentred' if centred else 'verl'}_{name}"] for name in ("seconds", "loss_seconds"))
    more = f"\n{found['centering']} of {found['vocabulary']} tokens" if centred else ""
    if "ours_growth_bytes" in found:
        grown = [found[f"{who}_growth_bytes"] / 2**20 for who in ("uncentred", "ours")]
        more += f"; memory of an update {other}: {grown[0]:.0f} MiB, {ours}: {grown[1]:.0f} MiB"
    return (
        f"{found['model']} on {found['device']}: updates of {found['mini_batches']} x {found['micro_batches']} "
        f"micro-batches of {found['rows']} rows, {found['prompt']} + {found['response']} tokens at most, "
        f"{found['pairs']} pairs\n"
        f"forward and backward of a micro-batch {other}: {1e3 * base:.1f} ms, "
        f"{ours}: {1e3 * found['seconds']:.1f} ms, median ratio of a pair {found['time_ratio']:.3f}\n"
        f"of it in the loss and its metrics: {1e3 * in_base:.2f} ms and "
        f"{1e3 * found['loss_seconds']:.2f} ms; the difference is {100 * found['share_in_loss']:.1f} % of A{more}"
    )


def _clock(device: torch.device) -> Callable[[], float]:
    if device.type == "cpu":
        return time.process_time

    def synchronised() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    return synchronised


def main(arguments: Sequence[str] | None = None) -> None:
    parser = build_parser(__doc__)
    parser.add_argument("--model", choices=MODELS, default="quickstart")
    add_counts(parser, **asdict(Sizes()), pairs=25)
    parser.add_argument("--device", default="cpu", help="cpu, or a CUDA device")
    parser.add_argument("--centering", type=int, metavar="K", help="compare with and without score centering")
    parser.add_argument("--vocabulary", type=int, metavar="V", help="tokens of the model instead of its own")
    given = vars(parser.parse_args(arguments))
    sizes = Sizes(**{name: given.pop(name) for name in asdict(Sizes())})
    print(format_figures(compare(given.pop("model"), sizes, **given)))


if __name__ == "__main__":
    main()
