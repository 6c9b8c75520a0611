"""Launches in scripts with arguments, variables and exits: they are read as they would run, or the answer says what to
do.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from recipe.offpolicy.doctor.bash.shell_values import ScriptError
from recipe.offpolicy.doctor.diagnosis import diagnose
from recipe.offpolicy.doctor.scripts import find_launches

LAUNCH = "python3 -m verl.trainer.main_ppo"
COUNTED = f"ngpu=$1; shift\n{LAUNCH} trainer.n_gpus_per_node=$ngpu"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "run.sh"


def refused(script: Path, source: str, *arguments: str) -> str:
    script.write_text(source)
    with pytest.raises(ScriptError) as caught:
        find_launches(script, list(arguments))
    return str(caught.value).removeprefix(f"{script}")


@pytest.mark.parametrize(
    ("source", "given", "arguments"),
    [
        (f'{COUNTED} "$@"', ["8", "a.b=1"], ["trainer.n_gpus_per_node=8", "a.b=1"]),
        # A flag of the script's own.
        (f"if [[ $1 == --fast ]]; then F=1; fi\n{LAUNCH} a.b=${{F:-0}}", ["--fast"], ["a.b=1"]),
        # A whole override by its number.
        (f'main() {{\n n=$1; shift\n {LAUNCH} a.b=$n "$@"\n}}\nmain "$@"', ["8", "c.d=2"], ["a.b=8", "c.d=2"]),
    ],
)
def test_arguments_that_a_script_takes_itself(
    source: str, given: list[str], arguments: list[str], script: Path
) -> None:
    script.write_text(f"{source}\n")
    assert list(find_launches(script, given)[0].arguments) == arguments


@pytest.mark.parametrize(
    ("source", "given", "lost"),
    [
        (COUNTED, ["8", "correction=gsm"], "correction=gsm"),
        (f'echo "$@"\n{LAUNCH} a.b=1', ["model_engine=megatron"], "model_engine=megatron"),
        (f"shift\n{LAUNCH} a.b=1", ["c.d=2"], "c.d=2"),
    ],
)
def test_overrides_that_do_nothing_are_named_and_added(source: str, given: list[str], lost: str, script: Path) -> None:
    script.write_text(f"{source}\n")
    (launch,) = find_launches(script, given)
    assert (launch.lost, launch.arguments[-1]) == ((lost,), lost)
    found = diagnose(launch)
    assert found.status == 2
    assert lost in found.problems[0].advice


def test_a_variable_with_a_default_is_to_be_put_in_front(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One variable that decides about many keys, and all keys at once."""
    source = f"""DEVICE=${{DEVICE:-$(which_device)}}
if [ "$DEVICE" = npu ]; then
  A=1 B=2
else
  A=3 B=4
fi
{LAUNCH} a.b=$A c.d=$B e.f=1
"""
    assert refused(script, source) == (
        ", line 7: 2 overrides are unknown (a.b, c.d): it depends on the output of `which_device`, and which_device is "
        "not run (line 1). Fix: put DEVICE=VALUE before the command."
    )
    monkeypatch.setenv("DEVICE", "gpu")
    assert find_launches(script, [])[0].arguments == ("a.b=3", "c.d=4", "e.f=1")


def test_each_cause_has_its_own_fix(script: Path) -> None:
    said = refused(script, f"N=$(count)\n{LAUNCH} a.b=$N c.d=$NOT_SET_HERE e.f=$N g.h=$2")
    assert said == (
        ", line 2: 4 overrides are unknown (a.b, c.d, e.f, g.h): it depends on the output of `count`, and count is not "
        "run (line 1); $NOT_SET_HERE is not set (line 2); $2 is not set (line 2). Fix: "
        "export NOT_SET_HERE=VALUE (bash treats it as empty), and give the script's arguments after --script FILE, "
        f"and to check the launch with your own values, add a.b=VALUE e.f=VALUE after --script {script}."
    )


@pytest.mark.parametrize(
    ("before", "said"),
    [
        (
            '[ -f "$NOT_SET_HERE" ] || exit 2',
            "line 2 (exit 2) before any launch. Fix: export NOT_SET_HERE=VALUE.",
        ),
        ("case $DIR in /none) exit 4;; esac", "line 2 (exit 4) before any launch."),
    ],
)
def test_a_script_that_ends_before_its_launch(before: str, said: str, script: Path) -> None:
    assert refused(script, f"DIR=/none\n{before}\n{LAUNCH} a.b=1\n") == f": the script ends at {said}"


@pytest.mark.parametrize(
    ("before", "line"),
    [
        ("if [[ ! -d $DIR ]]; then\n  exit 1\nfi", 3),
        ("die() {\n  exit 1\n}\ntest -e $DIR || die", 3),
        ("for p in $DIR; do\n  if [[ ! -s $p ]]; then exit 2; fi\ndone", 3),
    ],
)
def test_a_file_that_is_missing_here_is_assumed(before: str, line: int, script: Path) -> None:
    script.write_text(f"DIR=/none\n{before}\n{LAUNCH} a.b=${{X:-1}}\n")
    (launch,) = find_launches(script, [])
    assert launch.arguments == ("a.b=1",)
    assert launch.assumed == (
        f"line {line}: the doctor assumes that /none exists, because otherwise the script would end",
    )
    assert [note.reason for note in diagnose(launch).notes] == [f"{launch.assumed[0]}."]


def test_an_unset_variable_of_a_name_is_empty_as_in_bash(script: Path) -> None:
    names = "trainer.experiment_name=x$N trainer.default_local_dir=c/$NOT_SET_HERE"
    source = f"N=$NOT_SET_HERE-$NOR_THIS\ndate | tee $N.log\n{LAUNCH} {names}"
    script.write_text(source)
    (launch,) = find_launches(script, [])
    assert launch.arguments == ("trainer.experiment_name=x-", "trainer.default_local_dir=c/")
    assert launch.assumed == tuple(
        f"${name} is not set, and bash treats it as empty" for name in ("NOR_THIS", "NOT_SET_HERE")
    )
    assert "2 overrides are unknown" in refused(script, f"set -eu\n{source}")
    assert "$NOR_THIS is not set" in refused(script, f"{LAUNCH} a.b=1 trainer.default_local_dir=$NOR_THIS/c")
    assert "$NOR_THIS is not set" in refused(script, f"{source} trainer.nnodes=$NOR_THIS")


@pytest.mark.parametrize(
    "before",
    [
        "R=no\nfor i in 1 2; do\n  if curl x; then\n    R=yes\n    break\n  fi\ndone",
        "while true; do\n  R=$(ray_status)\n  if [ $R = yes ]; then break; fi\n  sleep 5\ndone",
    ],
)
def test_a_loop_that_waits_may_end(before: str, script: Path) -> None:
    script.write_text(f'{before}\nif [ "$R" != yes ]; then exit 1; fi\n{LAUNCH} a.b=1\n')
    assert find_launches(script, [])[0].arguments == ("a.b=1",)
