"""Whatever a checkpoint's files contain, they are restored, or rejected with file, key and fix."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Iterator
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

from recipe.offpolicy.correction import Reduction, Statistic
from recipe.offpolicy.extensions.add_ons import AddOns
from recipe.offpolicy.extensions.length_penalty.length_penalty import LengthPenalty
from recipe.offpolicy.extensions.pass_at_k.pass_at_k import PassAtK
from recipe.offpolicy.fault_tolerance.checkpoints import (
    ACTIVE,
    RECORD,
    CheckpointError,
    check_before_loading,
    extension_states,
    find_record,
    guard_save,
    read_staleness,
)
from recipe.offpolicy.fault_tolerance.state_schema import restoring
from recipe.offpolicy.monitor.active_correction import ActiveCorrection, find_differences, list_dependents
from recipe.offpolicy.monitor.alarm_settings import DEFAULTS as ALARMS
from recipe.offpolicy.staleness.ages import AgeLimit
from recipe.offpolicy.staleness.staleness_settings import AdaptSettings, EtaController
from tests.support.corrections import TIS, band, spec
from tests.support.examples import at_most
from tests.support.histograms import histogram

SPEC = spec(gsm=band(0.99, 1.01))
ADAPT = AdaptSettings(ess=0.9, trainer_wait=0.05, floor=0, ceiling=8, every=2, patience=2, step=1)
FILES = (RECORD, "offpolicy/length_penalty/anchors.json", "offpolicy/pass_at_k/pass_rates.json")


def config(folder: Path) -> DictConfig:
    fallback = {"options": ["tis_token"], "correction": spec(weight=TIS).to_mapping()}
    return OmegaConf.create(
        {
            "trainer": {"default_local_dir": str(folder), "resume_mode": "auto", "resume_from_path": None},
            "correction": SPEC.to_mapping(),
            "offpolicy": {
                "resume_changed_correction": False,
                "alarms": {name: {"action": "off"} for name in ALARMS}
                | {"ess": {"action": "fallback", "patience": 9, "fallback": fallback}},
                "calibrate": {"target_kept": 0.9, "warmup": 1},
            },
        }
    )


class Run:
    """All state of a run that a checkpoint contains."""

    def __init__(self, folder: Path) -> None:
        self.config = config(folder)
        self.active = ActiveCorrection(SPEC, self.config)
        self.anchors = LengthPenalty("length_penalty", {"kind": "anchor", "anchor": {"min_samples": 2}})
        self.rates = PassAtK("pass_at_k", {"objective": "none", "k": 2, "budget": {"mode": "group_size"}})
        self.hooks = AddOns([self.anchors, self.rates])
        self.controller = EtaController(ADAPT, Fraction(1))
        self.ages = AgeLimit(Fraction(1))

    def train(self) -> None:
        distances = histogram(torch.full((10,), 0.1, dtype=torch.float64), torch.ones(10, dtype=torch.bool))
        kept = Statistic(Reduction.MEAN, (5.0, 10.0))
        for _ in range(3):
            self.active.after_update(
                {"rollout_ratio/ess": 0.1, "weight/ess": 0.1}, {"gsm/distance": distances, "gsm/kept": kept}
            )
        self.anchors.anchors.add(1, [("p", True, 3.0), ("p", True, 5.0), ("q", False, 4.0), ("q", True, 4.0)])
        self.rates.rates.add({"0": (4, 1), "1": (4, 4), "2": (8, 3)})
        self.controller.observe(0.8, 0.2)
        self.ages.change(3, Fraction(2))

    def save(self) -> Path:
        staleness = {"eta": "2", "account": 12, "adapt": vars(ADAPT), "controller": self.controller.state()}
        staleness["changes"] = self.ages.state()
        with guard_save(self.config, 4, SPEC, self.active.state(), self.hooks.state, staleness):
            folder = Path(self.config.trainer.default_local_dir) / "global_step_4"
            folder.mkdir(parents=True)
        return folder

    def resume(self) -> None:
        """Resume in the trainer's order."""
        dependents = [*list_dependents(self.config), *self.hooks.list_dependents()]
        differences = partial(find_differences, self.config)
        state = check_before_loading(self.config, SPEC, differences, self.hooks.differences, dependents)
        if state is not None:
            with restoring(lambda: find_record(self.config), ACTIVE):
                self.active.restore(state)
        self.hooks.restore(*extension_states(self.config))
        if (saved := read_staleness(self.config)) is not None:
            with restoring(lambda: find_record(self.config), "staleness"):
                self.controller.restore(saved["controller"])
                self.ages.restore(4, saved["eta"], saved["changes"])

    def everything(self) -> Any:
        """The state from which training continues, without what is only shown."""
        return json.dumps(
            [self.active.state(), self.anchors.anchors.to_json(), self.rates.rates.to_json(), self.controller.state()],
            sort_keys=True,
        )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    run = Run(tmp_path_factory.mktemp("run"))
    run.train()
    folder = run.save()
    again = Run(folder.parent)
    again.resume()
    assert again.everything() == run.everything()
    return folder, {name: (folder / name).read_text() for name in FILES}


