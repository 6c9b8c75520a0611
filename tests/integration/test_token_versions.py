"""Weight versions per token in a real asynchronous run: each chunk is rescored with the weights that it names."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recipe.offpolicy.recording import Recording, Rows
from tests.support.whole_runs import trained

STEPS = 4
ROOT = "offpolicy/staleness"

pytestmark = [pytest.mark.slow, pytest.mark.extended]


def test_each_chunk_was_sampled_by_the_version_that_it_names(run_program: Callable[..., Any], tmp_path: Path) -> None:
    """Responses of 48 tokens are sampled 8 at a time and interrupted by synchronisations; the weights of each step are
    kept.

    Interrupted rows resume after newly issued rows. With eta=1, the trainer waits for them, which verl alone does not.

    In float32, engine and trainer differ by about 1e-7 nats per token at equal weights.
    """
    steps = trained(
        run_program,
        "+mode=separate_async_cpu",
        "correction=[tis_token]",
        "correction.weight.level=version",
        f"trainer.total_training_steps={STEPS}",
        "trainer.save_freq=1",
        f"trainer.default_local_dir={tmp_path / 'checkpoints'}",
        "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.rollout.dtype=float32",
        "actor_rollout_ref.rollout.ignore_eos=true",
        "actor_rollout_ref.rollout.max_num_seqs=8",
        "data.max_response_length=48",
        "offpolicy.staleness.eta=1",
        f"offpolicy.record.dir={tmp_path / 'recording'}",
    )
    assert all(step["offpolicy/live/proved"] == 1.0 for step in steps)
    assert all(step[f"{ROOT}/unknown_by_token"] == 0.0 for step in steps)
    recording = Recording(tmp_path / "recording")
    rows = recording.rows()
    # chunks cover the response, and versions never fall within a row.
    assert (rows.version[rows.response_mask] >= 0).all()
    inner = np.diff(rows.row_of_token) == 0
    assert (np.diff(rows.version)[inner] >= 0).all()
    for step in steps:
        here = rows.take(np.flatnonzero(rows.step == step["training/global_step"]))
        ages = here.token_staleness[here.response_mask]
        assert step[f"{ROOT}/max"] == ages.max() <= here.staleness.max()
        assert step[f"{ROOT}/is1/token_count"] == (ages == 1).sum()

    @cache
    def model(version: int) -> Any:
        from transformers import AutoModelForCausalLM

        saved = tmp_path / "checkpoints" / f"global_step_{version}" / "actor" / "huggingface"
        path = saved if version else Path(recording.card["model"])
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    gaps = [
        compute_gap(rows, row, version, model)
        for row in range(len(rows))
        if len(versions := np.unique(rows.version[rows.offsets[row] : rows.offsets[row + 1]])) == 2
        for version in versions
    ]
    own, other = (np.array(column) for column in zip(*gaps, strict=True))
    print(f"{len(own)} chunks: own version {own.max():.2e} at most, the other {other.min():.2e} at least")
    assert len(own) >= 8
    assert own.max() < 1e-5
    assert (other > own).all()


@torch.no_grad()
def compute_gap(rows: Rows, row: int, version: int, model: Callable[[int], Any]) -> tuple[float, float]:
    """Compute the mean |log mu - log pi| of the tokens of one version, with its weights and with the row's other
    weights.
    """
    at = slice(rows.offsets[row], rows.offsets[row + 1])
    prompt = rows.prompt_ids[rows.prompt_offsets[row] : rows.prompt_offsets[row + 1]]
    response = torch.from_numpy(rows.response_ids[at]).long()
    ids = torch.cat([torch.from_numpy(prompt).long(), response])[None]
    chunk = rows.version[at] == version
    (another,) = set(rows.version[at].tolist()) - {version}
    found = []
    for weights in (version, another):
        logits = model(int(weights))(ids).logits[0, len(prompt) - 1 : -1]
        log_prob = logits.log_softmax(-1).gather(-1, response[:, None])[:, 0].numpy()
        found.append(float(np.abs(rows.rollout_log_prob[at] - log_prob)[chunk].mean()))
    return found[0], found[1]
