"""A replay makes the same decisions as training, for any blocks, and agrees with telemetry and the recording."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recipe.offpolicy.analysis.whatif import replay as module
from recipe.offpolicy.analysis.whatif.candidates import Candidate
from recipe.offpolicy.analysis.whatif.replay import RecordedLoss, iterate_blocks
from recipe.offpolicy.analysis.whatif.study import Study, run_study
from recipe.offpolicy.correction import CorrectionSpec, rollout_stage, step_stage
from recipe.offpolicy.correction.statistics import BUCKETS, SIGNS, STALENESS
from recipe.offpolicy.recording import Recording
from tests.support.acted import recorded, varied_rows
from tests.support.corrections import M2PO, TIS, band, opsm, spec

WIDE = band(0.97, 1.03)
SPECS = {
    "tis": spec(TIS, gsm=WIDE),
    "signs": CorrectionSpec.from_mapping(
        {
            "weights": {
                "negative": TIS | {"level": "sequence", "upper": 1.0, "when": "negative"},
                "positive": TIS | {"kind": "reject", "lower": 0.98, "upper": 1.02, "when": "positive", "sign": "row"},
            }
        }
    ),
    "turn": spec(TIS | {"level": "turn"}, turn=band(0.98, 1.02, level="turn")),
    "sequence": spec(TIS | {"level": "sequence", "kind": "reject", "lower": 0.5, "upper": 2.0}, opsm=opsm(0.01)),
    "normalised": spec(TIS | {"normalize": True}, positive=WIDE | {"when": "positive", "sign": "token"}),
    "m2po": spec(None, m2po=M2PO),
    "ppo": spec(None, ppo=band(0.999, 1.001, ratio="ppo"), tv=band(-0.1, 0.1, aggregate="binary_tv", level="token")),
    "outward": spec(
        None,
        vaco=band(None, 0.05, aggregate="tv_mean", when="outward", sign="token"),
        kpop=band(None, 0.1, aggregate="binary_kl", level="token", ratio="full"),
        roll=band(-0.02, 0.02, aggregate="binary_tv_mean", level="turn"),
        nemo=band(None, 1.25, aggregate="exp_abs_mean"),
    ),
    "skyrl": replace(spec(TIS, gsm=WIDE, icepop=band(0.8, 1.2, level="token", aggregate="any")), skyrl_compat=True),
    "prefix": spec(
        TIS | {"level": "prefix", "aggregate": "minimum", "upper": 1.01},
        veto=band(0.97, None, level="prefix", aggregate="any", when="negative"),
        growing=band(0.99, 1.01, level="prefix", aggregate="geometric") | {"by_position": -0.5},
    ),
    "gamma": CorrectionSpec.from_mapping(
        {
            "weights": {
                when: {"level": "sequence", "kind": "gamma", "power": power, "rate": rate, "when": when}
                for when, power, rate in (("positive", 2.0, 3.0), ("negative", 3.0, 2.0))
            }
        }
    ),
    "version": spec(TIS | {"level": "version"}),
    "age": spec(
        TIS | {"by_staleness": [0.5, 1.0, 2.0]}, stale={"aggregate": "staleness", "level": "token", "upper": 2}
    ),
}


def run(recording: Path, specs: Mapping[str, CorrectionSpec] = SPECS, **options: Any) -> Study:
    read = Recording(recording)
    named = [Candidate(name, name, {}, one) for name, one in specs.items()]
    return run_study(read, read.steps, named, **options)


def numbers(result: Study) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for outcome in result.outcomes:
        label = outcome.candidate.label
        for name, group in {"": outcome.overall, **outcome.groups}.items():
            found |= {f"{label} {name} {key}": value for key, value in asdict(group).items()}
        found |= {f"{label} {name}": share.kept_tokens for name, share in outcome.turns.items()}
    return found


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recording")
    return recorded(folder, SPECS["tis"], varied_rows(seed=1, step=5), varied_rows(40, seed=2, step=6))


@pytest.mark.slow
def test_blocks_do_not_matter(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows are replayed in blocks of about 500 places with similar lengths, and as one padded batch per step."""
    monkeypatch.setattr(iterate_blocks, "__defaults__", (500,))
    cut = run(directory)
    monkeypatch.setattr(module, "_SHORTEST", 0.0)
    monkeypatch.setattr(iterate_blocks, "__defaults__", (10**9,))
    whole = run(directory)
    assert len(list(iterate_blocks(Recording(directory).step(5).rows, 10**9))) == 1
    of_whole, of_cut = numbers(whole), numbers(cut)
    assert of_whole.keys() == of_cut.keys()
    for name, value in of_whole.items():
        if value is None:
            assert of_cut[name] is None, name
        else:
            assert of_cut[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name
    for matrix in asdict(whole.agreement):
        one, other = (getattr(result.agreement, matrix) for result in (whole, cut))
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)
    # Each of these corrections does something here, so that the comparison is of more than ones.
    assert all(value is not None and value < 0.9999 for key, value in of_cut.items() if key.endswith("  ess"))


