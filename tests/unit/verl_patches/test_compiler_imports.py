"""tensordict works without PyTorch's compiler, which is still available to code that uses it."""

from __future__ import annotations

import pytest

from tests.support.fresh_python import ok

pytest.importorskip("tensordict")

pytestmark = pytest.mark.slow

START = "import sys; from verl_patches import lazy_imports as c; c.install(); c.install();"
USE = """
import torch
from tensordict import NonTensorData, TensorDict
batch = TensorDict({"a": torch.arange(6).view(3, 2), "b": NonTensorData("word")}, batch_size=3)
part = batch[1:].select("a").clone()
print(int(part["a"].sum()), batch["b"], list(part.split(1)[1]["a"][0]) == [4, 5])
"""


def test_tensordict_works_without_the_compiler() -> None:
    printed = ok(f"{START}{USE}\nprint('torch._dynamo' in sys.modules, 'sympy' in sys.modules)", bare=True)
    assert printed.split("\n")[:-1] == ["14 word True", "False False"]
