"""The command: the very configuration of a launch, its exit status, and what it prints, for people and programs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from tests.support.applications import CONFIGS, NEEDED
from tests.support.doctor_answer import Ask
from tests.support.examples import each_nth_by_default
from tests.support.paths import ROOT

pytest.importorskip("verl")

pytestmark = pytest.mark.slow

ROLLOUT = "actor_rollout_ref.rollout"
ACTOR = "actor_rollout_ref.actor"
VERL = "algorithm.rollout_correction"
GSM_UPPER = "correction.masks.gsm.upper"
PLAIN = ("--module", "verl.trainer.main_ppo")
GIVEN = (f"{ROLLOUT}.name=vllm", *NEEDED)
RUN = ROOT / "recipe" / "offpolicy"


def test_the_example_of_its_page_is_what_it_prints(ask: Ask) -> None:
    """Lines that end in ... are the beginnings of longer ones."""
    page = (ROOT / "docs" / "liveness.md").read_text(encoding="utf-8")
    block = page.partition("    $ python -m recipe.offpolicy.doctor ")[2].partition("\n\n")[0]
    command, *shown = block.splitlines()
    one_mini_batch = ("data.train_batch_size=64", f"{ACTOR}.ppo_mini_batch_size=64", "algorithm.adv_estimator=grpo")
    printed = ask(*command.removesuffix(" ...").split(), *one_mini_batch, *GIVEN).printed.splitlines()
    assert len(shown) == 6
    for line in shown:
        wanted = line.removeprefix("    ")
        assert any(
            found.startswith(wanted[:-4]) if wanted.endswith(" ...") else found == wanted for found in printed
        ), wanted


def test_json_is_one_object_and_nothing_else(ask: Ask) -> None:
    answer = ask("--json", "correction=gsm", f"{ROLLOUT}.calculate_log_probs=false", *GIVEN)
    assert answer.status == 2
    found = answer.json
    assert (found["schema"], found["verdict"], found["exit_status"], found["error"]) == (2, "ERROR", 2, None)
    assert found["path"]["worker"] in ("engine", "legacy")
    (row,) = found["corrections"]
    assert (row["name"], row["verdict"]) == ("masks.gsm", "ERROR")
    (problem,) = row["problems"]
    assert (problem["key"], problem["value"]) == (f"{ROLLOUT}.calculate_log_probs", False)
    assert problem["overrides"] == [f"{ROLLOUT}.calculate_log_probs=true"]


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_no_secret_of_the_launch_is_repeated(ask: Ask, form: tuple[str, ...]) -> None:
    """Neither of its arguments nor of an error that quotes one."""
    secrets = ("++trainer.wandb_token=hunter22", "++trainer.proxy=https://user:hunter22@host")
    assert "hunter22" not in ask(*form, "correction=gsm", *secrets, *GIVEN).printed
    broken = ask(*form, "correction=gsm", "trainer.github_token=hunter22", *GIVEN)
    assert "github_token" in broken.printed
    assert "hunter22" not in broken.printed


# The program as `python -m` runs it; where it ends it tells whether Ray was started, and what was imported.
WATCHED = """
import os, runpy, sys
ended = os._exit
def tell(status):
    ray = sys.modules.get("ray")
    sys.stderr.write(f"Ray started: {ray is not None and ray.is_initialized()}\\n")
    sys.stderr.write(f"imported: {' '.join(sys.modules)}\\n")
    sys.stderr.flush()
    ended(status)
