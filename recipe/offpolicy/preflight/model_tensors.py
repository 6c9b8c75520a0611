"""Size of a Hugging Face model's largest tensor, read from the files of its folder without loading any weights."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CONFIG = "config.json"
WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_EXPERT = re.compile(r"(.*\.experts)\.\d+\..*")


def count_largest_tensor(folder: Path, *, stacked: bool = False) -> int | None:
    """Count the elements of the largest tensor of a model.

    Args:
        folder: holds ``config.json`` and, if they are at hand, safetensors or PyTorch files, sharded or not.
        stacked: count the experts of one layer as one tensor, which is at least as large as the tensors that
            transformers stacks them into.

    Returns:
        The elements; those of the embedding, vocab_size x hidden_size, where no file of weights can be read; None where
        the configuration does not say these either.
    """
    counts: dict[str, int] = {}
    for file in list_weights(folder):
        try:
            shapes = read_shapes(file)
        except ValueError:
            continue
        for name, shape in shapes.items():
            expert = _EXPERT.fullmatch(name) if stacked else None
            name = expert[1] if expert else name
            counts[name] = counts.get(name, 0) * bool(expert) + math.prod(shape)
    return max(counts.values(), default=None) or _count_embedding(folder)


def list_weights(folder: Path) -> list[Path]:
    """List the files of weights in a folder, by name."""
    return sorted(file for pattern in WEIGHTS for file in folder.glob(pattern))


def read_shapes(file: Path) -> dict[str, list[int]]:
    """Read name and shape of each tensor in a safetensors or PyTorch file, without its data.

    Raises:
        ValueError: the file is cut off or damaged.
    """
    try:
        return _read_header(file) if file.suffix == ".safetensors" else _read_pickled(file)
    except Exception as error:  # pickle, zip and JSON have errors of their own
        raise ValueError(f"{file.name} is damaged or cut off") from error


def _read_header(file: Path) -> dict[str, list[int]]:
    """Read the header of a safetensors file: its length in 8 bytes, then JSON, then the data that it locates."""
    whole = file.stat().st_size
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        if size > whole:
            raise ValueError
        entries = {name: entry for name, entry in json.loads(opened.read(size)).items() if name != "__metadata__"}
    if max((entry["data_offsets"][1] for entry in entries.values()), default=0) + size + 8 > whole:
        raise ValueError
    return {name: entry["shape"] for name, entry in entries.items()}


def _read_pickled(file: Path) -> dict[str, list[int]]:
    """Read a PyTorch file; nothing but tensors is loaded, and none of their data."""
    import torch

    saved = torch.load(file, map_location="meta", weights_only=True, mmap=True)
    return {name: list(tensor.shape) for name, tensor in saved.items() if isinstance(tensor, torch.Tensor)}


def _count_embedding(folder: Path) -> int | None:
    try:
        values: Any = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    sections = [values, *values.values()] if isinstance(values, Mapping) else []
    found = [
        section["vocab_size"] * section["hidden_size"]
        for section in sections
        if isinstance(section, Mapping) and all(isinstance(section.get(k), int) for k in ("vocab_size", "hidden_size"))
    ]
    return max(found, default=None)
