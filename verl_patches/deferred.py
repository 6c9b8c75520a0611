"""Runs a patch right after the module that it targets has been imported.

Some targets are costly to import and needed in few processes (vLLM's layers). Patching them when they
arrive makes the order of imports irrelevant and leaves every other process alone.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType


def after_import(module_name: str, action: Callable[[], object]) -> None:
    """Calls `action` once `module_name` is imported: now, or after its import. Its errors propagate."""
    if module_name in sys.modules:
        action()
        return
    sys.meta_path.insert(0, _Watcher(module_name, action))


class _Watcher(importlib.abc.MetaPathFinder):
    """Finds one module through the other finders and adds the action to its loader."""

    def __init__(self, module_name: str, action: Callable[[], object]) -> None:
        self.module_name = module_name
        self.action = action

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.module_name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self.action)
        return spec


class _Loader(importlib.abc.Loader):
    """Loads as the original loader does, then acts."""

    def __init__(self, loader: importlib.abc.Loader, action: Callable[[], object]) -> None:
        self.loader = loader
        self.action = action

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        self.action()

    def __getattr__(self, name: str) -> object:
        return getattr(self.loader, name)  # get_source, get_filename ...: what tracebacks and tools ask for
