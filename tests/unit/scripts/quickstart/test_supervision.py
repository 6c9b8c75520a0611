"""Options, limits and progress of the quickstart's supervisor."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.quickstart import prepare
from scripts.quickstart.options import Options, build_child_environment
from tests.support.paths import ROOT


@pytest.mark.parametrize(
    ("env", "overrides", "options"),
    [
        ({}, [], Options(model=None, platform="cpu")),
        ({"TASK": "free_length"}, ["platform=cpu", "a=3", "platform=cuda"], Options(None, "cuda", "free_length")),
        ({}, ["model=moe"], Options(None, "cpu", mixture=True)),
        ({"TASK": "free_length"}, ["length_penalty=anchor"], Options(None, "cpu", "free_length")),
        ({}, ["process_reward=prefix_value"], Options(None, "cpu", "process_reward")),
    ],
)
def test_options_are_of_the_environment_and_of_overrides(env, overrides, options):
    assert Options.read(env, overrides) == options


@pytest.mark.parametrize(
    ("env", "overrides", "message"),
    [
        ({"MODEL": "/nowhere"}, [], "MODEL=/nowhere"),
        ({}, ["platform=tpu"], "platform=tpu"),
        ({}, ["model=dense"], "model=dense"),
        (
            {},
            ["model=moe", "process_reward=prefix_value"],
            "model=moe: the mixture of experts has its own task",
        ),
        ({"TASK": "long"}, [], "TASK=long: choose one of spelling, free_length"),
        ({"TASK": "free_length"}, ["process_reward=advantage"], "TASK=free_length: process_reward has its own task"),
        ({"MODEL": "smollm2", "TASK": "free_length"}, [], "smollm2|arithmetic"),
        ({"MODEL": "smollm2"}, ["process_reward=prefix_value"], "smollm2|arithmetic"),
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
