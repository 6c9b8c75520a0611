"""Import finder that loads the source of certain modules with another loader."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

from .deferred import find_behind


class SourceFinder(importlib.abc.MetaPathFinder):
    """Import finder for chosen modules, which later finders must find as source files.

    Args:
        chooses: returns True if ``loader`` must load the module with this full name.
        loader: replaces the loader that was found; called with that loader's arguments.
    """

    def __init__(self, chooses: Callable[[str], bool], loader: type[importlib.machinery.SourceFileLoader]) -> None:
        self._chooses, self._loader = chooses, loader

    def install(self) -> None:
        """Put this finder before all others in this process. Idempotent."""
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not self._chooses(fullname) or self not in sys.meta_path:
            return None
        spec = find_behind(self, fullname, path, target)
        if spec is not None and type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = self._loader(spec.loader.name, spec.loader.path)
        return spec
