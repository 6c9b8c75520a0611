"""One update with on-policy distillation in this process: a batch of six rows, a teacher, and the worker's loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from recipe.offpolicy.batch.plan import PLAN, SharedPlan
from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.extensions.opd.distillation import OnPolicyDistillation
from recipe.offpolicy.extensions.opd.signal import TEACHER
from recipe.offpolicy.worker.loss import OffPolicyLoss
from recipe.offpolicy.worker.metrics import METRIC_KEY, Packet, take_packets
from tests.support import training_worker as tw
from tests.support.judged import judge
from verl.utils import tensordict_utils as tu

REWARDS = (0.0, 0.0, 1.0, 0.0, 1.0, 1.0)
UIDS = ("hard", "hard", "hard", "easy", "easy", "easy")
ELIGIBLE = (0, 1)
GATE = {"max_pass_rate": 0.4}


@dataclass
class Batch:
    """A ``TrainerBatch`` in memory."""

    rollout: tw.Rollout
    step: int = 1
    put_columns: dict[str, Tensor] = field(default_factory=dict)
    keys: tuple[str, ...] = tuple("abcdef")
    uids: tuple[str, ...] = UIDS
    sessions: tuple[str, ...] = tuple("abcdef")
    is_padding: tuple[bool, ...] = (False,) * 6
    silent: Tensor | None = None
    data_source: tuple[str, ...] = ("words",) * 6

    @property
    def scores(self) -> Tensor:
        scores = torch.zeros(self.rows("response_mask")["response_mask"].shape)
        for row, mask in enumerate(self.rollout.response_mask):
            scores[row, int(mask.nonzero()[-1])] = REWARDS[row]
        return scores

    @property
    def token_ids(self) -> list[tuple[list[int], list[int]]]:
        return [(p.tolist(), r.tolist()) for p, r in zip(self.rollout.prompts, self.rollout.responses, strict=True)]

    @property
    def advantages(self) -> Tensor:
        return pad_sequence(self.rollout.advantages, batch_first=True)

    def put_advantages(self, advantages: Tensor, *, returns: bool) -> None:
        lengths = map(len, self.rollout.responses)
        self.rollout.advantages = [row[:n] for row, n in zip(advantages, lengths, strict=True)]

    def rows(self, *names: str) -> dict[str, Any]:
        own = {name: list(self.data_source) for name in names if name == "data_source"}
        return own | {n: pad_sequence(getattr(self.rollout, n), batch_first=True) for n in names if n not in own}

    def put(self, **columns: Tensor) -> None:
        self.put_columns |= columns

    def ship(self) -> TensorDict:
        """The rows as the V1 trainer sends them, with the columns that were put, per token or per row."""
        data = self.rollout.to_tensordict()
        for name, column in self.put_columns.items():
            if column.dim() == 2:
                rows = [row[: len(ids)].clone() for row, ids in zip(column, self.rollout.responses, strict=True)]
                column = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
            data[name] = column
        tu.assign_non_tensor(data, **{PLAN: SharedPlan(1)})
        return data


def opinion(ids: Any) -> list[float]:
    """Return a log-prob for each token but the first, which depends on the token's place and id."""
    return [-0.2 * (1 + (place * 7 + token) % 11) for place, token in enumerate(ids[1:], 1)]


def rollout() -> tuple[tw.Rollout, Tensor, list[int]]:
    """Return six rows whose pi_old is pi and whose mu is close to pi; pi, flat; and the rows' lengths."""
    made = tw.make_rollout(6)
    generator = torch.Generator().manual_seed(3)
    whole = [len(p) + len(r) for p, r in zip(made.prompts, made.responses, strict=True)]
    flat = -2 * torch.rand(sum(whole), generator=generator) - 0.1
    rows = torch.nested.nested_tensor_from_jagged(flat, torch.tensor([0, *whole]).cumsum(0)).unbind()
    made.old_log_probs = [row[len(p) - 1 : -1] for row, p in zip(rows, made.prompts, strict=True)]
    made.rollout_log_probs = [row + 0.2 * torch.randn(row.shape, generator=generator) for row in made.old_log_probs]
    return made, flat, whole


class Run:
    """One update.

    Attributes:
        opd: the trainer's half.
        batch: what it saw and shipped.
        advantages: (n, T) after it.
    """

    def __init__(self, url: str, mode: str, *, step: int = 1, sources: Any = ("words",) * 6, **changes: Any) -> None:
        settings = {
            "mode": mode,
            "teacher": {"url": url},
            "eligible": GATE,
            "scale": "none" if mode == "advantage" else "std",
        }
        self.opd = OnPolicyDistillation("opd", settings | changes)
        self.made, self.flat, self.whole = rollout()
        self.batch = Batch(self.made, step, data_source=sources)
        self.opd.begin(None)  # type: ignore[arg-type]
        self.base = pad_sequence(self.made.advantages, batch_first=True)
        try:
            self.opd.on_rollout(self.batch)
            shaped = self.opd.shape_advantages(self.batch, self.base.clone())
        finally:
            self.opd.end()
        self.advantages = self.base if shaped is None else shaped

    def data(self) -> TensorDict:
        self.batch.put_advantages(self.advantages, returns=False)
        data = self.batch.ship()
        data["attention_mask"] = torch.ones_like(data["input_ids"])  # verl 0.7.1 looks it up
        tokens = int(data["response_mask"].values().sum())
        tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=tokens, global_batch_size=6)
        return data

    def update(
        self,
        spec: CorrectionSpec,
        change: Callable[[TensorDict], None] = lambda data: None,
        *,
        agg_mode: str = "token-mean",
        **settings: Any,
    ) -> tuple[Tensor, Packet]:
        """Return the gradient at the flat log-probs, and the packet; ``settings`` are settings of the loss."""
        leaf = self.flat.clone().requires_grad_()
        offsets = torch.tensor([0, *self.whole]).cumsum(0)
        data = self.data()
        change(data)
        loss = OffPolicyLoss(
            spec, tw.actor_config(loss_agg_mode=agg_mode), **settings, extensions={"opd": self.opd.worker()}
        )
        value, metrics = loss({"log_probs": torch.nested.nested_tensor_from_jagged(leaf, offsets)}, data)
        value.backward()
        (packet,) = take_packets({METRIC_KEY: metrics[METRIC_KEY]})
        assert leaf.grad is not None
        return leaf.grad, packet

    def judge(self, packet: Packet) -> dict[str, float]:
        return judge(self.opd, [packet.reports["opd"]])

    def by_token(self, flat: Tensor) -> list[Tensor]:
        """Split flat values into the responses of the rows."""
        rows = torch.split(flat, self.whole)
        return [row[len(p) - 1 : -1] for row, p in zip(rows, self.made.prompts, strict=True)]


# Faults between trainer and worker -------------------------------------------------------------------------------


def drop(data: TensorDict) -> None:
    del data[TEACHER]


def round_off(data: TensorDict) -> None:
    data[TEACHER] = data[TEACHER].to(torch.bfloat16)


def permute(data: TensorDict) -> None:
    """The first two rows exchange the teacher's values of their first tokens."""
    rows = list(data[TEACHER].unbind())
    a, b = rows[0].clone(), rows[1].clone()
    width = min(len(a), len(b))
    rows[0][:width], rows[1][:width] = b[:width], a[:width]
    data[TEACHER] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
