"""Find the launch in a script: which of several, by which program, with values that replace unknown ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipe.offpolicy.doctor.bash.shell_values import ScriptError
from recipe.offpolicy.doctor.launch import parse_flags
from recipe.offpolicy.doctor.program import HydraMain, LaunchError, read_hydra_main
from recipe.offpolicy.doctor.scripts import find_launches

LAUNCH = "python3 -m verl.trainer.main_ppo a.b=1"


def test_one_of_several_launches(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"{LAUNCH}\n\n{LAUNCH} c.d=2\n")
    assert find_launches(script, [], line=3)[0].arguments == ("a.b=1", "c.d=2")
    with pytest.raises(ScriptError, match="no launch at line 2"):
        find_launches(script, [], line=2)


COUNTED = "trainer.n_gpus_per_node=$(nvidia-smi -L | wc -l)"


@pytest.mark.parametrize(
    ("words", "given", "arguments"),
    [
        # The value given stands for the one that is not known; "$@" hands it on as well.
        (f'{COUNTED} "$@"', ["trainer.n_gpus_per_node=8"], ["trainer.n_gpus_per_node=8"] * 2),
        (COUNTED, ["trainer.n_gpus_per_node=8"], ["trainer.n_gpus_per_node=8"]),
        # A key of the user's own stays one; of two later values the last counts, with or without a plus.
        ("+my.key=$(make_it) my.key=2 my.key=3", [], ["+my.key=3", "my.key=2", "my.key=3"]),
    ],
)
def test_a_value_that_is_not_known_is_replaced_by_a_later_one(
    words: str, given: list[str], arguments: list[str], tmp_path: Path
) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"{LAUNCH} {words}\n")
    assert list(find_launches(script, given)[0].arguments) == ["a.b=1", *arguments]


@pytest.mark.parametrize(
    "call",
    [
        "PYTHONUNBUFFERED=1 nohup python3 -u -m {} a.b=1 2>&1 | tee log",
        "ray job submit --no-wait -- python3 -m {} a.b=1",
        "python -W ignore -X dev -m {} a.b=1 &",
        "torchrun --nnodes 1 --nproc_per_node=8 -m {} a.b=1",
        "python3 -m torch.distributed.run --nnodes 1 -m {} a.b=1",
        "uv run --project ~/verl --extra $NOT_SET_HERE -m {} a.b=1",
        "uv run torchrun --nproc_per_node=8 -m {} a.b=1",
        "srun --nodes=2 bash -c 'python3 -m {} a.b=1'",
    ],
)
def test_ways_to_launch(call: str, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(call.format("verl.trainer.main_ppo") + "\n")
    [launch] = find_launches(script, [])
    assert (launch.module, launch.arguments) == ("verl.trainer.main_ppo", ("a.b=1",))


@pytest.mark.parametrize(
    ("imported", "called"),
    [
        ("import hydra", 'hydra.main("conf", "own", None)'),
        ("from hydra import main", 'main(config_path="conf", config_name="own")'),
        ("from hydra import main as cli", 'cli("conf", config_name="own")'),
    ],
)
def test_the_decorator_of_an_own_main(imported: str, called: str, tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(f"{imported}\n\n\n@{called}\ndef run(config):\n    pass\n")
    assert read_hydra_main(path) == HydraMain(path, "conf", "own")


def test_a_computed_config_path_is_replaced_by_a_flag(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text('import hydra\n\n\n@hydra.main(str(FOLDER / "conf"), "own")\ndef run(config):\n    pass\n')
    found = read_hydra_main(path)
    assert found == HydraMain(path, None, "own", ("config_path",))
    with pytest.raises(LaunchError, match=r"computes config_path, .*\. Fix: append --config-path VALUE to the launch"):
        found.demand(parse_flags(["a.b=1"]))
    found.demand(parse_flags(["--config-path", "/conf", "a.b=1"]))
