"""Batch views for add-ons, and the rows of extra forward passes in the trainer.

verl's V0 trainer has padded tensors in a DataProto without padding rows. The V1 trainer stores columns in
TransferQueue, nested by row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig
from tensordict import NonTensorStack, TensorDict
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from verl import DataProto

from ..batch.padding import put_columns, read_columns, zero_rows
from ..batch.plan import Groups
from ..correction import RolloutStage, Statistic
from ..extensions.batch_view import check_columns

MEDIA = "multi_modal_inputs"
"""Column with one mapping per row for the inputs other than tokens, for example pixels and their grid."""
ESTIMATES = ("advantages", "returns")
Pair = tuple[list[int], list[int]]
"""Token ids of a prompt and of a response."""


class MediaError(RuntimeError):
    """A row has images, videos or audio, but would be scored without them or with the inputs of another row."""


def demand_text(inputs: Iterable[Mapping[str, Any] | None]) -> None:
    """Raise an error if a row has ``multi_modal_inputs``, because the extra forward pass receives only token ids.

    Raises:
        MediaError: a row has such inputs.
    """
    for row, given in enumerate(inputs):
        if names := sorted((given or {}).keys()):
            raise MediaError(
                f"sequence {row} has {', '.join(names)}, but an extra forward pass scores only token ids, without "
                "images, videos and audio. Set offpolicy.late_weights.snapshots=null and process_reward=null, which "
                "need this pass."
            )


def _shape_positions(positions: Tensor, axes: Sequence[int]) -> Tensor:
    """Repeat text positions along the model's position axes: (L,) or (B, L) becomes (..., *axes, L)."""
    shape = (*positions.shape[:-1], *axes, positions.shape[-1])
    return positions.unsqueeze(-2).expand(shape) if axes else positions


