"""Parts of an answer by themselves: a diagnosis as text and as JSON, unknown keys, and the reader's smallest steps."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from recipe.offpolicy.correction.problem import Problem
from recipe.offpolicy.doctor.bash.format import format_command
from recipe.offpolicy.doctor.bash.grammar import parse
from recipe.offpolicy.doctor.bash.parameters import Parameter, expand_parameter, parse_parameter
from recipe.offpolicy.doctor.bash.shell_values import ScriptError, ShellState, Unknown
from recipe.offpolicy.doctor.doctor_command import describe_failure
from recipe.offpolicy.doctor.program import Launch
from recipe.offpolicy.doctor.show import show, to_json
from recipe.offpolicy.doctor.unknown_keys import find_unknown_keys
from recipe.offpolicy.doctor.verdicts import Diagnosis, VerdictRow

TOP_P = Problem("rollout.top_p", 0.9, "mu is of another distribution.", overrides=("rollout.top_p=1",))
FOUND = Diagnosis(
    Launch("", ("correction=gsm", "trainer.wandb_token=hunter22"), "run.sh:3"),
    rows=(VerdictRow("masks.gsm", "drops rows", (TOP_P,)), VerdictRow("weight", "truncates")),
    headline="correction: gsm",
)


def test_a_piped_table_has_100_columns_with_nothing_cut() -> None:
    name, file = "masks." + "long_" * 20 + "name", io.StringIO()
    show(Diagnosis(Launch("", ()), rows=(VerdictRow(name, "keeps rows inside [0.99, 1.01] " * 9),)), file)
    table = [line for line in file.getvalue().splitlines() if line[:1] in "┏┃┡│└"]
    assert max(map(len, table)) <= 100
    assert name in "".join(line.split("│")[1].strip() for line in table if line.startswith("│"))


def test_a_diagnosis_as_text() -> None:
    file = io.StringIO()
    show(FOUND, file)
    lines = file.getvalue().splitlines()
    assert lines[0] == "run.sh:3"
    assert lines[1] == "correction: gsm"
    assert "ERROR rollout.top_p=0.9: mu is of another distribution. Set rollout.top_p=1." in lines
    assert "      rollout.top_p=1" in lines


def test_a_diagnosis_as_json() -> None:
    found = to_json(FOUND)
    assert (found["verdict"], found["exit_status"], found["origin"]) == ("ERROR", 2, "run.sh:3")
    assert [row["verdict"] for row in found["corrections"]] == ["ERROR", "OK"]
    assert found["corrections"][0]["problems"][0]["overrides"] == ["rollout.top_p=1"]
    assert "hunter22" not in str(found)


def test_a_failure_of_the_doctor_says_nothing_of_the_launch() -> None:
    assert describe_failure(KeyError("a\n  b")) == (
        r"Internal error in the doctor; your launch was not checked: KeyError: 'a\n b'."
    )


def test_unknown_keys_are_named_with_the_nearest() -> None:
    config = OmegaConf.create({"trainer": {"total_epochs": 1, "n_gpus_per_node": 8}, "data": {"seed": None}})
    asked: list[list[str]] = []

    def compose(overrides: list[str]) -> DictConfig:
        asked.append(overrides)
        return config

    overrides = ["trainer.total_epoch=3", "data.seed=1", "+data.new=2"]
    (problem,) = find_unknown_keys(compose, overrides, "verl 0.9.1")
    assert problem.cause.startswith("trainer.total_epoch=3: verl 0.9.1 has no such key")
    assert "trainer.total_epochs" in problem.advice
    assert asked == [["++data.new=2"]], "what is added is composed, whether it is there or not"


@pytest.mark.parametrize("key", ["correction.masks.tight", "correction.weights.two", "offpolicy.extensions.mine"])
def test_a_name_of_the_users_own_is_added_with_a_plus(key: str) -> None:
    config = OmegaConf.create({"correction": {"masks": {"gsm": {}}, "weights": {}}, "offpolicy": {"extensions": {}}})
    (problem,) = find_unknown_keys(lambda overrides: config, [f"{key}={{level: token}}"], "verl 0.9.1")
    assert problem.fix == f"Write '+{key}={{level: token}}', which adds it."


@pytest.mark.parametrize(
    ("source", "said"),
    [("[[ -n $NODES ]]", "[[ -n $NODES ]]"), ("grep -q x file", "grep -q x file"), ("A=1 " + "x" * 99, None)],
)
def test_a_condition_in_one_line(source: str, said: str | None) -> None:
    (command,) = parse(source)
    found = format_command(command)
    assert found == said if said else found.endswith("...") and len(found) < len(source)


@pytest.mark.parametrize(
    ("written", "parameter"),
    [
        ("NODES", Parameter("NODES")),
        ("NODES:-8", Parameter("NODES", operator=":-", word="8")),
        ("A[@]", Parameter("A", index="@")),
        ("#A[@]", Parameter("A", index="@", length=True)),
        ("P%%/*", Parameter("P", operator="%%", word="/*")),
        ("#", Parameter("#")),
    ],
)
def test_parameters_are_parsed(written: str, parameter: Parameter) -> None:
    assert parse_parameter(written, 1) == parameter


def test_a_form_that_is_not_read_names_its_line() -> None:
    with pytest.raises(ScriptError, match=r"line 7: \$\{NODES@Q\} is not supported"):
        parse_parameter("NODES@Q", 7)


@pytest.mark.parametrize(
    ("written", "values"),
    [
        ("NODES", ["4"]),
        ("NODES:-8", ["4"]),
        ("GPUS:-8", ["8"]),
        ("A[@]", ["x", "y"]),
        ("#A[@]", ["2"]),
        ("P%/*", ["/data"]),
        ("GPUS", [Unknown("$GPUS is not set", 1, unset="GPUS")]),
    ],
)
def test_parameters_are_expanded(written: str, values: list[object]) -> None:
    variables = {"NODES": "4", "A": ["x", "y"], "P": "/data/train"}
    state = ShellState(variables, [], Path("/"), Path("/run.sh"))  # type: ignore[arg-type]
    assert expand_parameter(parse_parameter(written, 1), state, 1, lambda word: word) == values
