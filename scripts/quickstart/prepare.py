"""Prepares data and model in a cache (cache.py), once for each version of this code.

Run by path: `python prepare.py --cache DIR [--data-only]`.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from cache import cached, folder
from task import TaskSettings, instruction, splits, write_parquet


def say(text: str) -> None:
    print(text, flush=True)


def prepare_data(path: Path, task: TaskSettings) -> None:
    """Makes the folder with train.parquet and heldout.parquet."""

    def build(draft: Path) -> None:
        parts = splits(task)
        for split in ("train", "heldout"):
            write_parquet(parts[split], split, draft / f"{split}.parquet")

    known = cached(path, build)
    say(
        f"data: {task.train} training and {task.heldout} held-out questions of {task.family}"
        + (f", cached in {path}" if known else "")
    )


def prepare_model(path: Path, task: TaskSettings) -> None:
    """Makes the folder with the warm-started model and its tokenizer, as Hugging Face saves them."""
    import torch
    import transformers
    from model import ModelSettings, build_model, build_tokenizer
    from warm_start import WarmStartSettings, warm_start

    # A batch is too small to be shared: on busy cores two threads wait for each other longer than they work.
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    shape, schooling = ModelSettings(), WarmStartSettings()

    def build(draft: Path) -> None:
        parts = splits(task)
        tokenizer = build_tokenizer(instruction(parts["warm_start"]))
        model = build_model(shape, tokenizer)
        size = sum(parameter.numel() for parameter in model.parameters())
        say(f"warm start: a Qwen2 of {size / 1e6:.2f} M parameters, {len(tokenizer)} tokens")
        start = time.monotonic()

        def report(step: int, loss: float, score: float) -> None:
            say(
                f"warm start: step {step} (at most {schooling.max_steps}), loss {loss:.2f}, sampled score {score:.2f} "
                f"of {schooling.target:.2f}, {time.monotonic() - start:.0f} s"
            )

        score = warm_start(schooling, model, tokenizer, parts["warm_start"], report)
        if score < schooling.target:
            say(f"warm start: stopped at score {score:.2f}, below its aim of {schooling.target:.2f}")
        model.save_pretrained(draft)
        tokenizer.save_pretrained(draft)

    if cached(path, build):
        say(f"warm start: skipped, the model is cached in {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--data-only", action="store_true", help="the caller brings a model")
    arguments = parser.parse_args()
    task = TaskSettings()
    prepare_data(folder(arguments.cache, "data"), task)
    if not arguments.data_only:
        prepare_model(folder(arguments.cache, "model"), task)


if __name__ == "__main__":
    main()
