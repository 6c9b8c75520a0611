"""Checkpoints that stay loadable, and that record the correction with which the run was trained.

verl writes ``global_step_N`` in place, and then names it in ``latest_checkpointed_iteration.txt``. A run that ends
during a save can lose its checkpoint in three ways. If verl keeps only one checkpoint, it deletes the previous
checkpoint before it names the new one. Saving the same step again overwrites the named checkpoint. The name is not
written atomically.

    default_local_dir/offpolicy_saving.json            during a save: which checkpoint is being written
    default_local_dir/global_step_N/offpolicy.json     after a save: the correction
    default_local_dir/global_step_N/offpolicy/SECTION  files of an extension
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from ..correction import CorrectionSpec
from ..correction.correction_parts import OF_THE_TRAINER
from .state_schema import RECORD as SCHEMA
from .state_schema import SAVING as SAVING_SCHEMA
from .state_schema import CheckpointError, Keys, read_json, restoring

logger = logging.getLogger("verl.offpolicy")

TRACKER = "latest_checkpointed_iteration.txt"
SAVING = "offpolicy_saving.json"
RECORD = "offpolicy.json"
CHANGED = "offpolicy.resume_changed_correction"
STATES = "offpolicy"
"""Folder, within a checkpoint, for the files of extensions."""
_STEP = "global_step_"
_STALENESS = "staleness"
ACTIVE = "steering"
"""Key in a record for the state of alarms and moved bounds; must not change, because existing checkpoints use it."""
_CUT_SHORT = "writing it was interrupted"


@dataclass(frozen=True)
class CheckpointFolder:
    """The folder ``trainer.default_local_dir``, which contains a run's checkpoints."""

    path: Path

    @classmethod
    def from_config(cls, config: DictConfig) -> CheckpointFolder:
        """Read the folder from a composed configuration; relative paths start at the current directory."""
        return cls(Path.cwd() / config.trainer.default_local_dir)

    def step_path(self, step: int) -> Path:
        """Return the folder ``global_step_N`` of a step, which may not exist."""
        return self.path / f"{_STEP}{step}"

    def read_tracked_step(self) -> int | None:
        """Read the step from which verl would resume; None if there is no tracker file.

        Raises:
            ValueError: the tracker file contains no number, because writing it was interrupted.
        """
        with contextlib.suppress(FileNotFoundError):
            return int((self.path / TRACKER).read_text())
        return None

    def read_unfinished(self) -> dict[str, Any] | None:
        """Read which checkpoint was started but not completed; None if all were completed.

        Returns:
            ``step`` of the checkpoint, and ``tracked``, the step from which a run could resume before, if any.
        """
        return _read(self.path / SAVING, SAVING_SCHEMA)

    def is_whole(self, step: int) -> bool:
        """Return True unless a checkpoint is known to be incomplete; one without a record counts as complete."""
        if not self.step_path(step).is_dir() or self._is_emptied(step):
            return False
        mark, record = self.read_unfinished(), _read(self.step_path(step) / RECORD)
        if record is not None and not record["complete"]:
            # verl names an asynchronously saved checkpoint as soon as the save is done.
            with contextlib.suppress(ValueError):
                return (self.read_tracked_step() or 0) >= step
            return False
        if record is not None or mark is None or mark["step"] != step:
            return True
        # verl names a checkpoint once it is complete. If this one was named before the save, the save was overwriting
        # it.
        with contextlib.suppress(ValueError):
            return self.read_tracked_step() == step != mark["tracked"]
        return False

    def _is_emptied(self, step: int) -> bool:
        """Return True if verl has deleted the weights of an old checkpoint but left its folder."""
        actor = self.step_path(step) / "actor"
        return actor.is_dir() and not any(actor.iterdir())

    def list_complete_steps(self) -> list[int]:
        """List the steps that are recorded as complete, newest first."""
        found = {}
        for path in self.path.glob(f"{_STEP}*/{RECORD}"):
            with contextlib.suppress(CheckpointError):
                found[path.parent.name.removeprefix(_STEP)] = _read(path)
        return sorted((int(s) for s, r in found.items() if s.isdigit() and r and r["complete"]), reverse=True)


