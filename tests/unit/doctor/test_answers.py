"""Parts of an answer by themselves: a piped table, and a key that is added."""

from __future__ import annotations

import io

import pytest
from omegaconf import OmegaConf

from recipe.offpolicy.doctor.program import Launch
from recipe.offpolicy.doctor.show import Diagnosis, VerdictRow, show
from recipe.offpolicy.doctor.unknown_keys import find_unknown_keys


def test_a_piped_table_has_100_columns_with_nothing_cut() -> None:
    name, file = "masks." + "long_" * 20 + "name", io.StringIO()
    show(Diagnosis(Launch("", ()), rows=(VerdictRow(name, "keeps rows inside [0.99, 1.01] " * 9),)), file)
    table = [line for line in file.getvalue().splitlines() if line[:1] in "┏┃┡│└"]
    assert max(map(len, table)) <= 100
    assert name in "".join(line.split("│")[1].strip() for line in table if line.startswith("│"))


@pytest.mark.parametrize("key", ["correction.masks.tight", "correction.weights.two", "offpolicy.extensions.mine"])
def test_a_name_of_the_users_own_is_added_with_a_plus(key: str) -> None:
    config = OmegaConf.create({"correction": {"masks": {"gsm": {}}, "weights": {}}, "offpolicy": {"extensions": {}}})
    (problem,) = find_unknown_keys(lambda overrides: config, [f"{key}={{level: token}}"], "verl 0.9.1")
    assert problem.fix == f"Write '+{key}={{level: token}}', which adds the key."
