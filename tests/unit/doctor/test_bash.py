"""Launch scripts are read as bash reads them, and results that only an execution would show are not guessed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from recipe.offpolicy.doctor.bash.interpreter import read_script
from recipe.offpolicy.doctor.bash.shell_values import ProgramCall, ScriptError, Unknown
from tests.support.paths import ROOT

RUN = ROOT / "recipe" / "offpolicy"
ENVIRONMENT = {"HOME": "/home/me", "PATH": os.environ["PATH"], "GIVEN": "from outside", "EMPTY": ""}
ARGUMENTS = ["one.a=1", "two words", "three"]

# Snippets that call `launch`; their words are compared with those that bash itself hands on.
SAME_AS_BASH = {
    "words and quotes": """launch a 'b c' "d  e" f\\ g "h'i" 'j"k' l"m n"o""",
    "continued lines": "launch a \\\n  b \\\n\\\n  c",
    "comments": "# launch no\nlaunch a#b 'c # d' # e\n",
    "variables": 'X=1; Y="$X 2"; launch $X "$Y" $Y ${X}y "${Y}z" $X/$Y',
    "assigned by quotes and dollars": "A='$X'\nB=\"a\\$b\"\nC=a$A\nlaunch $A $B $C",
    "defaults": 'launch ${NONE:-x} ${EMPTY:-y} ${EMPTY-z} ${GIVEN:+set} "${NONE:-two words}" ${NONE:-two words}',
    "defaults in defaults": 'launch ${NONE:-${ALSO:-$HOME/x}} "${GIVEN:-no}"',
    "defaults that are kept": 'launch ${NONE:=x} $NONE; : ${OTHER:="a b"}; launch "$OTHER"',
    "trimmed": "F=/a/b.c.d; launch ${F##*/} ${F#*/} ${F%.*} ${F%%.*} ${#F} ${F/b/X} ${F//[bc]/X} ${F^^} ${F,,}",
    "slices": 'F=abcdef; A=(1 2 3 4); launch ${F:1:2} ${F: -2} "${A[@]:1:2}" "${@:2}" ${A[1]} ${#A[@]}',
    "arrays": 'A=(a "b c" # no\n  d="e f"\n  $GIVEN)\nA+=(g)\nlaunch "${A[@]}" x"${A[@]}"y "${A[*]}" ${A[@]}',
    "empty arrays": 'A=(); launch "${A[@]}" ${A[@]} a "" $EMPTY',
    "arguments": 'launch "$@" $# ${#} "$1" ${2} "$*"',
    "shifted": 'launch $1; shift; launch "$@"',
    "exported": 'export X=$GIVEN Y="a b"; declare -r Z=1; launch "$X" "$Y" $Z',
    "arithmetic": "N=3; launch $((N * 2 + 1)) $((N / 2)) $((-7 / 2)) $(( ($N + 1) % 3 )) $((N > 2 && N < 9))",
    "powers": "N=4; launch $((2 ** 10)) $((1 << N)) $((!0))",
    "substitution": 'launch $(echo a b) "$(echo "c  d")" `echo e` "x$(dirname /a/b/c)y" $(basename /a/b.c)',
    "if": "if [ $# -gt 2 ]; then launch many; elif [ $# = 0 ]; then launch none; else launch few; fi",
    "tests": 'if [[ -n $GIVEN && ! -f /none && "$1" == one.* ]]; then launch yes; else launch no; fi',
    "patterns in quotes": '[[ " $* " != *" two"* ]] && launch no; [[ "a*b" == "a*"* ]] && launch yes',
    "case": "case $GIVEN in no) launch 1;; from*|other) launch 2;; *) launch 3;; esac",
    "for": 'for x in a "b c" $GIVEN; do launch "$x"; done',
    "while": 'while [[ $# -gt 0 ]]; do case $1 in t*) launch "$1";; esac; shift; done',
    "functions": 'f() { local y=$1; launch "$y" $2; }; f "a b" c; function g { launch $1; }; g d',
    "subshell": "X=1; (X=2; launch $X); launch $X",
    "chains": "true && launch a; false || launch b; false && launch c; ! false && launch d",
    "redirected": "launch a > /dev/null 2>&1; launch b 2>/dev/null < /dev/null",
    "eval": 'X="launch a \'b c\'"; eval $X; eval "launch $GIVEN"',
    "here-strings": 'X=$(cat <<< "$GIVEN"); launch "$X" "$(cat <<< word)"',
    "a here-document as it is": "X=$(cat <<'END'\nan $X 'it\nEND\n)\nlaunch \"$X\"",
    "a here-document": 'Y=$(cat <<END\na ${GIVEN}\nEND\n)\nlaunch "$Y"',
    "files": 'echo "a  b" > /dev/null; X=$(< /dev/null); launch "$X" "$(cat < /dev/null)" c',
    "an empty file": "if [ -s /dev/null ]; then launch no; else launch yes; fi",
    "a quote in ANSI quotes": "X=$'it\\'s'; launch 'a b'",
    "appended to nothing": 'A=\'\'; A+=(2); B+=(3); launch "${A[@]}" "${B[@]}"',
    "pushd": "pushd / > /dev/null; launch $PWD",
    "pipes": "X=$(echo a:b | cut -d: -f2); launch $X",
    "braces": 'launch "{a: 1}" [a,b] \'["x","y"]\' a.b=[1,2]',
    "braces in quotes": "launch '{a,b}' \"{a,b}\" \\{a,b} {a} a.b={c:1}",
    "own place": 'launch "$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"',
    "unset": "X=1; unset X; launch ${X:-gone}",
}


def written(folder: Path, source: str) -> Path:
    script = folder / "run.sh"
    script.write_text(source)
    return script


def of_bash(script: Path) -> list[list[str]]:
    """Return the words of each call of launch, as bash sees them."""
    log = script.with_suffix(".log")
    log.write_text("")
    define = 'launch() { printf "%s\\0" launch "$@" >> "$LOG"; }; . "$0"'
    subprocess.run(
        ["bash", "-c", define.replace('. "$0"', 'export -f launch; bash "$0" "$@"'), str(script), *ARGUMENTS],
        env={**ENVIRONMENT, "LOG": str(log)},
        check=False,
        capture_output=True,
    )
    calls: list[list[str]] = []
    for word in log.read_text().split("\0")[:-1]:
        if word == "launch":
            calls.append([])
        calls[-1].append(word)
    return calls


def launches(script: Path, arguments: list[str] = ARGUMENTS) -> list[ProgramCall]:
    return [call for call in read_script(script, arguments, ENVIRONMENT).calls if call.words[0] == "launch"]


@pytest.mark.parametrize("name", SAME_AS_BASH)
def test_words_are_those_of_bash(name: str, tmp_path: Path) -> None:
    script = written(tmp_path, SAME_AS_BASH[name])
    expected = of_bash(script)
    assert expected, "the snippet launches something"
    assert [list(call.words) for call in launches(script)] == expected
    assert [call.doubt for call in launches(script)] == [None] * len(expected)


@pytest.mark.parametrize("name", ["run_dense_fsdp", "run_moe_megatron", "run_async"])
@pytest.mark.parametrize("arguments", [[], ["correction=gsm", "trainer.nnodes=2"]])
def test_our_launch_scripts_are_read_as_bash_runs_them(name: str, arguments: list[str], tmp_path: Path) -> None:
    """The scripts run in bash with a python3 that records its arguments, and that answers the scripts' question about
    verl's location.
    """
    pytest.importorskip("verl")
    shim = tmp_path / "python3"
    shim.write_text('#!/bin/bash\n[[ $1 == - ]] && exec "$PYTHON" -\nprintf "%s\\0" "$@" > "$LOG"\n')
    shim.chmod(0o755)
    import sys

    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": sys.executable}
    log, script = tmp_path / "log", RUN / f"{name}.sh"
    done = subprocess.run(
        ["bash", str(script), *arguments],
        env={**environment, "LOG": str(log)},
        check=False,
        capture_output=True,
    )
    if not log.exists():  # a release without the asynchronous trainer
        assert done.returncode == 1
        assert read_script(script, arguments, environment).calls == []
        return
    (call,) = read_script(script, arguments, environment).calls
    assert list(call.words[1:]) == log.read_text().split("\0")[:-1]
    assert call.doubt is None


# What is called, why its words are not known, and the line where that began.
NOT_KNOWN = {
    "a program's output": ("X=$(make_it)\nlaunch a.b=$X", "`make_it`", 1),
    "not set": ("\nlaunch a.b=$NONE", "$NONE is not set", 2),
    "an array that may have grown": ('A=(a.b=1)\nmake_it && A+=(c.d=2)\nlaunch "${A[@]}"', "`make_it`", 2),
    "a loop that counts": ("for ((i = 0; i < $(count_it); i++)); do\n X=$i\ndone\nlaunch a.b=$X", "`count_it`", 1),
    "sourced": ("X=1\nsource ./none.sh\nlaunch a.b=$X", "sources ./none.sh", 2),
    "indirect": ("launch a.b=${!X}", "${!X} is not supported", 1),
    "braces": ("launch a.b={1,2}", "braces of a.b={1,2}", 1),
    "a number that is counted": ("i=1\n((i++))\nlaunch a.b=$i", "((i++)) is not supported", 2),
    "a long count": (
        "i=0\nwhile [ $i -lt 200 ]; do i=$((i + 1)); done\nlaunch a.b=$i",
        "the end of the loop cannot be determined",
        2,
    ),
}


@pytest.mark.parametrize("name", NOT_KNOWN)
def test_what_is_not_known_is_not_guessed(name: str, tmp_path: Path) -> None:
    source, why, line = NOT_KNOWN[name]
    (call,) = launches(written(tmp_path, source))
    (unknown,) = [word for word in call.words if isinstance(word, Unknown)]
    assert why in unknown.why
    assert unknown.line == line


def test_a_script_calls_another(tmp_path: Path) -> None:
    (tmp_path / "inner.sh").write_text('launch inner "$@" $X\n')
    source = f'cd {tmp_path}\nX=2\nbash inner.sh a "b c"\nbash -c "launch text $X"\n'
    found = [call.words for call in launches(written(tmp_path, source))]
    assert found == [("launch", "inner", "a", "b c", "2"), ("launch", "text", "2")]


def test_nothing_is_run(tmp_path: Path) -> None:
    """This includes programs that look harmless but may write."""
    marks = [tmp_path / name for name in "abcdefg"]
    a, b, c, d, e, f, g = marks
    source = (
        f"touch {a}\nX=$(touch {b})\nY=`touch {c}`\necho x > {d}\nsed -i s/a/b/ {tmp_path}/run.sh\n"
        f"python3 -c \"open('{e}', 'w')\"\nZ=$(python3 - <<'PY'\nimport os\nos.mkdir('{f}')\nPY\n)\n"
        f"date -s 0 > {g}\nlaunch a"
    )
    (call,) = launches(written(tmp_path, source))
    assert call.words == ("launch", "a")
    assert not [mark for mark in marks if mark.exists()]


@pytest.mark.parametrize(
    ("source", "line", "part"),
    [
        ("launch 'a", 1, "' is not closed"),
        ('\nX="a', 2, '" is not closed'),
        ("A=(a\nb", 1, "an array is not closed"),
        ("\n\nif true; then launch a", 3, "expected 'fi'"),
        ("X=$(echo a", 1, "( is not closed"),
        ("cat <<END\na", 1, "the here-document END is not closed"),
    ],
)
def test_what_is_not_read_is_named_with_its_line(source: str, line: int, part: str, tmp_path: Path) -> None:
    script = written(tmp_path, source)
    with pytest.raises(ScriptError) as caught:
        read_script(script, [], ENVIRONMENT)
    assert str(caught.value).startswith(f"{script}, line {line}: ")
    assert part in str(caught.value)


def test_files_that_are_no_scripts(tmp_path: Path) -> None:
    with pytest.raises(ScriptError, match="No such file"):
        read_script(tmp_path / "none.sh", [], {})
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ScriptError, match="not a text"):
        read_script(tmp_path / "binary", [], {})
