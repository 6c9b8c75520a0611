"""Trains in one process: verl's training worker and loss, and a sampler whose weights lag exactly eta steps behind.

    python scripts/evidence/collapse/in_process.py --list
    python scripts/evidence/collapse/in_process.py [NAME ...] [--hours H]    # NAME: an arm, or a run: opsm-8-0.001-3

Finished runs are not repeated; each run adds its steps to results_in_process.parquet, or to the file that --out names.
This tests the loss and the correction under exact staleness. It does not test vLLM, Ray, TransferQueue, the transport
of weights or the counting of their versions, which the whole runs test.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

if __name__ == "__main__" and {"-h", "--help"} & set(sys.argv):  # before imports that take seconds
    sys.exit(print(__doc__))

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "evidence")]
os.environ |= {
    "OMP_NUM_THREADS": "1",
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",  # verl registers no engine for cpu; the cuda engine runs on it
    "VERL_USE_EXTERNAL_MODULES": "verl_patches.cpu",
}

import numpy as np
import torch
from collapse import arms, results
from collapse.run import find_start_model
from injected_faults.inject import rounded
from seeds import Planned, build_parser, make_runs
from tensordict import NonTensorStack, TensorDict
from torch import Tensor
from transformers import AutoTokenizer, Qwen2ForCausalLM

from recipe.offpolicy.batch.micro_batch import WEIGHTS, MicroBatch
from recipe.offpolicy.batch.plan import PLAN, SharedPlan, compute_constants
from recipe.offpolicy.correction import CorrectionSpec, StepStage
from recipe.offpolicy.worker.loss import OffPolicyLoss
from scripts.harness import Records
from scripts.quickstart.task import Entry, TaskSettings, splits
from scripts.quickstart.warm_start import grade, pad_left, tokenize_prompts
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPActorConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine_workers import TrainingWorker, TrainingWorkerConfig
from verl.workers.utils.padding import response_from_nested


@dataclass
class SampledRows:
    """Rows as they were sampled: lists with one (length,) tensor per row, notes on rows, and flags of the batch."""

    prompts: Sequence[Tensor]
    responses: Sequence[Tensor]
    advantages: Sequence[Tensor]
    log_mu: Sequence[Tensor]
    pi_old: Sequence[Tensor] = ()
    notes: Sequence[Mapping[str, Any]] = ()
    flags: Mapping[str, Any] = field(default_factory=dict)

    def to_tensordict(self) -> TensorDict:
        """Convert the rows to the layout that the V1 trainer uses."""
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
            "old_log_probs": self.pi_old,
        }
        given = {name: list(rows) for name, rows in columns.items() if rows}
        nested = {name: torch.nested.as_nested_tensor(rows, layout=torch.jagged) for name, rows in given.items()}
        data = TensorDict(nested, batch_size=len(whole))
        if self.notes:
            data["extra_fields"] = NonTensorStack(*self.notes)
        tu.assign_non_tensor(data, **self.flags)
        return data


def build_actor_config(rate: float) -> FSDPActorConfig:
    """Build verl's configuration of an actor, with as many prompts in a mini-batch as the plan says."""
    prompts = arms.PROMPTS // arms.MINI_BATCHES
    engine = FSDPEngineConfig(
        strategy="fsdp2",
        dtype="float32",
        model_dtype="float32",
        use_torch_compile=False,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=prompts * arms.ROLLOUTS,
        wrap_policy={"transformer_layer_cls_to_wrap": ["Qwen2DecoderLayer"]},
        mixed_precision={"param_dtype": "float32", "reduce_dtype": "float32", "buffer_dtype": "float32"},
    )
    return FSDPActorConfig(
        strategy="fsdp2",
        ppo_mini_batch_size=prompts,
        ppo_micro_batch_size_per_gpu=prompts * arms.ROLLOUTS,
        rollout_n=arms.ROLLOUTS,
        use_torch_compile=False,
        optim=FSDPOptimizerConfig(lr=rate, total_training_steps=10),
        fsdp_config=engine,
    )


