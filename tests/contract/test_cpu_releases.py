"""The CPU patches in releases of verl before 0.9, compared with verl's own code.

Patches change their process permanently, so tests that install them need their own process; tests share a process where
possible, because importing verl's workers takes long.
"""

from __future__ import annotations

import importlib.metadata
import json
from typing import Any

import pytest

from tests.support.fresh_python import CPU, ok, python

pytestmark = pytest.mark.verl("<0.9")

# Each notes what it finds, or why it fails.
FACTS = """
import json, tempfile, torch
facts = {}

def fact(find):
    try: facts[find.__name__] = find()
    except Exception as error: facts[find.__name__] = f"{type(error).__name__}: {error}"

@fact
def engines():
    from verl.workers.engine import EngineRegistry
    return [EngineRegistry.get_engine_cls("language_model", name).__name__ for name in ("fsdp", "fsdp2")]

@fact
def sharded():
    from torch.distributed.device_mesh import init_device_mesh
    from verl.utils.fsdp_utils import apply_fsdp2
    torch.distributed.init_process_group("gloo", init_method="file://" + tempfile.mktemp(), rank=0, world_size=1)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    model.config = type("Config", (), {"tie_word_embeddings": False})
    model._no_split_modules = {"Linear"}
    try: apply_fsdp2(model, {"mesh": init_device_mesh("cpu", (1,))}, {})
    finally: torch.distributed.destroy_process_group()
    return [type(module).__name__ for module in model.modules()]

@fact
def packed():
    from verl.utils.attention_utils import pad_input, unpad_input
    ids = torch.tensor([[0, 0, 5, 6], [7, 8, 9, 0]]).unsqueeze(-1)
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]])
    packed, where, starts, *_ = unpad_input(ids, mask)
    back = torch.equal(pad_input(packed, where, 2, 4), ids)
    return [packed.flatten().tolist(), where.tolist(), starts.tolist(), back]

@fact
def autocast():
    from types import SimpleNamespace as Namespace
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
    class Batch(dict):
        def to(self, device): return self
    seen = []
    note = lambda **_: seen.append(torch.is_autocast_enabled("cpu"))
    for wanted in (None, {"param_dtype": "bf16"}, {"param_dtype": "fp32"}, {"param_dtype": "bf16"}):
        engine = Namespace(engine_config=Namespace(mixed_precision=wanted), module=note,
            prepare_model_inputs=lambda micro_batch: ({}, {}), prepare_model_outputs=lambda **_: {})
        FSDPEngineWithLMHead.forward_step(engine, Batch(), None, forward_only=True)
    with torch.autocast("cpu", torch.bfloat16): note()
    return seen

@fact
def socket():
    from verl.utils.device import get_device_id
    from verl.workers.rollout.vllm_rollout.utils import get_device_uuid
    return [get_device_uuid(get_device_id()), get_device_uuid(None)]

@fact
def experts():
    import verl.utils.vllm.vllm_fp8_utils as helpers
    from vllm.model_executor.layers.fused_moe import RoutedExperts
    return helpers.FusedMoE is RoutedExperts

print(json.dumps(facts))
"""


def found(**environment: str) -> dict[str, Any]:
    slot = {"CUDA_VISIBLE_DEVICES": "3", "RAY_RAYLET_PID": "41"}
    facts: dict[str, Any] = json.loads(ok(FACTS, **slot, **environment).splitlines()[-1])
    return facts


@pytest.fixture(scope="module")
def patched() -> dict[str, Any]:
    return found(**CPU)


@pytest.fixture(scope="module")
def unpatched() -> dict[str, Any]:
    """Each test reproduces the cause of a patch; if a release fixes the cause, the patch can be deleted."""
    return found()


def test_engines_of_the_named_device_serve_the_cpu(patched: dict[str, Any], unpatched: dict[str, Any]) -> None:
    assert patched["engines"] == ["FSDPEngineWithLMHead", "FSDPEngineWithLMHead"]
    assert "Unknown device: cpu" in unpatched["engines"]


def test_padding_is_removed_without_flash_attn(patched: dict[str, Any], unpatched: dict[str, Any]) -> None:
    """Rows of 2 and 3 tokens: five tokens in one row, their places in the flat batch, the start of each row, and the
    inverse.
    """
    assert patched["packed"] == [[5, 6, 7, 8, 9], [2, 3, 4, 5, 6], [0, 2, 5], True]
    assert unpatched["packed"] == "ModuleNotFoundError: No module named 'flash_attn'"


