"""Options compose and stack; two options that set the same key, and a deleted group, stop."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from recipe.offpolicy.correction import SpecError
from recipe.offpolicy.preflight import hydra_groups
from recipe.offpolicy.preflight.composed import Composed
from recipe.offpolicy.preflight.hydra_groups import (
    AUTO,
    EMPTY,
    check_stack,
    load_option,
    read_chosen_options,
)
from tests.support.applications import DELTAS, OPTIONS, application
from tests.support.corrections import GSM, opsm


@pytest.mark.parametrize("option", DELTAS)
def test_a_budget_that_nobody_published_must_be_given(option: str, folder: Path) -> None:
    with application(f"correction={option}", folder=folder) as config, pytest.raises(SpecError) as caught:
        _ = Composed(config).spec
    key = DELTAS[option][0].split("=")[0]
    assert f"{key}=???: required" in str(caught.value)
    assert f"Set {key}=" in str(caught.value)


def paths(values: dict[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from paths(value, (*above, key))
        else:
            yield (*above, key)


def share_a_key(one: dict[str, Any], two: dict[str, Any]) -> bool:
    return any(a[: len(b)] == b[: len(a)] for a in paths(one) for b in paths(two))


def test_every_pair_that_shares_a_key_conflicts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the other choices are, two options stack exactly if they set no common key and no key above
    the other's.
    """
    stackable = [option for option in OPTIONS if option not in EMPTY | {AUTO} and not option.startswith("verl/")]
    seen = set()
    with application(folder=folder):
        values = {option: load_option(option) for option in stackable}
        monkeypatch.setattr(hydra_groups, "load_option", values.__getitem__)
        for pair in itertools.combinations(stackable, 2):
            shared = share_a_key(values[pair[0]], values[pair[1]])
            if shared:
                with pytest.raises(SpecError, match=f"{pair[0]} and {pair[1]} both set"):
                    check_stack(pair)
            else:
                check_stack(pair)
            seen.add(shared)
    assert seen == {True, False}


@pytest.mark.parametrize("option", sorted(EMPTY | {AUTO}))
@pytest.mark.parametrize("order", ["gsm,{}", "tis_token,{}"])
def test_some_stand_alone(option: str, order: str, folder: Path) -> None:
    options = order.format(option)
    with application(f"correction=[{options}]", folder=folder), pytest.raises(SpecError) as caught:
        check_stack(read_chosen_options())
    assert f"correction=[{options}]: {option} with others. Leave {option} out" in str(caught.value)


def test_the_values_of_an_option(folder: Path, tmp_path: Path) -> None:
    """The values are those of the file, including those that the user must set, also from the user's own folders."""
    (tmp_path / "correction").mkdir()
    (tmp_path / "correction" / "mine.yaml").write_text("alpha: ${oc.env:NO_SUCH_VARIABLE}\n")
    with application(f"hydra.searchpath=[file://{tmp_path}]", folder=folder):
        assert load_option("gsm") == {"masks": {"gsm": GSM}}
        assert load_option("opsm") == {"masks": {"opsm": opsm(0.1) | {"delta": "???"}}}
        assert load_option("none") == {"weight": None}
        assert load_option("mine") == {"alpha": "${oc.env:NO_SUCH_VARIABLE}"}
        with pytest.raises(SpecError, match=r"correction=mien: no such option\. Did you mean mine\?"):
            load_option("mien")


@pytest.mark.parametrize("overrides", [["~correction"], ["correction=[]"]])
def test_a_deleted_group(overrides: list[str], folder: Path) -> None:
    with application(*overrides, folder=folder), pytest.raises(SpecError, match="Set correction=none"):
        read_chosen_options()
