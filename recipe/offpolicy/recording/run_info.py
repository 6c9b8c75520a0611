"""``run.json``, the card of a run: its configuration without secrets, its sampling and its checkpoints."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_patches.execution_path import live_path

from ..correction import CorrectionSpec
from ..fault_tolerance.checkpoints import CheckpointFolder
from ..fault_tolerance.redaction import HIDDEN, redact, redact_text
from .recording import CARD, parse_step, read_config, read_json
from .schema import VERSION

_ROLLOUT = "actor_rollout_ref.rollout"
_ENGINE = f"{_ROLLOUT}.engine_kwargs.vllm"
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "do_sample")


def build_card(
    config: DictConfig,
    spec: CorrectionSpec,
    shadows: Mapping[str, CorrectionSpec],
    extensions: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Build the card of a run.

    Args:
        extensions: description of each enabled section.

    Returns:
        ``schema``, ``started`` (UTC), ``correction``, ``fingerprint``, ``shadows``, ``release`` and ``path`` of verl,
        ``model``, ``sampling``, ``checkpoints`` and the resolved ``config``, without environment variables and secrets;
        ``extensions`` if there are any.
    """
    path = live_path(config)
    return {
        "schema": VERSION,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "correction": spec.to_mapping(),
        "fingerprint": spec.fingerprint(),
        "shadows": {name: shadow.to_mapping() for name, shadow in shadows.items()},
        "release": path.release,
        "path": str(path),
        "model": redact_text(str(OmegaConf.select(config, "actor_rollout_ref.model.path"))),
        "sampling": read_sampling(config),
        "checkpoints": str(CheckpointFolder.from_config(config).path),
        "config": redact(_plain(OmegaConf.to_container(config, resolve=True))),
        **({"extensions": redact(_plain(extensions))} if extensions else {}),
    }


def read_sampling(config: DictConfig) -> dict[str, Any]:
    """Describe how responses were sampled: engine, keys that are set, the engine's own keys, and the support."""
    sampling: dict[str, Any] = {"engine": OmegaConf.select(config, f"{_ROLLOUT}.name")}
    for name in _SAMPLING:
        for key in (f"{_ROLLOUT}.{name}", f"{_ENGINE}.{name}", f"{_ENGINE}.override_generation_config.{name}"):
            if (value := OmegaConf.select(config, key)) is not None:
                sampling[name] = value
    if OmegaConf.select(config, "correction.support") is not None:
        names = ("support", "support_unknown", "support_min_p")
        sampling |= {name: OmegaConf.select(config, f"correction.{name}") for name in names}
    return sampling


def find_resumed_folder(config: DictConfig) -> str | None:
    """Return the directory whose checkpoints the run will resume; None for a new run."""
    mode = OmegaConf.select(config, "trainer.resume_mode")
    if mode == "resume_path":
        return str((Path.cwd() / str(config.trainer.resume_from_path)).parent)
    folder = CheckpointFolder.from_config(config)
    try:
        return str(folder.path) if mode == "auto" and folder.read_tracked_step() is not None else None
    except ValueError:
        # A tracker that cannot be read still belongs to an earlier run.
        return str(folder.path)


def explain_foreign(directory: str, config: DictConfig) -> str | None:
    """Explain why a run may not record into ``directory``; None if it may.

    Raises:
        RecordingError: the directory's card is not readable.
    """
    path = Path(directory)
    if not path.is_dir():
        return None
    card = read_json(path / CARD)
    if not card and not any(parse_step(each.name) for each in path.iterdir()):
        return None
    if card and _goes_on(card, config):
        return None
    return "the directory holds the recording of another run, and this run resumes no checkpoint of that run."


def _goes_on(card: Mapping[str, Any], config: DictConfig) -> bool:
    """Return True if this run resumes the card's run, or restarts a run that ended before its first checkpoint."""
    there = find_resumed_folder(config)
    if there is None and OmegaConf.select(config, "trainer.resume_mode") == "auto" and _saves(card):
        there = str(CheckpointFolder.from_config(config).path)
    known = card.get("checkpoints")
    return there is not None and isinstance(known, str) and os.path.realpath(known) == os.path.realpath(there)


def _saves(card: Mapping[str, Any]) -> bool:
    """Return True if the card's run was configured to save checkpoints; if there are none, it was interrupted early."""
    found = read_config(card, "trainer.save_freq")
    return isinstance(found, int) and found > 0


def _plain(value: Any) -> Any:
    """Convert to JSON values, without environment variables."""
    if isinstance(value, Mapping):
        return {str(key): HIDDEN if key == "env_vars" else _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    plain = value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value))
    return value if plain else str(value)
