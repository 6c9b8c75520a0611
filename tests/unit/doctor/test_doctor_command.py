"""The command: it examines the launch's exact configuration; its exit status and output serve people and programs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.applications import NEEDED
from tests.support.doctor_answer import Ask
from tests.support.paths import ROOT

pytest.importorskip("verl")

pytestmark = pytest.mark.slow

ROLLOUT = "actor_rollout_ref.rollout"
PLAIN = ("--module", "verl.trainer.main_ppo")
GIVEN = (f"{ROLLOUT}.name=vllm", *NEEDED)
RUN = ROOT / "recipe" / "offpolicy"


def test_json_is_one_object_and_nothing_else(ask: Ask) -> None:
    answer = ask("--json", "correction=gsm", f"{ROLLOUT}.calculate_log_probs=false", *GIVEN)
    assert answer.status == 2
    found = answer.json
    assert (found["schema"], found["verdict"], found["exit_status"], found["error"]) == (2, "ERROR", 2, None)
    assert found["path"]["worker"] in ("engine", "legacy")
    (row,) = found["corrections"]
    assert (row["name"], row["verdict"]) == ("masks.gsm", "ERROR")
    (problem,) = row["problems"]
    assert (problem["key"], problem["value"]) == (f"{ROLLOUT}.calculate_log_probs", False)
    assert problem["overrides"] == [f"{ROLLOUT}.calculate_log_probs=true"]


# The program as `python -m` runs it; where it ends it tells whether Ray was started, and what was imported.
WATCHED = """
import os, runpy, sys
ended = os._exit
def tell(status):
    ray = sys.modules.get("ray")
    sys.stderr.write(f"Ray started: {ray is not None and ray.is_initialized()}\\n")
    sys.stderr.write(f"imported: {' '.join(sys.modules)}\\n")
    sys.stderr.flush()
    ended(status)
os._exit = tell
runpy.run_module("recipe.offpolicy.doctor", run_name="__main__", alter_sys=True)
"""
HEAVY = {"vllm", "megatron", "mbridge", "flash_attn", "matplotlib", "torch._inductor.compile_fx"}
"""Modules that take seconds to import and that an answer does not need."""


def program(cwd: Path, *arguments: str, path: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": f"{path}{os.pathsep}{RUN.parents[1]}", "RAY_TMPDIR": str(cwd)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_as_a_program(tmp_path: Path) -> None:
    """Standard output contains only the answer, whatever verl and its imports print; nothing is started or
    left behind.
    """
    # All that the doctor ever imports is needed for it: the base loss is tried, and verl validates.
    done = program(tmp_path, "-c", WATCHED, "--json", "correction=gsm", *GIVEN, f"{ROLLOUT}.calculate_log_probs=false")
    assert done.returncode == 2, done.stderr[:2000] + done.stdout
    assert json.loads(done.stdout)["verdict"] == "ERROR"
    assert "Ray started: False" in done.stderr
    # The answer takes as long as its imports, on any machine.
    (imported,) = (line.split()[1:] for line in done.stderr.splitlines() if line.startswith("imported: "))
    assert HEAVY.isdisjoint(imported)
    assert list(tmp_path.iterdir()) == []


def test_a_doctor_that_fails_does_not_say_inert(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise KeyError("first\nsecond")

    monkeypatch.setattr("recipe.offpolicy.doctor.diagnosis.compose", fail)
    answer = ask("correction=gsm", *GIVEN)
    assert answer.status == 2
    assert "Internal error in the doctor; your launch was not checked: KeyError" in answer.printed
    answer = ask("--json", "correction=gsm", *GIVEN)
    assert (answer.json["exit_status"], answer.json["verdict"]) == (2, "ERROR")
    assert "KeyError" in answer.json["error"]


# What cannot be composed or is malformed: status 2, and a part of the message.
REFUSED = {
    "options that set one key": (["correction=[tis_token,tis_sequence]"], "both set correction.weight"),
    "no such folder": (["--config-dir=/none/such"], "there is no such folder"),
    "no such program": (["--module", "no.such.program", "a.b=1"], "this program was not found"),
    "a program without Hydra": (["--module", "verl.protocol", "a.b=1"], "has no @hydra.main"),
    "nothing is left": (["correction=gsm", "~correction.masks.gsm", *GIVEN], "overrides have removed all of its parts"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_compose_is_wrong(name: str, ask: Ask) -> None:
    arguments, part = REFUSED[name]
    answer = ask(*arguments)
    assert answer.status == 2
    assert "ERROR" in answer.printed
    assert part in answer.printed
    assert ask("--json", *arguments).json["exit_status"] == 2


def test_a_value_of_the_primary_configuration_that_the_option_replaces(ask: Ask, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        "hydra: {searchpath: ['pkg://verl.trainer.config']}\n"
        "defaults: [ppo_trainer, _self_]\n"
        "actor_rollout_ref:\n"
        "  rollout: {name: vllm, log_prob_micro_batch_size_per_gpu: 1}\n"
        "  actor: {ppo_micro_batch_size_per_gpu: 1}\n"
        "correction: {masks: {gsm: {upper: 1.05, lower: 0.99}}}\n"
    )
    launch = (*PLAIN, "--json", f"--config-dir={tmp_path}", "--config-name=run", "+correction@correction=gsm")
    answer = ask(*launch)
    assert answer.status == 2
    told = [(each["key"], each["overrides"]) for row in answer.json["corrections"] for each in row["problems"]]
    assert told == [("correction.masks.gsm.upper", ["correction.masks.gsm.upper=1.05"])]
    assert ask(*launch, "correction.masks.gsm.upper=1.05").status == 0
