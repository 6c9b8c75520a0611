"""Parts of the Bash reader by themselves; expected values are bash's own."""

from __future__ import annotations

import pytest

from recipe.offpolicy.doctor.bash.conditions import evaluate
from recipe.offpolicy.doctor.bash.programs import (
    find_inner_script,
    is_importable,
    is_read_only,
    list_imports,
)


@pytest.mark.parametrize("expression", ["1 / 0", "1.5 + 1", "f(1)", "2 ** 63", "1 +", "x = 1"])
def test_what_is_no_arithmetic(expression: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        evaluate(expression, {})


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
