"""Options, limits and progress of the quickstart's supervisor."""

from __future__ import annotations

import io
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from tests.support.paths import ROOT

sys.path.insert(0, str(ROOT / "scripts" / "quickstart"))

import cache as cache_module
from metrics import History, MetricsFile
from options import Options, child_environment, override
from progress import Progress
from stages import Child, Limits, OutOfTime, StageFailed, Stalled
from training import TrainingView


def test_options_from_nothing():
    assert Options.read({}, []) == Options(model=None, platform="cpu", time_limit=900.0, stall_limit=180.0)


def test_options_from_the_environment(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    env = {"MODEL": str(tmp_path), "QUICKSTART_TIME_LIMIT": "60"}
    options = Options.read(env, ["platform=cpu", "trainer.total_training_steps=3", "platform=cuda"])
    assert (options.model, options.platform, options.time_limit) == (tmp_path.resolve(), "cuda", 60.0)


@pytest.mark.parametrize(
    ("env", "overrides", "message"),
    [
        ({"MODEL": "/nowhere"}, [], "MODEL=/nowhere"),
        ({"QUICKSTART_TIME_LIMIT": "soon"}, [], "QUICKSTART_TIME_LIMIT=soon"),
        ({"QUICKSTART_STALL_LIMIT": "0"}, [], "QUICKSTART_STALL_LIMIT=0"),
        ({"QUICKSTART_TIME_LIMIT": "nan"}, [], "QUICKSTART_TIME_LIMIT=nan"),
        ({}, ["platform=tpu"], "platform=tpu"),
    ],
)
def test_bad_options_name_the_key_and_the_value(env, overrides, message):
    with pytest.raises(ValueError, match=message):
        Options.read(env, overrides)


def test_only_the_cpu_platform_loads_the_cpu_patches():
    base = {"PYTHONPATH": "/theirs", "OMP_NUM_THREADS": "3"}
    cpu = child_environment(base, "cpu", Path("/checkout"))
    assert cpu["VERL_USE_EXTERNAL_MODULES"] == "verl_patches.cpu"
    assert cpu["OMP_NUM_THREADS"] == "3"
    assert cpu["PYTHONPATH"] == "/checkout:/theirs"
    assert "VERL_USE_EXTERNAL_MODULES" not in child_environment(base, "cuda", Path("/checkout"))


def test_modules_of_the_callers_stay_beside_the_cpu_patches():
    base = {"VERL_USE_EXTERNAL_MODULES": "mine, verl_patches.cpu,theirs", "PYTHONPATH": "/checkout:/theirs"}
    cpu = child_environment(base, "cpu", Path("/checkout"))
    assert cpu["VERL_USE_EXTERNAL_MODULES"] == "verl_patches.cpu,mine,theirs"
    assert cpu["PYTHONPATH"] == "/checkout:/theirs"
    cuda = child_environment(base, "cuda", Path("/checkout"))
    assert cuda["VERL_USE_EXTERNAL_MODULES"] == "mine, verl_patches.cpu,theirs"


@pytest.mark.parametrize("path", ["/plain/path", "/with space/a,b/[c]", "/it's/quoted"])
def test_paths_survive_hydras_grammar(path):
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parsed = OverridesParser.create().parse_override(override("data.train_files", path))
    assert parsed.key_or_group == "data.train_files"
    assert parsed.value() == path


def test_a_part_is_known_once_it_is_whole(tmp_path, monkeypatch):
    both = ("data", "model")
    assert cache_module.known(tmp_path, both) is None
    data, model = (cache_module.folder(tmp_path, part) for part in both)

    def interrupted(draft):
        (draft / "half").touch()
        raise KeyboardInterrupt

    assert cache_module.cached(data, lambda draft: (draft / "train.parquet").touch()) is False
    with pytest.raises(KeyboardInterrupt):
        cache_module.cached(model, interrupted)
    assert list(tmp_path.iterdir()) == [data]
    assert cache_module.known(tmp_path, both) is None
    assert cache_module.known(tmp_path, ["data"]) == {"data": data}
    assert cache_module.cached(model, lambda draft: None) is False
    assert cache_module.known(tmp_path, both) == {"data": data, "model": model}
    assert cache_module.cached(model, interrupted) is True
    monkeypatch.setattr(cache_module.importlib.metadata, "version", lambda package: "0.0")
    assert cache_module.known(tmp_path, ["data"]) is None


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


class Clock:
    """Moved by hand: a limit strikes where a test says so, however busy the machine is."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def pass_by(self, sign_of_life: bool) -> Callable[[], bool]:
        """Ten seconds for each look at a child, at which there is a sign of life or none."""

        def tick() -> bool:
            self.now += 10.0
            return sign_of_life

        return tick


NO_LIMITS = Limits(math.inf, math.inf)


def child(tmp_path: Path, script: str) -> Child:
    return Child(["bash", "-c", script], {"PATH": "/usr/bin:/bin"}, tmp_path / "log", tmp_path)


def test_lines_arrive_whole_and_in_order(tmp_path):
    lines: list[str] = []
    child(tmp_path, "echo one; printf tw; sleep 0.4; echo o").wait(NO_LIMITS, on_line=lines.append)
    assert lines == ["one", "two"]


def test_what_follows_the_awaited_line_is_kept(tmp_path):
    talker = child(tmp_path, "echo one; echo ready, two; echo three; sleep 0.4; echo ready")
    first: list[str] = []
    rest: list[str] = []
    talker.wait(NO_LIMITS, on_line=first.append, until="ready")
    talker.wait(NO_LIMITS, on_line=rest.append)
    assert (first, rest) == (["one", "ready, two"], ["three", "ready"])


def test_a_child_that_fails_before_the_awaited_line(tmp_path):
    with pytest.raises(StageFailed, match="2"):
        child(tmp_path, "echo no; exit 2").wait(NO_LIMITS, until="ready")


def test_a_failing_child_shows_the_end_of_its_log(tmp_path):
    failing = child(tmp_path, "seq 100; exit 3")
    with pytest.raises(StageFailed, match="3"):
        failing.wait(NO_LIMITS)
    assert failing.tail(2) == "99\n100"


@pytest.mark.parametrize(
    ("alive", "total", "stall", "error", "strikes"),
    [(True, 35.0, 5.0, OutOfTime, 40.0), (False, 35.0, 25.0, Stalled, 30.0), (False, 25.0, 25.0, OutOfTime, 30.0)],
)
def test_limits_strike(tmp_path, alive, total, stall, error, strikes):
    clock = Clock()
    slow = child(tmp_path, "sleep 600")
    try:
        with pytest.raises(error):
            slow.wait(Limits(total, stall, clock), on_tick=clock.pass_by(alive))
        assert clock.now == strikes
    finally:
        slow.process.kill()
        slow.process.wait()


def test_output_is_a_sign_of_life(tmp_path):
    clock = Clock()
    talker = child(tmp_path, "until [[ -e ended ]]; do echo busy; sleep 0.05; done")
    seen: list[str] = []

    def on_line(line: str) -> None:
        seen.append(line)
        clock.now += 4.0
        if len(seen) == 20:
            (tmp_path / "ended").touch()

    talker.wait(Limits(math.inf, 5.0, clock), on_line=on_line)
    assert clock.now >= 80.0


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


def test_training_is_told_step_by_step(tmp_path):
    out = io.StringIO()
    metrics = tmp_path / "metrics.jsonl"
    with Progress(Console(file=out)) as progress:
        view = TrainingView(progress, MetricsFile(metrics), History(), steps=2, corrected=True)
        view.on_line("INFO worker.py -- Started a local Ray instance.")
        view.on_line("Creating file logger at /x")
        assert view.on_tick() is False
        metrics.write_text(
            '{"step": 0, "data": {"val-core/x/acc/mean@1": 0.25}}\n'
            '{"step": 1, "data": {"critic/rewards/mean": 0.5, "offpolicy/kl/k3": 1e-4, "offpolicy/live/proved": 1.0}}\n'
        )
        assert view.on_tick() is True
        metrics.open("a").write('{"step": 2, "data": {"critic/rewards/mean": 0.75, "val-core/x/acc/mean@1": 0.5}}\n')
        view.on_tick()
    text = out.getvalue()
    for shown in (
        "starting Ray and vLLM",
        "Ray is up",
        "held-out score before training: 0.250",
        "step 1 of 2: reward 0.500, KL 1.0e-04, ESS -, kept -",
        "proved live",
        "step 2 of 2: reward 0.750",
        "held-out score after step 2: 0.500",
    ):
        assert shown in text
