"""Run verl's real Megatron code in processes that end with the test.

The programs are megatron_legacy_ranks.py and megatron_engine_ranks.py.
"""

from __future__ import annotations

import copy
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.fresh_python import CPU
from tests.support.parity_case import CORRECTIONS, MODES, ROWS, Case, save_drawn, tiny_model
from tests.support.parity_update import Update, assert_same, expected
from tests.support.paths import ROOT

LEGACY = Path(__file__).with_name("megatron_legacy_ranks.py")
ENGINE = Path(__file__).with_name("megatron_engine_ranks.py")
LIMIT = 840.0
"""Seconds after which they count as hanging; less than pytest's own limit."""


@dataclass(frozen=True)
class Layout:
    """Parallel ranks and their settings.

    Attributes:
        data, tensor, pipeline: parallel ranks.
        stages: virtual stages on each pipeline rank.
        dtype: of the engine's weights.
        transformer_engine: its layers on packed sequences, which need CUDA, instead of Megatron's own on padded ones.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    stages: int | None = None
    dtype: str = "float32"
    transformer_engine: bool = False

    @property
    def ranks(self) -> int:
        return self.data * self.tensor * self.pipeline


@dataclass(frozen=True)
class Job:
    """One update of the actor.

    Attributes:
        correction: plain mapping; None: a batch that knows nothing of corrections.
        mini_batches: into how many the batch is cut.
        micro_rows: rows of a micro-batch.
        silent: rows whose response mask is all zero.
        witnessed: verl's loss is called through ``Witness``.
        config: fields of the actor's config.
        patched: install the patches of the legacy actors first.
        tokens: that a micro-batch may have, instead of ``micro_rows``.
        prove: ask for the proof, whose trials call the witness too.
        distilled: mode of on-policy distillation, see ``Case.with_teacher``.
    """

    name: str
    correction: dict[str, Any] | None
    mode: str = "token-mean"
    mini_batches: int = 1
    micro_rows: int = 2
    silent: list[int] = field(default_factory=list)
    witnessed: bool = True
    config: dict[str, Any] = field(default_factory=dict)
    patched: bool = True
    tokens: int | None = None
    prove: bool = False
    distilled: str = ""


@dataclass
class Seen:
    """Results of one rank for one job.

    Attributes:
        packets: of the correction, among the metrics that come back.
        gradients: whole parameters by Hugging Face's names, one dict a mini-batch.
        factors, losses: of the witness, one a micro-batch.
        error: of an update that raised.
    """

    packets: list[Any] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    factors: list[dict[tuple[int, int], float]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    error: str = ""


@dataclass
class Rank:
    """The coordinates of a rank, and its results by job."""

    data: int
    tensor: int
    last_stage: bool
    seen: dict[str, Seen]


Found = dict[str, list[Rank]]
"""Models by layout, one per rank."""


def run(program: Path, model: Path, out: Path, plan: dict[str, tuple[Layout, list[Job]]]) -> Found:
    """Run the jobs in real processes, for all layouts with the same number of ranks, and end them after ``LIMIT``
    seconds.

    They run on the CPU, or on as many GPUs as there are ranks if there are enough.
    """
    (ranks,) = {layout.ranks for layout, _ in plan.values()}
    file = out / "plan.json"
    file.write_text(
        json.dumps({name: [asdict(layout), [asdict(job) for job in jobs]] for name, (layout, jobs) in plan.items()})
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    logs = [out / f"rank{rank}.log" for rank in range(ranks)]
    arguments = [str(each) for each in (program, model, out, file)]
    programs = [_start(rank, ranks, port, arguments, log) for rank, log in enumerate(logs)]
    deadline = time.monotonic() + LIMIT
    try:
        while any(each.poll() is None for each in programs) and time.monotonic() < deadline:
            if any(each.poll() for each in programs):
                break  # a rank failed: the other one waits for it in vain
            time.sleep(0.2)
    finally:
        for each in programs:
            _end(each)
    failed = [log for log, each in zip(logs, programs, strict=True) if each.returncode]
    assert not failed, "\n".join(log.read_text()[-3000:] for log in failed)
    found = [torch.load(out / f"rank{rank}.pt", weights_only=False) for rank in range(ranks)]
    return {name: [each[name] for each in found] for name in plan}


def _start(rank: int, ranks: int, port: int, arguments: list[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as sink:
        return subprocess.Popen(
            [sys.executable, *arguments],
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                **({} if torch.cuda.is_available() else CPU | {"TORCHDYNAMO_DISABLE": "1"}),
                "OMP_NUM_THREADS": "1",
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            },
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _end(program: subprocess.Popen[bytes]) -> None:
    """End the remaining processes of a process group."""
    if program.poll() is None:
        os.killpg(program.pid, signal.SIGKILL)
    program.wait()


# What the tests of both programs ask ------------------------------------------------------------------------


def deep_model(folder: Path) -> Path:
    """``tiny_model`` with four layers, so that two pipeline ranks have two virtual stages each."""
    from transformers import AutoConfig, Qwen2ForCausalLM

    layers = {"num_hidden_layers": 4, "layer_types": ["full_attention"] * 4}
    config = AutoConfig.from_pretrained(tiny_model(folder), **layers)
    return save_drawn(Qwen2ForCausalLM(config), folder, seed=2)


LAYOUTS = {
    "data": Layout(data=2),
    "tensor": Layout(tensor=2),
    "pipeline": Layout(pipeline=2),
    "interleaved": Layout(pipeline=2, stages=2),
}
STACKED = CORRECTIONS["stacked"]
SILENT = [2, 3]  # a whole micro-batch in every layout
JOBS = [
    *(Job(name, correction) for name, correction in CORRECTIONS.items()),
    *(Job(f"stacked-{mode}", STACKED, mode=mode) for mode in MODES[1:]),
    Job("mini_batches", CORRECTIONS["tis"], mini_batches=2),
    Job("dynamic", STACKED, tokens=40),
    Job("distilled by loss", STACKED, distilled="loss"),
    Job("distilled by advantage", STACKED, distilled="advantage"),
    Job("proved", STACKED, witnessed=False, prove=True),
    Job("silent", STACKED, witnessed=False, prove=True, silent=SILENT),
]


def on_last_stage(ranks: list[Rank]) -> list[Rank]:
    """Choose one rank of each data-parallel share among those that compute a loss."""
    return [rank for rank in ranks if rank.last_stage and rank.tensor == 0]


def updates(ranks: list[Rank], job: Job) -> list[tuple[Update, list[int]]]:
    """Combine the ranks' results of each mini-batch, with its rows."""
    seen = [rank.seen[job.name] for rank in on_last_stage(ranks)]
    found = []
    for mini in range(job.mini_batches):
        factors: dict[tuple[int, int], float] = {}
        loss = 0.0
        for each in seen:
            count = len(each.factors) // job.mini_batches
            for call in each.factors[count * mini : count * (mini + 1)]:
                factors |= call
            # Megatron takes the mean over data-parallel ranks.
            loss += sum(each.losses[count * mini : count * (mini + 1)]) / len(seen)
        found.append((Update(factors, loss, seen[0].gradients[mini]), sorted({row for row, _ in factors})))
    return found


