"""What a proof says of itself, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.proof.verify import describe_proof, describe_rest
from tests.support.corrections import GSM, TIS

NUMBERS = {"gradient_tokens": 6.0, "gradient_error": 1e-7, "rows": 4.0, "fingerprint": 5.0}
LIVE = NUMBERS | {"own_rows": 1.0, "factor": 1.0, "denominators": 1.0}
BOTH = {"weight": TIS, "masks": {"gsm": GSM}}


def spec(**mapping: Any) -> CorrectionSpec:
    return CorrectionSpec.from_mapping(mapping)


@pytest.mark.parametrize(
    ("mapping", "changes", "sealed", "said"),
    [
        (BOTH, {}, [], "columns of the loss"),
        (BOTH, {"own_rows": 0.0}, ["plan"], "that log pi belongs to its own sequences"),
        (BOTH, {"factor": 0.0}, ["plan"], "the engine's factor"),
        (BOTH, {"denominators": 0.0}, ["plan"], "verl's denominators"),
        ({"weight": TIS | {"level": "version"}}, {}, ["model_input", "versions"], "versions of single tokens"),
        (BOTH, {}, ["plan"], "the model's input"),
        (BOTH | {"baseline": "exclude"}, {}, ["plan"], "baseline=exclude"),
        (
            {"masks": {"gsm": GSM | {"ratio": "full"}}, "proximal": "bypass"},
            {"parts": 1.0},
            ["plan"],
            "proximal (verl's loss",
        ),
    ],
)
def test_what_was_not_proved_is_named(mapping: Any, changes: dict[str, float], sealed: list[str], said: str) -> None:
    live = LIVE | {"parts": 2.0} | changes
    found = describe_rest(spec(**mapping), live, sealed, {"delivery": "offpolicy.delivery is off."})
    missing = found.partition("Not proved: ")[2]
    assert said in missing
    assert missing.endswith("delivery (offpolicy.delivery is off).")
    assert "proximal" not in describe_proof(spec(**mapping), live)