os._exit = tell
runpy.run_module("recipe.offpolicy.doctor", run_name="__main__", alter_sys=True)
"""
HEAVY = {"vllm", "megatron", "mbridge", "flash_attn", "matplotlib", "torch._inductor.compile_fx"}
"""What takes seconds to import and is not needed for an answer."""


def program(cwd: Path, *arguments: str, path: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": f"{path}{os.pathsep}{RUN.parents[1]}", "RAY_TMPDIR": str(cwd)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_as_a_program(tmp_path: Path) -> None:
    """Whatever verl and its imports print, the standard output is the answer; nothing is started or left behind."""
    # All that the doctor ever imports is needed for it: the base loss is tried, and verl validates.
    done = program(tmp_path, "-c", WATCHED, "--json", "correction=gsm", *GIVEN, f"{ROLLOUT}.calculate_log_probs=false")
    assert done.returncode == 2, done.stderr[:2000] + done.stdout
    assert json.loads(done.stdout)["verdict"] == "ERROR"
    assert "Ray started: False" in done.stderr
    # The answer takes as long as its imports, on any machine.
    (imported,) = (line.split()[1:] for line in done.stderr.splitlines() if line.startswith("imported: "))
    assert HEAVY.isdisjoint(imported)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("launch", "given", "said"),
    [
        ("verl.trainer.main_ppo a.b=$1", ("8", "9"), "9 does not reach the launch"),
        ("recipe.dapo.main_dapo a.b=1", (), "was not found. It belongs to verl-recipe"),
        ("recipe.dapo.main_dapo a.b=1", ("c.d=2",), "does not pass on c.d=2"),
        (
            "recipe.one_step_off_policy.main_ppo a.b=1",
            (),
            "has moved this program: launch verl.experimental.one_step_off_policy.main_ppo.",
        ),
        ("verl.trainer.main_sft a.b=1", (), "was not found. Correct its name"),
    ],
)
@pytest.mark.verl(">=0.8")
def test_the_text_of_a_script_is_judged_before_torch_is_imported(
    launch: str, given: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"python3 -m {launch}\n")
    done = program(tmp_path, "-c", WATCHED, "--script", str(script), *given)
    assert done.returncode == 2
    assert said in done.stdout
    (imported,) = (line.split()[1:] for line in done.stderr.splitlines() if line.startswith("imported: "))
    assert {"torch", "verl", "hydra"}.isdisjoint(imported)


def test_a_doctor_that_cannot_be_imported_does_not_say_inert(tmp_path: Path) -> None:
    (tmp_path / "omegaconf.py").write_text("raise RuntimeError('half installed')")
    done = program(tmp_path, "-m", "recipe.offpolicy.doctor", "correction=gsm", path=str(tmp_path))
    assert done.returncode == 2
    said = "Internal error in the doctor; your launch was not checked: RuntimeError: half installed."
    assert done.stdout.splitlines()[-1] == said


def test_a_doctor_that_fails_does_not_say_inert(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise KeyError("first\nsecond")

    monkeypatch.setattr("recipe.offpolicy.doctor.diagnosis.compose", fail)
    answer = ask("correction=gsm", *GIVEN)
    assert answer.status == 2
    assert "Internal error in the doctor; your launch was not checked: KeyError" in answer.printed
    answer = ask("--json", "correction=gsm", *GIVEN)
    assert (answer.json["exit_status"], answer.json["verdict"]) == (2, "ERROR")
    assert "KeyError" in answer.json["error"]


@pytest.mark.parametrize(
    ("key", "program"),
    each_nth_by_default(3, product([ACTOR, f"{ACTOR}.policy_loss", ROLLOUT, "trainer", "ray_kwargs"], [(), PLAIN])),
)
def test_a_section_that_is_null_is_named(key: str, program: tuple[str, ...], ask: Ask) -> None:
    answer = ask(*program, "--json", f"{key}=null")
    assert answer.status == 2
    assert answer.verdicts() == {key: "ERROR"}
    assert f"ERROR {key}=null: this section" in ask(*program, f"{key}=null").printed


# What verl or our launch refuses before Ray starts, and the key that is named.
SIZES = ("trainer.n_gpus_per_node=7", "data.train_batch_size=1000", f"{ACTOR}.ppo_mini_batch_size=994")
REFUSED_BY_VERL = {
    "rows that cannot be dealt": (SIZES, "data.train_batch_size"),
    "a mini-batch above the batch": ((f"{ACTOR}.ppo_mini_batch_size=2048",), f"{ACTOR}.ppo_mini_batch_size"),
    "no micro-batch": (
        (f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=null",),
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu",
    ),
    "two micro-batches": ((f"{ROLLOUT}.log_prob_micro_batch_size=8",), f"{ROLLOUT}.log_prob_micro_batch_size"),
}


@pytest.mark.parametrize(
    ("name", "program"),
    each_nth_by_default(3, product(REFUSED_BY_VERL, [("correction=gsm",), (*PLAIN, f"{VERL}.rollout_rs=null")])),
)
def test_what_verl_itself_refuses_is_wrong(name: str, program: tuple[str, ...], ask: Ask) -> None:
    changes, key = REFUSED_BY_VERL[name]
    answer = ask(*program, "--json", *GIVEN, *changes)
    assert answer.status == 2
    assert [problem["key"] for row in answer.json["corrections"] for problem in row["problems"]] == [key]
    assert ask(*program, *GIVEN, *changes, *answer.overrides()).status == 0


def test_a_variable_of_workers_that_contradicts_is_wrong(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFPOLICY_X", "1")
    key = "ray_kwargs.ray_init.runtime_env.env_vars.OFFPOLICY_X"
    answer = ask("--json", "correction=gsm", f"++{key}=2", *GIVEN)
    assert answer.status == 2
    assert answer.overrides() == [], "each of the two was asked for"
    assert ask("correction=gsm", f"++{key}=1", *GIVEN).status == 0


# What cannot be composed or is malformed: status 2, and a part of the message.
REFUSED = {
    "an option that is not there": (["correction=gmask"], "gmask"),
    "a key of verl's that is not there": (["trainer.no_such=1", "correction=gsm"], "no_such"),
    "no correction named": (["correction=null"], "Set correction=none"),
    "two at once": (["correction=gsm", "correction=tis_token"], "given 2 times"),
    "a malformed bound": (["correction=gsm", "correction.masks.gsm.lower=2"], "nothing lies between. Swap the bounds."),
    "a delta left open": (["correction=opsm"], "correction.masks.opsm.delta=???: required"),
    "options that set one key": (["correction=[tis_token,tis_sequence]"], "both set correction.weight"),
    "an override that Hydra cannot read": (
        ["correction=gsm", "trainer.name=a=b"],
        "trainer.name=a=b: Hydra cannot read",
    ),
    "several runs": (["-m", "trainer.nnodes=1,2"], "only a single run"),
    "no such folder": (["--config-dir=/none/such"], "there is no such folder"),
    "no such program": (["--module", "no.such.program", "a.b=1"], "this program was not found"),
    "a program without Hydra": (["--module", "verl.protocol", "a.b=1"], "has no @hydra.main"),
    "nothing is left": (["correction=gsm", "~correction.masks.gsm", *GIVEN], "overrides have removed all of its parts"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_compose_is_wrong(name: str, ask: Ask) -> None:
    arguments, part = REFUSED[name]
    answer = ask(*arguments)
    assert answer.status == 2
    assert "ERROR" in answer.printed
    assert part in answer.printed
    assert ask("--json", *arguments).json["exit_status"] == 2


def test_another_primary_configuration(ask: Ask, tmp_path: Path) -> None:
    """Its own values count, as in a launch, by each of Hydra's ways to name it."""
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "run.yaml").write_text(
        "hydra: {searchpath: ['pkg://verl.trainer.config']}\n"
        "defaults: [ppo_trainer, offpolicy_base, _self_, {correction: gsm}]\n"
        "actor_rollout_ref:\n"
        "  rollout: {name: vllm, top_p: 0.5, log_prob_micro_batch_size_per_gpu: 1}\n"
        "  actor: {ppo_micro_batch_size_per_gpu: 1}\n"
    )
    by_folder = ask("--json", "--config-dir", str(mine), "--config-name=run")
    assert by_folder.status == 2
    assert by_folder.verdicts() == {"masks.gsm": "ERROR"}
    for path in CONFIGS.iterdir():
        if path.is_dir() or path.name == "offpolicy_base.yaml":
            (mine / path.name).symlink_to(path)
    assert ask("--json", "--config-path", str(mine), "-cn", "run", f"{ROLLOUT}.top_p=1").status == 0


