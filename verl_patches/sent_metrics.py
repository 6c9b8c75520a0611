"""Let a loss's metrics complete themselves before verl's worker sends them to other processes.

verl gathers the metrics of a mini-batch over ranks in ``_postprocess_output``, and only on the ranks whose metrics
anybody wants. An object among them that has ``before_sending()`` is called there, once the backward passes are through.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from . import engine_loss
from .contract import wrap

MODULE = "verl.workers.engine_workers"
CONTRACT = replace(engine_loss.POSTPROCESS_OUTPUT, name="sent_metrics")


def install() -> None:
    """Put the wrapper in front of the target, once, where this process has verl's worker at all.

    Raises:
        PatchError: the target has moved.
    """
    if MODULE in sys.modules and not in_force():
        wrap(CONTRACT, _postprocess_output)


def in_force() -> bool:
    return CONTRACT.in_force()


def complete(metrics: Mapping[str, Any]) -> None:
    """Call ``before_sending()`` of every object among the metrics, alone or in lists, that has it."""
    for value in metrics.values():
        _complete(value)


def _complete(value: Any) -> None:
    if isinstance(value, list | tuple):
        for each in value:
            _complete(each)
    elif (ready := getattr(value, "before_sending", None)) is not None:
        ready()


def _postprocess_output(original: Callable[..., Any], worker: Any, output: Any, **kwargs: Any) -> Any:
    complete(output["metrics"])
    return original(worker, output, **kwargs)
