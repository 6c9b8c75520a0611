"""A module's file, as ``python -m`` finds it, without importing it."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipe.offpolicy.preflight.checks.module_source import source_of


def test_modules_packages_and_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("single.py", "package/__init__.py", "package/inner.py", "program/__init__.py", "program/__main__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert source_of("single") == tmp_path / "single.py"
    assert source_of("package") == tmp_path / "package" / "__init__.py"
    assert source_of("package.inner") == tmp_path / "package" / "inner.py"
    assert source_of("program") == tmp_path / "program" / "__main__.py"
    assert source_of("package.none") is None
    assert source_of("there_is_no_such_package.x") is None
