"""tensordict without PyTorch's compiler: it works, and the compiler is there for whoever asks."""

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


def test_the_compiler_is_there_afterwards() -> None:
    code = f"{START}{USE}\nimport torch._dynamo\nprint(torch.compile(lambda x: x + 1, backend='eager')(torch.ones(1)))"
    assert ok(code, bare=True).split("\n")[1] == "tensor([2.])"


def test_what_the_marks_do_not_have_is_asked_of_the_compiler() -> None:
    code = f"{START}\nfrom verl_patches.lazy_imports import _ask_compiler\nprint(_ask_compiler('optimize').__module__)"
    assert ok(code, bare=True).strip().startswith("torch._dynamo")
