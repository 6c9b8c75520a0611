"""scripts/launch_ray.sh on a real Ray cluster with two nodes: what the nodes receive, and how the launch ends."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT

LAUNCHER = str(ROOT / "scripts" / "launch_ray.sh")
LIMIT = 300
"""Seconds after which a command counts as hanging."""
CPU = {"VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda", "VERL_USE_EXTERNAL_MODULES": "verl_patches.cpu"}
CLUSTER = {"RAY_ADDRESS": "{dashboard}", "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
# Each of them means something to a shell or to Ray's own command line.
AWKWARD = ["two words", "it's", '"quoted"', "$HOME", "`date`", "[a,b]", "{c: 1}", "back\\slash", "*", ";", "", "a\nb"]


def launched(*words: str, **environment: str) -> dict[str, Any]:
    return {"words": ["bash", LAUNCHER, *words], "env": {**CLUSTER, **environment}, "limit": LIMIT}


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Commands that are tested on one cluster, because starting the cluster takes longer than any of them."""
    python = sys.executable
    report = [python, "tests/support/patches_on_nodes.py"]
    dense = "recipe/offpolicy/run_dense_fsdp.sh"
    return {
        # As a job: files, variables and arguments come with the submission.
        "job": launched("OFFPOLICY_TOKEN=a b", *report, *AWKWARD, **CPU),
        # As a driver started on a node: variables come with its own ray.init.
        "driver": {
            "words": [python, str(ROOT / report[1])],
            "env": {**CPU, "RAY_ADDRESS": "{gcs}", "PYTHONPATH": str(ROOT), "OFFPOLICY_TOKEN": "driver"},
            "limit": LIMIT,
        },
        "check": launched(dense, "--check", "correction=[tis_token,gsm]", "correction.weight.upper=3.0", **CPU),
        "refused": launched(dense, "--check", "+correction.x=1", **CPU),
        "status": launched("bash", "-c", "exit 7"),
        "not waited for": launched("--no-wait", "sleep", str(2 * LIMIT), SUBMISSION_ID="left_alone"),
        "stopped": {
            "words": [str(Path(python).parent / "ray"), "job", "stop", "left_alone"],
            "env": {"RAY_ADDRESS": "{dashboard}"},
            "limit": LIMIT,
        },
    }


@pytest.mark.slow
@pytest.mark.extended
def test_jobs_on_two_nodes(run_program: Any, commands: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    given, results = tmp_path / "commands.json", tmp_path / "results.json"
    given.write_text(json.dumps(list(commands.values())))
    program = [sys.executable, str(ROOT / "tests" / "support" / "two_nodes.py"), str(given), str(results)]
    finished = run_program(program, limit=8 * LIMIT, PATH=f"{Path(sys.executable).parent}:/usr/bin:/bin")
    assert finished.returncode == 0, finished.output[-3000:]
    done = dict(zip(commands, json.loads(results.read_text()), strict=True))

    for name, token in {"job": "a b", "driver": "driver"}.items():
        report = answer(done[name])
        assert len(report["nodes"]) == 2
        assert {each["node"] for each in report["answers"]} == set(report["nodes"])
        for each in report["answers"]:
            assert each["modules"] == "verl_patches.cpu"
            assert each["token"] == token
            assert each["status"]["cpu"]["process_group"] == "in force"
            assert each["status"]["cpu"]["vllm_weights"] == "waiting"
    # Words arrive unharmed, and the job's code is the copy that was sent.
    report = answer(done["job"])
    assert report["arguments"] == AWKWARD
    assert all("working_dir_files" in each["from"] for each in report["answers"])
    assert all(Path(each["from"]).is_relative_to(ROOT) for each in answer(done["driver"])["answers"])

    assert done["check"]["returncode"] == 0, done["check"]["output"][-2000:]
    assert "all checks passed" in done["check"]["output"]
    assert '"upper": 3.0' in done["check"]["output"]
    assert done["refused"]["returncode"] == 1
    assert "correction.x=1: unknown key" in done["refused"]["output"]
    assert done["status"]["returncode"] == 7, done["status"]["output"]
    assert done["not waited for"]["returncode"] == 0
    assert "left_alone" in done["not waited for"]["output"]
    assert done["stopped"]["returncode"] == 0, done["stopped"]["output"]


def answer(result: dict[str, Any]) -> dict[str, Any]:
    lines = [line for line in result["output"].splitlines() if "PATCHES {" in line]
    assert len(lines) == 1, result["output"][-3000:]
    found: dict[str, Any] = json.loads(lines[0].partition("PATCHES ")[2])
    return found
