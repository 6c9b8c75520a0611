"""A contract accepts the function that it describes, and rejects a changed function with an error that names
the fix.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.metadata
import importlib.util
import inspect
import logging
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import verl_patches
from verl_patches.contract import (
    ALLOW_UNTESTED,
    Contract,
    NotInstalledError,
    PatchError,
    installed_release,
    is_wrapped,
    literals,
    loaded,
    location,
    of_installed,
    resolve,
    wrap,
)
from verl_patches.deferred import after_import

TARGET = "a_module_of_the_test:Owner.double"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module with one method to patch; it replaces an upstream module."""

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
    assert wrap(contract(), negated) is False
    assert module.Owner().double(3) == -6  # negated once, not twice


@pytest.mark.parametrize(
    "signature", ["(self, value, plus=0)", "(self, value, *, plus=1)", "(self, number, *, plus=0)"]
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


def module_file(folder: Path, name: str, code: str) -> str:
    """Create a package of that name with one module, `inner`."""
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text("")
    (folder / name / "inner.py").write_text(code)
    return f"{name}.inner"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import a_dependency_that_is_not_installed\n", "No module named 'a_dependency_that_is_not_installed'"),
        ("raise ValueError('no platform')\n", "no platform"),
        ("def __getattr__(name):\n    import a_lazy_dependency\n", "No module named 'a_lazy_dependency'"),
    ],
)
def test_a_target_that_cannot_be_imported_has_not_moved(
    code: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fix is to install the missing dependency, not another release of the distribution."""
    monkeypatch.syspath_prepend(tmp_path)
    name = module_file(tmp_path, f"wants_{abs(hash(code))}", code)
    with pytest.raises(PatchError) as error:
        Contract("wanting", f"{name}:f", "()", "packaging", ">=20").check()
    assert str(error.value).startswith(f"{name}:f cannot be imported: {reason}")
    proposed = "follow the advice in the error message" if "platform" in reason else "install the missing module"
    assert str(error.value).endswith(f"Fix: {proposed}.")
    assert loaded(f"{name}:f") is None, "a look at the state does not raise"


def test_an_untested_release_needs_an_opt_in(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ALLOW_UNTESTED, raising=False)
    release = importlib.metadata.version("packaging")
    untested = contract(releases="<1")
    with pytest.raises(PatchError, match=rf"packaging<1, but the installed release is {release}.*{ALLOW_UNTESTED}=1"):
        untested.check()
    monkeypatch.setenv(ALLOW_UNTESTED, "1")
    assert untested.check() is module.Owner.double
    with pytest.raises(PatchError, match="has changed"):  # the opt-in is for releases, not for signatures
        contract(releases="<1", signature="()").check()


def test_a_missing_distribution_raises(module: ModuleType) -> None:
    with pytest.raises(NotInstalledError, match=r"'no-such-distribution', which is not installed\. Fix: install"):
        contract(distribution="no-such-distribution").check()


def test_a_deferred_patch_waits_for_its_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The action runs once, after the module's own code, and later importers get the patched module."""
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
    """Every importer sees the error, and so does the caller who asks for failures that importers swallowed."""
    (tmp_path / "refused_by_the_test.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(verl_patches, "_failures", {})

    def refuse() -> None:
        raise PatchError("moved")

    after_import("refused_by_the_test", refuse)
    for _ in range(2):
        with pytest.raises(PatchError, match="moved"):
            importlib.import_module("refused_by_the_test")
    assert list(verl_patches._failures) == ["the patch that waits for refused_by_the_test: moved"]


# Keys: what a target's code reads or passes on ----------------------------------------------------------------


def test_keys_are_found_where_code_holds_them(module: ModuleType) -> None:
    class Owner:
        def select(self, data: dict[str, int], kl: bool) -> dict[str, int]:
            """names: not_a_key"""
            keys = ["responses", "old_log_probs", "advantages"]
            if kl:
                keys.append("ref_log_prob")

            def inner(name: str) -> int:
                return data["in_a_closure"] if name in ("a", "b") else dict(given_by_name=1)["given_by_name"]

            return {key: inner(key) for key in keys}

    held = literals(Owner.select)
    assert {"responses", "ref_log_prob", "in_a_closure", "given_by_name", "a"} <= held
    assert ("responses", "old_log_probs", "advantages") in held
    assert "not_a_key" not in held
    assert literals(Owner) >= held, "of a class, the keys of all its methods"
    module.Owner = Owner  # type: ignore[attr-defined]
    target = "a_module_of_the_test:Owner.select"

    def check(*keys: str | tuple[str, ...]) -> object:
        return Contract("select", target, "(self, data, kl)", "packaging", ">=20", keys).check()

    assert check("ref_log_prob", ("responses", "old_log_probs", "advantages")) is Owner.select
    with pytest.raises(PatchError) as error:
        check("responses", "rollout_log_probs")
    message = str(error.value)
    assert "Expected its code to contain 'rollout_log_probs', found none of it in" in message
    assert "ref_log_prob" in message, "what is there instead"
    assert "Fix:" in message
    # A list that lost or gained a key is another list.
    for other in (("responses", "advantages"), ("responses", "old_log_probs", "advantages", "values")):
        with pytest.raises(PatchError, match="its code to contain"):
            check(other)


def test_names_are_what_code_looks_up(module: ModuleType) -> None:
    class Trainer:
        def fit(self, batch: object) -> object:
            """names: not_looked_up"""
            not_looked_up = "hook"

            def inner() -> object:
                return compute(batch, not_looked_up)  # type: ignore[name-defined]  # noqa: F821

            return self.update(inner)  # type: ignore[attr-defined]

    module.Trainer = Trainer  # type: ignore[attr-defined]

    def check(*names: str) -> object:
        target = "a_module_of_the_test:Trainer.fit"
        return Contract("fit", target, "(self, batch)", "packaging", ">=20", names=names).check()

    assert check("update", "compute") is Trainer.fit
    for missing in ("hook", "not_looked_up", "batch"):
        with pytest.raises(PatchError, match=f"Expected its code to look up {missing}, found code that does not. Fix"):
            check("update", missing)


# Several releases ---------------------------------------------------------------------------------------------


def test_the_contract_of_the_installed_release() -> None:
    release = importlib.metadata.version("packaging")
    old, here, new = contract(releases="<1"), contract(releases=f"=={release}"), contract(releases=">1000")
    assert of_installed(old, here, new) is here
    assert of_installed(old, new) is new, "whose check says that the release was not tested"


def test_verls_release_is_that_of_the_package_an_import_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a checkout precedes an installed verl on the path, the metadata still belong to the installed verl."""
    monkeypatch.delitem(sys.modules, "verl", raising=False)
    checkout = tmp_path / "verl"
    (checkout / "version").mkdir(parents=True)
    (checkout / "__init__.py").write_text("raise RuntimeError('imported')")
    (checkout / "version" / "version").write_text("0.12.3+local\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert location("verl") == checkout
    assert installed_release("verl") == "0.12.3"
    assert location("no_package_of_that_name") is None
    assert installed_release("no_package_of_that_name") is None


@pytest.mark.parametrize(
    ("version", "release"),
    [("0.8.0.dev", "0.8.0"), ("0.8.0.dev0+gpu", "0.8.0"), ("0.9.0", "0.9.0"), ("0.9.2.dev", "0.9.2.dev")],
)
def test_the_tag_of_0_8_0_is_that_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, release: str
) -> None:
    monkeypatch.delitem(sys.modules, "verl", raising=False)
    (tmp_path / "verl" / "version").mkdir(parents=True)
    (tmp_path / "verl" / "__init__.py").touch()
    (tmp_path / "verl" / "version" / "version").write_text(f"{version}\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert installed_release("verl") == release
    early, late = (Contract("a", "b:c", None, "verl", releases) for releases in ("==0.8.0", "==0.9.1"))
    assert of_installed(early, late) is (early if release == "0.8.0" else late)


# What kinds of functions stay what they are -------------------------------------------------------------------


def test_a_coroutine_function_stays_one(module: ModuleType) -> None:
    async def fetch(value: int) -> int:
        return value + 1

    module.fetch = fetch  # type: ignore[attr-defined]

    async def doubled(original: Any, value: int) -> int:
        return 2 * int(await original(value))

    wrap(Contract("fetch", "a_module_of_the_test:fetch", "(value)", "packaging", ">=20"), doubled)
    assert inspect.iscoroutinefunction(module.fetch)
    assert asyncio.run(module.fetch(2)) == 6  # 2 * (2 + 1)
    assert is_wrapped(module.fetch, "fetch")
