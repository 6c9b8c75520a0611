"""Lets a loss's metrics complete themselves before verl's worker sends them to other processes.

verl gathers the metrics of a mini-batch over ranks in ``_postprocess_output``, only on the ranks whose metrics are
used. After the backward passes, this patch calls ``before_sending()`` of each of these metrics, if the metric has such
a method.
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
    """Wrap the target if this process has verl's worker. Idempotent.

    Raises:
        PatchError: the target has moved.
    """
    if MODULE in sys.modules and not in_force():
        wrap(CONTRACT, _postprocess_output)


def in_force() -> bool:
    return CONTRACT.in_force()


def complete(metrics: Mapping[str, Any]) -> None:
    """Call ``before_sending()`` of every metric that has this method, including metrics inside lists."""
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
