"""The CPU patches of Megatron and mbridge, compared with the unpatched code; a moved target is detected.

Patches change their process permanently, so each test that installs them runs in its own process.
"""

from __future__ import annotations

import importlib.util

import pytest

from tests.support.fresh_python import CPU, ok

pytestmark = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs Megatron")

PATCHES = (
    "megatron_attention",
    "megatron_bridge",
    "megatron_cuda",
    "megatron_device",
    "megatron_optimizer",
    "megatron_rng",
    "megatron_rope",
)
STATES = "{name: state for name, state in verl_patches.cpu.status().items() if name.startswith('megatron')}"


def test_a_process_that_never_imports_megatron_pays_nothing() -> None:
    out = ok(f"import sys, verl_patches.cpu\nprint({STATES}, 'megatron' in sys.modules)\n", **CPU)
    assert out.count("'waiting'") == len(PATCHES)
    assert out.splitlines()[-1].endswith(" False")


IMPORTED = """
import torch
torch.manual_seed(0)
def say(name, *values): print('@', name, '=', *values)

cuda_functions = torch.cuda.current_device, torch.Tensor.cuda, torch.Tensor.type
import verl, verl_patches, verl.models.mcore.mbridge
say('states', {states})
say('untouched', cuda_functions == (torch.cuda.current_device, torch.Tensor.cuda, torch.Tensor.type))
import megatron.core.pipeline_parallel.schedules as schedules
say('inside', schedules.torch.zeros([], device='cuda').device, schedules.torch.Tensor is torch.Tensor)
try: torch.zeros([], device='cuda')
except AssertionError as error: say('outside', error)

from megatron.core.optimizer.optimizer import clip_grad_by_total_norm_fp32
parameter = torch.nn.Parameter(torch.zeros(2))
parameter.grad = torch.tensor([3.0, 4.0])
clip_grad_by_total_norm_fp32([parameter], max_norm=1.0, total_norm=5.0)
say('clipped', [round(value, 4) for value in parameter.grad.tolist()], parameter.type())

import tempfile
from megatron.core import parallel_state as mpu, tensor_parallel
torch.distributed.init_process_group('gloo', init_method='file://' + tempfile.mktemp(), rank=0, world_size=1)
mpu.initialize_model_parallel()
say('device', torch.cuda.current_device(), torch.ones(1).cuda().device)
"""

RANDOM = """
tensor_parallel.model_parallel_cuda_manual_seed(7)
outside = torch.get_rng_state()
def draw():
    with tensor_parallel.get_cuda_rng_tracker().fork(): return torch.rand(3).tolist()
first, second = draw(), draw()
say('forked', first != second, torch.equal(outside, torch.get_rng_state()))
tensor_parallel.model_parallel_cuda_manual_seed(7)
say('seeded', [draw(), draw()] == [first, second])
"""

ATTENTION = """
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
config = TransformerConfig(
    num_layers=1, hidden_size=4, num_attention_heads=1, masked_softmax_fusion=False, attention_dropout=0.0,
    use_cpu_initialization=True,
)
attend = DotProductAttention(config, 1, AttnMaskType.causal, 'self')
query, key, value = torch.randn(3, 3, 2, 1, 4)  # sequence, batch, heads, width
valid = torch.tensor([[1, 1, 1], [1, 1, 0]], dtype=torch.bool)
seen = attend(query, key, value, valid)
by_hand = torch.zeros(3, 2, 4)
for row in range(2):
    for position in range(3):
        scores = key[: position + 1, row, 0] @ query[position, row, 0] / 2.0
        by_hand[position, row] = scores.softmax(0) @ value[: position + 1, row, 0]
kept = valid.T
say('causal', float((seen - by_hand)[kept].abs().max()) < 1e-6)
try: attend(query, key, value, valid.flip(-1))
except ValueError as error: say('left padding', error)
"""

BRIDGE = """
from transformers import Qwen2Config
from verl.models.mcore.mbridge import AutoBridge
hugging_face = Qwen2Config(
    vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
    num_key_value_heads=1, rope_parameters={'rope_type': 'default', 'rope_theta': 5000.0},
)
bridge = AutoBridge.from_config(hugging_face, dtype=torch.float32)
say('rotary base', bridge._get_gptmodel_args()['rotary_base'])
names = bridge._weight_name_mapping_mcore_to_hf
say('names', *names('decoder.layers.0.input_layernorm.weight'), *names('decoder.layers.0.pre_mlp_layernorm.weight'))
say('Transformer Engine', 'TE' in str(bridge._get_transformer_layer_spec()))
"""


def test_megatron_runs_on_the_cpu() -> None:
    """All checks share one process, because importing Megatron takes long."""
    out = ok(IMPORTED.replace("{states}", STATES) + RANDOM + ATTENTION + BRIDGE, **CPU)
    said = dict(line[2:].split(" = ", 1) for line in out.splitlines() if line.startswith("@ "))
    assert said.pop("states").count("'in force'") == len(PATCHES)
    assert "not compiled with CUDA" in said.pop("outside")
    assert "has padding before a token" in said.pop("left padding")
    assert said == {
        # Importing verl imports Megatron: until it is set up, PyTorch is as it was.
        "untouched": "True",
        "inside": "cpu True",
        "clipped": "[0.6, 0.8] torch.FloatTensor",
        "device": "cpu cpu",
        "forked": "True True",
        "seeded": "True",
        "causal": "True",
        "rotary base": "5000.0",
        "names": "model.layers.0.input_layernorm.weight model.layers.0.post_attention_layernorm.weight",
        "Transformer Engine": "False",
    }
