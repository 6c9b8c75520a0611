"""Every configured correction is proved by itself."""

from __future__ import annotations

from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.proof.gradient import isolate_parts
from tests.support.corrections import TIS


def test_weights_by_sign_and_a_penalty_are_parts() -> None:
    weights = {"up": TIS | {"when": "positive"}, "down": TIS | {"when": "negative"}}
    penalty = {"ratio": "full", "coefficient": 0.1}
    correction = CorrectionSpec.from_mapping({"weights": weights, "penalty": penalty})
    parts = dict(isolate_parts(correction))
    assert list(parts) == ["weights.down", "weights.up", "penalty"]
    assert [name for name, _ in parts["weights.up"].weights] == ["up"]
    assert parts["penalty"] == CorrectionSpec(penalty=correction.penalty)
