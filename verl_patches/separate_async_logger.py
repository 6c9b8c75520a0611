"""Lets verl's separate asynchronous trainer start without colocated rollouts.

With `actor_rollout_ref.hybrid_engine=False`, the trainer logs its start with `flush=True`, which `print` accepts but a
logger does not. This raises a TypeError on every platform, unless VERL_LOGGING_LEVEL is above INFO.
"""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any

from .contract import Contract, PatchError, loaded, resolve
from .contract import logger as own_logger
from .releases import specifiers

MODULE = "verl.trainer.ppo.v1.trainer_separate_async"
CONTRACT = Contract(
    name="separate_async_logger",
    target=f"{MODULE}:logger.info",
    signature="(msg, *args, **kwargs)",
    distribution="verl",
    releases=specifiers(lambda release: "separate_async" in release.v1_modes),
)


class _WithoutFlush(logging.LoggerAdapter[logging.Logger]):
    """Proxy for verl's logger that ignores `flush`."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        return msg, {key: value for key, value in kwargs.items() if key != "flush"}


def install() -> None:
    """Replace the module's logger with the proxy, once. Imports the trainer's module.

    Raises:
        PatchError: the module's logger is not a logger.
    """
    CONTRACT.check()
    module = resolve(f"{MODULE}:__dict__")
    if in_force():
        return
    if not isinstance(module["logger"], logging.Logger):
        raise PatchError(CONTRACT.moved(f"a {type(module['logger']).__name__}"))
    module["logger"] = _WithoutFlush(module["logger"], {})
    own_logger.info("patch %s in force on %s", CONTRACT.name, CONTRACT.target)


def in_force() -> bool:
    return isinstance(loaded(f"{MODULE}:logger"), _WithoutFlush)
