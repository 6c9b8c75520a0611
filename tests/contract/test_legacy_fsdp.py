"""The patch of verl 0.7.1's legacy FSDP actor fits the installed release, and names any target that has changed."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support import legacy_actor as la
from tests.support.fresh_python import CPU, ok, python

pytestmark = pytest.mark.verl("==0.7.1")


@pytest.fixture
def patch() -> Any:
    from verl_patches.legacy import fsdp_actor

    return fsdp_actor.PATCH


def test_targets_are_where_they_were_before_and_after_installation(patch: Any) -> None:
    for _ in range(2):
        for contract, _ in patch.wrappers:
            contract.check()
        patch.install()
    assert len(patch.wrappers) == 7


def test_nothing_is_wrapped_where_a_target_has_moved(patch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from verl_patches import PatchError

    *others, (update, wrapper) = patch.wrappers
    moved = replace(patch, wrappers=(*others, (replace(update, signature="(self)"), wrapper)))
    monkeypatch.setattr("verl_patches.deferred.wrap", lambda contract, wrapper: pytest.fail("wrapped"))
    with pytest.raises(PatchError, match="has changed"):
        moved.apply()


def test_installed_once_however_often(patch: Any) -> None:
    from verl.workers.actor import dp_actor

    patch.install()
    before = [dp_actor.agg_loss, dp_actor.DataParallelPPOActor.update_policy]
    patch.install()
    assert before == [dp_actor.agg_loss, dp_actor.DataParallelPPOActor.update_policy]
    assert patch.in_force()


@pytest.mark.parametrize("positional", [True, False])
def test_the_count_is_agreed_on_over_the_world_or_the_group_given(
    patch: Any, positional: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verl.workers.actor import dp_actor

    patch.install()
    reduce, groups = torch.distributed.all_reduce, []

    def all_reduce(numbers: torch.Tensor, op: Any, group: Any) -> Any:
        groups.append(group)
        return reduce(numbers, op=op, group=group)

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    data = la.proto(la.rollout())
    with la.process_group():
        world, given = torch.distributed.group.WORLD, torch.distributed.new_group([0])
        dp_actor.prepare_dynamic_batch(data, max_token_len=17)
        if positional:
            dp_actor.prepare_dynamic_batch(data, 17, given)
        else:
            dp_actor.prepare_dynamic_batch(data, max_token_len=17, dp_group=given)
    assert groups == [world, given]
    assert world is not given


def test_every_other_module_keeps_verls_functions(patch: Any) -> None:
    from verl.trainer.ppo import core_algos
    from verl.workers.actor import dp_actor
    from verl.workers.utils import losses

    patch.install()
    for function in ("agg_loss", "kl_penalty", "get_policy_loss_fn"):
        own = getattr(core_algos, function)
        assert getattr(losses, function) is own
        assert inspect.unwrap(getattr(dp_actor, function)) is own
        assert getattr(dp_actor, function) is not own


# The group ---------------------------------------------------------------------------------------------------

LEGACY = {"VERL_USE_EXTERNAL_MODULES": "verl_patches.legacy"}
STATUS = "import verl_patches; print(verl_patches.status()['legacy']['fsdp_actor'])\n"


@pytest.mark.parametrize("others", ["", "verl_patches.cpu,"])
def test_verl_loads_it_into_a_process_and_the_actor_is_patched_when_it_is_imported(others: str) -> None:
    environment = {**CPU, "VERL_USE_EXTERNAL_MODULES": f"{others}verl_patches.legacy"} if others else LEGACY
    code = f"import verl, sys\n{STATUS}print('recipe.offpolicy.worker.legacy_loss' in sys.modules)\n"
    code += f"from verl.workers.actor import DataParallelPPOActor\n{STATUS}"
    code += "print(hasattr(DataParallelPPOActor.update_policy, '__wrapped__'))\n"
    lines = [line for line in ok(code, **environment).splitlines() if line in ("waiting", "in force", "True", "False")]
    assert lines == ["waiting", "False", "in force", "True"]


def test_a_moved_target_stops_the_import_of_the_actor() -> None:
    code = (
        "import verl_patches, verl.trainer.ppo.core_algos as algorithms\n"
        "algorithms.agg_loss = lambda loss_mat, loss_mask: None\n"
        "import verl.workers.actor.dp_actor\n"
    )
    done = python(f"import verl\n{code}", **LEGACY)
    assert done.returncode != 0
    assert "PatchError: patch 'dp_actor.agg_loss': the target verl.workers.actor.dp_actor:agg_loss" in done.stderr