@pytest.mark.verl("<0.9")
def test_without_plugins_the_variable_that_brings_the_hooks_is_named(ask: Ask) -> None:
    answer = ask(*PLAIN, "+correction@correction=tis_token", *GIVEN)
    assert (
        "The launch sets VERL_USE_EXTERNAL_MODULES=recipe.offpolicy.trainer.hooked for all workers." in answer.printed
    )


def test_a_value_of_the_primary_configuration_that_the_option_replaces(ask: Ask, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        "hydra: {searchpath: ['pkg://verl.trainer.config']}\n"
        "defaults: [ppo_trainer, _self_]\n"
        "actor_rollout_ref:\n"
        "  rollout: {name: vllm, log_prob_micro_batch_size_per_gpu: 1}\n"
        "  actor: {ppo_micro_batch_size_per_gpu: 1}\n"
        "correction: {masks: {gsm: {upper: 1.05, lower: 0.99}}}\n"
    )
    launch = (*PLAIN, "--json", f"--config-dir={tmp_path}", "--config-name=run", "+correction@correction=gsm")
    answer = ask(*launch)
    assert answer.status == 2
    told = [(each["key"], each["overrides"]) for row in answer.json["corrections"] for each in row["problems"]]
    assert told == [("correction.masks.gsm.upper", ["correction.masks.gsm.upper=1.05"])]
    assert ask(*launch, "correction.masks.gsm.upper=1.05").status == 0


def test_auto_says_what_it_chose(ask: Ask) -> None:
    answer = ask("correction=auto", "setup.model=dense", *GIVEN)
    assert answer.status == 0
    assert "correction=auto selects correction=[tis_token]" in answer.printed


def test_shadows_are_parts_too(ask: Ask) -> None:
    answer = ask("--json", "offpolicy.shadow=[gsm]", f"{ROLLOUT}.calculate_log_probs=false", *GIVEN)
    assert answer.verdicts() == {"shadow.gsm": "ERROR"}


def test_verls_own_program_has_verls_own_defaults(ask: Ask) -> None:
    """Up to 0.8 its rollouts give no log-probs unless they are asked for."""
    from importlib.metadata import version

    from packaging.version import Version

    answer = ask(*PLAIN, "--json", f"{VERL}.rollout_is=token", *GIVEN)
    assert answer.verdicts() == {
        "rollout_correction.rollout_is": "OK" if Version(version("verl")) >= Version("0.9") else "NO-OP"
    }
    mended = ask(*PLAIN, "--json", f"{VERL}.rollout_is=token", *GIVEN, *answer.overrides())
    assert mended.status == 0


