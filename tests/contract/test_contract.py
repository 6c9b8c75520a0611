"""A contract accepts what it was written for and refuses, with the mend, what has moved."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import logging
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from verl_patches.contract import ALLOW_UNTESTED, Contract, PatchError, bare_signature, is_wrapped, resolve, wrap
from verl_patches.deferred import after_import

TARGET = "a_module_of_the_test:Owner.double"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module with one method to patch; it stands for upstream."""

    class Owner:
        def double(self, value: int, *, plus: int = 0) -> int:
            return 2 * value + plus

    made = ModuleType("a_module_of_the_test")
    made.Owner = Owner  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, made.__name__, made)
    return made


def contract(**changes: Any) -> Contract:
    fields = {"signature": "(self, value, *, plus=0)", "distribution": "packaging", "releases": ">=20"}
    return Contract(name="doubling", target=TARGET, **{**fields, **changes})


def negated(original: Any, *args: Any, **kwargs: Any) -> int:
    return -int(original(*args, **kwargs))


def test_wrap_runs_in_front_of_the_original(module: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="verl_patches"):
        assert wrap(contract(), negated) is True
    # double(3, plus=1) = 2*3 + 1 = 7, negated -7
    assert module.Owner().double(3, plus=1) == -7
    assert is_wrapped(module.Owner.double, "doubling")
    assert [record.getMessage() for record in caplog.records] == [f"patch doubling in force on {TARGET}"]


def test_wrap_is_idempotent(module: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    wrap(contract(), negated)
    with caplog.at_level(logging.INFO, logger="verl_patches"):
        assert wrap(contract(), negated) is False
    assert module.Owner().double(3) == -6  # negated once, not twice
    assert caplog.records == []


def test_two_patches_share_a_target(module: ModuleType) -> None:
    wrap(contract(), negated)
    wrap(Contract("other", TARGET, "(self, value, *, plus=0)", "packaging", ">=20"), negated)
    assert module.Owner().double(3) == 6
    assert is_wrapped(module.Owner.double, "doubling")
    assert is_wrapped(module.Owner.double, "other")


@pytest.mark.parametrize(
    "signature", ["(self, value)", "(self, value, plus=0)", "(self, value, *, plus=1)", "(self, number, *, plus=0)"]
)
def test_a_moved_signature_raises_and_changes_nothing(module: ModuleType, signature: str) -> None:
    before = module.Owner.double
    with pytest.raises(PatchError) as error:
        wrap(contract(signature=signature), negated)
    message = str(error.value)
    assert TARGET in message
    assert signature in message, "what was expected"
    assert "(self, value, *, plus=0)" in message, "what was found"
    assert "Fix:" in message
    assert module.Owner.double is before


@pytest.mark.parametrize("target", ["a_module_of_the_test:Owner.triple", "no_module_of_that_name:f"])
def test_a_missing_target_raises(module: ModuleType, target: str) -> None:
    missing = Contract("doubling", target, "()", "packaging", ">=20")
    assert resolve(target) is None
    with pytest.raises(PatchError, match="nothing of that name"):
        missing.check()


def test_an_untested_release_needs_an_opt_in(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ALLOW_UNTESTED, raising=False)
    release = importlib.metadata.version("packaging")
    untested = contract(releases="<1")
    with pytest.raises(PatchError, match=rf"packaging<1, found {release}.*{ALLOW_UNTESTED}=1"):
        untested.check()
    monkeypatch.setenv(ALLOW_UNTESTED, "1")
    assert untested.check() is module.Owner.double
    with pytest.raises(PatchError, match="has moved"):  # the opt-in is for releases, not for signatures
        contract(releases="<1", signature="()").check()


def test_a_missing_distribution_raises(module: ModuleType) -> None:
    with pytest.raises(PatchError, match=r"'no-such-distribution', which is not installed\. Fix: install"):
        contract(distribution="no-such-distribution").check()


def test_a_deferred_patch_waits_for_its_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The action runs once, after the module's own code; later importers get the patched module."""
    (tmp_path / "imported_late_by_the_test.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    finders = list(sys.meta_path)
    seen: list[int] = []
    after_import("imported_late_by_the_test", lambda: seen.append(sys.modules["imported_late_by_the_test"].value))
    assert seen == []
    module = importlib.import_module("imported_late_by_the_test")
    assert seen == [1]
    assert inspect.getsource(module) == "value = 1\n"  # the loader still answers for its source
    assert sys.meta_path == finders
    after_import("imported_late_by_the_test", lambda: seen.append(2))
    assert seen == [1, 2]


def test_an_error_in_a_deferred_patch_reaches_the_importer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "refused_by_the_test.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)

    def refuse() -> None:
        raise PatchError("moved")

    after_import("refused_by_the_test", refuse)
    with pytest.raises(PatchError, match="moved"):
        importlib.import_module("refused_by_the_test")


def test_bare_signature_drops_annotations_only() -> None:
    def function(a: int, /, b: str = "x", *rest: int, c: float, d: bool = True, **more: Any) -> None: ...

    assert bare_signature(function) == "(a, /, b='x', *rest, c, d=True, **more)"
