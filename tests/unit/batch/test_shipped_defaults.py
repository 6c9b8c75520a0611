"""Defaults of offpolicy.* stand in the YAML alone."""

from __future__ import annotations

from dataclasses import MISSING, fields

import pytest

from recipe.offpolicy.batch import shipped_defaults
from recipe.offpolicy.monitor.alarms import alarm_settings
from recipe.offpolicy.monitor.bounds import bound_settings
from recipe.offpolicy.monitor.bounds.schedule import Schedule
from recipe.offpolicy.recording.record_settings import RecordSettings
from recipe.offpolicy.staleness.staleness_settings import StalenessSettings


@pytest.mark.parametrize(
    "kind", [RecordSettings, StalenessSettings, alarm_settings.AlarmSettings, bound_settings.Settings, Schedule]
)
def test_settings_have_no_default_of_their_own(kind: type) -> None:
    found = [field.name for field in fields(kind) if (field.default, field.default_factory) != (MISSING, MISSING)]
    assert found == []


def test_what_the_yaml_says_is_what_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shipped_defaults.read_shipped_defaults("calibrate")["rate"] == 0.2
    values = {"record": {**shipped_defaults.read_shipped_defaults("record"), "every": 7}}
    monkeypatch.setattr(shipped_defaults, "_sections", lambda: values)
    assert RecordSettings.at("/somewhere").every == 7
    assert RecordSettings.at("/somewhere", every=2).every == 2


def test_a_section_is_the_readers_own() -> None:
    shipped_defaults.read_shipped_defaults("record")["every"] = 7
    assert shipped_defaults.read_shipped_defaults("record")["every"] == 1