def test_shares_are_those_of_the_log(directory: Path) -> None:
    """The kept share by group is compared with the statistics that training logs for the same batch."""
    rows = Recording(directory).step(5).rows
    age = torch.from_numpy(rows.staleness)
    result = run(directory)
    for outcome in result.outcomes:
        correction = SPECS[outcome.candidate.label]
        padded = rows.padded("rollout_log_prob", "old_log_prob", "log_prob", "advantages", "turn")
        stage = rollout_stage(
            correction,
            old_log_prob=padded["old_log_prob"],
            rollout_log_prob=padded["rollout_log_prob"],
            response_mask=padded["response_mask"],
            segment_ids=padded["turn"].long(),
            versions=torch.from_numpy(rows.oldest_version)[:, None].expand(padded["turn"].shape),
            staleness=age,
        )
        step = step_stage(correction, stage, log_prob=padded["log_prob"], advantages=padded["advantages"])
        logged = {name: statistic.value() for name, statistic in step.statistics.items()}
        # By step the study has the whole alone; a study of that step has the groups.
        read = Recording(directory)
        (alone,) = run_study(read, [5], [outcome.candidate]).outcomes
        assert outcome.steps[5] == alone.overall
        expected = {"": ("keep/token_share", "keep/sequence_share")}
        expected |= {
            f"length/{b}": (f"length/{b}/keep_token_share", f"length/{b}/keep_sequence_share") for b in BUCKETS
        }
        expected |= {f"advantage/{s}": (f"keep/{s}/token_share", f"keep/{s}/sequence_share") for s in SIGNS}
        expected |= {f"staleness/{s}": (f"staleness/{s}/keep_token_share", "") for s in STALENESS}
        seen = 0
        for group, (tokens, sequences) in expected.items():
            measured = alone.overall if not group else alone.groups.get(group)
            if measured is None:
                assert math.isnan(logged[tokens])
                continue
            seen += 1
            assert measured.kept_tokens == pytest.approx(logged[tokens]), group
            if sequences:
                assert measured.kept_rows == pytest.approx(logged[sequences]), group
        assert seen >= 9
        assert alone.turns["turn/is0"].kept_tokens == pytest.approx(logged["turn/first/keep_token_share"])


@pytest.mark.parametrize("name", [name for name in SPECS if name != "version"])
def test_what_acted_is_reproduced(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(iterate_blocks, "__defaults__", (300,))
    path = recorded(tmp_path, SPECS[name], varied_rows(seed=3), varied_rows(seed=4, step=6))
    fidelity = run(path, {}).fidelity
    assert fidelity.agrees, fidelity
    assert fidelity.tokens == sum(int(step.rows.response_mask.sum()) for step in Recording(path))
    assert fidelity.weight_error <= 1e-6


@pytest.mark.parametrize(("share", "told"), [(0.5, True), (None, False)])
def test_a_sample_has_no_constants_of_the_batch(share: float | None, told: bool, tmp_path: Path) -> None:
    path = recorded(tmp_path, SPECS["normalised"], varied_rows(seed=3))
    if share is not None:
        card = {"config": {"offpolicy": {"record": {"share": share}}}}
        (path / "run.json").write_text(json.dumps(card))
    result = run(path, {"tis": SPECS["tis"]})
    assert RecordedLoss.from_card(Recording(path).card).sampled == told
    assert any("Only a sample of the rows" in note for note in result.notes) == told
    assert any("not compared with its replay" in note for note in result.notes) == told
    assert (result.fidelity.tokens == 0) == told
