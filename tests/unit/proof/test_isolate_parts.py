"""Every configured correction is proved by itself."""

from __future__ import annotations

from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.proof.gradient import isolate_parts
from tests.support.corrections import TIS


def test_another_pi_old_and_a_clipped_kl_are_parts() -> None:
    mapping = {"proximal": "loglinear", "alpha": 0.5, "kl_clip": {"lower": 0.8, "upper": 1.2}}
    parts = dict(isolate_parts(CorrectionSpec.from_mapping(mapping)))
    assert set(parts) == {"proximal", "kl_clip"}
    assert (parts["proximal"].proximal, parts["proximal"].alpha, parts["proximal"].kl_clip) == ("loglinear", 0.5, None)
    assert (parts["kl_clip"].kl_clip, parts["kl_clip"].proximal) == ((0.8, 1.2), "recompute")


def test_weights_by_sign_and_a_penalty_are_parts() -> None:
    weights = {"up": TIS | {"when": "positive"}, "down": TIS | {"when": "negative"}}
    penalty = {"ratio": "full", "coefficient": 0.1}
    correction = CorrectionSpec.from_mapping({"weights": weights, "penalty": penalty})
    parts = dict(isolate_parts(correction))
    assert list(parts) == ["weights.down", "weights.up", "penalty"]
    assert [name for name, _ in parts["weights.up"].weights] == ["up"]
    assert parts["penalty"] == CorrectionSpec(penalty=correction.penalty)
