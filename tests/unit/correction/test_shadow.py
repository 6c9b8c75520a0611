"""Shadow mode: what inactive corrections would have done, and which of them can be reported."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as draw

from recipe.offpolicy.correction import BatchConstants, CorrectionSpec, SpecError, rollout_stage, step_stage, turns
from recipe.offpolicy.correction.stages import compute_shadow_statistics
from recipe.offpolicy.preflight.resolve import parse_shadows
from tests.support.corrections import GSM, M2PO, TIS, band, opsm, spec

CORRECTIONS = {
    "gsm": spec(gsm=GSM),
    "stack": spec(TIS, opsm=opsm(0.05), gsm_turn=band(0.9, 1.1, level="turn")),
    "reject": spec(TIS | {"kind": "reject", "level": "version", "upper": 1.2}),
    "full": spec(TIS | {"ratio": "full", "level": "sequence"}, drift=band(0.8, 1.2, ratio="ppo")),
    "m2po": spec(m2po=M2PO),
}


@given(draw.integers(0, 2**16), draw.sampled_from(sorted(CORRECTIONS)))
def test_it_reports_what_the_correction_does_once_it_is_on(seed: int, name: str) -> None:
    random = torch.Generator().manual_seed(seed)
    mu, old, pi, signs = (torch.randn((6, 40), generator=random) * size for size in (1.0, 0.2, 0.2, 1.0))
    mask = torch.rand((6, 40), generator=random) < 0.8
    versions = (2 * torch.rand((6, 40), generator=random)).long()
    given_rows = dict(old_log_prob=mu + old, rollout_log_prob=mu, response_mask=mask)
    ids = dict(segment_ids=turns(mask), versions=versions, staleness=torch.arange(6))
    correction = CORRECTIONS[name]
    stage = rollout_stage(correction, **given_rows, **ids)
    step = step_stage(correction, stage, log_prob=mu + old + pi, advantages=signs)
    on = {key: one.value() for key, one in step.statistics.items()}
    first = rollout_stage(CorrectionSpec(), **given_rows, **ids)
    off = compute_shadow_statistics({name: correction}, first, log_prob=mu + old + pi, advantages=signs)
    renamed = {
        "keep_token_share": "keep/token_share",
        "keep_sequence_share": "keep/sequence_share",
        "positive/keep_token_share": "keep/positive/token_share",
        "negative/keep_token_share": "keep/negative/token_share",
    }
    found = {key.removeprefix(f"shadow/{name}/"): one.value() for key, one in off.items()}
    assert set(renamed) < set(found)
    assert found == pytest.approx({key: on[renamed.get(key, key)] for key in found}, nan_ok=True)
    assert any("weight/" in key for key in found) == (correction.weight is not None)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("name", CORRECTIONS)
def test_beside_another_corrections_stage_it_reports_the_same(name: str, nested: bool) -> None:
    random = torch.Generator().manual_seed(0)
    mu, old, pi, signs = (torch.randn((6, 40), generator=random) for _ in range(4))
    mask = torch.rand((6, 40), generator=random) < 0.8
    mu[0, 3] = float("nan")
    columns = dict(old_log_prob=mu + 0.2 * old, rollout_log_prob=mu, response_mask=mask, segment_ids=turns(mask))
    columns |= dict(versions=mask.long(), log_prob=mu + 0.2 * pi, advantages=signs)
    if nested:
        columns = {key: torch.nested.as_nested_tensor(list(t), layout=torch.jagged) for key, t in columns.items()}
    rows: dict[str, Any] = columns | dict(staleness=torch.arange(6))
    first = {key: value for key, value in rows.items() if key not in ("log_prob", "advantages")}
    own, other = (rollout_stage(each, **first) for each in (CORRECTIONS[name], spec(TIS, wide=band(0.5, 2.0))))
    alone, alongside = (
        compute_shadow_statistics(
            {name: CORRECTIONS[name]}, stage, log_prob=rows["log_prob"], advantages=rows["advantages"]
        )
        for stage in (own, other)
    )
    assert {key: one.value() for key, one in alongside.items()} == pytest.approx(
        {key: one.value() for key, one in alone.items()}, nan_ok=True, rel=0, abs=0
    )


def test_what_is_fixed_for_the_batch_comes_from_its_constants() -> None:
    """Two tokens with ratios 2 and 1: (log 2)^2 = 0.48 is kept with a cut of 0.5, and dropped with 0.04."""
    old = torch.tensor([[math.log(2), 0.0]])
    columns = dict(rollout_log_prob=torch.zeros(1, 2), response_mask=torch.ones(1, 2))
    stage = rollout_stage(CorrectionSpec(), old_log_prob=old, **columns)

    def report(name: str, constants: dict[str, BatchConstants]) -> float:
        shadow = {name: CORRECTIONS[name]}
        found = compute_shadow_statistics(shadow, stage, log_prob=old, advantages=old, constants=constants)
        return found[f"shadow/{name}/keep_token_share"].value()

    assert report("m2po", {"m2po": BatchConstants(cutoffs={"m2po": 0.5})}) == 1.0
    assert report("m2po", {"m2po": BatchConstants(cutoffs={"m2po": 0.04})}) == 0.5
    with pytest.raises(ValueError, match=r"shadow m2po .*constants"):
        report("m2po", {})
    assert report("gsm", {}) == 0.0  # one that fixes nothing needs none


# Which can be reported on -----------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "kl_clip": {"kl_clip": {"lower": 0.8, "upper": 1.2}},
    "tis": {"weight": TIS},
    "opsm": {"masks": {"opsm": opsm(0.1) | {"delta": "???"}}},
    "open_bound": {"masks": {"gsm": GSM | {"upper": "???"}}},
    "open_weight": {"weight": TIS | {"upper": "???"}},
    "open_masks": {"weight": TIS, "masks": "???"},
    "bypass": {"proximal": "bypass", "masks": {"opsm": opsm(0.1)}},
    "loglinear": {"proximal": "loglinear", "alpha": 0.5, "weight": TIS},
    "mistyped": {"weights": TIS},
    "With-Capitals": {"weight": TIS},
}


def test_an_open_delta_is_filled_and_said() -> None:
    shadows, notes = parse_shadows(["opsm"], OPTIONS.__getitem__, 0.1)
    assert shadows == {"opsm": spec(opsm=opsm(0.1))}
    assert notes == ["shadow opsm: correction.masks.opsm.delta is not set; the report uses 0.1 nats per token"]
    assert OPTIONS["opsm"]["masks"]["opsm"]["delta"] == "???"  # the option's own values are left as they were


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("kl_clip", "no weight and no mask"),
        ("open_bound", r"correction\.masks\.gsm\.upper=\?\?\?: required"),
        ("open_weight", r"correction\.weight\.upper=\?\?\?: required"),
        ("open_masks", r"correction\.masks=\?\?\?"),
        ("bypass", "correction.proximal=bypass"),
        ("loglinear", "correction.proximal=loglinear"),
        ("mistyped", r"correction\.weights"),
        ("With-Capitals", "lower case"),
    ],
)
def test_what_cannot_be_reported_on_is_an_error(name: str, message: str) -> None:
    with pytest.raises(SpecError, match=message) as error:
        parse_shadows(["tis", name], OPTIONS.__getitem__, 0.1)
    assert str(error.value).startswith((f"offpolicy.shadow={name}: ", f"offpolicy.shadow={name!r}: "))


def test_a_shadow_that_cannot_decide_raises() -> None:
    """It is never left out silently, whatever precedes it."""
    ones = torch.ones(1, 2)
    stage = rollout_stage(CorrectionSpec(), old_log_prob=ones, rollout_log_prob=ones, response_mask=ones)
    for level, ids in (("turn", "segment_ids"), ("version", "versions")):
        shadows = {"good": spec(opsm=opsm(0.1)), "bad": spec(t=GSM | {"level": level})}
        with pytest.raises(ValueError, match=f"shadow bad: .*{ids}"):
            compute_shadow_statistics(shadows, stage, log_prob=ones, advantages=ones)


def test_metrics_of_an_option_are_not_reduced_by_its_name() -> None:
    """verl chooses min and max by a substring of the name."""
    ones = torch.ones(1, 2)
    stage = rollout_stage(CorrectionSpec(), old_log_prob=ones, rollout_log_prob=ones, response_mask=ones)
    shadows, _ = parse_shadows(["paper/minpro"], {"paper/minpro": {"weight": TIS}}.__getitem__, 0.1)
    found = compute_shadow_statistics(shadows, stage, log_prob=ones, advantages=ones)
    assert "shadow/paper/leastpro/weight/mean" in found
    assert not [key for key in found if "min" in key or "max" in key]
