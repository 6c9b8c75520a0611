"""What verl's separate asynchronous trainer needs: snapshots that are copies, and a logger that accepts `flush`.

Patches change their process permanently, so each test runs in its own process.
"""

from __future__ import annotations

import pytest

from tests.support.fresh_python import ok

pytest.importorskip("verl")


FSDP2 = """
import tempfile, torch
import verl_patches.cpu
patch = verl_patches.cpu.find_patch("async_snapshot")
torch.distributed.init_process_group("gloo", rank=0, world_size=1, init_method="file://" + tempfile.mktemp())
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
model = torch.nn.Linear(2, 1, bias=False)
torch.nn.init.ones_(model.weight)
fully_shard(model, mesh=init_device_mesh("cpu", (1,)))

def after_a_step_and_a_restoration():
    from verl.utils import fsdp_utils
    old = fsdp_utils.fsdp2_sharded_save_to_cpu(model)
    with torch.no_grad():
        model.weight.add_(1.0)
    new = fsdp_utils.fsdp2_sharded_save_to_cpu(model)
    fsdp_utils.fsdp2_sharded_load_from_cpu(model, *old)
    restored = model.weight.full_tensor().tolist()
    fsdp_utils.fsdp2_sharded_load_from_cpu(model, *new)
    return restored, model.weight.full_tensor().tolist()
"""


def test_a_snapshot_on_the_cpu_is_the_live_weight_until_it_is_patched() -> None:
    """Do what the trainer does: save pi_old, step, save pi, restore pi_old, restore pi."""
    out = ok(
        f"{FSDP2}\n"
        "print(after_a_step_and_a_restoration())\n"
        "import sys\n"
        "del sys.modules['verl.utils.fsdp_utils']\n"
        "patch.install(); patch.install()\n"
        "assert patch.waiting() and not patch.in_force()\n"
        "import verl.utils.fsdp_utils as utils\n"
        "assert not patch.waiting()\n"
        "assert utils.fsdp2_sharded_save_to_cpu.__wrapped__.__module__ == 'verl.utils.fsdp_utils'\n"
        "assert not hasattr(utils.fsdp2_sharded_save_to_cpu.__wrapped__, '__wrapped__')\n"
        "print(after_a_step_and_a_restoration(), patch.in_force())\n"
    )
    unpatched, patched = out.splitlines()[-2:]
    assert unpatched == "([[2.0, 2.0]], [[2.0, 2.0]])"  # pi_old would be pi
    assert patched == "([[2.0, 2.0]], [[3.0, 3.0]]) True"


TRAINER = "import verl_patches.trainer_seams as t, verl.trainer.ppo.v1.trainer_separate_async as module\n"


@pytest.mark.slow
@pytest.mark.verl("==0.9.1")
def test_verls_trainer_logs_with_flush_and_its_logger_refuses_it_until_it_is_patched() -> None:
    out = ok(
        f"{TRAINER}"
        "import inspect, logging, sys\n"
        "logging.basicConfig(stream=sys.stdout, format='%(name)s %(message)s', force=True)\n"
        "assert 'flush=True' in inspect.getsource(module.PPOTrainerSeparateAsync._setup)\n"
        "try: module.logger.info('started', flush=True)\n"
        "except TypeError as error: print(error)\n"
        "t.let_logger_flush(); t.let_logger_flush()\n"
        "assert isinstance(module.logger.logger, logging.Logger)\n"
        "module.logger.info('started with %s', 3, flush=True)\n"
        "module.logger.warning('warned')\n"
        "print(t.SEPARATE_ASYNC_LOGGER.in_force())\n"
    )
    refused, started, warned, state = out.splitlines()[-4:]
    assert "unexpected keyword argument 'flush'" in refused
    assert started == "verl.trainer.ppo.v1.trainer_separate_async started with 3"
    assert warned == "verl.trainer.ppo.v1.trainer_separate_async warned"
    assert state == "True"
