"""Patches that wrap their targets immediately, or as soon as the targets' module has been imported.

Some targets, such as vLLM's layers, are expensive to import and needed in only a few processes. If such a target is
patched after its import, the order of imports does not matter, and other processes need not import it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from . import record_failure
from .contract import Contract, check_all, wrap


def after_import(module_name: str, action: Callable[[], object]) -> None:
    """Call `action` now if `module_name` has been imported, otherwise right after its import.

    An error raised by the action propagates to the importer, and is recorded for `verl_patches.status()`, because
    importers may swallow errors. The next import of the module raises the error again.
    """
    if module_name in sys.modules:
        action()
        return
    sys.meta_path.insert(0, _Watcher(module_name, action))


def is_awaited(module_name: str) -> bool:
    """Return True if an action is waiting for the import of this module."""
    # The finders of other packages do not have this attribute.
    watched = any(getattr(finder, "module_name", None) == module_name for finder in sys.meta_path)
    return watched and module_name not in sys.modules


def find_behind(
    finder: importlib.abc.MetaPathFinder, fullname: str, path: Sequence[str] | None, target: ModuleType | None
) -> importlib.machinery.ModuleSpec | None:
    """Find a module with the finders that come after ``finder``."""
    for other in sys.meta_path[sys.meta_path.index(finder) + 1 :]:
        # Finders written for Python before 3.4 do not have find_spec.
        find = getattr(other, "find_spec", None)
        spec: importlib.machinery.ModuleSpec | None = find(fullname, path, target) if find else None
        if spec is not None:
            return spec
    return None


class _Watcher(importlib.abc.MetaPathFinder):
    """Import finder that finds one module with the finders after it, and adds the action to the module's loader.

    The finder stays installed until the module has been imported and the action has run. Looking up the module's spec,
    or a failed import, does not remove it.
    """

    def __init__(self, module_name: str, action: Callable[[], object]) -> None:
        self.module_name = module_name
        self.action = action

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.module_name or self not in sys.meta_path:
            return None
        spec = find_behind(self, fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._arrived)
        return spec

    def _arrived(self) -> None:
        try:
            self.action()
        except Exception as error:
            record_failure(f"the patch that waits for {self.module_name}", error)
            raise
        if self in sys.meta_path:
            sys.meta_path.remove(self)


class _Loader(importlib.abc.Loader):
    """Loader that loads a module with the original loader, and then runs the action."""

    def __init__(self, loader: importlib.abc.Loader, action: Callable[[], object]) -> None:
        self.loader = loader
        self.action = action

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        self.action()

    def __getattr__(self, name: str) -> object:
        return getattr(self.loader, name)  # get_source, get_filename ... for tracebacks and tools


@dataclass(frozen=True)
class ReleasePatch:
    """A patch: wrappers that are installed together.

    Attributes:
        wrappers: pairs of a target's contract and its wrapper, for each release that needs the patch.
        after: module whose import triggers the installation; None to install the patch immediately.
        cause: returns whether the installed releases need the patch.
    """

    wrappers: tuple[tuple[Contract, Callable[..., Any]], ...]
    after: str | None = None
    cause: Callable[[], bool] = lambda: True

    def install(self) -> None:
        """Wrap the targets now, or right after the import of `after`; repeated calls have no effect.

        Raises:
            PatchError: a target has changed, or the release was not tested.
        """
        if not self.cause() or self.waiting() or self.in_force():
            return
        if self.after is None:
            self.apply()
        else:
            after_import(self.after, self.apply)

    def waiting(self) -> bool:
        """Return True if the patch will be installed when `after` is imported."""
        return any(getattr(finder, "action", None) == self.apply for finder in sys.meta_path)

    def in_force(self) -> bool:
        """Return True if the patch is applied in this process. Does not import ``after``."""
        return (self.after is None or self.after in sys.modules) and self.is_applied()

    def check(self) -> None:
        """Check the contract with every target."""
        check_all(contract for contract, _ in self.wrappers)

    def apply(self) -> None:
        """Wrap every target if all contracts are met."""
        self.check()
        for contract, wrapper in self.wrappers:
            wrap(contract, wrapper)

    def is_applied(self) -> bool:
        """Return True if every target is wrapped."""
        return all(contract.in_force() for contract, _ in self.wrappers)


@dataclass(frozen=True)
class Addition(ReleasePatch):
    """A patch that adds something instead of wrapping; its wrappers take no arguments and make the additions.

    Attributes:
        added: returns whether the additions are present.
    """

    added: Callable[[], bool] = lambda: False

    def apply(self) -> None:
        for _, add in self.wrappers:
            add()

    def is_applied(self) -> bool:
        return self.added()
