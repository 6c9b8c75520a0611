"""Contracts on methods wrapped by verl's ``GPUMemoryLogger``, which hides their signature."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from ..contract import Contract


class Logged(Contract):
    """Contract on the signature and keys of the method that the logger calls."""

    def _inspect(self, target: Any) -> Any:
        return behind(target, self.target.rpartition(".")[2])


def behind(function: Callable[..., Any], name: str) -> Callable[..., Any] | None:
    """Return the function of that name behind a decorator without ``functools.wraps``, or the function itself."""
    function = inspect.unwrap(function)
    # Such a decorator keeps the wrapped function only in its closure.
    held = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    return next((found for found in (function, *held) if getattr(found, "__name__", None) == name), None)
