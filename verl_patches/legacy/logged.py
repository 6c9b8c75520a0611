"""Contracts for methods behind verl's ``GPUMemoryLogger``, which shows Python a function of any arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from ..contract import Contract, PatchError, bare_signature, literals, resolve


class Logged(Contract):
    """A contract whose signature and keys are those of the method that the logger calls."""

    def check(self) -> Any:
        """Returns the target as it stands in its class, once the method behind it is what was expected.

        Raises:
            PatchError: as ``Contract.check``.
        """
        self._check_release()
        target = resolve(self.target)
        method = behind(target, self.target.rpartition(".")[2]) if target else None
        if method is None:
            raise PatchError(self.moved("nothing of that name"))
        if self.signature is not None and bare_signature(method) != self.signature:
            raise PatchError(self.moved(bare_signature(method)))
        if missing := [key for key in self.keys if key not in literals(method)]:
            raise PatchError(self.moved("none of it", f"its code to hold {', '.join(map(repr, missing))}"))
        return target


def behind(function: Callable[..., Any], name: str) -> Callable[..., Any] | None:
    """The function of that name that a decorator without ``functools.wraps`` holds; itself where it is that one."""
    function = inspect.unwrap(function)
    held = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    return next((found for found in (function, *held) if getattr(found, "__name__", None) == name), None)
