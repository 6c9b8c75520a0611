"""Pytest plugin: which tests are for which release of verl.

``@pytest.mark.verl("<0.9")`` on a test, or ``pytestmark = pytest.mark.verl("<0.9")`` in a module, names the releases
that the test is for; several marks all count. In the environment of another release the test is deselected, and a
module so marked is not even imported, so it may import at its top what other releases lack. In the environment of a
release that it names the test must run: being skipped there is a failure, except for tests marked ``gpu``.

``--not-in RELEASE`` leaves out what that release runs too.
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version

from tests.support.paths import ROOT

MARK = "verl"
SUPPORTED = sorted(Version(path.stem.removeprefix("verl-")) for path in (ROOT / "requirements").glob("verl-*.txt"))
"""The releases for which there is an environment."""


@dataclass
class State:
    """State of this run: the installed release, a release whose tests run elsewhere, and the modules that are
    left out.
    """

    installed: Version | None
    elsewhere: Version | None = None
    left_out: list[str] = field(default_factory=list)


STATE = pytest.StashKey[State]()


@functools.cache
def admits(arguments: tuple[object, ...], installed: Version | None, where: str) -> bool:
    """Whether the arguments of a mark admit the installed release; with none installed they never do.

    Raises:
        pytest.UsageError: not one version specifier, or one that no supported release meets, so that the test would
            run nowhere.
    """
    try:
        (text,) = arguments
        specifier = SpecifierSet(str(text))
    except (ValueError, InvalidSpecifier):
        raise pytest.UsageError(
            f"{where}: mark {MARK}{arguments} is not a version specifier. Write @pytest.mark.{MARK}('<0.9')."
        ) from None
    if not any(release in specifier for release in SUPPORTED):
        names = ", ".join(map(str, SUPPORTED))
        raise pytest.UsageError(f"{where}: no supported release of verl meets {text!r}. Supported: {names}.")
    return installed is not None and specifier.contains(installed, prereleases=True)


def module_marks(path: Path) -> dict[str, list[tuple[object, ...]]]:
    """Return the marks in a module's `pytestmark` by name, each with its literal arguments, without importing the
    module.
    """
    marks: dict[str, list[tuple[object, ...]]] = {}
    source = path.read_text(encoding="utf-8")
    if "pytestmark" not in source:
        return marks
    for statement in ast.parse(source, str(path)).body:
        if not isinstance(statement, ast.Assign) or ast.unparse(statement.targets[0]) != "pytestmark":
            continue
        called = {id(node.func): node for node in ast.walk(statement.value) if isinstance(node, ast.Call)}
        for node in ast.walk(statement.value):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith("mark"):
                call = called.get(id(node))
                arguments = () if call is None or node.attr != MARK else tuple(map(ast.literal_eval, call.args))
                marks.setdefault(node.attr, []).append(arguments)
    return marks


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--not-in", metavar="RELEASE", type=Version, help="leave out tests that this release runs too")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"{MARK}(specifier): for these releases of verl; left out in others")
    config.addinivalue_line("markers", "extended: a long run that the default command leaves to --release")
    try:
        installed = Version(importlib.metadata.version("verl"))
    except importlib.metadata.PackageNotFoundError:
        installed = None
    config.stash[STATE] = State(installed, config.getoption("--not-in"))


def pytest_report_header(config: pytest.Config) -> str:
    return f"verl: {config.stash[STATE].installed or 'not installed'}"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import modules for other releases."""
    if collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
        return None
    state = config.stash[STATE]
    for arguments in module_marks(collection_path).get(MARK, []):
        if not admits(arguments, state.installed, str(collection_path)):
            state.left_out.append(collection_path.name)
            return True
    return None


def pytest_report_collectionfinish(config: pytest.Config) -> str:
    left_out = config.stash[STATE].left_out
    return f"for other releases of verl: {', '.join(sorted(left_out))}" if left_out else ""


def _for(item: pytest.Item, installed: Version | None) -> bool:
    return all(admits(mark.args, installed, item.location[0]) for mark in item.iter_markers(MARK))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests for other releases, and tests that run elsewhere."""
    state = config.stash[STATE]
    kept = [
        item
        for item in items
        if _for(item, state.installed) and (state.elsewhere is None or not _for(item, state.elsewhere))
    ]
    if len(kept) < len(items):
        chosen = set(kept)
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = kept


def _refuse_skip(report: pytest.TestReport | pytest.CollectReport, names: Iterable[str]) -> None:
    """Turn the skip of a test for the installed release into a failure."""
    if report.skipped and MARK in names and "gpu" not in names and not hasattr(report, "wasxfail"):
        reason = report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"This is for the installed release of verl and must run there. {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _refuse_skip(report, [mark.name for mark in item.iter_markers()])
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if isinstance(collector, pytest.Module):
        _refuse_skip(report, module_marks(collector.path))
    return report