def test_a_pair_that_became_a_number(ask: Ask) -> None:
    pair = (f"{VERL}.rollout_rs=token_k1", f"{VERL}.rollout_rs_threshold=0.5_2", f"{ROLLOUT}.calculate_log_probs=true")
    answer = ask(*PLAIN, "--json", *pair, *GIVEN)
    assert answer.status == 2
    assert answer.overrides() == [f'{VERL}.rollout_rs_threshold="0.5_2"']
    assert ask(*PLAIN, *pair, *GIVEN, *answer.overrides()).status == 0


def test_a_pair_that_crosses_the_bounds_is_shown_and_not_the_crossing(ask: Ask) -> None:
    pair = "correction.masks.gsm.upper=0.5_2"
    answer = ask("--json", "correction=gsm", pair, *GIVEN)
    assert answer.status == 2
    assert answer.verdicts() == {"masks.gsm": "ERROR"}
    assert answer.overrides() == ["correction.masks.gsm.lower=0.5", "correction.masks.gsm.upper=2"]
    assert ask("correction=gsm", pair, *GIVEN, *answer.overrides()).status == 0


def test_a_pair_is_not_also_a_bound_that_is_never_reached(ask: Ask) -> None:
    """101 lies beyond anything seen, and no one has asked for it; 02 is no bound."""
    answer = ask("--json", "correction=gsm", f"{GSM_UPPER}=1_02", *GIVEN)
    assert answer.overrides() == [f"{GSM_UPPER}=1.02"]
    (problem,) = answer.json["corrections"][0]["problems"]
    assert problem["fix"] == f"Set {GSM_UPPER}=1.02."


def test_one_line_mends_all_or_does_not_say_so(ask: Ask) -> None:
    wrong = ("correction=gsm", f"{GSM_UPPER}=1_02", f"{ROLLOUT}.calculate_log_probs=false", *GIVEN)
    assert "All fixes in one line: " in ask(*wrong).printed
    unmended = ask(*wrong, "+trainer.mask=gsm").printed
    assert "Fixes that can be pasted in one line: " in unmended
    assert "All fixes" not in unmended


def test_a_pair_hides_no_other_malformed_key(ask: Ask) -> None:
    answer = ask("--json", "correction=[tis_token,gsm]", "correction.weight.upper=-2", f"{GSM_UPPER}=1_5", *GIVEN)
    assert answer.verdicts() == {"masks.gsm": "ERROR", "correction.weight.upper": "ERROR"}
    assert "correction.weight.upper=2.0" in answer.overrides()


@pytest.mark.verl(">=0.9")
def test_a_shadow_that_cannot_be_reported_is_taken_out(
    ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As of a release whose servers do not say by which version they sampled.
    monkeypatch.setattr("recipe.offpolicy.preflight.composed.Composed.unknown_age", "not noted.")
    options = tmp_path / "mine" / "correction"
    options.mkdir(parents=True)
    source = (CONFIGS / "correction" / "gsm.yaml").read_text().replace("level: sequence", "level: version")
    for name in ("by_version", "by_version_too"):
        (options / f"{name}.yaml").write_text(source)
    given = ("--config-dir", str(options.parent), "correction=gsm", "trainer.v1.trainer_mode=colocate_async", *GIVEN)
    for names, left in (("by_version", "[]"), ("by_version,tis_token,by_version_too", "[tis_token]")):
        answer = ask("--json", *given, f"offpolicy.shadow=[{names}]")
        assert answer.status == 2
        assert set(answer.overrides()) == {f"offpolicy.shadow={left}"}
        assert ask(*given, f"offpolicy.shadow=[{names}]", *answer.overrides()[:1]).status == 0


@pytest.mark.verl(">=0.9")
def test_verls_own_program_for_megatron(ask: Ask) -> None:
    answer = ask(*PLAIN, "--json", "--config-path=config", "--config-name=ppo_megatron_trainer.yaml", *GIVEN)
    assert answer.status == 0
    assert answer.json["path"]["strategy"] == "megatron"


@pytest.mark.verl(">=0.9")
def test_another_engine_is_refused_and_kept(ask: Ask) -> None:
    for given in ("model_engine=veomni", f"{ACTOR}.strategy=torchtitan"):
        answer = ask("--json", "correction=gsm", given, *GIVEN)
        assert answer.status == 2
        assert not answer.overrides(), "another engine would be another run"
    assert ask(*PLAIN, f"{VERL}.rollout_is=token", "model_engine=veomni", *GIVEN).status == 0
