"""A tiny Qwen2-VL in a real verl TrainingWorker, and rows of which some have an image."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from tensordict import NonTensorStack, TensorDict

from tests.support import training_worker as tw

IMAGE, START, END = 35, 36, 37
"""Token ids that ``make_rollout`` does not draw."""
WITH_IMAGE = (0, 3, 5)
LAYER = "Qwen2VLDecoderLayer"
AXES = 4
"""Position ids of a token: in the text, and in time, height and width."""


def tiny_model(folder: Path) -> Path:
    """A float32 Qwen2-VL of two layers with random weights; an image of 4 x 4 patches is four tokens."""
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    tw.tiny_model(folder)
    text = dict(
        vocab_size=40,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        initializer_range=0.2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    vision = dict(
        depth=1,
        embed_dim=32,
        hidden_size=64,
        num_heads=2,
        mlp_ratio=2,
        patch_size=2,
        spatial_merge_size=2,
        temporal_patch_size=2,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    tokens = dict(image_token_id=IMAGE, vision_start_token_id=START, vision_end_token_id=END)
    config = Qwen2VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **tokens)
    Qwen2VLForConditionalGeneration(config).save_pretrained(folder)
    return folder


def start_worker(folder: Path) -> Any:
    """Start a worker with this model."""
    worker = tw.start_worker(folder, layer=LAYER)
    (tower,) = (module for name, module in worker.engine.module.named_modules() if name.endswith("visual"))
    # verl's forward pass of this model wants the tensor that transformers 4 returned.
    tower.register_forward_hook(lambda module, given, output: output.pooler_output)
    return worker


@dataclass
class ImageRollout(tw.Rollout):
    """Rows with ``multi_modal_inputs``, which is {} for text, and with positions as Qwen2-VL counts them."""

    media: list[dict[str, torch.Tensor]] = field(default_factory=list)

    def positions(self) -> list[torch.Tensor]:
        """Positions of each row, (AXES, L)."""
        return [
            _positions(len(prompt) + len(response), bool(given))
            for prompt, response, given in zip(self.prompts, self.responses, self.media, strict=True)
        ]

    def to_tensordict(self) -> TensorDict:
        data = super().to_tensordict()
        data["position_ids"] = torch.nested.as_nested_tensor(self.positions(), layout=torch.jagged)
        data["multi_modal_inputs"] = NonTensorStack(*self.media)
        return data


def _positions(length: int, image: bool) -> torch.Tensor:
    positions = torch.arange(length).repeat(AXES, 1)
    if image:  # START at 0, 2 x 2 places from 1 on, and the text goes on at 3
        positions[1, 1:5] = 1
        positions[2, 1:5] = torch.tensor([1, 1, 2, 2])
        positions[3, 1:5] = torch.tensor([1, 2, 1, 2])
        positions[1:, 5:] = torch.arange(length - 5) + 3
    return positions


def make_rollout(rows: int = 8, seed: int = 0) -> ImageRollout:
    """Call ``training_worker.make_rollout``, and put an image of one size before some prompts."""
    plain = tw.make_rollout(rows, seed)
    made = ImageRollout(**{each.name: getattr(plain, each.name) for each in fields(plain)})
    generator = torch.Generator().manual_seed(seed)
    for row in range(rows):
        given: dict[str, torch.Tensor] = {}
        if row in WITH_IMAGE:
            made.prompts[row] = torch.cat([torch.tensor([START, *[IMAGE] * 4, END]), made.prompts[row]])
            pixels = torch.randn(16, 3 * 2 * 2 * 2, generator=generator)
            given = {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 4, 4]])}
        made.media.append(given)
    return made
