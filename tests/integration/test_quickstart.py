"""The two promises of the quickstart, tested on the whole system: the score rises, and an interrupt leaves nothing
behind.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipe.offpolicy.recording import Recording, Step
from tests.support.whole_runs import LIMIT, ROOT, train, trained

QUICKSTART = ["bash", str(ROOT / "scripts" / "quickstart.sh")]

pytestmark = pytest.mark.slow


def environment() -> dict[str, str]:
    return {"VENV": os.environ.get("VENV") or sys.prefix}


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(["trainer.total_training_steps=12"], id="half as long"),
        pytest.param([], id="whole", marks=pytest.mark.extended),
    ],
)
def test_default_run_improves_the_model_and_is_recorded(
    overrides: list[str], run_program: Callable[..., Any], tmp_path: Path
) -> None:
    command = [*QUICKSTART, f"offpolicy.record.dir={tmp_path / 'recording'}", *overrides]
    finished = run_program(command, limit=LIMIT, cwd=ROOT, **environment())
    assert finished.returncode == 0, finished.output[-3000:]
    before, after = (
        float(score)
        for score in re.findall(r"held out (?:before training|after step \d+): .*score ([\d.]+)", finished.output)
    )
    assert 0.1 <= before <= 0.6
    assert after - before >= 0.1
    assert "proved live" in finished.output
    picture = re.search(r"picture: (\S+)", finished.output)
    assert picture
    assert (ROOT / picture.group(1)).read_bytes()[:4] == b"\x89PNG"
    steps = [int(step) for step in re.findall(r"step (\d+) of \d+: reward", finished.output)]
    assert steps == list(range(1, len(steps) + 1))
    stamps = [int(stamp) for stamp in re.findall(r"^\[ *(\d+) s\]", finished.output, flags=re.MULTILINE)]
    assert max(later - earlier for earlier, later in pairwise(stamps)) < 60  # never silent

    metrics = metrics_by_step(finished.output)
    assert list(metrics) == steps
    recording = Recording(tmp_path / "recording")
    # A busy machine leaves rows out of some steps, not of all.
    assert recording.steps == [step for step, of in metrics.items() if of["offpolicy/record/rows"]]
    whole = [step for step, of in metrics.items() if not of["offpolicy/record/dropped_rows"]]
    assert whole
    assert "LIVE in the gradient" in recording.proof["sentence"]
    assert recording.card["fingerprint"] == recording.proof["live"]["fingerprint"]
    for step in recording.steps:
        assert_recorded(recording.step(step), metrics[step])
    for step in whole:
        assert_as_logged(recording.step(step), metrics[step])


@pytest.mark.extended
@pytest.mark.verl("==0.9.1")
@pytest.mark.parametrize("use_v1", ["true", "false"])
def test_truncated_sampling_stays_on_policy_where_its_support_is_replayed(
    use_v1: str, run_program: Callable[..., Any], tmp_path: Path
) -> None:
    folder = tmp_path / "recording"
    sampling = ("actor_rollout_ref.rollout.top_p=0.9", "correction.support=engine", f"trainer.use_v1={use_v1}")
    steps = trained(run_program, *sampling, "trainer.total_training_steps=2", f"offpolicy.record.dir={folder}")
    assert [step["offpolicy/live/proved"] for step in steps] == [1.0, 1.0]
    for step in steps:
        of = {name: step[f"offpolicy/support/{name}"] for name in ("kl_k3", "kl_k3_without", "size", "bytes_a_token")}
        assert of["kl_k3"] < of["kl_k3_without"] / 3, of
        assert 1 < of["size"] < 8
        assert of["bytes_a_token"] < 20
        assert step["offpolicy/keep/token_share"] > 0.8
    recorded = Recording(folder)
    assert recorded.card["sampling"]["support"] == "engine"
    sizes = recorded.step(recorded.steps[0]).rows.extensions["offpolicy_support_size"]
    assert sizes.max() > 1


@pytest.mark.extended
@pytest.mark.verl("==0.9.1")
@pytest.mark.parametrize("use_v1", ["true", "false"])
def test_scores_are_centred_by_the_likeliest_tokens_of_vllm(use_v1: str, run_program: Callable[..., Any]) -> None:
    centred = ("correction=[gsm,paper/score_centering]", "offpolicy.shadow=[tis_token]", f"trainer.use_v1={use_v1}")
    steps = trained(run_program, *centred, "trainer.total_training_steps=2")
    assert [step["offpolicy/live/proved"] for step in steps] == [1.0, 1.0]
    for step in steps:
        # 20 ids of 2 bytes, 20 float32, and their number.
        assert step["offpolicy/centering/bytes_a_token"] == 121.0
        assert step["offpolicy/centering/head_mass"] > 0.99
        assert 0 <= step["offpolicy/drift/tis_token/mean"] < step["offpolicy/drift/mean"] < 0.2


@pytest.mark.extended
def test_a_model_with_a_tensor_larger_than_the_default_bucket_trains(
    run_program: Callable[..., Any], tmp_path: Path
) -> None:
    """Matrices have 40 960 x 128 elements, which is 20 MiB in float32; the default bucket has 16 MiB."""
    from transformers import Qwen2ForCausalLM

    from scripts.quickstart.model import build_model, build_tokenizer

    tokenizer = build_tokenizer("Spell")
    config = build_model(tokenizer).config
    config.intermediate_size = 40_960
    Qwen2ForCausalLM(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    sizes = ["data.max_prompt_length=64", "data.max_response_length=10", "actor_rollout_ref.rollout.max_model_len=128"]
    sizes += ["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16", "trainer.total_training_steps=1"]
    run = train(run_program, *sizes, MODEL=str(tmp_path))
    assert run.returncode == 0, run.output[-3000:]
    assert [step["offpolicy/live/proved"] for step in run.steps] == [1.0]


def metrics_by_step(output: str) -> dict[int, dict[str, Any]]:
    """Return the logged metrics of each step in which the model was updated."""
    folder = re.search(r"everything goes to (\S+)", output)
    assert folder
    records = map(json.loads, (ROOT / folder[1] / "metrics.jsonl").read_text().splitlines())
    return {record["step"]: record["data"] for record in records if "actor/grad_norm" in record["data"]}


def assert_recorded(step: Step, metrics: dict[str, Any]) -> None:
    """Check that each row of the step is recorded, or is counted as left out."""
    rows = step.rows
    assert len(rows) == metrics["offpolicy/record/rows"]
    assert len(rows) + metrics["offpolicy/record/dropped_rows"] == metrics["offpolicy/live/rows"]
    assert metrics["offpolicy/record/stopped"] == 0
    assert set(rows.staleness.tolist()) == {0}
    assert (np.diff(rows.prompt_offsets) > 0).all()


def assert_as_logged(step: Step, metrics: dict[str, Any]) -> None:
    """Check that, if every row is recorded, GRPO's groups are complete and the correction's statistics equal the logged
    ones.
    """
    rows = step.rows
    _, sizes = np.unique(rows.uid.astype(str), return_counts=True)
    assert set(sizes.tolist()) == {8}
    assert rows.reward.mean() == pytest.approx(metrics["critic/score/mean"], abs=1e-5)
    mask = rows.response_mask
    log_ratio = (rows.old_log_prob - rows.rollout_log_prob).astype(np.float64)[mask]
    assert np.mean(np.expm1(log_ratio) - log_ratio) == pytest.approx(metrics["offpolicy/kl/k3"], rel=1e-4)
    assert np.mean(rows.rejected_by[mask] == 0) == pytest.approx(metrics["offpolicy/keep/token_share"], abs=1e-6)
    assert np.mean(rows.weight[mask], dtype=np.float64) == pytest.approx(metrics["offpolicy/weight/mean"], rel=1e-5)


def test_an_interrupt_while_engines_start_leaves_nothing(run_program: Callable[..., Any]) -> None:
    """SIGINT arrives while Ray and vLLM start; run_program looks for remaining processes and files."""
    finished = run_program(QUICKSTART, limit=20.0, after="starting Ray and vLLM", cwd=ROOT, **environment())
    assert finished.timed_out
    assert finished.returncode == 130
    assert "no process is left" in finished.output