Path_ = tuple[Any, ...]


def leaves(value: Any, at: Path_ = ()) -> Iterator[Path_]:
    """List the paths of all values, including mappings and lists."""
    yield at
    for key, each in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from leaves(each, (*at, key))


FREE = ("rules", "past", "values", "in_force", "fingerprint", "fallback", "settings", "correction", "calibrate")
"""Keys below which another value means another run; they are compared, or only shown."""
IMPOSSIBLE: dict[str, Any] = {
    "NaN": math.nan,
    "infinite": math.inf,
    "huge": 1e300,
    "negative": -5,
    "list": [],
    "map": {},
}
KINDS = (*IMPOSSIBLE, "null", "text", "deleted", "unknown key", "nested", "cut short", "true", "zero")


def mutate(text: str, kind: str, chance: random.Random) -> tuple[str, Path_]:
    if kind == "cut short":
        return text[: chance.randrange(len(text) - 2)], ()
    content = json.loads(text)
    at = chance.choice([place for place in leaves(content) if place])
    parent = find(content, at[:-1])
    if kind == "deleted":
        del parent[at[-1]]
    elif kind == "unknown key":
        chosen = parent[at[-1]] if isinstance(parent[at[-1]], dict) else content
        chosen["surprise"] = 1
    elif kind == "nested":
        parent[at[-1]] = [copy.deepcopy(parent[at[-1]])]
    else:
        parent[at[-1]] = {"null": None, "text": "x", "true": True, "zero": 0, **IMPOSSIBLE}[kind]
    return json.dumps(content), at


@settings(max_examples=at_most(300), deadline=None)
@given(st.sampled_from(FILES), st.sampled_from(KINDS), st.integers(0, 2**32))
def test_no_mutation_raises_anything_but_a_checkpoint_error(
    saved: tuple[Path, dict[str, str]], name: str, kind: str, seed: int
) -> None:
    folder, texts = saved
    changed, at = mutate(texts[name], kind, random.Random(seed))
    run, path = Run(folder.parent), folder / name
    path.write_text(changed)
    try:
        run.resume()
    except CheckpointError:
        return
    finally:
        path.write_text(texts[name])
    before, after = find(json.loads(texts[name]), at), IMPOSSIBLE.get(kind)
    emptied = isinstance(after, list | dict) and type(before) is type(after)
    assert emptied or kind not in IMPOSSIBLE or any(key in FREE for key in at), f"{name}: {at} as {kind} is accepted"


def find(content: Any, at: Path_) -> Any:
    for key in at:
        content = content[key]
    return content


CASES: dict[str, tuple[str, Path_, Any, str]] = {
    "bounds removed": (RECORD, ("steering", "calibration", "bounds"), {}, r"calibration.bounds have the parts \[\]"),
    "beyond its ceiling": (RECORD, ("steering", "calibration", "bounds", "gsm", "upper"), 1.5, "out of range"),
    "controller": (RECORD, ("staleness", "controller", "eta"), "9", r"controller.eta=9 is not in \[0, 8\]"),
    "changes": (RECORD, ("staleness", "changes"), [[7, "2"]], r"the steps must increase from 0"),
    "NaN": (FILES[2], ("counts", "0", 0), math.nan, r"counts\.0=\[NaN, 1"),
    "a prompt lost": (FILES[2], ("counts",), {}, "counts=0: the checkpoint records 3 pass_rates"),
    "state lost": (
        RECORD,
        ("extensions", "pass_at_k", "state"),
        {},
        "pass_at_k.budget.mode=group_size continues from it",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_file_key_value_and_what_to_do(name: str, saved: tuple[Path, dict[str, str]]) -> None:
    file, at, value, said = CASES[name]
    folder, texts = saved
    content = json.loads(texts[file])
    find(content, at[:-1])[at[-1]] = value
    (folder / file).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=said) as raised:
        Run(folder.parent).resume()
    (folder / file).write_text(texts[file])
    assert Path(file).name in str(raised.value)
    assert "Restore the file from a copy, or resume another checkpoint" in str(raised.value)


def test_a_lost_record_stops_what_goes_on_from_it(
    saved: tuple[Path, dict[str, str]], caplog: pytest.LogCaptureFixture
) -> None:
    folder, texts = saved
    (folder / RECORD).unlink()
    try:
        run = Run(folder.parent)
        keys = r"offpolicy.calibrate, offpolicy.alarms.ess.fallback, length_penalty.kind=anchor, pass_at_k.budget.mode="
        with pytest.raises(CheckpointError, match=f"has no offpolicy.json, but {keys}"):
            run.resume()
        run.config.offpolicy.resume_changed_correction = True
        run.resume()
        assert check_before_loading(config(folder.parent), SPEC) is None
        assert caplog.text.count("it is unknown") == 2
    finally:
        (folder / RECORD).write_text(texts[RECORD])
