"""Does score centering help a sampler of lower precision? Training in one process, as collapse/in_process.py.

    python scripts/evidence/centering/experiment.py --list
    python scripts/evidence/centering/experiment.py [NAME ...] [--hours H]    # NAME: an arm, or a run: centred-3
    python scripts/evidence/centering/experiment.py --table                   # the committed results

verl's training worker and the recipe's loss with the committed start weights of the evidence on collapse; the sampler
holds the weights of this step, rounded to a few bits of mantissa. Plan: PLAN.md. What has finished is not run again.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

if __name__ == "__main__" and {"-h", "--help"} & set(sys.argv):  # before imports that take seconds
    sys.exit(print(__doc__))

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "evidence")]

import numpy as np
import torch
from collapse import in_process, results  # sets the environment of verl on a CPU
from collapse.arms import FIRST_SEED, MAX_TOKENS, MINI_BATCHES, PROMPTS, RATES, ROLLOUTS
from injected_faults.inject import rounded
from seeds import build_parser, make_runs
from tensordict import NonTensorStack, TensorDict
from torch import Tensor

from recipe.offpolicy.correction import CorrectionSpec
from scripts.quickstart.warm_start import pad_left

DATA = Path(__file__).with_name("results.parquet")
STEPS, EVERY, SEEDS, MANTISSA, SIZE = 60, 20, 20, 1, 20
TIS: dict[str, Any] = {"weight": {"level": "token", "kind": "truncate", "lower": None, "upper": 2.0}}
ARMS: dict[str, dict[str, Any]] = {
    "none": {},
    "centred": {"centering": SIZE},
    "tis": TIS,
    "tis_centred": TIS | {"centering": SIZE},
}


@dataclass(frozen=True)
class Run:
    """One run: an arm, and a seed of the order of the questions and of sampling."""

    arm: str
    seed: int
    seconds: int = 45
    details: str = ""

    @property
    def setting(self) -> str:
        return self.arm

    @property
    def name(self) -> str:
        return f"{self.arm}-{self.seed}"

    @property
    def names(self) -> set[str]:
        return {self.arm, self.name}


def list_runs() -> Iterator[Run]:
    """List all runs seed by seed."""
    for seed in range(FIRST_SEED, FIRST_SEED + SEEDS):
        yield from (Run(arm, seed) for arm in ARMS)


@torch.no_grad()
def sample(model: Any, tokenizer: Any, prompts: Sequence[Sequence[int]]) -> list[tuple[Tensor, Tensor]]:
    """Sample an answer to each prompt at temperature 1: (T,) token ids with the end, and (T, V) log mu, by row."""
    padded, attention = pad_left([list(each) for each in prompts], tokenizer.pad_token_id)
    found = model.generate(
        input_ids=padded,
        attention_mask=attention,
        do_sample=True,
        top_k=0,
        max_new_tokens=MAX_TOKENS,
        output_logits=True,
        return_dict_in_generate=True,
        pad_token_id=tokenizer.pad_token_id,
    )
    ids = found.sequences[:, padded.shape[1] :]
    log_probs = torch.stack(found.logits, 1).float().log_softmax(-1)
    ended = (ids == tokenizer.eos_token_id).int().cumsum(-1)
    lengths = ((ended == 0).sum(-1) + 1).clamp(max=ids.shape[1]).tolist()
    return [(row[:length], each[:length]) for row, each, length in zip(ids, log_probs, lengths, strict=True)]


def build_note(prompt: Sequence[int], answer: Tensor, log_probs: Tensor) -> dict[str, Any]:
    """Build the note of a row's likeliest tokens as the client of the rollout servers does."""
    from recipe.offpolicy.support.support_notes import NOTE, SupportNote
    from recipe.offpolicy.support.token_supports import read_supports

    values, ids = log_probs.topk(SIZE)
    own = log_probs.gather(-1, answer[:, None])
    listed = torch.cat([answer[:, None], ids], 1).flatten().tolist()
    found = read_supports(listed, torch.cat([own, values], 1).flatten().tolist(), len(answer), likeliest=True)
    note = SupportNote()
    note.add(prompt, answer.tolist(), found)
    return {NOTE: note.finish().to_plain()}


