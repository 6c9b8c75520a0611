"""One small script for each kind of launch that users of verl have, followed by our override, and its verdict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.doctor_answer import Answer, Ask
from tests.support.examples import each_nth_by_default
from tests.support.paths import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.verl("==0.9.1")]

SCRIPTS = ROOT / "tests" / "data" / "launch_kinds"
OVERRIDE = "+correction@correction=[tis_token,gsm]"
MODEL = "actor_rollout_ref"
MU = f"{MODEL}.rollout.name"


@dataclass(frozen=True)
class Kind:
    """The doctor's answer to a script.

    Attributes:
        said: a part of it that matters.
        status: exit status; 0 starts corrected.
        mode: verl's, of a launch that composes.
        fixes: overrides behind the script with which it starts, the same program and algorithm.
    """

    said: str
    status: int = 0
    mode: str | None = "sync"
    fixes: tuple[str, ...] = ()


KINDS = {
    "main_ppo": Kind("verl.trainer.main_ppo, verl 0.9.1, V1 trainer, engine worker on fsdp"),
    "critic": Kind("V1 trainer"),
    "arrays": Kind("engine worker on fsdp2"),
    "loop": Kind("launch 2 of 2"),
    "uv_run": Kind("verl.trainer.main_ppo"),
    "ray_job_submit": Kind("verl.trainer.main_ppo"),
    "torchrun": Kind("verl.trainer.main_ppo"),
    "srun": Kind("verl.trainer.main_ppo"),
    "npu": Kind("trainer.device=npu"),
    "vlm": Kind("models with images"),
    "dapo": Kind("OK"),
    "gspo": Kind("OK"),
    "lora": Kind("OK: every check passes"),
    "megatron_engine": Kind("engine worker on megatron"),
    "ppo_megatron_trainer": Kind("engine worker on megatron"),
    "own_yaml": Kind(f"{MU}=sglang"),
    "own_main": Kind("module=own_recipe.main_own: supported only if its trainer derives"),
    "fully_async": Kind("fully_async_main, verl 0.9.1, V0 trainer", mode="fully_async"),
    "one_step_off": Kind("one_step_off_policy.main_ppo, verl 0.9.1, V0 trainer", mode="one_step_off"),
    "sglang": Kind(f"{MU}=sglang"),
    "trtllm": Kind(f"{MU}=trtllm"),
    # After a change that keeps what the run is for.
    "no_log_probs": Kind("there is no mu to correct with", 2, fixes=(f"{MODEL}.rollout.calculate_log_probs=true",)),
    "dr_grpo": Kind(
        "Set actor_rollout_ref.actor.loss_scale_factor", 2, fixes=(f"{MODEL}.actor.loss_scale_factor=512",)
    ),
    "sapo": Kind(
        "PolicyLossConfig does not accept tau_pos, tau_neg",
        2,
        fixes=(
            f"~{MODEL}.actor.policy_loss.tau_pos",
            f"{MODEL}.actor.tau_pos=1.0",
            f"~{MODEL}.actor.policy_loss.tau_neg",
            f"{MODEL}.actor.tau_neg=1.05",
        ),
    ),
    "separate_async_lora": Kind(
        "rollouts would never use an update",
        2,
        "separate_async",
        (f"{MODEL}.rollout.checkpoint_engine.backend=nccl", f"{MODEL}.model.lora.merge=true"),
    ),
    "fully_async_lora": Kind(
        "rollouts would never use an update", 2, "fully_async", (f"{MODEL}.model.lora.merge=true",)
    ),
    "verls_correction": Kind(
        "correction.weight does this already", 2, fixes=("algorithm.rollout_correction.rollout_is=null",)
    ),
    "fully_async_own_correction": Kind(
        "correction.weight does this already",
        2,
        "fully_async",
        ("algorithm.rollout_correction.rollout_is=null",),
    ),
    # The user has to choose, or to change the script.
    "verls_correction_others": Kind("to train with ours only, or correction=none to train with verl's only", 2),
    "megatron_dead_key": Kind("grad_offload=True: verl 0.9.1 has no such key: verl 0.9.0 was the last", 2, None),
    "added_twice": Kind(f"Write {MODEL}.model.lora.merge=True", 2, None),
    "no_arguments": Kind('End the launch with "$@"', 2),
    "unset_variable": Kind("export CHECKPOINTS", 2, None),
    "legacy_keys": Kind("Write critic.fsdp.param_offload=False", 2, None),
    # Refused, as no change would keep what the run is for.
    "veomni": Kind("No override corrects veomni", 2),
    "torchtitan": Kind("No override corrects torchtitan", 2),
    "mindspeed": Kind("Install the package that provides mindspeed", 2, None),
    "old_fork": Kind("actor.state_masking=true: verl 0.9.1 has no such key", 2, None),
    "distillation": Kind("verl's worker accepts one loss", 2),
    "gmpo": Kind("No override corrects geo_mean", 2),
    "hf_rollout": Kind(f"{MU}=hf: not a verl engine that returns the log-probs", 2),
    "own_engine": Kind("Install the package that provides mlite_actor", 2, None),
    "generation": Kind("it trains nothing", 2, None),
    "sft": Kind("does not train with verl's PPO", 2, None),
}
PURPOSE = (
    *("adv_estimator", "distillation", "filter_groups", "loss_mode", "model_engine", "multi_turn", "rollout.name"),
    *("overlong_buffer", "strategy", "trainer_mode", "use_v1", "async_training", "reward"),
)
"""Parts of keys that determine the purpose of a run."""


@pytest.fixture
def asked(ask_launch: Ask) -> Any:
    def ask_of(name: str, *overrides: str, json: bool = True) -> Answer:
        return ask_launch(name, *["--json"] * json, OVERRIDE, *overrides)

    return ask_of


def test_every_script_is_in_the_table() -> None:
    assert {path.stem for path in SCRIPTS.glob("*.sh")} == set(KINDS)


@pytest.mark.parametrize("name", each_nth_by_default(2, KINDS))
def test_a_kind_of_launch_and_its_verdict(name: str, asked: Any) -> None:
    kind = KINDS[name]
    answer = asked(name, json=False)
    assert answer.status == kind.status, answer.printed
    assert kind.said in answer.printed
    assert f"mode {kind.mode}\n" in answer.printed if kind.mode else "mode " not in answer.printed
    assert "leave it out" not in answer.printed.lower()
    if kind.status == 0:
        assert "weight (token, truncate <= 2 on pi_old / mu), masks.gsm" in answer.printed


@pytest.mark.parametrize("name", each_nth_by_default(5, [name for name, kind in KINDS.items() if kind.mode]))
def test_no_advice_gives_up_what_a_run_is_for(name: str, asked: Any) -> None:
    """The advice that can be pasted deletes nothing that is not set elsewhere, and is complete."""
    pasted = asked(name).overrides()
    assert tuple(dict.fromkeys(pasted)) == KINDS[name].fixes
    values = {each.rpartition("=")[0].rpartition(".")[2] for each in pasted if not each.startswith("~")}
    assert all(each.rpartition(".")[2] in values for each in pasted if each.startswith("~"))
    assert not [each for each in pasted for part in PURPOSE if f".{part}" in f".{each}"]
    if pasted:
        fixed = asked(name, *dict.fromkeys(pasted))
        assert (fixed.status, fixed.json["path"]["mode"]) == (0, KINDS[name].mode), fixed.printed
