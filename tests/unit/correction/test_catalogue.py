"""Names of statistics, options and aggregates do not depend on the data, and are all documented."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from recipe.offpolicy.correction import Reduction
from recipe.offpolicy.correction.masks import AGGREGATES
from tests.support.applications import OPTIONS
from tests.support.paths import ROOT
from tests.support.statistics_page import ENTRIES, SHADOW_ENTRIES, format_markdown
from tests.support.telemetry_cases import CORRECTIONS, random_batch, shadow, stages


@pytest.mark.parametrize("name", CORRECTIONS)
def test_names_are_the_same_whatever_the_data(name: str) -> None:
    """Every rank and step must report the same keys, because they become the logger's names."""
    batch = random_batch(1)
    empty = replace(batch, mask=torch.zeros_like(batch.mask))
    matrices = {field.name: getattr(batch, field.name) for field in fields(batch) if field.name != "staleness"}
    no_length = replace(batch, **{name: matrix[:, :0] for name, matrix in matrices.items()})
    keys = [list(stages(CORRECTIONS[name], some)[1].statistics) for some in (batch, empty, batch[:0], no_length)]
    assert keys[1:] == keys[:1] * 3


def test_a_minimum_or_maximum_is_said_in_a_name_only_where_it_is_one() -> None:
    """verl chooses min and max by a substring of the name."""
    for correction in CORRECTIONS.values():
        for name, statistic in stages(correction, random_batch(1))[1].statistics.items():
            extreme = statistic.reduction in (Reduction.MIN, Reduction.MAX)
            assert ("min" in name or "max" in name) == extreme, name


def test_the_catalogue_holds_every_key_and_no_other() -> None:
    """With its reduction."""
    emitted, shown = {}, {}
    for name, correction in CORRECTIONS.items():
        for key, statistic in stages(correction, random_batch(1))[1].statistics.items():
            for mask, _ in correction.masks:
                key = key.replace(f"mask/{mask}/", "mask/<name>/")
            for weight, _ in correction.weights:
                key = key.replace(f"weights/{weight}/", "weights/<name>/")
            emitted[key] = statistic.reduction
        if not correction.is_none:
            for key, statistic in shadow({name: correction}, random_batch(1)).items():
                shown[key.replace(f"shadow/{name}/", "shadow/<option>/")] = statistic.reduction
    assert emitted == dict(pair for entry in ENTRIES for pair in entry.expand())
    assert shown == dict(pair for entry in SHADOW_ENTRIES for pair in entry.expand())


def expanded(pattern: str) -> list[str]:
    before, brace, rest = pattern.partition("{")
    if not brace:
        return [pattern]
    inside, _, after = rest.partition("}")
    return [before + one + end for one in inside.split(",") for end in expanded(after)]


def read_table(page: str, header: str) -> set[str]:
    """Return the names in the first column of the table of docs/PAGE that begins with ``header``."""
    _, _, rest = (ROOT / "docs" / page).read_text().partition(f"| {header} |")
    first = [line.split("|")[1] for line in rest.partition("\n\n")[0].splitlines()[2:]]
    return {name for cell in first for pattern in cell.split("`")[1::2] for name in expanded(pattern)}


def test_the_documentation_has_every_option_and_no_other() -> None:
    """verl's factories have one row for all of them."""
    named = read_table("corrections.md", "option")
    assert named - {"verl/<factory>"} == {name for name in OPTIONS if not name.startswith("verl/")}
    assert "verl/<factory>" in named


def test_the_documentation_has_every_aggregate_and_no_other() -> None:
    assert read_table("correction_keys.md", "aggregate of a mask") == set(AGGREGATES)


def test_the_documentation_has_the_table() -> None:
    """To rewrite the table: python -c 'from tests.support.statistics_page import *; print(format_markdown())'."""
    page = (ROOT / "docs" / "metrics.md").read_text()
    assert [line for line in format_markdown().splitlines() if line not in page] == []
