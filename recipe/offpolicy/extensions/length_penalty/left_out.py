"""A verl data set that leaves out the training prompts that an early checkpoint rarely solved.

In verl 0.7.1 to 0.9.1, ``data.custom_cls`` selects this class. It overrides ``_read_files_and_tokenize`` of
``RLHFDataset``, which also reads the files again when a run is resumed. verl uses the same class for the validation
set.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from verl.utils.dataset.rl_dataset import RLHFDataset

from ...proof.verify import LivenessError
from ..validation_answers import read_pass_rates
from .settings import LEAVE_OUT


class EasierPrompts(RLHFDataset):
    """verl's data set without the prompts whose pass rate in a dump is below a limit.

    Attributes:
        total, known, left_out: number of prompts in all, of prompts that occur in the dump, and of prompts left out.
    """

    total = known = left_out = 0
    dataframe: Any

    def _read_files_and_tokenize(self) -> None:
        super()._read_files_and_tokenize()
        given = self.config.get(LEAVE_OUT)
        files = self.config.get("train_files")
        files = [files] if isinstance(files, str) else list(files)
        if given is None or list(self.original_data_files) != files:
            return  # the validation set
        rates = read_pass_rates(Path(given.dump), given.correct_at_least)
        found = [rates.get(self._write(row)) for row in self.dataframe]
        keep = [at for at, rate in enumerate(found) if rate is None or rate >= given.below]
        self.total, self.known = len(found), sum(rate is not None for rate in found)
        self.left_out = len(found) - len(keep)
        if self.known == 0:
            raise LivenessError(
                f"length_penalty.leave_out.dump={given.dump}: the dump contains none of the {self.total} prompts of "
                "data.train_files. Fix: give a dump from a validation of an early checkpoint on the training prompts."
            )
        if not keep:
            raise LivenessError(
                f"length_penalty.leave_out.below={given.below}: the pass rates of all {self.total} prompts are below "
                "this limit. Set a lower limit."
            )
        self.dataframe = self.dataframe.select(keep)

    def _write(self, row: Any) -> str:
        """Format a prompt as in verl's dumps: with the chat template, and without special tokens."""
        options = dict(self.apply_chat_template_kwargs)
        for name in ("tokenize", "return_dict", "return_tensors"):
            options.pop(name, None)
        if (tools := getattr(self, "tool_schemas", None)) is not None:
            options["tools"] = tools
        ids = self.tokenizer.apply_chat_template(
            row[self.prompt_key], add_generation_prompt=True, tokenize=True, return_dict=False, **options
        )
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))
