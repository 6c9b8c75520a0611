"""A real verl TrainingWorker whose engine replays the support of truncated sampling, and rows with notes of the
support.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict
from torch import Tensor

from tests.support import training_worker as tw


def start(model: Path, unknown: str | None = "mask", **settings: Any) -> Any:
    """Start a worker that replays the support; if ``unknown`` is None, verl's plain worker."""
    from recipe.offpolicy.support.fsdp_engine import install_support

    worker = tw.start_worker(model, **settings)
    if unknown is not None:
        install_support(SimpleNamespace(actor=worker), unknown)  # type: ignore[arg-type]
    return worker


def draw_supports(tokens: Tensor, *, most: int = 6, seed: int = 4) -> list[list[int]]:
    """Draw a support of 1 to ``most`` ids for each token, with the token itself first."""
    generator = torch.Generator().manual_seed(seed)
    drawn = []
    for token in tokens.tolist():
        others = [each for each in torch.randperm(tw.VOCABULARY, generator=generator).tolist() if each != token]
        drawn.append([token, *others[: int(torch.randint(0, most, (1,), generator=generator))]])
    return drawn


def build_note(prompt: Tensor, response: Tensor, supports: list[list[int]]) -> Any:
    """Build a row's note; an empty support is unknown."""
    from recipe.offpolicy.support.token_supports import SupportNote, TokenSupports

    note = SupportNote()
    found = TokenSupports(
        np.array([len(each) for each in supports], np.uint8),
        np.array([one for each in supports for one in each], np.uint8),
        np.array([1.0 if each else 0.7 for each in supports], np.float32),
    )
    note.add(prompt.tolist(), response.tolist(), found)
    return note.finish()


def with_notes(rollout: tw.Rollout, notes: list[Any]) -> TensorDict:
    """Return the rows with their notes in verl's extra fields."""
    from recipe.offpolicy.support.token_supports import NOTE

    data = rollout.to_tensordict()
    data["extra_fields"] = NonTensorStack(*({} if note is None else {NOTE: note.to_plain()} for note in notes))
    return data


def note_rows(rollout: tw.Rollout, supports: list[list[list[int]]]) -> list[Any]:
    return [
        build_note(prompt, response, given)
        for prompt, response, given in zip(rollout.prompts, rollout.responses, supports, strict=True)
    ]


def with_supports(rollout: tw.Rollout, supports: list[list[list[int]]]) -> TensorDict:
    """Return the rows with the notes of these supports, as our trainer sends them."""
    return flagged(with_notes(rollout, note_rows(rollout, supports)))


def flagged(data: TensorDict) -> TensorDict:
    """Add what our trainer tells the engine."""
    from recipe.offpolicy.support.fsdp_engine import FLAG
    from verl.utils import tensordict_utils as tu

    tu.assign_non_tensor(data, **{FLAG: True})
    return data
