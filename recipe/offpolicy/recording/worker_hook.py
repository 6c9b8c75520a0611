"""The adapter between the worker's loss and the recorder."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from verl.utils import tensordict_utils as tu

from ..batch import micro_batch as mb
from ..batch.padding import Layout, flatten, pad_column
from ..batch.plan import REWARD, UID
from ..batch.weight_versions import TokenVersions
from ..correction import CorrectionSpec, Statistic, StepStage
from ..correction.ratios import find_valid_tokens
from ..correction.statistics import Reduction
from .recorder import Recorder, get_recorder
from .run import SECTION, RecordSettings
from .schema import WITHOUT_REPLAY
from .writer import Seen, pack

_MEGATRON = "megatron.core.parallel_state"


@dataclass(frozen=True)
class Place:
    """Role of a training process in the recording.

    Attributes:
        rank: data-parallel rank.
        writes: True in the one process of each data-parallel rank that records, which is the one whose metrics verl
            collects.
    """

    rank: int = 0
    writes: bool = True


def place(dp_size: int) -> Place:
    """Return the role of this process, which has computed a loss (with Megatron, on the last pipeline stage).

    Args:
        dp_size: number of data-parallel ranks.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return Place()
    megatron = sys.modules.get(_MEGATRON)
    if megatron is not None and megatron.model_parallel_is_initialized():
        first = megatron.get_tensor_model_parallel_rank() == 0 and megatron.get_context_parallel_rank() == 0
        return Place(megatron.get_data_parallel_rank(), first)
    # Ranks that share sequences (Ulysses) are adjacent and have the same rows.
    rank, copy = divmod(dist.get_rank(), dist.get_world_size() // dp_size)
    return Place(rank, copy == 0)


_SCORES = ("token_level_scores", "rm_scores")
"""verl's names of the per-token rewards, before any KL is subtracted: on the V0 trainer and on the V1 trainer."""


def record(
    settings: RecordSettings,
    spec: CorrectionSpec,
    batch: mb.MicroBatch,
    step: StepStage,
    extensions: Collection[str] = (),
) -> dict[str, Statistic]:
    """Record a micro-batch as the loss reads it, if the plan asks for a recording.

    Args:
        extensions: columns of extensions to record.
        batch: as the loss reads it; a micro-batch that the trainer's plan does not announce (a trial) is not recorded.
        step: the decisions on the micro-batch.

    A failure stops the recorder, see ``Recorder.stop``.

    Returns:
        ``record/...``, see ``take_statistics``; empty if the plan does not announce a recording.
    """
    plan = batch.plan
    if plan is None or plan.update is None or not torch.is_grad_enabled():
        return {}
    here = place(tu.get_non_tensor_data(batch.data, "dp_size", 1))
    recorder = get_recorder(settings, rank=here.rank, ranks=plan.update.ranks)
    if here.writes and settings.records(plan.step):
        started = recorder.clock()
        rows = len(batch.response_mask)
        mini_batch = recorder.admit(plan.step, plan.update, rows)
        if mini_batch is not None:
            try:
                columns = (*extensions, WITHOUT_REPLAY) if settings.without_replay else extensions
                seen = _seen(settings, spec, batch, step, columns)
                packed = pack(seen, _chosen(settings.share, seen.uids))
                recorder.put(plan.step, plan.update, mini_batch, packed, spec.to_mapping(), tuple(step.rejected))
            except Exception as error:  # training continues after any failure
                recorder.stop(error, rows)
        recorder.spent(recorder.clock() - started)
    return take_statistics(recorder, here)


def take_statistics(recorder: Recorder, here: Place) -> dict[str, Statistic]:
    """Return the recorder's counts since the last call: ``record/{rows,dropped_rows,bytes,seconds,stopped}``."""
    found = {
        f"record/{name}": Statistic(Reduction.SUM, (float(value),)) for name, value in asdict(recorder.take()).items()
    }
    stopped = float(here.writes and recorder.stopped is not None)
    return found | {"record/stopped": Statistic(Reduction.MAX, (stopped, 1.0))}


def _seen(
    settings: RecordSettings,
    spec: CorrectionSpec,
    batch: mb.MicroBatch,
    step: StepStage,
    extensions: Collection[str],
) -> Seen:
    old_log_prob, mu = mb.choose_pi_old(spec, batch), batch.rollout_log_prob
    versions = batch.versions
    return Seen(
        response_ids=batch.responses,
        response_mask=batch.response_mask,
        # mu of withheld tokens is NaN, so that readers of the recording exclude them as well.
        rollout_log_prob=mu if batch.withheld is None else mu.masked_fill(~batch.policy_mask, torch.nan),
        old_log_prob=old_log_prob,
        log_prob=batch.log_prob.detach(),
        advantages=batch.advantages,
        weight=step.weight,
        valid=find_valid_tokens(batch.policy_mask, old_log_prob, mu),
        rejected=step.rejected,
        uids=_uids(batch.data),
        reward=_reward(batch.data),
        versions=None if versions is None else (versions.oldest, versions.newest),
        token_versions=versions.tokens if isinstance(versions, TokenVersions) else None,
        prompts=_prompts(batch.data, batch.responses.shape[1]) if settings.prompts else None,
        extensions={name: _of_extension(name, batch) for name in extensions},
    )


def _of_extension(name: str, batch: mb.MicroBatch) -> Tensor:
    """Expand a column per token or per row to (B, T); a column of the model output is per token."""
    if (found := batch.model_output.get(name)) is not None:
        return (batch.layout or Layout.of(batch.data)).responses_of(flatten(found))
    column = batch.data[name] if batch.layout is None else pad_column(batch.data[name], batch.layout, name)
    return column if column.dim() > 1 else column[:, None].expand(batch.response_mask.shape)


def _uids(data: TensorDict) -> Sequence[str] | Tensor | None:
    if UID in data.keys():
        return data[UID]
    if "uid" not in data.keys():
        return None
    found = tu.get(data, "uid")
    # A value that is the same for all rows may arrive as a single string.
    uids = [found] * len(data) if isinstance(found, str) else found
    if not isinstance(uids, list) or len(uids) != len(data) or not all(isinstance(uid, str) for uid in uids):
        raise TypeError(f"uid in the micro-batch is {str(found)[:80]!r}, but each row needs a string.")
    return uids


def _reward(data: TensorDict) -> Tensor | None:
    if REWARD in data.keys():
        return data[REWARD]
    for name in _SCORES:
        if name in data.keys():
            return data.select(name).to_padded_tensor()[name].sum(-1)
    return None


def _prompts(data: TensorDict, width: int) -> tuple[Tensor, Tensor] | None:
    """Read concatenated token ids and the length of each prompt; ``width`` is the width of the responses."""
    prompts = data["prompts"] if "prompts" in data.keys() else None
    if prompts is not None and prompts.is_nested:
        return prompts.values(), prompts.offsets().diff()
    if "attention_mask" not in data.keys():
        return None
    if prompts is None:
        # Legacy actors receive prompt and response in one column.
        prompts = data["input_ids"][:, :-width]
    mask = data["attention_mask"][:, : prompts.shape[1]].bool()
    return prompts[mask], mask.sum(-1)


def _chosen(share: float, uids: Sequence[str] | Tensor | None) -> Tensor | None:
    """Return a (B,) bool mask of the rows to record, the same on every rank; None means all rows."""
    if share >= 1:
        return None
    if uids is None:
        raise KeyError(f"uid is not in the micro-batch that reached the loss. Set {SECTION}.share=1.")
    if isinstance(uids, Tensor):
        uids = [bytes(row).rstrip(b"\0").decode(errors="replace") for row in uids.cpu().numpy()]
    return torch.tensor([is_chosen(uid, share) for uid in uids])


def is_chosen(uid: str, share: float) -> bool:
    """Return True if the prompt ``uid`` is in the recorded ``share`` of all prompts."""
    # With a hash, the choice is the same on every rank and in every step; Python's own hash differs between processes.
    digest = hashlib.blake2b(uid.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64
