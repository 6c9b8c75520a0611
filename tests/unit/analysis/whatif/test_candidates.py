"""Overrides and grids become corrections, as a launch would compose them."""

from __future__ import annotations

from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from recipe.offpolicy.analysis.whatif.candidates import MOST, build_candidates
from recipe.offpolicy.correction import CorrectionSpec, SpecError
from tests.support.applications import CONFIGS, DELTAS
from tests.support.corrections import GSM, TIS, spec

RECORDED = spec(TIS, gsm=GSM).to_mapping()
UPPER = "correction.masks.gsm.upper"


@pytest.mark.parametrize("option", ["gsm", "opsm", "tis_turn", "verl/bypass_pg_geo_rs_seq_tis"])
def test_an_option_is_what_its_file_says(option: str) -> None:
    """No part, a mask, one with an open value, a weight, and both next to another pi_old: others are composed alike."""
    (candidate,) = build_candidates([[f"correction={option}", *DELTAS.get(option, [])]], [], RECORDED)
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONFIGS), version_base=None):
        plain: Any = compose(f"correction/{option}").correction
    expected = {name: plain[name] for name in plain}
    for override in DELTAS.get(option, []):
        _, _, name, leaf = override.split("=")[0].split(".")
        expected["masks"][name][leaf] = 0.1
    assert candidate.resolve_spec(RECORDED) == CorrectionSpec.from_mapping({k: _plain(v) for k, v in expected.items()})


def _plain(value: Any) -> Any:
    return {str(name): _plain(value[name]) for name in value} if hasattr(value, "keys") else value


def test_what_was_recorded_changed_at_one_key() -> None:
    _, wide = build_candidates([["recorded"]], [f"{UPPER}=1.01,1.5"], RECORDED)
    assert wide.resolve_spec(RECORDED) == spec(TIS, gsm=GSM | {"upper": 1.5})
    # Another step may have had another cap, which stays.
    other = spec(TIS | {"upper": 7.0}, gsm=GSM).to_mapping()
    assert wide.resolve_spec(other) == spec(TIS | {"upper": 7.0}, gsm=GSM | {"upper": 1.5})
    assert RECORDED["masks"]["gsm"]["upper"] == 1.01


def test_an_invalid_point_is_reported_and_the_others_stay() -> None:
    bad, good = build_candidates([["correction=gsm"]], [f"{UPPER}=0.5,1.5"], RECORDED)
    assert bad.spec is None
    assert "correction.masks.gsm.lower=0.99 with correction.masks.gsm.upper=0.5: nothing lies between" in bad.error
    assert good.error is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("specs", "grid", "words"),
    [
        ([["correction=opsm"]], [], "delta=???: required and not set"),
        ([["correction=gsm"]], ["correction.masks.gsm.uper=1,2"], f"Nearest: '{UPPER}'"),
        ([["recorded"]], ["correction=gsm,icepop"], "--grid correction: no --spec has this key"),
        ([["correction=gsm"]], [f"~{UPPER}"], "deletes a key"),
        ([["correction=gsm"]], [f"{UPPER}=range(2,{MOST + 3})"], f"more than {MOST} corrections"),
        ([["correction=auto"]], [], "depends on a run's configuration"),
        ([["recorded", f"{UPPER}=2"]], [], "recorded takes no overrides. Use --grid"),
    ],
)
def test_what_cannot_be_meant(specs: list[list[str]], grid: list[str], words: str) -> None:
    with pytest.raises(SpecError) as caught:
        build_candidates(specs, grid, RECORDED)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