def test_trainer_and_rollout_name_one_socket(patched: dict[str, Any], unpatched: dict[str, Any]) -> None:
    assert patched["socket"] == ["CPU-41-3", "CPU-41-3"]
    assert isinstance(unpatched["socket"], str)


def test_verls_fp8_helpers_find_vllms_experts(patched: dict[str, Any], unpatched: dict[str, Any]) -> None:
    assert patched["experts"] is True
    assert isinstance(unpatched["experts"], str)


def test_fsdp2_shards_the_layers_that_transformers_5_names(patched: dict[str, Any]) -> None:
    assert patched["sharded"] == ["FSDPSequential", "FSDPLinear", "ReLU"]


@pytest.mark.verl("==0.7.1")
def test_what_layer_names_is_patched_for_is_still_there(unpatched: dict[str, Any]) -> None:
    assert unpatched["sharded"] == "TypeError: 'set' object is not subscriptable"


@pytest.mark.verl("==0.7.1")
def test_mixed_precision_decides_about_autocast(patched: dict[str, Any], unpatched: dict[str, Any]) -> None:
    """Run verl's own forward_step around a module that records autocast: null, bf16, fp32, bf16, and outside
    an engine.
    """
    assert patched["autocast"] == [True, True, False, True, True]
    assert unpatched["autocast"] == [True, True, True, True, True]


def test_an_accelerator_is_not_ignored_in_silence() -> None:
    """Before 0.9, verl uses any visible GPU, so VERL_PLATFORM=cpu would have no effect."""
    done = python("import torch\ntorch.cuda.is_available = lambda: True\nimport verl\n", **CPU)
    assert done.returncode != 0
    assert "PatchError: VERL_PLATFORM=cpu on a machine with a GPU" in done.stderr
    assert "Fix:" in done.stderr


# Eight weights of 1 MiB in buckets of 1 MiB, each filled with its number. Where the sender may go on while a bucket is
# loaded, the receiver looks at the bucket once the sender has filled the next, as a slow load would.
TRANSFER = """
import asyncio, importlib.metadata, os, tempfile, threading, torch
import verl.workers.rollout.vllm_rollout.bucketed_weight_transfer as transfer

def whole():
    handle = f"ipc://{tempfile.mkdtemp()}/weights"
    before = set(os.listdir("/dev/shm"))
    seen = {}
    asked = [threading.Event() for _ in range(10)]  # for a weight: the one before it is in the buffer

    def load(weights, *_):
        if importlib.metadata.version("verl") == "0.7.1":
            assert asked[int(weights[-1][0][1:]) + 2].wait(300.0)
        seen.update((name, weight.unique().tolist()) for name, weight in weights)

    def receive():
        receiver = transfer.BucketedWeightReceiver(handle, torch.device("cpu"), use_shm=True)
        try: receiver.receive_weights(load)
        except BufferError as error: seen["error"] = str(error)

    thread = threading.Thread(target=receive)
    thread.start()

    def weights():
        for n in range(8):
            asked[n].set()
            yield f"w{n}", torch.full((2**18,), float(n))
        for event in asked[8:]:
            event.set()

    asyncio.run(transfer.BucketedWeightSender(handle, bucket_size_mb=1, use_shm=True).async_send_weights(weights()))
    thread.join()
    left = [name for name in set(os.listdir("/dev/shm")) - before if name.startswith("verl_weights")]
    return seen == {f"w{n}": [float(n)] for n in range(8)}, left

print(*whole())
transfer.rebuild_shared_memory = getattr(transfer.rebuild_shared_memory, "__wrapped__", None)
if transfer.rebuild_shared_memory: print(whole()[0])
"""


def test_weights_arrive_whole_and_without_the_patch_they_do_not() -> None:
    """In 0.7.1, the next bucket overwrites weights that are still being loaded; from 0.8 on, no patch is needed."""
    lines = [line for line in ok(TRANSFER, **CPU).splitlines() if line.startswith(("True", "False"))]
    assert lines == ["True []", *["False"] * (importlib.metadata.version("verl") == "0.7.1")]
