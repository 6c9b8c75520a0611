"""Checks that the folder of a user's model can be trained, and derives settings from the model."""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recipe.offpolicy.preflight.model_files import CONFIG, WEIGHTS, count_largest_tensor, list_weights, read_shapes

BUCKET = "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes"
LEAST_BUCKET = {"cpu": 16, "cpu_megatron": 16, "cuda": 256}
"""Platform -> size of the bucket in MiB, as in configs/platform/ for the quickstart's own models."""
BYTES = 4
"""Bytes per element, because the trainer stores and sends its weights in float32."""
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
_SHARED_MEMORY = Path("/dev/shm")


def find_unusable(folder: Path, *, has_template: bool = False) -> str | None:
    """Explain, before anything starts, why the model in a folder cannot be trained as a causal language model.

    Args:
        has_template: whether a chat template is configured, so that the tokenizer need not have one.

    Returns:
        The problem and its fix; None if there is no problem.
    """
    values = _read_json(folder / CONFIG)
    if values is None:
        return f"there is no readable {CONFIG} in it. Download the model, and pass the folder that contains this file"
    names = values.get("architectures") or []
    if not names or not set(names) <= _list_causal_models():
        return (
            f"its architecture is {', '.join(names) or 'not named'}, but the installed transformers has no causal "
            "language model of that name. Choose another model, or install a transformers release that supports it"
        )
    if values.get("quantization_config"):
        return "its weights are quantised and cannot be trained. Choose the unquantised model"
    files = list_weights(folder)
    if not files:
        return f"it has no weights: none of {' and '.join(WEIGHTS)} is there. Download them"
    for file in files:
        try:
            read_shapes(file)
        except ValueError as error:
            return f"{error}. Download it again (git lfs pull, if it is a pointer of git-lfs)"
    if not any((folder / name).is_file() for name in TOKENIZERS):
        return f"it has no tokenizer: none of {', '.join(TOKENIZERS)} is there. Save the tokenizer into it"
    in_files = any((folder / name).exists() for name in TEMPLATES)
    if not (has_template or in_files or (_read_json(folder / "tokenizer_config.json") or {}).get("chat_template")):
        return (
            "its tokenizer has no chat template, which is common for base models. Choose the instruct model, or set "
            "actor_rollout_ref.model.custom_chat_template=TEMPLATE"
        )
    return None


def _read_json(file: Path) -> dict[str, Any] | None:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return values if isinstance(values, dict) else None


def _list_causal_models() -> set[str]:
    """List transformers' causal language models by reading its source, because its import takes seconds and 300 MB."""
    spec = importlib.util.find_spec("transformers")
    assert spec is not None, "quickstart.sh looks for transformers before"
    source = Path(str(spec.origin)).parent / "models" / "auto" / "modeling_auto.py"
    _, _, table = source.read_text().partition("\nMODEL_FOR_CAUSAL_LM_MAPPING_NAMES = ")
    return set(table.partition("\n)")[0].split('"')[1::2])


def build_bucket_override(folder: Path, platform: str, overrides: Sequence[str]) -> list[str]:
    """Build the override of the bucket size for sending weights to the rollout engine.

    verl never splits a tensor. On a CPU, and in verl 0.7.1 on any device, a tensor larger than the bucket ends the run.

    Args:
        overrides: the user's overrides; if they contain a bucket size, it is kept.

    Raises:
        ValueError: /dev/shm, which contains the bucket on a CPU, is smaller than the bucket.
    """
    if any(override.lstrip("+").partition("=")[0] == BUCKET for override in overrides):
        return []
    elements = count_largest_tensor(folder, stacked=True)
    needed = max(LEAST_BUCKET[platform], math.ceil((elements or 0) * BYTES / 2**20) + 1)
    free = shutil.disk_usage(_SHARED_MEMORY).free >> 20
    if platform != "cuda" and needed > free:
        raise ValueError(
            f"{folder}: the model's largest tensor needs {needed} MiB of {_SHARED_MEMORY} when it is sent to the "
            f"rollout engine, but only {free} MiB are free. Enlarge that file system; for a container, pass "
            f"--shm-size={2 * needed}m"
        )
    return [f"{BUCKET}={needed}"]