def train(run: Run, model: Path, steps: int = STEPS) -> list[tuple[int, dict[str, float]]]:
    """Train once; return what each step measured, under verl's names, the 0th of which is before training."""
    from collapse.worker import SampledRows, Trainer, build_actor_config
    from transformers import Qwen2ForCausalLM

    from recipe.offpolicy.centering.centering_engine import FLAG, install_centering
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage
    from verl.utils import tensordict_utils as tu

    class CentredRows(SampledRows):
        notes: Sequence[dict[str, Any]] = ()

        def to_tensordict(self) -> TensorDict:
            data = super().to_tensordict()
            data["extra_fields"] = NonTensorStack(*self.notes)
            tu.assign_non_tensor(data, **{FLAG: spec.centering is not None})
            return data

    torch.set_num_threads(1)
    torch.manual_seed(run.seed)
    task, spec = in_process.Spelling(model), CorrectionSpec.from_mapping(ARMS[run.arm])
    config = build_actor_config(RATES[0], prompts=PROMPTS // MINI_BATCHES, rollouts=ROLLOUTS)
    trainer = Trainer(model, config)
    install_centering(SimpleNamespace(actor=trainer._worker))
    sampler = Qwen2ForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    loss = in_process.MeasuredLoss(spec, config)
    order = torch.randperm(len(task.entries["train"])).tolist()
    records = [(0, in_process._validate(sampler, task))]
    for step in range(1, steps + 1):
        began = time.time()
        weights = {name: rounded(each, MANTISSA) for name, each in trainer.copy_weights().items()}
        sampler.load_state_dict(weights, strict=False)
        first = (step - 1) * PROMPTS % (len(order) - PROMPTS)
        chosen = [task.entries["train"][place] for place in order[first : first + PROMPTS] for _ in range(ROLLOUTS)]
        prompts = task.encode(chosen)
        answers, log_probs = zip(*sample(sampler, task.tokenizer, prompts), strict=True)
        scores = torch.tensor([each["score"] for each in task.score(chosen, answers)])
        masks = [torch.ones(len(answer), dtype=torch.int64) for answer in answers]
        padded = torch.nn.utils.rnn.pad_sequence(masks, batch_first=True)
        rewards = torch.zeros(padded.shape).scatter(1, padded.sum(1, keepdim=True) - 1, scores[:, None])
        groups = [str(row // ROLLOUTS) for row in range(len(chosen))]
        advantages, _ = compute_grpo_outcome_advantage(rewards, padded, np.array(groups))
        log_mu = [each.gather(-1, answer[:, None])[:, 0] for each, answer in zip(log_probs, answers, strict=True)]
        rows = CentredRows(
            prompts=[torch.tensor(each) for each in prompts],
            responses=answers,
            advantages=[row[: len(answer)] for row, answer in zip(advantages, answers, strict=True)],
            log_mu=log_mu,
        )
        rows.notes = [build_note(*each) for each in zip(prompts, answers, log_probs, strict=True)]
        rows.pi_old = trainer.compute_log_probs(rows)
        loss.kept.clear()
        trainer.update(loss, spec, rows, step)
        records.append((step, in_process._measure(scores, rows.pi_old, log_mu, loss, time.time() - began)))
        if step % EVERY == 0 or step == steps:
            sampler.load_state_dict(trainer.copy_weights(), strict=False)
            records[-1][1].update(in_process._validate(sampler, task))
    return records


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = build_parser(__doc__)
    parser.add_argument("--table", action="store_true", help="print the committed results and judge the hypotheses")
    parser.add_argument("--out", type=Path, default=DATA)
    options = parser.parse_args(arguments)
    if options.table:
        from centering.judge import format_table

        print(format_table(results.read(options.out)))
        return 0

    def make(run: Run) -> str:
        model, began = in_process.begin(), time.time()
        records = train(run, model)
        seconds = time.time() - began
        card = {"arm": run.setting, "seed": run.seed, "outcome": "finished", "wall_seconds": seconds}
        results.append(results.build_rows(card, records), options.out)
        return f"exact match {records[-1][1][results.COLUMNS['exact']]:.3f}, {seconds:.0f} s"

    make_runs(list_runs(), results.describe_finished(options.out), make, options, "of one core")
    return 0


if __name__ == "__main__":
    sys.exit(main())
