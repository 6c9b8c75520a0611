"""States of patches, the table of contracts, and how a trainer gets into verl's place; on stand-ins."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

import verl_patches
from verl_patches import __main__ as table_command
from verl_patches import cpu, plugin
from verl_patches.__main__ import Row, _row
from verl_patches.contract import ALLOW_UNTESTED, Contract, PatchError
from verl_patches.legacy.algorithms import list_wrappers

HELD = Row("worker_seams", "verl.workers.utils.losses:ppo_loss", ">=0.8", "calls", "ok", broken=False)
BROKEN = Row("trainer", "verl.trainer:fit", ">=0.9", "calls", "has moved. Fix: install verl 0.9.1.", broken=True)


def test_each_group_says_the_state_of_each_patch() -> None:
    found = verl_patches.status()
    states = {state for patches in found.values() for state in patches.values()}
    assert states <= {"in force", "waiting", "not needed", "off"}


def test_a_platform_that_nobody_asked_for_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    assert set(cpu.status().values()) == {"off"}


@pytest.mark.parametrize("name", ["vllm_weights", "vllm_fused_moe", "engine_device"])
def test_a_patch_waits_for_the_import_of_its_target(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patch = cpu.find_patch(name)
    monkeypatch.setattr(sys, "meta_path", [])
    assert not patch.waiting()
    monkeypatch.setattr(sys, "meta_path", [SimpleNamespace(module_name=patch.after, action=patch.apply)])
    assert patch.waiting()


def test_megatron_is_waited_for_while_one_of_its_modules_is(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl_patches.cpu import of_megatron

    patch = of_megatron.PATCHES["megatron_device"]

    monkeypatch.setattr(of_megatron, "is_awaited", lambda name: False)
    assert not patch.waiting()
    monkeypatch.setattr(of_megatron, "is_awaited", lambda name: name == of_megatron.MODULES[-1])
    assert patch.waiting()


def test_an_attribute_of_a_release_counts_where_verl_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "installed_release", lambda name: "0.7.1")
    assert cpu.installed_has(lambda release: release.legacy_actors)
    monkeypatch.setattr(cpu, "installed_release", lambda name: "0.9.1")
    assert not cpu.installed_has(lambda release: release.legacy_actors)
    monkeypatch.setattr(cpu, "installed_release", lambda name: None)
    assert cpu.installed_has(lambda release: False), "its contract says that verl is missing"


def test_functions_of_a_legacy_actor_that_are_wrapped() -> None:
    assert [contract.name for contract, _ in list_wrappers("dp_actor")] == [
        "dp_actor.get_policy_loss_fn",
        "dp_actor.agg_loss",
        "dp_actor.kl_penalty",
        "rollout_corr_metrics",
    ]


def test_the_table_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    table_command.show([HELD, BROKEN])
    printed = capsys.readouterr().out
    assert "verl.workers.utils.losses:ppo_loss" in printed
    assert "has moved" in printed


@pytest.mark.parametrize(("rows", "status"), [([HELD], 0), ([HELD, BROKEN], 1)])
def test_a_broken_contract_ends_with_1(
    rows: list[Row], status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(table_command, "rows", lambda: rows)
    monkeypatch.setattr(table_command, "status", dict)
    assert table_command.main([]) == status
    assert ("trainer: has moved" in capsys.readouterr().err) is bool(status)


@pytest.mark.parametrize(
    ("releases", "option", "broken"),
    [(">=20", "staleness.eta", True), ("<1", "staleness.eta", False), ("<1", "", True)],
)
def test_a_seam_of_an_option_ends_with_1_in_tested_releases_alone(
    releases: str, option: str, broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In others the option is refused, by its name."""
    monkeypatch.setenv(ALLOW_UNTESTED, "1")
    moved = Contract("issue", "no_module_of_that_name:f", "()", "packaging", releases, option=option)
    row = _row("buffer", moved, "calls", may_be_of_others=False)
    assert row.broken is broken
    assert "has moved" in row.verdict
    assert ("staleness.eta is refused here" in row.verdict) is not broken
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
        raise PatchError("the target has moved")

    monkeypatch.setattr(plugin, "install", refuse)
    with pytest.raises(PatchError):
        plugin.load()
    assert kept == ["OFFPOLICY_PATCHES=cpu,auto: the target has moved"]
