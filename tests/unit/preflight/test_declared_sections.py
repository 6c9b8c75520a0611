"""Every key below ``offpolicy``: invalid values, the proposed fix, and when the key is unused."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from recipe.offpolicy.correction.problem import Problem, set_to
from recipe.offpolicy.preflight.checks.staleness import check_own_keys
from recipe.offpolicy.preflight.composed import Composed
from tests.support.applications import CONFIGS, changed
from tests.support.corrections import GSM, TIS

COUNT, FLAG = (0, -1, 1.5, True, "often"), ("yes", 1, None)
ABOVE_0 = (0, -1, math.nan, math.inf, True, "10GB")
SHARE = (0, 1.1, "half")
BOUND, WITHIN = ("low", True, math.nan), (0.4, 1, "half")
ALARM = {
    "action": ("page", None),
    **dict.fromkeys(("lower", "upper", "recovery_lower", "recovery_upper"), BOUND),
    **dict.fromkeys(("patience", "recovery_patience", "return_after"), COUNT),
    "window": (1, 2.5),
    "least": ABOVE_0,
}
OUTSIDE: dict[str, tuple[Any, ...]] = {
    "allow_identical_log_probs": FLAG,
    "prove_every": (-1, 0.5, True, None),
    "watchdog.step_timeout": ABOVE_0,
    "watchdog.phase_timeouts.rollout": ABOVE_0,
    "staleness.eta": (-1, "two", True, math.nan, math.inf),
    "staleness.too_old": ("abort", None),
    "staleness.adapt.ess": SHARE,
    "staleness.adapt.trainer_wait": (-0.1, 1),
    "staleness.adapt.step": ABOVE_0,
    "replay.oldest": (-1, 0.5, True),
    "delivery.probe": COUNT,
    "late_weights.rows": (*COUNT, None),
    "record.dir": (7, ""),
    "record.share": SHARE,
    "record.max_bytes": (*ABOVE_0, None),
    "calibrate.target_kept": (*WITHIN, 98),
    "calibrate.target_ess": (0, 1.0, -0.5, 90, "high", True, math.nan, math.inf),
    "calibrate.of": (3,),
    "calibrate.side": ("left", None),
    "calibrate.warmup": (-1, 0.5, "long"),
    "calibrate.ceiling": (0.5, math.inf),
}
INSIDE: dict[str, tuple[Any, ...]] = {
    "watchdog.step_timeout": (0.1, None),
    "staleness.eta": (0, 0.5, None),
    "staleness.adapt.ess": (0.01, 1, None),
    "staleness.adapt.trainer_wait": (0, 0.99),
    "calibrate.target_kept": (0.5, 0.99, None),
    "calibrate.of": ("gsm", ["gsm"], None),
    "calibrate.side": ("both", "upper", "lower"),
    "calibrate.ceiling": (1, 99),
    "alarms.ess.action": ("off", False, "warn", "stop", "fallback"),
    "alarms.mismatch_growth.window": (2,),
}
"""Keys -> values at the edge of their range."""
UNREAD: dict[str, Any] = {
    "staleness.too_old": "mask",
    "staleness.adapt.trainer_wait": 0.1,
    "staleness.adapt.floor": 1,
    "record.every": 10,
    "calibrate.of": ["gsm"],
    "calibrate.ceiling": 2.0,
    "alarms.ess.return_after": 9,
}
"""Keys -> a valid value, of a section that is off."""
ELSEWHERE = ("extensions", "shadow", "shadow_delta")


BASE: Any = OmegaConf.create(
    {
        "offpolicy": OmegaConf.load(CONFIGS / "offpolicy_base.yaml").offpolicy,
        "correction": {"weight": TIS, "masks": {"gsm": GSM}},
        "actor_rollout_ref": {"actor": {"strategy": "fsdp2"}, "rollout": {"calculate_log_probs": True}},
        "trainer": {"use_v1": True, "v1": {"trainer_mode": "sync"}},
    }
)


def find(key: str, value: Any) -> list[Problem]:
    """The problems of the shipped configuration with one key changed, or added."""
    return list(check_own_keys(Composed(changed(BASE, {f"offpolicy.{key}": value}))))


def list_sections(node: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    for name, value in node.items():
        if isinstance(value, dict) and name not in ELSEWHERE:
            yield f"{path}{name}", value
            yield from list_sections(value, f"{path}{name}.")


SHIPPED: Any = OmegaConf.to_container(BASE.offpolicy)
SECTIONS = dict(list_sections(SHIPPED))
ALARMS = {f"alarms.ess.{key}": ALARM[key] for key in SHIPPED["alarms"]["ess"] if key in ALARM}
EVERY = OUTSIDE | ALARMS


def test_what_is_shipped_passes() -> None:
    assert list(check_own_keys(Composed(BASE))) == []


@pytest.mark.parametrize("key", EVERY)
def test_a_value_outside_of_the_range_is_refused_and_what_is_proposed_is_taken(key: str) -> None:
    default = OmegaConf.select(BASE, f"offpolicy.{key}")
    for value in EVERY[key]:
        (problem,) = find(key, value)
        assert problem.key == f"offpolicy.{key}"
        assert problem.reason.startswith(("expected", "not a"))
        if default is not None:
            assert problem.overrides == (set_to(problem.key, default),)
        for override in problem.overrides:
            assert problem.key not in [each.key for each in find(key, yaml.safe_load(override.partition("=")[2]))]


@pytest.mark.parametrize("key", INSIDE)
def test_a_value_at_the_edge_of_the_range_is_taken(key: str) -> None:
    for value in INSIDE[key]:
        assert [each for each in find(key, value) if each.reason.startswith(("expected", "not a"))] == []


@pytest.mark.parametrize("key", UNREAD)
def test_a_key_of_a_section_that_is_off_is_refused(key: str) -> None:
    (problem,) = find(key, UNREAD[key])
    assert problem.key == f"offpolicy.{key}"
    assert problem.reason.startswith("read only with") or "unused" in problem.reason


@pytest.mark.parametrize("path", SECTIONS)
def test_an_unknown_key_is_moved_to_the_one_that_it_is_like(path: str) -> None:
    (stray,) = find(f"{path}.zzz", 1)
    assert (stray.key, stray.overrides) == (f"offpolicy.{path}.zzz", ())
    if path == "alarms":
        return
    name = next(name for name, value in SECTIONS[path].items() if not isinstance(value, dict))
    misspelt = f"{name[:-1]}_{name[-1]}"
    (problem,) = find(f"{path}.{misspelt}", 1)
    assert problem.overrides == (f"~offpolicy.{path}.{misspelt}", f"offpolicy.{path}.{name}=1")


@pytest.mark.parametrize("path", SECTIONS)
def test_a_section_is_a_mapping(path: str) -> None:
    (problem,) = find(path, 3)
    assert problem.key == f"offpolicy.{path}"
