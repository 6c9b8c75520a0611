"""Generates test data: runs the cases with real verl, Ray and vLLM, and keeps their recordings.

    python scripts/evidence/injected_faults/make.py WORK [NAME ...]

VENV=path names an environment with verl 0.9.1, by default the environment that runs this script. Each of
``cases.CASES`` is one run of scripts/quickstart.sh, which takes about 100 seconds on two cores. WORK keeps models, logs
and whole recordings; existing recordings are not made again. tests/data/faults/PART/NAME-SEED keeps at most ``ROWS``
rows per step, with whole prompts.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

if __name__ == "__main__" and {"-h", "--help"} & set(sys.argv):  # before imports that take seconds
    sys.exit(print(__doc__))

import numpy as np
import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path[:0] = [str(ROOT), str(HERE.parent)]

from injected_faults.cases import CASES, DATA, FaultCase
from transformers import AutoTokenizer, Qwen2ForCausalLM

from recipe.offpolicy.recording import Recording
from recipe.offpolicy.recording.files import write
from scripts.harness import run_quickstart
from scripts.quickstart.model import build_model, build_tokenizer
from scripts.quickstart.prepare import prepare
from scripts.quickstart.task import TaskSettings, get_instruction, splits, write_parquet
from scripts.quickstart.warm_start import warm_start

ROWS = 128
TOKENS = 1000
"""Number of valid tokens per step that is sufficient; if rows are longer, fewer prompts are kept."""
LIMIT = 600.0
MERGES = 60
"""Number of most frequent letter pairs that become tokens, in addition to the quickstart's single bytes."""
DROPOUT = 0.4
"""Share of merges that are randomly skipped in the demonstrations, so that the model spells with long and with short
tokens."""


def main(work: Path, names: list[str]) -> int:
    work.mkdir(parents=True, exist_ok=True)
    for case in CASES:
        if not names or case.name in names:
            recording = work / f"{case.part}-{case.name}-{case.seed}"
            if not recording.exists():
                make_needed(work / "models", case.needs)
                run(case, work, recording)
            keep(recording, DATA / case.part / f"{case.name}-{case.seed}", case)
    return 0


def make_needed(models: Path, name: str) -> None:
    """Make a model or questions, unless they exist."""
    if not name or (models / name).exists():
        return
    if name == "merging":
        merging_model(models / name)
    elif name.startswith("again-"):
        (models / name).mkdir(parents=True)
        write_parquet(questions(name, splits(TaskSettings())["train"]), "train", models / name / "train.parquet")
    else:
        source = prepare(ROOT / "outputs" / "quickstart" / "cache", ["model"])["model"]
        pad_vocabulary(source, models / name, int(name.partition("-")[2]))


def pad_vocabulary(source: Path, target: Path, extra: int) -> None:
    """Copy a model, adding ``extra`` rows of vocabulary beyond its tokenizer, as in real checkpoints.

    The extra rows contain the values that the model's initialisation would have given them. verl's rollout server masks
    their logits, but the trainer does not.
    """
    model = Qwen2ForCausalLM.from_pretrained(source, dtype=torch.float32)
    size, deviation = model.config.vocab_size, model.config.initializer_range
    model.resize_token_embeddings(size + extra, mean_resizing=False)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        rows = model.get_input_embeddings().weight[size:]
        rows.copy_(deviation * torch.randn(rows.shape, generator=generator))
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(source).save_pretrained(target)


