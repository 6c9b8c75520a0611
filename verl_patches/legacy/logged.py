"""Contracts on methods wrapped by verl's ``GPUMemoryLogger``, which hides their signature."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from ..contract import Contract, PatchError, bare_signature, literals, resolve


class Logged(Contract):
    """Contract on the signature and keys of the method that the logger calls."""

    def check(self) -> Any:
        """Check the method behind the target, and return the target as it is in its class.

        Raises:
            PatchError: as for ``Contract.check``.
        """
        self._check_release()
        target = resolve(self.target)
        method = behind(target, self.target.rpartition(".")[2]) if target else None
        if method is None:
            raise PatchError(self.moved("nothing of that name"))
        if self.signature is not None and not self.allows(bare_signature(method)):
            raise PatchError(self.moved(bare_signature(method)))
        if missing := [key for key in self.keys if key not in literals(method)]:
            raise PatchError(self.moved("none of it", f"its code to hold {', '.join(map(repr, missing))}"))
        return target


def behind(function: Callable[..., Any], name: str) -> Callable[..., Any] | None:
    """Return the function of that name behind a decorator without ``functools.wraps``, or the function itself."""
    function = inspect.unwrap(function)
    # Such a decorator keeps the wrapped function only in its closure.
    held = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    return next((found for found in (function, *held) if getattr(found, "__name__", None) == name), None)