class Trainer:
    """A model that is being trained.

    Args:
        model: folder of the model.
        actor: actor configuration from ``build_actor_config``.
    """

    def __init__(self, model: Path, actor: FSDPActorConfig) -> None:
        self._config = actor
        plain: Any = {"use_remove_padding": False, "enable_gradient_checkpointing": False}
        config = TrainingWorkerConfig(
            model_type="language_model",
            model_config=HFModelConfig(path=str(model), override_config={"attn_implementation": "sdpa"}, **plain),
            engine_config=actor.fsdp_config,
            optimizer_config=actor.optim,
            checkpoint_config=actor.checkpoint,
        )
        self._worker = TrainingWorker(config)
        self._worker.reset()

    def copy_weights(self) -> dict[str, Tensor]:
        """Copy the weights, keyed by their names in the model."""
        named = self._worker.engine.module.named_parameters()
        return {
            name: (weight.full_tensor() if hasattr(weight, "full_tensor") else weight).detach().clone()
            for name, weight in named
        }

    def compute_log_probs(self, rows: SampledRows) -> list[Tensor]:
        """Compute log-probs of the responses with the engine's own forward pass, one tensor per row."""
        data = rows.to_tensordict()
        self._worker.engine_config.infer_micro_batch_size_per_gpu = len(data)
        tu.assign_non_tensor(data, calculate_entropy=False, compute_loss=False, temperature=1.0, global_token_num=None)
        found = self._worker.infer_batch(data)["log_probs"]
        return list(response_from_nested(found, data["response_mask"]).unbind())

    def update(self, loss: OffPolicyLoss, spec: CorrectionSpec, rows: SampledRows, step: int) -> None:
        """Train on the rows, in mini-batches of the configured size and in their order."""
        data = rows.to_tensordict()
        size = self._config.ppo_mini_batch_size * self._config.rollout_n
        plan = SharedPlan(step=step, constants=compute_constants(spec, data))
        loader = {"epochs": 1, "seed": 1, "dataloader_kwargs": {"shuffle": False}}
        settings = {"calculate_entropy": False, "temperature": 1.0, "global_batch_size": size, "mini_batch_size": size}
        tu.assign_non_tensor(data, **settings, **loader, **{PLAN: plan})
        self._worker.set_loss_fn(loss)
        self._worker.train_mini_batch(data)