def merging_model(target: Path) -> None:
    """Warm-start a model that spells the same word with either long or short tokens."""
    torch.set_num_threads(1)
    entries: list[dict[str, Any]] = splits(TaskSettings())["warm_start"]
    pairs = Counter(pair for entry in entries for pair in pairwise(entry["answer"]))
    frequent = sorted(pairs, key=lambda pair: (-pairs[pair], pair))[:MERGES]
    tokenizer = build_tokenizer(get_instruction(entries), frequent)
    model = build_model(tokenizer)
    tokenizer.backend_tokenizer.model.dropout = DROPOUT
    warm_start(model, tokenizer, entries, lambda step, loss, score: print(step, loss, score, flush=True))
    tokenizer.backend_tokenizer.model.dropout = None
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def questions(name: str, entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Draw questions that are repeated.

    Args:
        name: "again-N": N questions, once each. "again-N-new-M": M questions, once each, and N other questions, M times
            in total, so that about half of each batch has occurred before.
        entries: entries from which to choose, in their order.
    """
    again, _, new = name.removeprefix("again-").partition("-new-")
    count, others = int(again), int(new or 0)
    chosen = [of_one_length(entry) for entry in entries[: count + others]]
    return chosen[:count] * max(others // count, 1) + chosen[count:]


def of_one_length(entry: dict[str, Any], letters: int = 13) -> dict[str, Any]:
    """Pad a question by repeating its word, up to ``letters`` letters, which include the word itself.

    With the quickstart's tokens for the instruction and the turns, 13 letters make a prompt of 17 tokens: a block of 16
    tokens that contains the whole word and can be taken from vLLM's cache, and a last token that is always computed.
    """
    word = entry["metadata"]["word"]
    return {**entry, "question": (word * letters)[: letters - len(word)] + entry["question"]}


def run(case: FaultCase, work: Path, recording: Path) -> None:
    """Train once with the fault.

    Raises:
        RuntimeError: not every step was recorded; the log is next to the recording.
    """
    overrides = [
        "correction=none",
        f"offpolicy.record.dir={recording}",
        # The run must record the fault rather than stop because of it.
        "offpolicy.allow_unrelated_log_probs=true",
        "offpolicy.delivery.sums=null",
        "offpolicy.delivery.probe=null",
        f"trainer.total_training_steps={case.steps}",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        f"data.seed={case.seed}",
        *(override.format(models=work / "models", here=HERE) for override in case.overrides),
    ]
    cache_log = recording.with_name(f"{recording.name}.cache.jsonl")
    cache_log.unlink(missing_ok=True)
    environment = {
        "VERL_USE_EXTERNAL_MODULES": "verl_patches.cpu,inject",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")])),
        "OFFPOLICY_INJECT_CACHE": str(cache_log),
        **case.environment,
    }
    log = recording.with_name(f"{recording.name}.log")
    print(f"{recording.name}: {' '.join(overrides)}", flush=True)
    # The quickstart's verdict depends on the held-out score, which is not measured in these short runs.
    run_quickstart(overrides, log, limit=LIMIT, environment=environment)
    made = Recording(recording).steps if recording.is_dir() else []
    if len(made) < case.steps:
        raise RuntimeError(f"{recording.name}: {len(made)} of {case.steps} steps were recorded, see {log}")


def keep(recording: Path, target: Path, case: FaultCase) -> None:
    """Write the part that tests read; its card names the injected fault, but contains nothing about this machine."""
    source = Recording(recording)
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for number in source.steps:
        step = source.step(number)
        rows = step.rows
        chosen: list[int] = []
        tokens = 0
        for uid in dict.fromkeys(rows.uid):
            group = np.flatnonzero(rows.uid == uid)
            if tokens >= TOKENS or len(chosen) + len(group) > ROWS:
                break
            chosen += group.tolist()
            tokens += int(rows.length[group].sum())
        write(target / source.files[number][0].name, rows.take(chosen), step.spec, step.reasons)
    injected: dict[str, Any] = {
        "causes": sorted(case.causes),
        "seed": case.seed,
        "overrides": list(case.overrides),
        "environment": dict(case.environment),
    }
    if (cache_log := recording.with_name(f"{recording.name}.cache.jsonl")).exists():
        served = [json.loads(line) for line in cache_log.read_text().splitlines()]
        injected["served"] = [line for line in served if line["requests"]]
    card = {"release": source.card.get("release"), "path": source.card.get("path"), "injected": injected}
    (target / "run.json").write_text(json.dumps(card, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    if not sys.argv[1:]:
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1]).resolve(), sys.argv[2:]))
