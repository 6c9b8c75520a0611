"""The model that every run starts from: the quickstart's, with the weights of one warm start, which are committed.

A warm start ends in other weights on another processor, and runs from other weights are not paired.
"""

from __future__ import annotations

import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
WEIGHTS = Path(__file__).resolve().parent / "start_weights.safetensors"
FOLDER = ROOT / "outputs" / "evidence" / "collapse" / "start_model"


def find_start_model(path: Path = FOLDER) -> Path:
    """Find the folder of the model and its tokenizer, or make it."""
    from scripts.quickstart.model import build_model, build_tokenizer
    from scripts.quickstart.prepare import make_once
    from scripts.quickstart.task import TaskSettings, get_instruction, splits

    def build(draft: Path) -> None:
        tokenizer = build_tokenizer(get_instruction(splits(TaskSettings())["warm_start"]))
        build_model(tokenizer).save_pretrained(draft)
        tokenizer.save_pretrained(draft)
        shutil.copyfile(WEIGHTS, draft / "model.safetensors")

    make_once(path, build)
    return path
