"""A user's model: the requirements that its folder must meet, and the settings that result from it."""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
from collections.abc import Iterator, Sequence
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
    return next(_list_obstacles(folder, has_template), None)


def _list_obstacles(folder: Path, has_template: bool) -> Iterator[str]:
    if not folder.is_dir():
        yield "there is no such folder. Download the model, and name the folder that holds its config.json"
        return
    values = _read_json(folder / CONFIG)
    if values is None:
        is_there = (folder / CONFIG).is_file()
        yield (
            f"{CONFIG} is not readable as JSON"
            if is_there
            else f"the folder holds no Hugging Face model, because it has no {CONFIG}"
        )
        return
    names = values.get("architectures") or []
    trained = _list_causal_models()
    if "auto_map" in values:
        yield (
            f"{CONFIG} has auto_map: the model needs code of its own, which is not run. Choose a model that "
            "transformers itself supports"
        )
    elif not names or not set(names) <= trained:
        yield (
            f"its architecture is {', '.join(names) or 'not named'}, but the installed transformers has no causal "
            "language model of that name. Choose another model, or install a transformers release that supports it"
        )
    quantization = values.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else quantization
        yield f"its weights are quantised (quant_method={method}) and cannot be trained. Choose the unquantised model"
    if not list_weights(folder):
        others = sorted(file.name for file in folder.glob("*.gguf"))
        convert = f"; convert {others[0]} with transformers' save_pretrained" if others else ""
        yield f"it has no weights: none of {' and '.join(WEIGHTS)} is there{convert}"
    for index in sorted(folder.glob("*.index.json")):
        files = set((_read_json(index) or {}).get("weight_map", {}).values())
        if missing := sorted(name for name in files if not (folder / name).is_file()):
            yield f"{index.name} lists {len(files)} weight files, but {missing[0]} is missing. Download it"
    for file in list_weights(folder):
        if _is_pointer(file):
            yield f"{file.name} is a git-lfs pointer instead of the weights. Run git lfs pull in that folder"
        try:
            read_shapes(file)
        except ValueError as error:
            yield f"{error}. Download it again"
    if not any((folder / name).is_file() for name in TOKENIZERS):
        yield f"it has no tokenizer: none of {', '.join(TOKENIZERS)} is there. Save the tokenizer into it"
    elif not has_template and not _has_template(folder):
        yield (
            "its tokenizer has no chat template, which is common for base models. Choose the instruct model, or set "
            "actor_rollout_ref.model.custom_chat_template=TEMPLATE"
        )


def _read_json(file: Path) -> dict[str, Any] | None:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return values if isinstance(values, dict) else None


def _is_pointer(file: Path) -> bool:
    with file.open("rb") as opened:
        return opened.read(24) == b"version https://git-lfs."


def _has_template(folder: Path) -> bool:
    in_files = any((folder / name).exists() for name in TEMPLATES)
    return in_files or bool((_read_json(folder / "tokenizer_config.json") or {}).get("chat_template"))


def _list_causal_models() -> set[str]:
    """List transformers' causal language models by reading its source, because its import takes seconds and 300 MB."""
    spec = importlib.util.find_spec("transformers")
    assert spec is not None, "quickstart.sh looks for transformers before"
    assert spec.submodule_search_locations is not None
    source = Path(spec.submodule_search_locations[0]) / "models" / "auto" / "modeling_auto.py"
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
            f"{folder}: the model's largest tensor takes {needed} MiB of {_SHARED_MEMORY} on its way to the rollout "
            f"engine, but only {free} MiB are free. Enlarge that file system; for a container, pass "
            f"--shm-size={2 * needed}m"
        )
    return [f"{BUCKET}={needed}"]
