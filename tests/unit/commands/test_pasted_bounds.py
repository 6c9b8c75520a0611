"""Overrides printed by attribution and report run after any launch."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from recipe.offpolicy.analysis.attribution.attribution import attribute
from recipe.offpolicy.analysis.whatif.candidates import build_overrides, compose_correction, initialize_composer
from recipe.offpolicy.correction import CorrectionSpec, recommended
from recipe.offpolicy.preflight.examination import examine
from recipe.offpolicy.recording import Recording
from tests.support.applications import NEEDED, application

LAUNCH = (*NEEDED, "actor_rollout_ref.rollout.name=vllm")
TIGHT = "{ratio: rollout, level: sequence, aggregate: geometric, lower: 0.999, upper: 1.001, when: negative}"


def composed(overrides: list[str]) -> CorrectionSpec:
    with initialize_composer():
        return CorrectionSpec.from_mapping(compose_correction(overrides))


def launched(*overrides: str) -> CorrectionSpec:
    """Return the configuration of a launch with these overrides; fail if a check would stop it."""
    given = [*LAUNCH, *overrides]
    with application(*given) as config:
        found = examine(config, given)
    assert [str(problem) for problem in found.problems if problem.verdict == "ERROR"] == []
    assert found.spec is not None
    return found.spec


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "pasted"),
    [
        (["correction=[gsm,tis_token]"], ["correction=[tis_token,gsm]"]),
        (
            ["correction=[tis_token,opsm]", "correction.masks.opsm.delta=0.1", "correction.weight.upper=3.0"],
            ["correction=[tis_token,opsm]", "correction.weight.upper=3.0", "correction.masks.opsm.delta=0.1"],
        ),
        (["correction=bypass"], ["correction=none", "correction.proximal=bypass"]),
    ],
    ids=lambda overrides: " ".join(overrides),
)
def test_shipped_options_by_name(asked: list[str], pasted: list[str]) -> None:
    spec = composed(asked)
    with initialize_composer():
        assert build_overrides(spec) == pasted
    assert composed(pasted) == spec


@pytest.mark.parametrize(
    "asked",
    [
        ["correction=none", f"+correction.masks.tight={TIGHT}"],
        [
            "correction=tis_token",
            "+correction.weight.by_staleness=[1.5,2.0]",
            "+correction.masks.stale={aggregate: staleness, level: turn, upper: 3}",
        ],
    ],
    ids=lambda overrides: " ".join(overrides)[:50],
)
@pytest.mark.slow
def test_what_no_option_is_comes_whole_and_launches_behind_another_correction(asked: list[str]) -> None:
    pytest.importorskip("verl")
    spec = composed(asked)
    with initialize_composer():
        pasted = build_overrides(spec)
    found = launched("correction=icepop", *pasted)
    assert found.to_mapping() | {"proximal": "recompute"} == spec.to_mapping()


@pytest.mark.parametrize(
    ("directory", "advised"),
    [("colocate_async-14", recommended.OVERRIDES), ("round-2-8", ("correction=[tis_token,icepop]",))],
)
def test_what_attribution_advises(directory: str, advised: tuple[str, ...]) -> None:
    recording = Recording(Path("tests/data/faults/held_out") / directory)
    fixes = [cause.fix for cause in attribute(recording).causes if cause.verdict == "present"]
    (pasted,) = [found[1] for fix in fixes if (found := re.search("correct for [^:]*: (.*)", fix))]
    assert tuple(shlex.split(pasted)) == advised
    assert not composed(list(advised)).is_none
