"""Cache of data and model, one folder for each version of the code and the packages that make it.

python -m scripts.quickstart.prepare --cache DIR data [model] [mixture] [teacher]
python -m scripts.quickstart.prepare --cache DIR sums sums_model
python -m scripts.quickstart.prepare --cache DIR data free_length_model
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from .sums import SumsSettings, build_sums_tokenizer, write_data
from .task import TaskSettings, get_instruction, splits, write_parquet

HERE = Path(__file__).resolve().parent
_OF_A_MODEL = ["task.py", "reward.py", "model.py", "warm_start.py"], ["torch", "transformers", "reasoning-gym"]
_OF_SUMS = ["sums.py", "sums_reward.py"]
INGREDIENTS = {
    "data": (["task.py"], ["reasoning-gym"]),
    "model": _OF_A_MODEL,
    "mixture": _OF_A_MODEL,
    "teacher": _OF_A_MODEL,
    "free_length_model": (
        ["free_length.py", "free_length_reward.py", "free_length_warm_start.py", *_OF_A_MODEL[0]],
        ["torch", "transformers", "reasoning-gym"],
    ),
    "sums": (_OF_SUMS, []),
    "sums_model": ([*_OF_SUMS, "sums_warm_start.py", "model.py", "warm_start.py"], ["torch", "transformers"]),
}
"""Part -> the files that make it, settings included, and the packages that they need."""


def folder(cache: Path, part: str) -> Path:
    """Return the folder of a part, such as "data" or "model", of this version, made or still to be made."""
    sources, packages = INGREDIENTS[part]
    digest = hashlib.sha256(b"".join((HERE / name).read_bytes() for name in sources))
    digest.update("".join(f"{name}=={importlib.metadata.version(name)}" for name in packages).encode())
    return cache / f"{part}-{digest.hexdigest()[:12]}"


def find_made(cache: Path, parts: Sequence[str]) -> dict[str, Path] | None:
    """Find the folder of each part; None when one of them is still to be made."""
    folders = {part: folder(cache, part) for part in parts}
    return folders if all(path.exists() for path in folders.values()) else None


def make_once(path: Path, build: Callable[[Path], None]) -> bool:
    """Make the folder `path` unless it exists; True when it was there already.

    It is built under another name and renamed, so that an interrupted build leaves nothing that looks whole. Of two
    processes that build it at once the first to end makes it.
    """
    if path.exists():
        return True
    path.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{path.name}-{socket.gethostname()}-"
    for left in path.parent.glob(f"{prefix}*-*"):
        if not psutil.pid_exists(int(left.name.rsplit("-", 2)[1])):  # its process was killed
            shutil.rmtree(left, ignore_errors=True)
    draft = Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=path.parent))
    try:
        build(draft)
        draft.chmod(0o755)
        try:
            os.rename(draft, path)
        except OSError:
            if not path.exists():
                raise
            return True
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return False


def prepare_data(path: Path, task: TaskSettings) -> None:
    """Make the folder with train.parquet and heldout.parquet."""

    def build(draft: Path) -> None:
        parts = splits(task)
        for split in ("train", "heldout"):
            write_parquet(parts[split], split, draft / f"{split}.parquet")

    known = f", cached in {path}" if make_once(path, build) else ""
    print(f"data: {task.train} training and {task.heldout} held-out questions of {task.family}{known}", flush=True)


def prepare_model(path: Path, task: TaskSettings, part: str = "model") -> None:
    """Make the folder with a warm-started model and its tokenizer, as Hugging Face saves them.

    Args:
        part: model, mixture or teacher.
    """
    import torch
    import transformers

    from .model import build_mixture, build_model, build_tokenizer
    from .warm_start import STUDENT, TEACHER, warm_start

    settings = TEACHER if part == "teacher" else STUDENT

    def say(text: str) -> None:
        print(f"warm start of the {part}: {text}", flush=True)

    # A batch is too small to be shared: on busy cores two threads wait for each other longer than they work.
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    start = time.monotonic()

    def report(step: int, loss: float, score: float) -> None:
        aim = f"sampled score {score:.2f} of {settings.target:.2f}"
        say(f"step {step} (at most {settings.max_steps}), loss {loss:.2f}, {aim}, {time.monotonic() - start:.0f} s")

    def build(draft: Path) -> None:
        entries = splits(task)["warm_start"]
        tokenizer = build_tokenizer(get_instruction(entries))
        if part == "mixture":
            # verl knows Qwen3's turns by it, and asks every tokenizer of a model of that type.
            tokenizer.add_tokens(["<|im_end|>"], special_tokens=True)
        model = build_mixture(tokenizer) if part == "mixture" else build_model(tokenizer)
        name = type(model).__name__.removesuffix("ForCausalLM")
        say(f"a {name} of {model.num_parameters() / 1e6:.2f} M parameters, {len(tokenizer)} tokens")
        score = warm_start(model, tokenizer, entries, report, settings)
        if score < settings.target:
            say(f"stopped at score {score:.2f}, below its aim of {settings.target:.2f}")
        model.save_pretrained(draft)
        tokenizer.save_pretrained(draft)

    if make_once(path, build):
        say(f"skipped, the model is cached in {path}")


def prepare_free_length_model(path: Path, task: TaskSettings) -> None:
    """Make the folder with the model that is warm-started on answers of free length, and its tokenizer."""
    import torch
    import transformers

    from .free_length_warm_start import LengthWarmStart, warm_start_at_length
    from .model import build_model, build_tokenizer

    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    start = time.monotonic()

    def say(text: str) -> None:
        print(f"warm start at free length: {text}", flush=True)

    settings = LengthWarmStart()

    def report(step: int, loss: float, share: float) -> None:
        say(f"step {step}, loss {loss:.2f}, {share:.0%} right, {time.monotonic() - start:.0f} s")

    def build(draft: Path) -> None:
        entries = splits(task)["warm_start"]
        tokenizer = build_tokenizer(get_instruction(entries))
        model = build_model(tokenizer)
        share = warm_start_at_length(model, tokenizer, entries, report, settings)
        if share < settings.target:
            say(f"stopped at {share:.0%} right, below its aim of {settings.target:.0%}")
        model.save_pretrained(draft)
        tokenizer.save_pretrained(draft)

    if make_once(path, build):
        say(f"skipped, the model is cached in {path}")


def prepare_sums(path: Path, settings: SumsSettings) -> None:
    """Make the folder with train.parquet and heldout.parquet of the task of process rewards."""

    def build(draft: Path) -> None:
        count = write_data(draft, settings)
        print(f"data: {count} training and {settings.heldout} held-out sums", flush=True)

    if make_once(path, build):
        print(f"data: sums, cached in {path}", flush=True)


def prepare_sums_model(path: Path, data: SumsSettings) -> None:
    """Make the folder with the model that is warm-started on sums, and its tokenizer."""
    import torch
    import transformers

    from .model import build_model
    from .sums_warm_start import SumsWarmStartSettings, warm_start_sums

    settings = SumsWarmStartSettings()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    start = time.monotonic()

    def say(text: str) -> None:
        print(f"warm start on sums: {text}", flush=True)

    def report(step: int, loss: float, share: float) -> None:
        aim = f"{share:.0%} of steps right (aim {settings.target:.0%})"
        say(f"step {step} (at most {settings.max_steps}), loss {loss:.2f}, {aim}, {time.monotonic() - start:.0f} s")

    def build(draft: Path) -> None:
        tokenizer = build_sums_tokenizer()
        model = build_model(tokenizer, spread=settings.spread)
        if not warm_start_sums(model, tokenizer, data, settings, report):
            say("stopped below its aim")
        model.save_pretrained(draft)
        tokenizer.save_pretrained(draft)

    if make_once(path, build):
        say(f"skipped, the model is cached in {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("parts", nargs="+", choices=INGREDIENTS)
    arguments = parser.parse_args()
    for part in arguments.parts:
        path = folder(arguments.cache, part)
        if part == "data":
            prepare_data(path, TaskSettings())
        elif part == "free_length_model":
            prepare_free_length_model(path, TaskSettings())
        elif part == "sums":
            prepare_sums(path, SumsSettings())
        elif part == "sums_model":
            prepare_sums_model(path, SumsSettings())
        else:
            prepare_model(path, TaskSettings(), part)


if __name__ == "__main__":
    main()