def without_tokens(case: Case, rows: list[int]) -> Case:
    """The case with rows whose response mask is all zero."""
    mask = case.columns["response_mask"].clone()
    mask[rows] = 0
    return Case(case.model, case.columns | {"response_mask": mask})


def of_job(name: str) -> Job:
    return next(job for job in JOBS if job.name == name)


def gradient_error(found: dict[str, Any], demanded: dict[str, Any]) -> float:
    """Greatest difference, relative to the greatest gradient."""
    assert found.keys() == demanded.keys()
    scale = max(float(gradient.abs().max()) for gradient in demanded.values())
    return max(float((found[name].double().cpu() - demanded[name]).abs().max()) for name in demanded) / scale


def assert_same_in_bf16(found: Update, case: Case, job: Job) -> None:
    """Compare the factors, which depend on shipped log-probs, and the other results within the precision of 8-bit
    mantissas.

    Gradients are compared with the reference in bfloat16, because rounding in the forward pass moves tokens across
    PPO's clip.
    """
    exact = expected(case, job.correction or {}, job.mode, range(ROWS))
    assert found.factor == pytest.approx(exact.factor, rel=1e-5)
    assert found.loss == pytest.approx(exact.loss, rel=0.1)
    rounded = Case(copy.deepcopy(case.model).bfloat16(), case.columns)
    demanded = expected(rounded, job.correction or {}, job.mode, range(ROWS)).gradients
    ours, theirs = (
        torch.cat([gradients[name].double().cpu().flatten() for name in sorted(demanded)])
        for gradients in (found.gradients, demanded)
    )
    assert float((ours - theirs).norm() / theirs.norm()) < 0.2


def assert_makes_the_reference(ranks: list[Rank], job: Job, case: Case) -> None:
    """Check that weights, masks, loss and gradients of all ranks equal the reference, for every split of the
    mini-batch.
    """
    assert [rank.seen[job.name].error for rank in ranks] == ["", ""]
    made, asked = updates(ranks, job), case.with_teacher(job.distilled)
    assert sorted(row for _, rows in made for row in rows) == list(range(ROWS))
    for update, rows in made:
        assert_same(update, expected(asked, job.correction, job.mode, rows))
    if job.distilled:
        asked.check_taught([packet for rank in on_last_stage(ranks) for packet in rank.seen[job.name].packets])


def judged(packets: list[Any], job: Job, case: Case) -> dict[str, float]:
    """Return the trainer's verdict on the packets of an update of the whole batch."""
    from tensordict import TensorDict

    from recipe.offpolicy.correction import CorrectionSpec
    from recipe.offpolicy.proof.verify import verify
    from tests.support.sampled_rows import compute_sampled_checksums

    rows = TensorDict(without_tokens(case, job.silent).columns, batch_size=ROWS)
    spec = CorrectionSpec.from_mapping(job.correction or {})
    return verify(packets, spec, sampled_rows=compute_sampled_checksums(rows))