@contextlib.contextmanager
def guard_save(
    config: DictConfig,
    step: int,
    spec: CorrectionSpec,
    active: Mapping[str, Any] | None = None,
    extensions: Callable[[Path], Mapping[str, Any]] = lambda folder: {},
    staleness: Mapping[str, Any] | None = None,
) -> Iterator[None]:
    """Wrap verl's ``_save_checkpoint``: mark the checkpoint as started, and record it once it is complete.

    Args:
        active: state of the alarms and moved bounds, see ``monitor.active_correction``.
        extensions: called with a folder for the extensions' files; returns the extensions' state, by section.
        staleness: state of the rate limit, if the run has one.
    """
    folder = CheckpointFolder.from_config(config)
    _keep_previous(config)
    record = folder.step_path(step) / RECORD
    try:
        tracked = folder.read_tracked_step()
    except ValueError:
        tracked = None
    write_json(folder.path / SAVING, {"step": step, "tracked": tracked})
    record.unlink(missing_ok=True)
    yield
    # An asynchronous Megatron save continues in the background; verl writes its tracker file at the end of the save.
    complete = not OmegaConf.select(config, "actor_rollout_ref.actor.checkpoint.async_save", default=False)
    states = {ACTIVE: active, "extensions": extensions(folder.step_path(step) / STATES) or None, _STALENESS: staleness}
    content = {"correction": spec.to_mapping(), "fingerprint": spec.fingerprint(), "step": step, "complete": complete}
    write_json(record, content | {key: dict(state) for key, state in states.items() if state is not None})
    if complete:
        # verl has just written the same number, but not atomically. If the process had been killed during that write,
        # the file would contain no number.
        _write(folder.path / TRACKER, str(step))
    (folder.path / SAVING).unlink(missing_ok=True)


def check_before_loading(
    config: DictConfig,
    spec: CorrectionSpec,
    differences: Callable[[Mapping[str, Any] | None], list[str]] = lambda found: [],
    of_extensions: Callable[[Mapping[str, Any]], list[str]] = lambda found: [],
    dependents: Sequence[str] = (),
) -> dict[str, Any] | None:
    """Before verl's ``_load_checkpoint``, check that the checkpoint is complete and has the same correction.

    Args:
        differences: called with the checkpoint's state of alarms and moved bounds; lists the keys whose values differ
            in this run, in the form of ``find_changes``.
        of_extensions: like ``differences``, but for the checkpoint's state of extensions, by section.
        dependents: keys of this run that need the checkpoint's state.

    Returns:
        The checkpoint's state of alarms and moved bounds; None if there is none or if the correction has changed.

    Raises:
        CheckpointError: all checkpoints are incomplete, or the named checkpoint was trained with another correction, or
            the checkpoint's record is missing or invalid.
    """
    path = _find_resumed(config)
    if path is None:
        return None
    record = _read(path / RECORD)
    changed_is_meant = OmegaConf.select(config, CHANGED, default=False)
    if record is None:
        if dependents and not changed_is_meant:
            raise CheckpointError(
                f"{path} has no {RECORD}, but {', '.join(dependents)} need the state in this file. "
                f"Restore the file, or set {CHANGED}=true to start without this state."
            )
        logger.warning(
            "%s has no %s, so it is unknown whether the checkpoint was trained with this correction. The next "
            "checkpoint will record the correction.",
            *(path, RECORD),
        )
        return None
    active: dict[str, Any] | None = record.get(ACTIVE)
    of_correction = find_changes(_normalize_proximal(record["correction"]), _normalize_proximal(spec.to_mapping()))
    with restoring(lambda: path / RECORD, ACTIVE):
        found = of_correction + differences(active) + of_extensions(record.get("extensions", {}))
    lines = "".join(f"\n  {line}" for line in found)
    if not found:
        own = "the correction that it was trained with"
        logger.info("resuming %s with %s, fingerprint %d.", path.name, own, spec.fingerprint())
    elif changed_is_meant:
        logger.warning("resuming %s with another correction, allowed by %s=true:%s", path.name, CHANGED, lines)
    else:
        fix = f"Set these keys back, or allow the change with {CHANGED}=true."
        raise CheckpointError(f"{path} was trained with another correction:{lines}\n{fix}")
    if of_correction and active is not None:
        logger.warning("alarms and moved bounds of %s belong to the other correction, so they are reset.", path.name)
        return None
    return active


def find_record(config: DictConfig) -> Path:
    """Return the path of the resumed checkpoint's record, which may not exist."""
    return (_find_resumed(config) or Path()) / RECORD


def extension_states(config: DictConfig) -> tuple[dict[str, Any], Path]:
    """Read the extensions' state from the checkpoint that verl has just loaded; also return their files' folder."""
    folder, record = _read_resumed(config)
    return record.get("extensions", {}), folder / STATES


def read_staleness(config: DictConfig) -> dict[str, Any] | None:
    """Read the state of the rate limit in the checkpoint that verl has just loaded; None if the checkpoint has none."""
    return _read_resumed(config)[1].get(_STALENESS)


def _read_resumed(config: DictConfig) -> tuple[Path, dict[str, Any]]:
    """Find the folder of the resumed checkpoint, and read its record; both are empty for a new run."""
    path = _find_resumed(config)
    record = None if path is None else _read(path / RECORD)
    return path or Path(), record or {}


def find_changes(old: Mapping[str, Any], new: Mapping[str, Any], key: str = "correction") -> list[str]:
    """List the keys under ``key`` whose values differ between two mappings of plain values, with both values."""
    before, now = _flatten(old, key), _flatten(new, key)

    def show(values: Mapping[str, Any], key: str) -> str:
        return json.dumps(values[key]) if key in values else "not there"

    return [
        f"{key}: {show(before, key)} in the checkpoint, {show(now, key)} now"
        for key in sorted(before.keys() | now.keys())
        if key not in before or key not in now or before[key] != now[key]
    ]


