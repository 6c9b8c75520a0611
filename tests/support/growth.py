"""The number of operations in a call, and the bytes of tensors that exist at the same time."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Work(TorchDispatchMode):
    """Number of tensor operations in a ``with`` block; ``peak`` is the maximum number of bytes of their results."""

    def __init__(self) -> None:
        super().__init__()
        self.operations, self.peak = 0, 0
        self._held: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {self._key(_values(one)) for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        result = func(*args, **(kwargs or {}))
        self.operations += 1
        for one in tree_leaves(result):
            plain = isinstance(one, Tensor) and not one.is_nested
            if plain and (key := self._key(one)) not in given and key not in self._held:
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


def _values(one: Any) -> Tensor:
    values: Tensor = one._values if one.is_nested else one
    return values
