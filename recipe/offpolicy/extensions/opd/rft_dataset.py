"""The data set of rejection fine-tuning, for verl's SFT trainer: ``data.custom_cls``.

verl's own class renders each message separately. Templates that treat the last answer differently, such as Qwen3's,
then drop the thinking part of the answer. This class renders the prompt exactly as during the rollout, and appends the
answer unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset


class AnsweredPrompts(MultiTurnSFTDataset):
    """Prompts, each with one answer as the last message; only the answer and its end-of-turn text are trained on."""

    def __getitem__(self, item: int) -> dict[str, torch.Tensor]:
        """Return ``input_ids``, ``position_ids`` and ``loss_mask``, (T,) int64.

        Raises:
            ValueError: the row is longer than ``data.max_length``, or ``data.pad_mode`` is not no_padding.
        """
        if self.pad_mode != "no_padding":
            raise ValueError(f"data.pad_mode={self.pad_mode}: expected no_padding.")
        *prompt, answer = self.messages[item]
        rendered = self.tokenizer.apply_chat_template(prompt, add_generation_prompt=True)
        before = list(rendered["input_ids"] if isinstance(rendered, Mapping) else rendered)
        text = answer["content"] + find_end(self.tokenizer)
        after = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        ids = torch.tensor(before + after)
        if len(ids) > self.max_length:
            raise ValueError(f"row {item} has {len(ids)} tokens, but data.max_length={self.max_length}.")
        mask = (torch.arange(len(ids)) >= len(before)).long()
        return {"input_ids": ids, "position_ids": torch.arange(len(ids)), "loss_mask": mask}


def find_end(tokenizer: Any) -> str:
    """Find the text that ends an answer in the chat template, or the tokenizer's end-of-text token."""
    turn = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "#"}]
    tail = str(tokenizer.apply_chat_template(turn, tokenize=False)).rpartition("#")[2].strip()
    return tail or str(tokenizer.eos_token or "")
