"""Import finder that gives some modules another loader of their source."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

from .deferred import find_behind


class SourceFinder(importlib.abc.MetaPathFinder):
    """Import finder of the chosen modules that the finders behind it find in source.

    Args:
        chooses: of a module's full name, True if the module is to be loaded by ``loader``.
        loader: takes the place of the loader that was found, with its arguments.
    """

    def __init__(self, chooses: Callable[[str], bool], loader: type[importlib.machinery.SourceFileLoader]) -> None:
        self._chooses, self._loader = chooses, loader

    def install(self) -> None:
        """Put it in front of all finders of this process; once."""
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
