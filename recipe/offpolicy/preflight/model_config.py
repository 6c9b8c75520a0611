"""Detection of mixture-of-experts models from their local ``config.json``."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

_MODEL = "actor_rollout_ref.model"
_FILE = "config.json"
_EXPERTS = re.compile(r"experts")


def find_experts(config: DictConfig) -> tuple[bool, str] | None:
    """Find out whether the actor is a mixture of experts, without loading it and without a network.

    Returns:
        Whether it is, and a sentence with the file that says so; None where there is no ``config.json`` at hand.
    """
    for name in (OmegaConf.select(config, f"{_MODEL}.{key}") for key in ("hf_config_path", "path")):
        if not isinstance(name, str) or (file := find_local(name)) is None:
            continue
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        found = next(_find_expert_counts(values), None)
        return found is not None, f"{file} {f'has {found[0]}={found[1]}' if found else 'counts no experts'}"
    return None


def _find_expert_counts(values: Any) -> Iterator[tuple[str, int]]:
    """Find keys that count more than one expert, at any depth: num_experts, num_local_experts, n_routed_experts ..."""
    if not isinstance(values, Mapping):
        return
    for key, value in values.items():
        counts = value if isinstance(value, list) else [value]
        most = max((each for each in counts if isinstance(each, int) and not isinstance(each, bool)), default=0)
        if _EXPERTS.search(str(key)) and most > 1:
            yield str(key), most
        yield from _find_expert_counts(value)


def find_local(name: str) -> Path | None:
    """Find the ``config.json`` of a model in a local folder, or in the hub's cache on this machine."""
    folder = Path(os.path.expanduser(name))
    if (folder / _FILE).is_file():
        return folder / _FILE
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        return None
    try:
        cached = try_to_load_from_cache(name, _FILE)
    except HFValidationError:  # a path that is not there
        return None
    return Path(cached) if isinstance(cached, str) else None
