"""Options, limits and progress of the quickstart's supervisor."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from scripts.quickstart import prepare
from scripts.quickstart.options import Options, build_child_environment, build_task_overrides, quote
from scripts.quickstart.processes import Child, StageFailed, Tail
from scripts.quickstart.report import History, Progress, TrainingView
from tests.support.paths import ROOT
from tests.support.recorder_clock import Clock


@pytest.mark.parametrize(
    ("env", "overrides", "options"),
    [
        ({}, [], Options(model=None, platform="cpu")),
        ({"TASK": "free_length"}, ["platform=cpu", "a=3", "platform=cuda"], Options(None, "cuda", "free_length")),
        ({}, ["model=moe"], Options(None, "cpu", mixture=True)),
        ({"TASK": ""}, ["process_reward=null"], Options(None, "cpu")),
        ({"TASK": "free_length"}, ["length_penalty=anchor"], Options(None, "cpu", "free_length")),
        ({}, ["process_reward=prefix_value"], Options(None, "cpu", "process_reward")),
    ],
)
def test_options_are_of_the_environment_and_of_overrides(env, overrides, options):
    assert Options.read(env, overrides) == options


def test_routes_that_are_replayed_are_recorded() -> None:
    key = "actor_rollout_ref.actor.fsdp_config.router_replay.mode"
    recorded = ["actor_rollout_ref.rollout.enable_rollout_routing_replay=true"]
    options = Options(None, "cpu")
    assert build_task_overrides(options, [f"{key}=R3"]) == recorded
    assert build_task_overrides(options, [f"{key}=R3", f"{key}=R2"]) == build_task_overrides(options, []) == []


@pytest.mark.parametrize(
    ("env", "overrides", "message"),
    [
        ({"MODEL": "/nowhere"}, [], "MODEL=/nowhere"),
        ({}, ["platform=tpu"], "platform=tpu"),
        ({}, ["model=dense"], "model=dense"),
        (
            {},
            ["model=moe", "process_reward=prefix_value"],
            "model=moe: this selects a model that has a task of its own",
        ),
        ({"TASK": "long"}, [], "TASK=long: choose one of spelling, free_length"),
        ({"TASK": "free_length"}, ["process_reward=advantage"], "TASK=free_length: process_reward brings a task"),
        ({"TASK": "free_length"}, ["opd=advantage"], "TASK=free_length: opd brings a task of its own"),
        ({"MODEL": "smollm2", "TASK": "free_length"}, [], "smollm2|arithmetic"),
        ({"MODEL": "smollm2", "TASK": "spelling"}, [], "smollm2|arithmetic"),
        ({"MODEL": "smollm2"}, ["process_reward=prefix_value"], "smollm2|arithmetic"),
        ({"MODEL": "smollm2"}, ["opd=loss"], "smollm2|arithmetic"),
        ({"MODEL": "smollm2"}, ["model=moe"], "smollm2|arithmetic|model=moe"),
    ],
)
def test_bad_options_name_the_key_and_the_value(env, overrides, message):
    with pytest.raises(ValueError, match=message):
        Options.read(env, overrides)


def test_only_the_cpu_platform_loads_the_cpu_patches():
    base = {"PYTHONPATH": "/theirs", "OMP_NUM_THREADS": "3"}
    cpu = build_child_environment(base, "cpu", Path("/checkout"))
    assert cpu["VERL_USE_EXTERNAL_MODULES"] == "verl_patches.cpu"
    assert cpu["OMP_NUM_THREADS"] == "3"
    assert cpu["PYTHONPATH"] == "/checkout:/theirs"
    assert "VERL_USE_EXTERNAL_MODULES" not in build_child_environment(base, "cuda", Path("/checkout"))


def test_modules_of_the_callers_stay_beside_the_cpu_patches():
    base = {"VERL_USE_EXTERNAL_MODULES": "mine, verl_patches.cpu,theirs", "PYTHONPATH": "/checkout:/theirs"}
    cpu = build_child_environment(base, "cpu", Path("/checkout"))
    assert cpu["VERL_USE_EXTERNAL_MODULES"] == "verl_patches.cpu,mine,theirs"
    assert cpu["PYTHONPATH"] == "/checkout:/theirs"
    cuda = build_child_environment(base, "cuda", Path("/checkout"))
    assert cuda["VERL_USE_EXTERNAL_MODULES"] == "mine, verl_patches.cpu,theirs"


@pytest.mark.parametrize("path", ["/plain/path", "/with space/a,b/[c]", "/it's/quoted"])
def test_paths_survive_hydras_grammar(path):
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parsed = OverridesParser.create().parse_override(quote("data.train_files", path))
    assert parsed.key_or_group == "data.train_files"
    assert parsed.value() == path


def test_a_part_is_known_once_it_is_whole(tmp_path, monkeypatch):
    both = ("data", "model")
    assert prepare.find_made(tmp_path, both) is None
    data, model = (prepare.folder(tmp_path, part) for part in both)

    def interrupted(draft):
        (draft / "half").touch()
        raise KeyboardInterrupt

    assert prepare.make_once(data, lambda draft: (draft / "train.parquet").touch()) is False
    with pytest.raises(KeyboardInterrupt):
        prepare.make_once(model, interrupted)
    assert list(tmp_path.iterdir()) == [data]
    assert prepare.find_made(tmp_path, both) is None
    assert prepare.find_made(tmp_path, ["data"]) == {"data": data}
    assert prepare.make_once(model, lambda draft: None) is False
    assert prepare.find_made(tmp_path, both) == {"data": data, "model": model}
    assert prepare.make_once(model, interrupted) is True
    monkeypatch.setattr(prepare.importlib.metadata, "version", lambda package: "0.0")
    assert prepare.find_made(tmp_path, ["data"]) is None


def test_of_two_processes_that_build_a_part_the_first_to_end_makes_it(tmp_path):
    part = tmp_path / "part"

    def outrun(draft):
        (draft / "ours").touch()
        assert prepare.make_once(part, lambda other: (other / "theirs").touch()) is False

    assert prepare.make_once(part, outrun) is True
    assert list(tmp_path.rglob("*")) == [part, part / "theirs"]

    with pytest.raises(FileNotFoundError):
        prepare.make_once(tmp_path / "other", lambda draft: draft.rmdir())


@pytest.mark.slow
def test_a_misspelt_correction_is_refused_before_anything_starts():
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / "quickstart.sh"), "correction=gsn"],
        env={**os.environ, "VENV": sys.prefix},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2, done.stderr
    assert "gsn" in done.stdout
    assert "the configuration was refused" in done.stdout
    assert "starting Ray" not in done.stdout


def child(tmp_path: Path, script: str) -> Child:
    return Child(["bash", "-c", script], {"PATH": "/usr/bin:/bin"}, tmp_path / "log", tmp_path)


@pytest.mark.slow
def test_lines_arrive_whole_and_in_order(tmp_path):
    assert list(child(tmp_path, "echo one; printf tw; sleep 0.4; echo o").lines()) == ["one", "two"]


@pytest.mark.slow
def test_what_follows_the_awaited_line_is_kept(tmp_path):
    lines = child(tmp_path, "echo one; echo ready, two; echo three; sleep 0.4; echo ready").lines()
    assert next(line for line in lines if line.startswith("ready")) == "ready, two"
    assert list(lines) == ["three", "ready"]


def test_a_daemon_that_keeps_the_output_open_does_not_delay_the_end(tmp_path):
    """Ray's outlive its driver; the test's own ends when it is told."""
    talker = child(tmp_path, "(until [[ -e ended ]]; do sleep 0.1; done) & echo done")
    try:
        assert list(talker.lines()) == ["done"]
    finally:
        (tmp_path / "ended").touch()


def test_a_failing_child_shows_the_end_of_its_log(tmp_path):
    failing = child(tmp_path, "seq 100; exit 3")
    with pytest.raises(StageFailed, match="3"):
        list(failing.lines())
    assert failing.end_of_log(2) == "99\n100"


def test_a_growing_file_is_read_in_whole_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tail = Tail(path)
    assert tail.new_lines() == []
    path.write_text("first\nsec")
    assert tail.new_lines() == ["first"]
    path.write_text("first\nsecond\n")
    assert tail.new_lines() == ["second"]
    assert tail.new_lines() == []


@pytest.mark.slow
def test_an_interrupt_ends_the_run_and_nothing_is_left():
    with subprocess.Popen(
        [sys.executable, "-m", "scripts.quickstart.run"], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        shown = next(line for line in run.stdout if "checking the configuration" in line)
        run.send_signal(signal.SIGINT)
        shown += run.stdout.read()
    assert run.returncode == 128 + signal.SIGINT, shown
    assert "interrupted by SIGINT" in shown
    assert "cleaned up: no process is left\n" in shown


def test_a_log_gets_a_heartbeat():
    out, clock = io.StringIO(), Clock()
    with Progress(Console(file=out), clock) as progress:
        clock.now += 2.0
        progress.stage("waiting")
        progress.stage("waiting")
        for _ in range(4):
            clock.now += 8.0
            progress.tick()
    assert out.getvalue().splitlines() == [
        "[   2 s] waiting",
        "[  18 s] ... waiting, 16 s",
        "[  34 s] ... waiting, 32 s",
    ]


def test_training_is_told_step_by_step():
    out, history = io.StringIO(), History()
    validated = '{"step": 0, "data": {"val-core/x/acc/mean@1": 0.25, "val-aux/x/exact/mean@1": 0.125}}'
    first = '{"step": 1, "data": {"critic/rewards/mean": 0.5, "offpolicy/kl/k3": 1e-4, "offpolicy/live/proved": 1.0}}'
    last = '{"step": 2, "data": {"critic/rewards/mean": 0.75, "val-core/x/acc/mean@1": 0.5}}'
    with Progress(Console(file=out)) as progress:
        view = TrainingView(progress, history, steps=2, corrected=True, scored=True)
        view.log_line("Creating file logger at /x")
        for lines in ([validated, first], [last]):
            for step, data in history.add(lines):
                view.step(step, data)
    told = [line.partition("] ")[2].strip() for line in out.getvalue().splitlines()]
    assert told == [
        "starting Ray and vLLM (about a minute on two cores)",
        "held-out questions before training",
        "held out before training: exact match 0.125, graded score 0.250",
        "training (2 steps)",
        "step 1 of 2: reward 0.500, KL 1.00e-04, ESS -, kept -, - s",
        "the correction is proved live: it reached the gradient of the first update",
        "last step, then the held-out questions",
        "step 2 of 2: reward 0.750, KL -, ESS -, kept -, - s",
        "held out after step 2: score 0.500",
        "ending",
    ]
