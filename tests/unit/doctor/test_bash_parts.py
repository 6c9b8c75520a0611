"""Parts of the Bash reader by themselves; expected values are bash's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipe.offpolicy.doctor.bash.arithmetic import evaluate
from recipe.offpolicy.doctor.bash.format import note_condition
from recipe.offpolicy.doctor.bash.grammar import is_assignment
from recipe.offpolicy.doctor.bash.programs import (
    find_inner_script,
    find_python_code,
    is_importable,
    is_read_only,
    list_imports,
    shorten,
)
from recipe.offpolicy.doctor.bash.shell_values import ScriptEnd, Unknown
from recipe.offpolicy.doctor.bash.words import concatenate
from recipe.offpolicy.doctor.unknown_words import describe_overrides, describe_unknowns

NODES = Unknown("$NODES is not set", 3, prefix="trainer.nnodes=", unset="NODES")


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("", 0),
        ("GPUS * 2 + absent", 16),
        ("$GPUS / -3", -2),
        ("-7 % 3", -1),
        ("1 << 3 | 1", 9),
        ("2 ** 10", 1024),
        ("GPUS > 7 && !0", 1),
        ("9223372036854775807 + 1", -9223372036854775808),
    ],
)
def test_arithmetic(expression: str, value: int) -> None:
    assert evaluate(expression, {"GPUS": "8"}) == value


@pytest.mark.parametrize("expression", ["1 / 0", "1.5 + 1", "f(1)", "2 ** 63", "1 +", "x = 1"])
def test_what_is_no_arithmetic(expression: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        evaluate(expression, {})


@pytest.mark.parametrize(
    ("text", "assigns"),
    [("A=1", True), ("A+=1", True), ("A[0]=1", True), ("A=", True), ("A", False), ("a.b=1", False), ("=1", False)],
)
def test_words_that_assign(text: str, assigns: bool) -> None:
    assert is_assignment(text) is assigns


@pytest.mark.parametrize(
    ("words", "reads"),
    [
        (["cat", "x"], True),
        (["tail", "-n", "1"], True),
        (["tail", "-f", "x"], False),
        (["date", "+%F"], True),
        (["date", "-s", "now"], False),
        (["hostname"], True),
        (["hostname", "other"], False),
        (["rm", "x"], False),
    ],
)
def test_programs_that_only_read(words: list[str], reads: bool) -> None:
    assert is_read_only(words) is reads


def test_what_python_is_asked_to_run() -> None:
    assert find_python_code(["python3", "-c", "print(1)"], "") == "print(1)"
    assert find_python_code(["python", "-"], "print(2)") == "print(2)"
    assert find_python_code(["python", "train.py"], "") is None
    assert find_python_code(["ruby", "-c", "x"], "") is None


def test_imports_of_code_that_does_nothing_else() -> None:
    assert list_imports("import verl, vllm\nimport torch") == ["verl", "vllm", "torch"]
    assert list_imports("import verl; print(1)") == []
    assert list_imports("import (") == []
    assert is_importable("json.decoder")
    assert not is_importable("no_such_module_at_all")


def test_what_an_inner_shell_runs() -> None:
    assert find_inner_script(["env", "bash", "-e", "run.sh", "a"]) == ["run.sh", "a"]
    assert find_inner_script(["/bin/sh", "-ec", "echo x"]) == ["-c", "echo x"]
    assert find_inner_script(["bash"]) is None
    assert find_inner_script(["python", "bash.py"]) is None


def test_a_command_in_one_line() -> None:
    assert shorten(["python", NODES, "a\nb"]) == "python ... a"
    assert shorten(["x" * 61]) == "x" * 57 + "..."


def test_a_value_of_known_parts_and_of_an_unknown_one() -> None:
    assert concatenate(iter(["a", "", "b"])) == "ab"
    assert concatenate(iter(["a", NODES, "b"])) is NODES


def test_the_innermost_condition_of_an_end_is_noted() -> None:
    with pytest.raises(ScriptEnd) as caught, note_condition("[[ outer ]]"), note_condition("[[ inner ]]"):
        raise ScriptEnd("exit 1", 4)
    assert caught.value.because == "[[ inner ]]"


def test_unknown_overrides_are_named_with_one_fix_a_cause() -> None:
    said = describe_overrides([NODES], Path("run.sh"))
    assert said == (
        "an override is unknown (trainer.nnodes): $NODES is not set (line 3). "
        "Fix: export NODES=VALUE (bash takes it as empty)."
    )
    drawn = Unknown("the output of shuf", 5, prefix="data.seed=")
    assert describe_unknowns([drawn, drawn], Path("run.sh")) == (
        "the output of shuf (line 5). Fix: to check the launch with values of your own, add data.seed=VALUE after "
        "--script run.sh."
    )
