"""The common part of the batch views for add-ons, and rows for the trainer's own forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from uuid import uuid4

import torch
from omegaconf import DictConfig
from tensordict import TensorDict
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..correction import RolloutStage, Statistic

MEDIA = "multi_modal_inputs"
"""Column of mappings, one per row, with the inputs other than tokens, for example pixels and their grid."""
ESTIMATES = ("advantages", "returns")
Pair = tuple[list[int], list[int]]
"""Token ids of a prompt and of a response."""


class MediaError(RuntimeError):
    """A row has images, videos or audio, but would be scored without these inputs or with those of another row."""


def demand_text(inputs: Iterable[Mapping[str, Any] | None]) -> None:
    """Raise an error if a row has ``multi_modal_inputs``, because an extension's rows contain only token ids.

    Raises:
        MediaError: a row has such inputs.
    """
    for row, given in enumerate(inputs):
        if names := sorted((given or {}).keys()):
            raise MediaError(
                f"sequence {row} has {', '.join(names)}: an extra forward pass scores token ids only, without images, "
                f"videos and audio. Set offpolicy.late_weights.snapshots=null and process_reward=null, which need it."
            )


def _shape_positions(positions: Tensor, axes: Sequence[int]) -> Tensor:
    """Repeat text positions over the model's position axes: (L,) or (B, L) to (..., *axes, L)."""
    shape = (*positions.shape[:-1], *axes, positions.shape[-1])
    return positions.unsqueeze(-2).expand(shape) if axes else positions


def count_rows(rows: int, batch: int, ranks: int, config: DictConfig) -> int:
    """Compute how many rows to send in a pass over ``rows`` rows: the smallest number that the workers can split.

    An engine with pipeline stages can require a certain number of micro-batches, so it receives ``batch`` rows.
    """
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    a_rank = 1 if rollout.get("log_prob_use_dynamic_bsz") else rollout.get("log_prob_micro_batch_size_per_gpu")
    if not a_rank or actor.strategy not in ("fsdp", "fsdp2"):
        return batch
    unit = ranks * a_rank
    return min(-(-rows // unit) * unit, batch)


def repeat_rows(rows: Sequence[Pair], count: int) -> list[Pair]:
    """Repeat rows until there are ``count`` rows."""
    return [rows[place % len(rows)] for place in range(count)]


def build_padded(rows: Sequence[Pair], axes: Sequence[int] = ()) -> dict[str, Tensor]:
    """Build verl's padded columns of rows: prompts are padded on the left, responses on the right.

    Args:
        axes: shape of one token's position: (4,) for models with images, otherwise ().

    Example:
        >>> build_padded([([5], [6, 7]), ([8, 9], [1])])["input_ids"]
        tensor([[0, 5, 6, 7],
                [8, 9, 1, 0]])
    """
    prompts = pad_sequence([torch.tensor(each[::-1]) for each, _ in rows], batch_first=True).flip(-1)
    responses = pad_sequence([torch.tensor(each) for _, each in rows], batch_first=True)
    lengths = torch.tensor([[len(prompt), len(response)] for prompt, response in rows])
    before = torch.arange(prompts.shape[1] - 1, -1, -1) < lengths[:, :1]
    behind = torch.arange(responses.shape[1]) < lengths[:, 1:]
    attention_mask = torch.cat([before, behind], dim=-1).long()
    return {
        "prompts": prompts,
        "responses": responses,
        "input_ids": torch.cat([prompts, responses], dim=-1),
        "attention_mask": attention_mask,
        "position_ids": _shape_positions((attention_mask.cumsum(-1) - 1).clamp(min=0), axes),
        "response_mask": behind.long(),
    }


def build_nested(rows: Sequence[Pair], source: TensorDict) -> TensorDict:
    """Build the columns of rows as TransferQueue stores them; other columns repeat the first row of ``source``."""
    from verl.utils.tensordict_utils import list_of_dict_to_tensordict

    template = source[0]
    axes = template["position_ids"].shape[:-1] if "position_ids" in template.keys() else ()
    made = []
    for prompt, response in rows:
        row = {name: template[name] for name in template.keys()}
        ids, mask = torch.tensor(prompt + response), torch.ones(len(response), dtype=torch.int64)
        row |= {"prompts": torch.tensor(prompt), "responses": torch.tensor(response), "input_ids": ids}
        positions = _shape_positions(torch.arange(len(ids)), axes)
        row |= {"attention_mask": torch.ones_like(ids), "position_ids": positions}
        made.append(row | {"response_mask": mask, "loss_mask": mask})
    return list_of_dict_to_tensordict(made)


def name_keys(count: int) -> list[str]:
    """Create keys for rows that belong to no batch."""
    uid = f"forward{uuid4().hex}"
    return [f"{uid}_{number}_0" for number in range(count)]


class HeldBatch:
    """View of one of verl's batches, in the trainer's process.

    Args:
        batch: verl's batch.
        step: the trainer's step.
        sent: called with the columns that are sent to the workers, for all rows.
        forward: computes log-probs of (prompt, response) pairs with the trainer's own forward pass, outside the batch.
        decide: runs the rollout stage of the active correction on the batch.
    """

    def __init__(
        self,
        batch: Any,
        step: int,
        sent: Callable[[Mapping[str, Tensor]], None] = lambda columns: None,
        forward: Callable[[Any, Sequence[Pair]], list[list[float]]] | None = None,
        decide: Callable[[Any], RolloutStage] | None = None,
    ):
        self.batch, self.step = batch, step
        self.silent: Tensor | None = None
        self._sent, self._forward, self._decide = sent, forward, decide
        self._groups: list[str] | None = None
        self._stage: RolloutStage | None = None

    def compute_log_probs(self, rows: Sequence[Pair]) -> list[list[float]]:
        assert self._forward is not None, "this view was built without a trainer's forward pass"
        return self._forward(self.batch, rows)

    def weigh(self) -> tuple[Tensor, Mapping[str, Statistic]]:
        assert self._decide is not None, "this view was built without a correction"
        if self._stage is None:
            self._stage = self._decide(self.batch)
        return self._of_real(self._stage.weight * self._stage.keep), self._stage.statistics

    def rows(self, *names: str) -> dict[str, Any]:
        raise NotImplementedError

    def regroup(self, groups: Sequence[str], silent: Sequence[bool]) -> None:
        """Replace the groups that extensions read, for all rows, and mark the rows whose advantage is 0."""
        self._groups = list(self._of_real(groups))
        self.silent = self._of_real(torch.tensor(silent))

    @property
    def advantages(self) -> Tensor:
        advantages: Tensor = self.rows("advantages")["advantages"]
        return advantages

    def _of_real(self, column: Any) -> Any:
        """Reduce a column to the rows that are not padding."""
        return column
