"""Growth of what a call does, counted without a clock: operations, bytes of tensors, instructions of Python."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Work(TorchDispatchMode):
    """Tensor operations within a ``with`` block.

    Attributes:
        operations: how many.
        elements: of the results, by name of the operation.
        peak: most bytes that the results held at one time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations, self.peak = 0, 0
        self.elements: Counter[str] = Counter()
        self._held: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {self._key(_values(one)) for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        result = func(*args, **(kwargs or {}))
        self.operations += 1
        for one in tree_leaves(result):
            if _is_plain(one):
                self.elements[func.overloadpacket.__name__] += one.numel()
                if (key := self._key(one)) not in given and key not in self._held:
                    self._hold(key, one)
        return result

    def _hold(self, key: int, one: Tensor) -> None:
        storage = one.untyped_storage()
        self._held[key] = storage.nbytes()
        self.peak = max(self.peak, sum(self._held.values()))
        weakref.finalize(storage, self._held.pop, key, None)

    @staticmethod
    def _key(one: Tensor) -> int:
        return one.untyped_storage()._cdata


def _is_plain(one: Any) -> bool:
    return isinstance(one, Tensor) and not one.is_nested


def _values(one: Any) -> Tensor:
    values: Tensor = one._values if one.is_nested else one
    return values


def count_work(call: Callable[[], Any]) -> Work:
    """Count what one call does; it is called once before, so that what is kept for later is there."""
    call()
    with Work() as work:
        call()
    return work


def count_instructions(call: Callable[[], Any]) -> int:
    """Count the instructions of Python that one call executes."""
    seen = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal seen
        frame.f_trace_opcodes = True
        seen += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return seen
