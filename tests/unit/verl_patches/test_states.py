"""States of patches, the table of contracts, and how a trainer replaces verl's; with stand-ins."""

from __future__ import annotations

import pytest

from verl_patches import cpu, plugin
from verl_patches.__main__ import _row
from verl_patches.contract import ALLOW_UNTESTED, Contract, PatchError


def test_a_platform_that_nobody_asked_for_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    assert set(cpu.status().values()) == {"off"}


@pytest.mark.parametrize(
    ("releases", "option", "broken"),
    [(">=20", "staleness.eta", True), ("<1", "staleness.eta", False), ("<1", "", True)],
)
def test_a_seam_of_an_option_ends_with_1_in_tested_releases_alone(
    releases: str, option: str, broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In other releases, the option is rejected by its name."""
    monkeypatch.setenv(ALLOW_UNTESTED, "1")
    moved = Contract("issue", "no_module_of_that_name:f", "()", "packaging", releases, option=option)
    row = _row("buffer", moved, "calls", may_be_of_others=False)
    assert row.broken is broken
    assert "has changed" in row.verdict
    assert ("staleness.eta is rejected here" in row.verdict) is not broken
    if option:
        with pytest.raises(PatchError, match=r"which staleness\.eta needs"):
            moved.check()


def test_a_plugin_installs_what_is_asked_for_and_keeps_its_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    installed: list[str | None] = []
    monkeypatch.setattr(plugin, "install", installed.append)
    monkeypatch.setenv("OFFPOLICY_PATCHES", "cpu,auto")
    plugin.load()
    assert installed == ["cpu", None]
    kept: list[str] = []
    monkeypatch.setattr(plugin, "record_failure", lambda asked, error: kept.append(f"{asked}: {error}"))

    def refuse(name: str | None) -> None:
        raise PatchError("the target has changed")

    monkeypatch.setattr(plugin, "install", refuse)
    with pytest.raises(PatchError):
        plugin.load()
    assert kept == ["OFFPOLICY_PATCHES=cpu,auto: the target has changed"]
