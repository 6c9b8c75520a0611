"""Scripts that grow without end, and scripts in which a part of the launch is lost."""

from __future__ import annotations

import resource
import time
from pathlib import Path

import pytest

from recipe.offpolicy.doctor.bash.shell_values import ScriptError
from recipe.offpolicy.doctor.scripts import MOST, find_launches

LAUNCH = "python3 -m verl.trainer.main_ppo a.b=1"
CHAIN = "f0() { :; }\n" + "\n".join(f"f{i}() {{ f{i - 1}; f{i - 1}; }}" for i in range(1, 19)) + "\nf18"
DOUBLING = 'python3 -c \'x="aaaaaaaa"; ' + "x=x+x; " * 40 + "print(x)'"

ENDLESS = {
    "arguments that double in quotes": "set -- a b\n" + 'set -- "$@" "$@"\n' * 40,
    "an array that doubles": "A=(a b)\n" + 'A=("${A[@]}" "${A[@]}")\n' * 40,
    "one word of many values": 'X=$(seq 1 100000)\nY="' + "$X" * 2000 + '"',
    "functions that call two": CHAIN,
    "a function that calls itself": "f() { f; }; f",
    "a script that sources itself": "source run.sh",
    "printed without an end": "X=$(for a in $(seq 9999); do cat /etc/services /etc/passwd; done)",
    "an expression that goes back": "[[ " + "a" * 60 + "! =~ ^(a+)+$ ]]",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_script_that_grows_ends_in_words(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each script is rejected, or followed to its launch; the process grows by less than 512 MiB."""
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "run.sh"
    script.write_text(f"{ENDLESS[name]}\n{LAUNCH} c.d=$X\n")
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(ScriptError, match=r"run\.sh"):
        find_launches(script, [])
    assert time.process_time() - began < 30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 512 * 1024


def test_a_look_up_that_doubles_has_no_answer(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"X=$({DOUBLING})\n{LAUNCH} c.d=$X\n")
    began = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    with pytest.raises(ScriptError, match=r"c\.d.*does not end"):
        find_launches(script, [])
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss <= max(began, 600 * 1024)


def arguments_of(tmp_path: Path, source: str) -> list[tuple[str, ...]]:
    script = tmp_path / "run.sh"
    script.write_text(source)
    return [launch.arguments for launch in find_launches(script, [])]


def test_each_turn_of_a_loop_and_call_of_a_function_is_a_launch(tmp_path: Path) -> None:
    expected = [("a.b=1", "r.top_p=0.9"), ("a.b=1", "r.top_p=1.0")]
    loops = (
        f"for tp in 0.9 1.0; do\n  {LAUNCH} r.top_p=$tp\ndone",
        f'A=(0.9 1.0)\nfor tp in "${{A[@]}}"; do {LAUNCH} r.top_p=$tp; done',
        f"X=$({LAUNCH} r.top_p=0.9) && while true; do Y=`{LAUNCH} r.top_p=1.0`; break; done",
        f"set -- 0.9 1.0\nwhile [ $# -gt 0 ]; do {LAUNCH} r.top_p=$1; shift; done",
        f"train() {{ {LAUNCH} r.top_p=$1; }}\ntrain 0.9\ntrain 1.0\ntrain 1.0",
        f'train() {{ {LAUNCH} "$@"; }}\nfor tp in 9 10; do train r.top_p=$((tp / 10)).$((tp % 10)) || exit 1; done',
    )
    for source in loops:
        assert arguments_of(tmp_path, source) == expected, source
    with pytest.raises(ScriptError, match=f"30 different launches, but at most {MOST}"):
        arguments_of(tmp_path, f"for i in $(seq 30); do {LAUNCH} c.d=$i; done")


SEPARATE = "is a separate command, not part of the launch. Fix: end each line"
VARIABLE = "correction=gsm is a variable that the script does not use, not an override. Fix: put it after the module"
LOST = {
    "a comment": (f"{LAUNCH} \\\n  c.d=1 \\\n  # warm\n  e.f=2 \\\n  g.h=3\n", 4, SEPARATE),
    "a blank": (f"{LAUNCH} \\ \n  e.f=2\n", 2, SEPARATE),
    "a carriage return": (f"{LAUNCH} \\\n  e.f=2\r\n", 2, "the line ends in a carriage return"),
    "no backslash": (f"{LAUNCH} \\\n  a.b=2\n  correction=gsm\n", 3, VARIABLE),
    "a pipe": (f"{LAUNCH} | correction=gsm\n", 1, VARIABLE),
    "words from a pipe": (f"seq 3 | xargs -I{{}} {LAUNCH} c.d={{}}\n", 1, "xargs fills in the arguments"),
    "behind a block": (f"if true; then\n  {LAUNCH}\nfi c.d=1\n", 3, "'c.d=1' is not expected here"),
    "an array in a function": (f'f() {{\n  A=(c.d=1)\n{LAUNCH}\n  "${{A[@]}}"\n}}\nf\n', 4, SEPARATE),
}


@pytest.mark.parametrize("name", LOST)
def test_a_part_of_the_launch_that_is_lost_is_an_error_with_line_and_cause(name: str, tmp_path: Path) -> None:
    source, line, cause = LOST[name]
    with pytest.raises(ScriptError) as error:
        arguments_of(tmp_path, source)
    assert f"run.sh, line {line}: " in str(error.value)
    assert cause in str(error.value)


def test_what_is_no_part_of_the_launch_is_none(tmp_path: Path) -> None:
    """Comments and assignments around complete launches."""
    sources = (
        f"{LAUNCH} \\\n  c.d=1 \\\n\nstatus=$?\n",
        f"{LAUNCH} \\\n  c.d=1 # done \\\nstatus=$?\n",
        f"A=(c.d=1\n  # why\n\n  # not\n)\n{LAUNCH} ${{A[@]}}\nrc=$?\n",
        f"true && \\\n  # why\n  {LAUNCH} c.d=1\n",
        f"if true; then\n  {LAUNCH} c.d=1\n  rc=$?\nfi\n",
        f"cut -d \\ \n{LAUNCH} c.d=1",
        f"{LAUNCH} c.d=1 && rc=$?\n",
        f"{LAUNCH} c.d=1 || echo correction=gsm\n",
        f"if (true) then {LAUNCH} c.d=1; fi\n",
        f'pass_at_k=loo\necho "$pass_at_k"\n{LAUNCH} c.d=1\n',
        f"{LAUNCH} c.d=1 > >(tee log) 2>&1\n",
        f"exec > >(tee log)\n{LAUNCH} c.d=1\n",
        f"X=$(cat <(sort a))\n{LAUNCH} c.d=1\n",
    )
    for source in sources:
        assert arguments_of(tmp_path, source) == [("a.b=1", "c.d=1")], source


GUARDS = (
    '[ -z "$NOT_SET_HERE" ] && exit 1',
    '[[ -z $NOT_SET_HERE ]] && { echo "say where"; exit 2; }',
    'if [ -z "${NOT_SET_HERE:-}" ]; then\n  echo no >&2\n  exit 1\nfi',
    ': "${NOT_SET_HERE:?say where}"',
    'case "$NOT_SET_HERE" in "") exit 1;; esac',
    'die() { echo "$1"; exit 1; }\n[ -n "$NOT_SET_HERE" ] || die "say where"',
    'NOT_SET_HERE=${NOT_SET_HERE:-""}\n[ -d / ] && [ -z "$NOT_SET_HERE" ] && exit 1',
)  # fmt: skip


@pytest.mark.parametrize("guard", GUARDS)
def test_a_guard_on_an_unset_variable_asks_for_it(guard: str, tmp_path: Path) -> None:
    with pytest.raises(ScriptError, match=r"Fix: export NOT_SET_HERE=VALUE\."):
        arguments_of(tmp_path, f"{guard}\n{LAUNCH} model.path=$NOT_SET_HERE\n")


def test_a_guard_on_an_argument_asks_for_it(tmp_path: Path) -> None:
    for guard in (
        '[ -z "$1" ] && exit 1',
        "[ $# -lt 1 ] && exit 1",
        'M=${1:-}\n[ -z "$M" ] && exit 1',
        ": ${1:?model}",
    ):
        with pytest.raises(ScriptError, match=r"Fix: give the script's arguments after --script FILE\."):
            arguments_of(tmp_path, f"{guard}\n{LAUNCH} model.path=$1\n")