class MeasuredLoss(OffPolicyLoss):
    """The recipe's loss, which also records which tokens it kept.

    Args:
        at_random: whether to reject, in each micro-batch, the same number of negative rows but draw them at random.
    """

    def __init__(self, *args: Any, at_random: bool = False, seed: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kept: list[tuple[int, int]] = []
        self._generator = torch.Generator().manual_seed(seed) if at_random else None

    def hand_over(self, batch: MicroBatch, step: StepStage) -> TensorDict:
        data = super().hand_over(batch, step)
        mask = batch.response_mask.bool()
        if self._generator is not None:
            data[WEIGHTS] = shuffle_rejected(data[WEIGHTS], batch.advantages, mask, self._generator)
        self.kept.append((int(((data[WEIGHTS] != 0) & mask).sum()), int(mask.sum())))
        return data


def shuffle_rejected(factor: Tensor, advantages: Tensor, mask: Tensor, generator: torch.Generator) -> Tensor:
    """Reject as many negative rows (B, T) as ``factor`` does, drawn at random; all other rows have a factor of 1."""
    rejected = (((factor != 0) & mask).sum(-1) == 0) & mask.any(-1)
    negative = torch.nonzero((advantages * mask).sum(-1) < 0).flatten()
    chosen = negative[torch.randperm(len(negative), generator=generator)[: int(rejected.sum())]]
    shuffled = torch.ones_like(factor)
    shuffled[chosen] = 0.0
    return shuffled


class Spelling:
    """The quickstart's task, tokenised.

    Args:
        model: folder of the quickstart's own model.
    """

    def __init__(self, model: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.entries = splits(TaskSettings())

    def encode(self, entries: Sequence[Entry]) -> list[list[int]]:
        """Tokenise questions as verl's rollout renders them."""
        return tokenize_prompts(self.tokenizer, [entry["question"] for entry in entries])

    def score(self, entries: Sequence[Entry], answers: Sequence[Tensor]) -> list[dict[str, float]]:
        """Score answers with the quickstart's reward."""
        texts = self.tokenizer.batch_decode([answer.tolist() for answer in answers], skip_special_tokens=True)
        return [grade(entry, text) for entry, text in zip(entries, texts, strict=True)]


@torch.no_grad()
def sample(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    *,
    greedy: bool = False,
    most: int = arms.MAX_TOKENS,
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Sample an answer of at most ``most`` tokens to each prompt at temperature 1.

    Returns:
        Per row: (T,) token ids including the end of sequence, their log mu, (T,), and log mu of the whole vocabulary,
        (T, V).
    """
    padded, attention = pad_left([list(each) for each in prompts], tokenizer.pad_token_id)
    sampling = {"do_sample": not greedy, "top_k": 0, "max_new_tokens": most}
    given = {"input_ids": padded, "attention_mask": attention, "pad_token_id": tokenizer.pad_token_id}
    found = model.generate(**given, **sampling, output_logits=True, return_dict_in_generate=True)
    ids = found.sequences[:, padded.shape[1] :]
    log_probs = torch.stack(found.logits, 1).float().log_softmax(-1)
    columns = (ids, log_probs.gather(-1, ids[..., None])[..., 0], log_probs)
    ended = (ids == tokenizer.eos_token_id).int().cumsum(-1)
    lengths = ((ended == 0).sum(-1) + 1).clamp(max=ids.shape[1]).tolist()
    answers, log_mu, whole = ([row[:length] for row, length in zip(rows, lengths, strict=True)] for rows in columns)
    return answers, log_mu, whole


def train(
    model: Path,
    spec: CorrectionSpec,
    *,
    seed: int,
    rate: float,
    eta: int = 0,
    mantissa: int | None = None,
    at_random: bool = False,
    steps: int = arms.STEPS,
    build_trainer: Callable[[Path, FSDPActorConfig], Trainer] = Trainer,
    annotate: Callable[[SampledRows, Sequence[Tensor]], None] = lambda rows, log_probs: None,
) -> Records:
    """Train once; return each step's measurements under verl's names. Those of step 0 are made before training.

    Args:
        eta: number of steps by which the sampler's weights lag behind.
        mantissa: number of bits to which the sampler's weights are rounded; None if they are not rounded.
        at_random: see ``MeasuredLoss``.
        annotate: function that adds notes to the rows, based on each row's (T, V) log mu.
    """
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    task = Spelling(model)
    config = build_actor_config(rate)
    trainer = build_trainer(model, config)
    sampler = Qwen2ForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    ring: deque[dict[str, Tensor]] = deque(maxlen=eta + 1)
    loss = MeasuredLoss(spec, config, at_random=at_random, seed=seed)
    order = torch.randperm(len(task.entries["train"])).tolist()
    records = [(0, _validate(sampler, task))]
    for step in range(1, steps + 1):
        began = time.time()
        ring.append(trainer.copy_weights())
        weights = {name: rounded(each, mantissa) for name, each in ring[0].items()} if mantissa else ring[0]
        sampler.load_state_dict(weights, strict=False)
        first = (step - 1) * arms.PROMPTS % (len(order) - arms.PROMPTS)
        chosen = [
            task.entries["train"][place] for place in order[first : first + arms.PROMPTS] for _ in range(arms.ROLLOUTS)
        ]
        prompts = task.encode(chosen)
        answers, log_mu, log_probs = sample(sampler, task.tokenizer, prompts)
        scores = torch.tensor([each["score"] for each in task.score(chosen, answers)])
        masks = [torch.ones(len(answer), dtype=torch.int64) for answer in answers]
        padded = torch.nn.utils.rnn.pad_sequence(masks, batch_first=True)
        rewards = torch.zeros(padded.shape).scatter(1, padded.sum(1, keepdim=True) - 1, scores[:, None])
        groups = [str(row // arms.ROLLOUTS) for row in range(len(chosen))]
        advantages, _ = compute_grpo_outcome_advantage(rewards, padded, np.array(groups))
        rows = SampledRows(
            prompts=[torch.tensor(each) for each in prompts],
            responses=answers,
            advantages=[row[: len(answer)] for row, answer in zip(advantages, answers, strict=True)],
            log_mu=log_mu,
        )
        annotate(rows, log_probs)
        pi_old = trainer.compute_log_probs(rows)
        rows.pi_old = log_mu if spec.proximal == "bypass" else pi_old
        loss.kept.clear()
        trainer.update(loss, spec, rows, step)
        records.append((step, _measure(scores, pi_old, log_mu, loss, time.time() - began)))
        if step % arms.EVERY == 0 or step == steps:
            sampler.load_state_dict(trainer.copy_weights(), strict=False)
            records[-1][1].update(_validate(sampler, task))
    return records


def _validate(sampler: Any, task: Spelling) -> dict[str, float]:
    entries = task.entries["heldout"]
    answers, _, _ = sample(sampler, task.tokenizer, task.encode(entries), greedy=True)
    found = task.score(entries, answers)
    names = {"exact": "exact", "graded": "acc"}
    return {results.COLUMNS[column]: sum(each[key] for each in found) / len(found) for column, key in names.items()}


def _measure(
    scores: Tensor, pi_old: Sequence[Tensor], log_mu: Sequence[Tensor], loss: MeasuredLoss, seconds: float
) -> dict[str, float]:
    apart = torch.cat(list(pi_old)).double() - torch.cat(list(log_mu)).double()
    ratio = apart.exp()
    kept, whole = (sum(each[part] for each in loss.kept) for part in (0, 1))
    values = {
        "reward": float(scores.mean()),
        "k3": float((ratio - 1 - apart).mean()),
        "ratio_ess": float(ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum())),
        "kept": kept / whole if whole else 1.0,
        "length": sum(map(len, log_mu)) / len(log_mu),
        "seconds": seconds,
    }
    return {results.COLUMNS[name]: value for name, value in values.items()}


@cache
def begin() -> Path:
    """Set the variables that Ray sets for a single worker; return the folder of the model from which runs start."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    return find_start_model()


def make(run: Planned, train_from: Callable[[Path], Records], out: Path) -> str:
    """Execute one run and add its steps to ``out``; return how the run ended."""
    model, began = begin(), time.time()
    records = train_from(model)
    seconds = time.time() - began
    card = {"arm": run.setting, "seed": run.seed, "outcome": "finished", "wall_seconds": seconds}
    results.append(card, records, out)
    return f"exact match {records[-1][1][results.COLUMNS['exact']]:.3f}, {seconds:.0f} s"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = build_parser(__doc__)
    parser.add_argument("--out", type=Path, default=results.IN_PROCESS)
    options = parser.parse_args(arguments)

    def make_late(run: arms.LateRun) -> str:
        spec, mantissa = CorrectionSpec.from_mapping(arms.IN_PROCESS[run.group]), arms.MANTISSA if run.rounded else None
        late: dict[str, Any] = {"seed": run.seed, "rate": run.rate, "eta": run.eta, "mantissa": mantissa}
        return make(run, lambda model: train(model, spec, at_random=run.group == "random", **late), options.out)

    make_runs(arms.list_late_runs(), results.describe_finished(options.out), make_late, options, "of one core")
    return 0


if __name__ == "__main__":
    sys.exit(main())
