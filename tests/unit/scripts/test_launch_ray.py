"""What the launcher submits: its command line, the shell's line, and the runtime environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scripts import launch_ray
from scripts.launch_ray import EXCLUDES, JobError, parse, runtime_env
from tests.support.paths import ROOT

LAUNCHER = ROOT / "scripts" / "launch_ray.sh"
RUN = "recipe/offpolicy/run_dense_fsdp.sh"


def test_options_and_variables_end_where_the_command_begins() -> None:
    request = parse(["--no-wait", "NNODES=4", "PATH_=a=b", RUN, "trainer.nnodes=2", "--check", "--no-wait"])
    assert request.wait is False
    assert request.variables == {"NNODES": "4", "PATH_": "a=b"}
    assert request.command == ("bash", RUN, "trainer.nnodes=2", "--check", "--no-wait")


@pytest.mark.parametrize(
    ("words", "part"),
    [([], "no command"), (["A=1"], "no command"), (["--no-wait", "--"], "no command"), (["--wait", "x"], "--wait")],
)
def test_a_command_line_without_a_command(words: list[str], part: str) -> None:
    with pytest.raises(JobError, match=f"{part}.*Fix:"):
        parse(words)


def test_an_environment_of_its_own(tmp_path: Path) -> None:
    environ = {"VERL_PLATFORM": "cpu", "OFFPOLICY_X": "1", "HOME": "/root", "PYTHONPATH": "/here"}
    made = runtime_env("", str(tmp_path), "data, models/*.bin", {"NNODES": "4"}, environ)
    assert made == {
        "env_vars": {"VERL_PLATFORM": "cpu", "OFFPOLICY_X": "1", "NNODES": "4"},
        "working_dir": str(tmp_path),
        "excludes": [*EXCLUDES, "data", "models/*.bin"],
    }


def test_the_users_fields_stay(tmp_path: Path) -> None:
    base = {"pip": ["x"], "env_vars": {"A": "1"}, "excludes": ["big", ".git"], "working_dir": "s3://b/files.zip"}
    files = {name: tmp_path / f"env.{name}" for name in ("json", "yaml")}
    files["json"].write_text(json.dumps(base))
    files["yaml"].write_text("pip: [x]\nenv_vars: {A: '1'}\nexcludes: [big, .git]\nworking_dir: s3://b/files.zip\n")
    for given in (json.dumps(base), str(files["json"]), str(files["yaml"])):
        made = runtime_env(given, "/ignored", "", {"B": "2"}, {})
        assert made["pip"] == ["x"]
        assert made["env_vars"] == {"A": "1", "B": "2"}
        assert made["working_dir"] == "s3://b/files.zip", "what the user's own fields say wins"
        assert made["excludes"] == [*EXCLUDES, "big"]


@pytest.mark.parametrize(
    ("base", "working_dir", "given", "environ", "parts"),
    [
        ("{", "none", {}, {}, ["RUNTIME_ENV={"]),
        ("/no/such/file", "none", {}, {}, ["RUNTIME_ENV=/no/such/file", "name a JSON or YAML file"]),
        ("", "/no/such/folder", {}, {}, ["WORKING_DIR=/no/such/folder: no such folder", "or none"]),
        ('{"env_vars": {"A": "1"}}', "none", {"A": "2"}, {}, ["A=2", "says 1"]),
        ("", "none", {"VERL_PLATFORM": "cuda"}, {"VERL_PLATFORM": "cpu"}, ["VERL_PLATFORM=cuda", "says cpu"]),
    ],
)
def test_what_cannot_be_meant(
    base: str, working_dir: str, given: dict[str, str], environ: dict[str, str], parts: list[str]
) -> None:
    with pytest.raises(JobError) as error:
        runtime_env(base, working_dir, "", given, environ)
    for part in [*parts, "Fix:"]:
        assert part in str(error.value)


class Cluster:
    """A job server that is asked for a status after its log has ended."""

    def __init__(self, statuses: list[str], code: int | None) -> None:
        self.statuses = statuses
        self.code = code

    async def tail_job_logs(self, job: str) -> Any:
        yield "a line\n"

    def get_job_status(self, job: str) -> Any:
        value = self.statuses[0] if len(self.statuses) == 1 else self.statuses.pop(0)
        return SimpleNamespace(value=value, is_terminal=lambda: value not in ("PENDING", "RUNNING"))

    def get_job_info(self, job: str) -> Any:
        return SimpleNamespace(status=self.get_job_status(job), driver_exit_code=self.code, message="the end")


@pytest.mark.parametrize(
    ("statuses", "code", "expected"),
    [(["SUCCEEDED"], 0, 0), (["RUNNING", "RUNNING", "FAILED"], 7, 7), (["FAILED"], None, 1), (["STOPPED"], 0, 1)],
)
def test_the_launcher_ends_as_the_job_does(
    statuses: list[str],
    code: int | None,
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(launch_ray, "_POLL_SECONDS", 0.0)
    last = statuses[-1]
    assert launch_ray.follow(Cluster(statuses, code), "job") == expected
    printed = capsys.readouterr()
    assert printed.out == "a line\n"
    assert printed.err == f"launch: job job {last.lower()}. the end\n"


# The command itself, where there is no cluster ----------------------------------------------------------------


def launcher(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(LAUNCHER), *words],
        env={"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], "PYTHON": sys.executable, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
