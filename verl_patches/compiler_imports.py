"""Imports tensordict without PyTorch's compiler, which is slow to import, in a process that compiles nothing.

tensordict imports two decorators from the compiler, which affect only compiled code. In a process that called
`leave_out()`, tensordict receives decorators that do nothing instead; other names in `torch._dynamo` still come from
the compiler.
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
    """Make tensordict skip PyTorch's compiler when this process imports tensordict. Idempotent."""
    _FINDER.install()


class _Loader(importlib.machinery.SourceFileLoader):
    """Loader that puts stand-ins for the compiler's decorators in place while its module is imported."""

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
    if name.startswith("__"):  # the import system looks up its own attributes on every module
        raise AttributeError(name)
    sys.modules.pop(_COMPILER, None)
    return getattr(importlib.import_module(_COMPILER), name)