def pad_rows(rows: Sequence[Pair], batch: int, ranks: int, config: DictConfig) -> list[Pair]:
    """Repeat rows until the workers can split them in one pass.

    An engine with pipeline stages may require a certain number of micro-batches, so it always receives ``batch`` rows.
    """
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    a_rank = 1 if rollout.get("log_prob_use_dynamic_bsz") else rollout.get("log_prob_micro_batch_size_per_gpu")
    count = batch
    if a_rank and actor.strategy in ("fsdp", "fsdp2"):
        unit = ranks * a_rank
        count = min(-(-len(rows) // unit) * unit, batch)
    return [rows[place % len(rows)] for place in range(count)]


def build_padded(rows: Sequence[Pair], axes: Sequence[int] = ()) -> dict[str, Tensor]:
    """Build verl's padded columns from rows: prompts are padded on the left, responses on the right.

    Args:
        axes: shape of a single token's position, (4,) for models with images, otherwise ().

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
    """Build nested columns from rows, as in TransferQueue; other columns repeat the first row of ``source``."""
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


class HeldBatch:
    """View of one of verl's batches, in the trainer's process.

    Args:
        batch: verl's batch.
        step: the trainer's step.
        sent: called with the columns of all rows that are sent to the workers.
        forward: computes log-probs of (prompt, response) pairs with an extra forward pass of the trainer.
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
        """Drop the padding rows of a column."""
        return column


_SCORES = ("token_level_scores", "rm_scores")
"""Columns with a value per response token: the first exists once advantages are computed, the second after the
rollout."""
_REWARDS = "token_level_rewards"
"""Input of the estimator: the scores, minus the KL penalty if it is part of the reward."""


class DataProtoBatch(HeldBatch):
    """View of a DataProto; see also ``extensions.add_ons.TrainerBatch``."""

    batch: DataProto

    @property
    def is_padding(self) -> Sequence[bool]:
        return [False] * len(self.batch)

    @property
    def uids(self) -> list[str]:
        return self._groups or self.list_uids()

    @property
    def keys(self) -> list[str]:
        return [str(row) for row in range(len(self.batch))]

    sessions = keys  # each row is its own rollout

    @property
    def token_ids(self) -> list[tuple[list[int], list[int]]]:
        tensors = self.batch.batch
        prompts, responses, there = tensors["prompts"], tensors["responses"], tensors["attention_mask"].bool()
        width = prompts.shape[1]
        return [
            (prompts[row][there[row, :width]].tolist(), responses[row][there[row, width:]].tolist())
            for row in range(len(prompts))
        ]

    def list_uids(self) -> list[str]:
        """List verl's uid of every row."""
        return [str(uid) for uid in self.batch.non_tensor_batch["uid"]]

    @contextmanager
    def without_rejected(self, groups: Groups) -> Iterator[None]:
        """Let verl estimate advantages with these ``groups``, and then set the advantages of silent rows to 0."""
        uids = self.batch.non_tensor_batch["uid"]
        self.batch.non_tensor_batch["uid"] = np.array(groups.uids, dtype=object)
        yield
        self.batch.non_tensor_batch["uid"] = uids
        for name in ESTIMATES:
            self.batch.batch[name] = self.batch.batch[name].masked_fill(torch.tensor(groups.silent)[:, None], 0.0)

    @property
    def scores(self) -> Tensor:
        scores: Tensor = self.batch.batch[next(name for name in _SCORES if name in self.batch.batch.keys())]
        return scores

    def rows(self, *names: str) -> dict[str, Any]:
        tensors = self.batch.batch
        found = {name: tensors[name] for name in names if name in tensors.keys()}
        return found | {name: list(self.batch.non_tensor_batch[name]) for name in names if name not in found}

    def put(self, **columns: Tensor) -> None:
        check_columns(columns, len(self.batch))
        self._sent(columns)
        for name, column in columns.items():
            self.batch.batch[name] = column

    @contextmanager
    def shaped(self, rewards: Tensor) -> Iterator[None]:
        raw, scores = self.batch.batch[_REWARDS], self.scores
        penalised = not torch.equal(raw, scores)
        self.batch.batch[_REWARDS] = raw + (rewards - scores) if penalised else rewards
        try:
            yield
        finally:
            self.batch.batch[_REWARDS] = raw

    def put_advantages(self, advantages: Tensor, *, returns: bool) -> None:
        self.batch.batch["advantages"] = advantages
        if returns:
            self.batch.batch["returns"] = advantages.clone()


class DataProtoPrompts:
    """``PromptView`` of the DataProto of prompts for which the V0 trainer is about to sample responses."""

    def __init__(self, prompts: DataProto, step: int) -> None:
        self._prompts = prompts
        self.step = step

    @property
    def uids(self) -> list[str]:
        return [str(uid) for uid in self._prompts.non_tensor_batch["uid"]]

    def rows(self, *names: str) -> dict[str, Any]:
        batch = self._prompts
        tensors = set(names) & set(batch.batch.keys() if batch.batch is not None else ())
        return {name: batch.batch[name] if name in tensors else list(batch.non_tensor_batch[name]) for name in names}

    def put(self, **columns: Any) -> None:
        for name, values in columns.items():
            if isinstance(values, Tensor):
                self._prompts.batch[name] = values
            else:
                self._prompts.non_tensor_batch[name] = np.array(values, dtype=object)


SCORES = "rm_scores"


class TransferQueueBatch(HeldBatch):
    """View of a batch in TransferQueue; see also ``extensions.add_ons.TrainerBatch``.

    Attributes:
        batch: verl's KVBatchMeta, including the metadata of all columns stored so far; verl continues with this object.
    """

    def __init__(self, batch: Any, *arguments: Any, **named: Any) -> None:
        super().__init__(batch, *arguments, **named)
        self.is_padding: Sequence[bool] = [bool(tag.get("is_padding", False)) for tag in batch.tags]
        self._real = [row for row, padding in enumerate(self.is_padding) if not padding]

    @property
    def uids(self) -> list[str]:
        return self._groups or [key.rsplit("_", 2)[0] for key in self.keys]

    @property
    def sessions(self) -> list[str]:
        return [key.rsplit("_", 1)[0] for key in self.keys]

    @property
    def keys(self) -> list[str]:
        return [self.batch.keys[row] for row in self._real]

    @property
    def token_ids(self) -> list[tuple[list[int], list[int]]]:
        found = read_columns(self.batch, "prompts", "responses")
        prompts, responses = found["prompts"].unbind(), found["responses"].unbind()
        return [(prompts[row].tolist(), responses[row].tolist()) for row in self._real]

    def list_uids(self) -> list[str]:
        """List verl's uid of every row, padding included."""
        return [str(uid) for uid in read_columns(self.batch, "uid")["uid"]]

    @contextmanager
    def without_rejected(self, groups: Groups) -> Iterator[None]:
        """Let verl estimate advantages with these ``groups``, and then set the advantages of silent rows to 0."""
        uids = self.list_uids()
        self.batch = put_columns(self.batch, uid=NonTensorStack(*groups.uids))
        yield
        found = read_columns(self.batch, *ESTIMATES)
        silenced = {name: zero_rows(found[name], groups.silent) for name in ESTIMATES}
        self.batch = put_columns(self.batch, uid=NonTensorStack(*uids), **silenced)

    @property
    def scores(self) -> Tensor:
        scores: Tensor = self.rows(SCORES)[SCORES]
        return scores

    def rows(self, *names: str) -> dict[str, Any]:
        found = read_columns(self.batch, *names)
        return {name: self._of_real(found[name]) for name in names}

    def put(self, **columns: Tensor) -> None:
        check_columns(columns, len(self._real))
        whole = {name: self._whole(column) for name, column in columns.items()}
        self._sent(whole)
        self.batch = put_columns(self.batch, **whole)

    @contextmanager
    def shaped(self, rewards: Tensor) -> Iterator[None]:
        raw = read_columns(self.batch, SCORES)[SCORES]
        try:
            self.batch = put_columns(self.batch, **{SCORES: self._whole(rewards)})
            yield
        finally:
            self.batch = put_columns(self.batch, **{SCORES: raw})

    def put_advantages(self, advantages: Tensor, *, returns: bool) -> None:
        whole = self._whole(advantages)
        self.batch = put_columns(self.batch, advantages=whole, **({"returns": whole} if returns else {}))

    @cached_property
    def _lengths(self) -> list[int]:
        """Number of response tokens of each row."""
        lengths: list[int] = read_columns(self.batch, "response_mask")["response_mask"].offsets().diff().tolist()
        return lengths

    def _of_real(self, column: Any) -> Any:
        if not isinstance(column, Tensor):
            values = list(column)
            return [values[row] for row in self._real]
        if column.is_nested:
            rows = column.unbind()
            return pad_sequence([rows[row] for row in self._real], batch_first=True)
        return column[self._real]

    def _whole(self, column: Tensor) -> Tensor:
        """Expand a column to all rows, with zeros in padding rows; per-token columns are returned nested."""
        if column.dim() == 1:
            whole = column.new_zeros(len(self.is_padding))
            whole[self._real] = column
            return whole
        rows = [column.new_zeros(length) for length in self._lengths]
        for row, values in zip(self._real, column, strict=True):
            rows[row] = values[: self._lengths[row]].clone()
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


class TensorDictPrompts:
    """``PromptView`` of the TensorDict of prompts that the V1 trainer is about to submit."""

    def __init__(self, prompts: TensorDict, step: int) -> None:
        self._prompts = prompts
        self.step = step

    @property
    def uids(self) -> list[str]:
        return [str(uid) for uid in self._prompts["uid"]]

    def rows(self, *names: str) -> dict[str, Any]:
        found = {name: self._prompts[name] for name in names}
        return {name: value if isinstance(value, Tensor) else list(value) for name, value in found.items()}

    def put(self, **columns: Any) -> None:
        for name, values in columns.items():
            self._prompts[name] = values if isinstance(values, Tensor) else NonTensorStack(*values)
