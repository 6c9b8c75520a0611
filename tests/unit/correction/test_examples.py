"""The examples in docstrings of `recipe.offpolicy.correction` run, and each public function has one."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
from collections.abc import Iterator

import pytest

from recipe.offpolicy import correction

FLAGS = doctest.ELLIPSIS | doctest.FAIL_FAST


def public_functions() -> Iterator[str]:
    """Names of the package's public functions, as "module:function"."""
    for found in pkgutil.walk_packages(correction.__path__, f"{correction.__name__}."):
        for name, member in vars(importlib.import_module(found.name)).items():
            own = inspect.isfunction(inspect.unwrap(member)) and member.__module__ == found.name
            if own and not name.startswith("_"):
                yield f"{found.name}:{name}"


@pytest.mark.parametrize("name", list(public_functions()))
def test_example(name: str) -> None:
    module = importlib.import_module(name.partition(":")[0])
    function = vars(module)[name.partition(":")[2]]
    example = doctest.DocTestParser().get_doctest(inspect.getdoc(function) or "", dict(vars(module)), name, None, 0)
    assert example.examples, f"{name} has no example. Fix: add a hand-worked one to its docstring (>>> ...)."
    report: list[str] = []
    doctest.DocTestRunner(optionflags=FLAGS).run(example, out=report.append)
    assert not report, "".join(report)
