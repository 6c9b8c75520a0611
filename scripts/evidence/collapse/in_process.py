"""Training in one process: verl's training worker and loss, and a sampler whose weights are exactly eta steps late.

    python scripts/evidence/collapse/in_process.py --list
    python scripts/evidence/collapse/in_process.py [NAME ...] [--hours H]    # NAME: an arm, or a run: opsm-8-0.001-3

What has finished is not run again; each run adds its steps to results_in_process.parquet, or to what --out names. It
shows the loss and the correction under exact staleness. It does not show vLLM, Ray, TransferQueue, the transport of
weights or the counting of their versions: those are the whole runs'.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Sequence
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
    "VERL_ENGINE_DEVICE": "cuda",  # verl registers no engine for cpu; the one for cuda runs there
    "VERL_USE_EXTERNAL_MODULES": "verl_patches.cpu",
}

import numpy as np
import torch
from collapse import results
from collapse.arms import (
    EVERY,
    IN_PROCESS,
    MANTISSA,
    MAX_TOKENS,
    MINI_BATCHES,
    PROMPTS,
    ROLLOUTS,
    STEPS,
    LateRun,
    list_late_runs,
)
from collapse.run import find_start_model
from injected_faults.inject import rounded
from seeds import build_parser, make_runs
from tensordict import TensorDict
from torch import Tensor

from recipe.offpolicy.batch.micro_batch import WEIGHTS, MicroBatch
from recipe.offpolicy.correction import CorrectionSpec, StepStage
from recipe.offpolicy.worker.loss import OffPolicyLoss
from scripts.quickstart.task import Entry, TaskSettings, splits
from scripts.quickstart.warm_start import grade, pad_left, tokenize_prompts


class MeasuredLoss(OffPolicyLoss):
    """The recipe's loss, which notes what it kept.

    Args:
        at_random: reject as many negative rows of each micro-batch, drawn at random.
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
    """Reject as many negative rows (B, T) as ``factor`` does, drawn at random; all others have a factor of 1."""
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
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.entries = splits(TaskSettings())

    def encode(self, entries: Sequence[Entry]) -> list[list[int]]:
        """Tokenise questions as verl's rollout renders them."""
        return tokenize_prompts(self.tokenizer, [entry["question"] for entry in entries])

    def score(self, entries: Sequence[Entry], answers: Sequence[Sequence[int]]) -> list[dict[str, float]]:
        """Score answers by the quickstart's reward."""
        texts = self.tokenizer.batch_decode([list(answer) for answer in answers], skip_special_tokens=True)
        return [grade(entry, text) for entry, text in zip(entries, texts, strict=True)]


@torch.no_grad()
def sample(model: Any, tokenizer: Any, prompts: Sequence[Sequence[int]], *, greedy: bool) -> tuple[list, list]:
    """Sample an answer to each prompt at temperature 1: token ids with the end of sequence, and log mu, by row."""
    padded, attention = pad_left([list(each) for each in prompts], tokenizer.pad_token_id)
    found = model.generate(
        input_ids=padded,
        attention_mask=attention,
        do_sample=not greedy,
        top_k=0,
        max_new_tokens=MAX_TOKENS,
        output_logits=True,
        return_dict_in_generate=True,
        pad_token_id=tokenizer.pad_token_id,
    )
    ids = found.sequences[:, padded.shape[1] :]
    log_probs = torch.stack(found.logits, 1).float().log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    ended = (ids == tokenizer.eos_token_id).int().cumsum(-1)
    lengths = ((ended == 0).sum(-1) + 1).clamp(max=ids.shape[1]).tolist()
    return tuple([row[:length] for row, length in zip(rows, lengths, strict=True)] for rows in (ids, log_probs))  # type: ignore[return-value]


def train(run: LateRun, model: Path, steps: int = STEPS) -> list[tuple[int, dict[str, float]]]:
    """Train once; return what each step measured, under verl's names, the 0th of which is before training."""
    from collapse.worker import SampledRows, Trainer, build_actor_config
    from transformers import Qwen2ForCausalLM

    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

    torch.set_num_threads(1)
    torch.manual_seed(run.seed)
    task, spec = Spelling(model), CorrectionSpec.from_mapping(IN_PROCESS[run.arm])
    config = build_actor_config(run.rate, prompts=PROMPTS // MINI_BATCHES, rollouts=ROLLOUTS)
    trainer = Trainer(model, config)
    sampler = Qwen2ForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    ring: deque[dict[str, Tensor]] = deque(maxlen=run.eta + 1)
    loss = MeasuredLoss(spec, config, at_random=run.arm == "random", seed=run.seed)
    order = torch.randperm(len(task.entries["train"])).tolist()
    records = [(0, _validate(sampler, task))]
    for step in range(1, steps + 1):
        began = time.time()
        ring.append(trainer.copy_weights())
        weights = {name: rounded(each, MANTISSA) for name, each in ring[0].items()} if run.rounded else ring[0]
        sampler.load_state_dict(weights, strict=False)
        first = (step - 1) * PROMPTS % (len(order) - PROMPTS)
        chosen = [task.entries["train"][place] for place in order[first : first + PROMPTS] for _ in range(ROLLOUTS)]
        prompts = task.encode(chosen)
        answers, log_mu = sample(sampler, task.tokenizer, prompts, greedy=False)
        scores = torch.tensor([each["score"] for each in task.score(chosen, answers)])
        masks = [torch.ones(len(answer), dtype=torch.int64) for answer in answers]
        padded = torch.nn.utils.rnn.pad_sequence(masks, batch_first=True)
        rewards = torch.zeros(padded.shape).scatter(1, padded.sum(1, keepdim=True) - 1, scores[:, None])
        groups = [str(row // ROLLOUTS) for row in range(len(chosen))]
        advantages, _ = compute_grpo_outcome_advantage(rewards, padded, np.array(groups))
        rows = SampledRows(
            prompts=[torch.tensor(each) for each in prompts],
            responses=answers,
            advantages=[row[: len(answer)] for row, answer in zip(advantages, answers, strict=True)],
            log_mu=log_mu,
        )
        pi_old = trainer.compute_log_probs(rows)
        rows.pi_old = log_mu if spec.proximal == "bypass" else pi_old
        loss.kept.clear()
        trainer.update(loss, spec, rows, step)
        records.append((step, _measure(scores, pi_old, log_mu, loss, time.time() - began)))
        if step % EVERY == 0 or step == steps:
            sampler.load_state_dict(trainer.copy_weights(), strict=False)
            records[-1][1].update(_validate(sampler, task))
    return records


def _validate(sampler: Any, task: Spelling) -> dict[str, float]:
    entries = task.entries["heldout"]
    answers, _ = sample(sampler, task.tokenizer, task.encode(entries), greedy=True)
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
    """Prepare this process to train; return the folder of the model that runs start from."""
    from collapse.worker import join_process_group

    join_process_group()
    return find_start_model()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = build_parser(__doc__)
    parser.add_argument("--out", type=Path, default=results.IN_PROCESS)
    options = parser.parse_args(arguments)

    def make(run: LateRun) -> str:
        model, began = begin(), time.time()
        records = train(run, model)
        seconds = time.time() - began
        card = {"arm": run.setting, "seed": run.seed, "outcome": "finished", "wall_seconds": seconds}
        results.append(results.build_rows(card, records), options.out)
        return f"exact match {records[-1][1][results.COLUMNS['exact']]:.3f}, {seconds:.0f} s"

    make_runs(list_late_runs(), results.describe_finished(options.out), make, options, "of one core")
    return 0


if __name__ == "__main__":
    sys.exit(main())
