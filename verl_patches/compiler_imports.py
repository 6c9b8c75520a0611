"""tensordict without PyTorch's compiler, for a process that compiles nothing: the compiler takes longer to import.

tensordict asks the compiler for two marks that only compiled code reads. In a process that called `leave_out()` it gets
marks that do nothing, and whatever else it asks `torch._dynamo` for from the compiler itself.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

from .source_finder import SourceFinder

_COMPILER = "torch._dynamo"


def leave_out() -> None:
    """Let tensordict, when this process imports it, leave PyTorch's compiler out; once."""
    _FINDER.install()


class _Loader(importlib.machinery.SourceFileLoader):
    """Loader beside whose module, until that is imported, marks stand in for the compiler."""

    def exec_module(self, module: ModuleType) -> None:
        marks = ModuleType(_COMPILER)
        vars(marks).update(
            assume_constant_result=lambda function: function,
            graph_break=lambda *reason: None,
            __getattr__=_ask_compiler,
        )
        sys.modules[_COMPILER] = marks
        try:
            super().exec_module(module)
        finally:
            if sys.modules.get(_COMPILER) is marks:
                del sys.modules[_COMPILER]


_FINDER = SourceFinder(lambda module: module == "tensordict" and _COMPILER not in sys.modules, _Loader)


def _ask_compiler(name: str) -> Any:
    if name.startswith("__"):  # the import system asks every module for names of its own
        raise AttributeError(name)
    sys.modules.pop(_COMPILER, None)
    return getattr(importlib.import_module(_COMPILER), name)
