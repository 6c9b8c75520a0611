"""A module's file, as ``python -m`` finds it, without importing it."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipe.offpolicy.preflight.python_source import find_source


def test_modules_packages_and_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("single.py", "package/__init__.py", "package/inner.py", "program/__init__.py", "program/__main__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert find_source("single") == tmp_path / "single.py"
    assert find_source("package") == tmp_path / "package" / "__init__.py"
    assert find_source("package.inner") == tmp_path / "package" / "inner.py"
    assert find_source("program") == tmp_path / "program" / "__main__.py"
    assert find_source("package.none") is None
    assert find_source("there_is_no_such_package.x") is None
