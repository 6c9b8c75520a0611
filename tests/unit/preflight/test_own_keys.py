"""The names of our keys, and those of verl, come from the files that ship them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from recipe.offpolicy.preflight import own_keys
from recipe.offpolicy.preflight.own_keys import (
    complete,
    find_meant,
    list_children,
    list_groups,
    list_paths,
    list_sections,
    list_verls_names,
)
from recipe.offpolicy.preflight.similar_keys import explain_misplaced, has_key, list_fields


@pytest.fixture
def another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Configuration files with one section and one group more than the shipped ones."""
    caches = (list_sections, list_groups, list_paths)
    base = (own_keys.CONFIG_DIR / "offpolicy_base.yaml").read_text()
    (tmp_path / "offpolicy_base.yaml").write_text(base.replace("defaults:", "defaults:\n  - tempo: null", 1))
    (tmp_path / "tempo").mkdir()
    (tmp_path / "tempo" / "waltz.yaml").write_text("bpm: 90\n")
    monkeypatch.setattr(own_keys, "CONFIG_DIR", tmp_path)
    for each in caches:
        each.cache_clear()
    yield
    for each in caches:
        each.cache_clear()


@pytest.mark.usefixtures("another")
def test_a_section_that_is_added_is_covered_without_being_listed() -> None:
    from omegaconf import OmegaConf

    assert find_meant(["tempos"]) == ("tempo",)
    base = OmegaConf.create({"trainer": {"nnodes": 1}})
    problem = explain_misplaced("+", "trainer.tempo.bpm", "60", base)
    assert problem is not None
    assert problem.fix.startswith("Write tempo.bpm=60,")
    assert has_key(base, "trainer.nnodes")
    assert not has_key(base, "trainer.tempo")


def test_names_of_ours_and_of_verl() -> None:
    assert {"correction", "setup", "offpolicy", "opd", "pass_at_k"} <= list_sections()
    assert complete(("offpolicy", "staleness"), ["ETA"]) == ("offpolicy", "staleness", "eta")
    assert list_children(("offpolicy", "replay")) == ["oldest"]
    assert {"train_batch_size", "filter_groups"} <= list_verls_names()
    assert not {"eta", "too_old", "length_penalty"} & list_verls_names()
    assert list_fields({"_target_": "none"}) is None
