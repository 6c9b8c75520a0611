"""Prepares data and model under outputs/quickstart/cache, once for each setting and version of this code.

Run by path: `python prepare.py --cache DIR [--data-only]`. The last line on stdout is JSON with the two paths.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from task import TaskSettings, instruction, splits, write_parquet

HERE = Path(__file__).resolve().parent


def fingerprint(settings: dict[str, Any], sources: list[str], packages: list[str]) -> str:
    """Twelve hex digits over settings, the text of the given neighbours and the versions of packages."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for name in sources:
        digest.update((HERE / name).read_bytes())
    for package in packages:
        digest.update(f"{package}=={importlib.metadata.version(package)}".encode())
    return digest.hexdigest()[:12]


def cached(folder: Path, build: Callable[[Path], None]) -> bool:
    """Makes sure that `folder` exists, complete; True when it was there already.

    It is built under another name and renamed, so that an interrupted build leaves nothing that looks whole.
    """
    if folder.exists():
        return True
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        build(draft)
        draft.chmod(0o755)
        os.rename(draft, folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return False


def say(text: str) -> None:
    print(text, flush=True)


def prepare_data(cache: Path, task: TaskSettings) -> Path:
    """Folder with train.parquet and heldout.parquet."""
    folder = cache / f"data-{fingerprint(asdict(task), ['task.py'], ['reasoning-gym'])}"

    def build(draft: Path) -> None:
        parts = splits(task)
        for split in ("train", "heldout"):
            write_parquet(parts[split], split, draft / f"{split}.parquet")

    known = cached(folder, build)
    say(
        f"data: {task.train} training and {task.heldout} held-out questions of {task.family}"
        + (f", cached in {folder}" if known else "")
    )
    return folder


def prepare_model(cache: Path, task: TaskSettings) -> Path:
    """Folder with the warm-started model and its tokenizer, as Hugging Face saves them."""
    import torch
    import transformers
    from model import ModelSettings, build_model, build_tokenizer
    from warm_start import WarmStartSettings, warm_start

    # A batch is too small to be shared: on busy cores two threads wait for each other longer than they work.
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    shape, schooling = ModelSettings(), WarmStartSettings()
    settings = {"task": asdict(task), "model": asdict(shape), "warm_start": asdict(schooling)}
    sources = ["task.py", "reward.py", "model.py", "warm_start.py"]
    folder = cache / f"model-{fingerprint(settings, sources, ['torch', 'transformers', 'reasoning-gym'])}"

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

    if cached(folder, build):
        say(f"warm start: skipped, the model is cached in {folder}")
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--data-only", action="store_true", help="the caller brings a model")
    arguments = parser.parse_args()
    task = TaskSettings()
    paths = {"data": str(prepare_data(arguments.cache, task))}
    if not arguments.data_only:
        paths["model"] = str(prepare_model(arguments.cache, task))
    say(json.dumps(paths))


if __name__ == "__main__":
    main()
