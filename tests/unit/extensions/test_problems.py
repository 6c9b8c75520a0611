"""Keys next to which an extension is ERROR, NO-OP or worth a note, with the override that fixes it."""

from __future__ import annotations

import re
from typing import Any

import pytest
from omegaconf import OmegaConf

from recipe.offpolicy.extensions.add_on import Extension
from recipe.offpolicy.extensions.length_penalty.length_penalty import LengthPenalty
from recipe.offpolicy.extensions.pass_at_k.pass_at_k import PassAtK
from recipe.offpolicy.extensions.turn_credit import TurnCredit
from recipe.offpolicy.extensions.vcpo import EssLr, OptimalBaseline
from tests.support.short_keys import in_full, read_changes, read_table

EXTENSIONS: dict[str, type[Extension]] = {
    "ess_lr": EssLr,
    "length_penalty": LengthPenalty,
    "optimal_baseline": OptimalBaseline,
    "pass_at_k": PassAtK,
    "turn_credit": TurnCredit,
}
ONE_RELEASE = [pytest.mark.verl("==0.9.1")]
TABLE = [
    pytest.param(*head.split(": "), cases, marks=ONE_RELEASE if head.startswith("ess_lr") else [])
    for head, cases in read_table("extension_problems.txt")
]


@pytest.mark.parametrize(("section", "base", "cases"), TABLE)
def test_what_an_extension_cannot_stand_beside(section: str, base: str, cases: list[list[str]]) -> None:
    def named(text: str) -> str:
        return re.sub(r"(^|[ +~])\.(?=\w)", rf"\g<1>{section}.", text)

    for words, *expected in cases:
        config: Any = OmegaConf.create({section: {}})
        for key, value in (read_changes(named(base)) | read_changes(named(words))).items():
            OmegaConf.update(config, key, value, force_add=True)
        settings: Any = OmegaConf.to_container(config[section])
        found = list(EXTENSIONS[section](section, settings).problems(config))
        assert len(found) == len(expected), words
        for problem, wanted in zip(found, map(named, expected), strict=True):
            head, _, said = wanted.partition(" ~ ")
            head, _, fixes = head.partition(": ")
            verdict, key = head.split()
            assert (problem.verdict, problem.key) == (verdict, in_full(key)), words
            own = [f"{problem.key}{each}" if each.startswith("=") else in_full(each) for each in fixes.split("; ")]
            assert list(problem.overrides) == (own if fixes else []), words
            said = f"{problem.key}{said}" if said.startswith("=") else said
            assert said in f"{problem.reason} {problem.advice}", words