def _normalize_proximal(correction: Mapping[str, Any]) -> dict[str, Any]:
    """Map ``reuse`` and ``same_engine`` to ``recompute``, because all three use log pi_old of the trainer's weights.

    A change of micro-batch sizes alone may switch between ``reuse`` and ``recompute``; ``same_engine`` is proved again
    in the first step of each run.
    """
    of_trainer = correction.get("proximal") in (*OF_THE_TRAINER, "same_engine")
    return {**correction, "proximal": "recompute"} if of_trainer else dict(correction)


def write_json(path: Path, content: Mapping[str, Any], *, mode: int = 0o666) -> None:
    """Write a JSON file atomically, with the permissions ``mode`` minus the umask."""
    _write(path, json.dumps(content, indent=2, sort_keys=True) + "\n", mode)


def _find_resumed(config: DictConfig) -> Path | None:
    """Find the checkpoint from which verl is about to resume; None for a new run."""
    mode = config.trainer.resume_mode
    if mode == "auto":
        folder = CheckpointFolder.from_config(config)
        step = _choose_whole_step(folder)
        return None if step is None else folder.step_path(step)
    if mode != "resume_path":
        return None
    path = Path.cwd() / str(config.trainer.resume_from_path)
    folder, name = CheckpointFolder(path.parent), path.name.removeprefix(_STEP)
    if name.isdigit() and path.is_dir() and not folder.is_whole(int(name)):
        others = [step for step in folder.list_complete_steps() if step != int(name) and folder.is_whole(step)]
        advice = f"{folder.step_path(others[0])} is complete." if others else "No other checkpoint there is complete."
        raise CheckpointError(f"trainer.resume_from_path={path}: {_CUT_SHORT}. {advice}")
    return path


def _choose_whole_step(folder: CheckpointFolder) -> int | None:
    """Choose the step from which to resume; if verl's tracker names an incomplete checkpoint, correct the tracker."""
    mark = folder.read_unfinished()
    try:
        tracked = folder.read_tracked_step()
    except ValueError:
        named, trouble = folder.path / TRACKER, "it contains no number"
    else:
        if tracked is None:
            if mark is not None:
                logger.warning(
                    "the first checkpoint, of step %d, is incomplete, so training starts again.", mark["step"]
                )
            return None
        if folder.is_whole(tracked):
            if mark is not None and mark["step"] != tracked:
                logger.warning("the checkpoint of step %d is incomplete; resuming from step %d.", mark["step"], tracked)
            return tracked
        named = folder.step_path(tracked)
        trouble = _CUT_SHORT if named.is_dir() else "it does not exist"
    whole = [step for step in folder.list_complete_steps() if folder.is_whole(step)]
    if not whole:
        raise CheckpointError(
            f"{named}: {trouble}, and no other checkpoint is known to be complete. Select a checkpoint with "
            "trainer.resume_mode=resume_path trainer.resume_from_path=..., or restart with "
            "trainer.resume_mode=disable."
        )
    logger.warning("%s: %s; resuming from step %d, the newest complete checkpoint.", named, trouble, whole[0])
    _write(folder.path / TRACKER, str(whole[0]))
    return whole[0]


def _keep_previous(config: DictConfig) -> None:
    """Raise verl's limit on kept checkpoints from 1 to 2: verl deletes the old one before it names the new one."""
    trainer, removes = config.trainer, "remove_previous_ckpt_in_save"
    limits = ("max_actor_ckpt_to_keep", "max_critic_ckpt_to_keep")
    changed: dict[str, bool | int] = {key: 2 for key in limits if OmegaConf.select(trainer, key) == 1}
    if OmegaConf.select(trainer, removes, default=False):
        changed = {removes: False, **dict.fromkeys(limits, 2)}
    if changed:
        with open_dict(config):
            trainer.update(changed)
        logger.warning(
            "trainer.%s: two checkpoints are kept, because verl deletes the previous one before the new one can be "
            "resumed; a run that ends in between would have no checkpoint.",
            next(iter(changed)),
        )


def _flatten(values: Any, key: str) -> dict[str, Any]:
    if isinstance(values, Mapping) and values:
        return {path: leaf for name, value in values.items() for path, leaf in _flatten(value, f"{key}.{name}").items()}
    return {key: values}


def _read(path: Path, schema: Keys = SCHEMA) -> dict[str, Any] | None:
    with contextlib.suppress(FileNotFoundError):
        content: dict[str, Any] = read_json(path, schema)
        return content
    return None


def _write(path: Path, text: str, mode: int = 0o666) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "w", opener=lambda name, flags: os.open(name, flags, mode)) as sink:
        sink.write(text)
        sink.flush()
        os.fsync(sink.fileno())
    temporary.replace(path)
