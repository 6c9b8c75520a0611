"""One update of verl's own asynchronous V1 trainer with rows of any age and with extensions, without Ray.

verl pads, balances, estimates and updates; TransferQueue is a dictionary, and the workers are our loss on generated
log-probs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from tensordict import NonTensorStack, TensorDict
from torch import Tensor

from recipe.offpolicy.batch.declared_keys import read_shipped_defaults
from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.extensions.process_reward.prefix_scorer import FIELD
from recipe.offpolicy.worker.loss import OffPolicyLoss
from recipe.offpolicy.worker.metrics import METRIC_KEY
from tests.support import training_worker as tw
from verl.utils import tensordict_utils as tu

STEP = 6
FLAG = "offpolicy_flag"
"""An add-on's flag for the workers."""
Change = Callable[[list[TensorDict]], list[TensorDict]]


class RowQueue:
    """TransferQueue: the stored values of each row, by key."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, Any]] = {}

    def kv_batch_put(self, keys: Sequence[str], partition_id: str, fields: Any = None, tags: Any = None) -> Any:
        for place, key in enumerate(keys):
            for name, column in () if fields is None else fields.items():
                values = column.unbind() if isinstance(column, Tensor) else list(column)
                self.rows.setdefault(key, {})[name] = values[place]
        # As TransferQueue's: new metadata, which knows nothing of what was told with the batch before.
        return None if self.meta is None else replace(self.meta, extra_info={})

    def kv_clear(self, keys: Sequence[str], partition_id: str) -> None:
        for key in keys:
            del self.rows[key]

    def kv_batch_get(self, keys: Sequence[str], partition_id: str, select_fields: Any = None) -> TensorDict:
        names = select_fields or [*self.rows[keys[0]]]
        columns = {}
        for name in names:
            values = [self.rows[key].get(name) for key in keys]
            if any(value is None for value in values):
                continue
            if isinstance(values[0], Tensor):
                nested = values[0].dim() > 0
                columns[name] = (
                    torch.nested.as_nested_tensor(values, layout=torch.jagged) if nested else torch.stack(values)
                )
            else:
                columns[name] = NonTensorStack(*values)
        return TensorDict(columns, batch_size=len(keys))

    meta: Any = None


@dataclass
class Case:
    """A batch with one number per row and two rows per prompt.

    Attributes:
        ages: in versions.
        change: what somebody does to the micro-batches on their way to the loss.
    """

    ages: Sequence[int]
    lengths: Sequence[int]
    scores: Sequence[float]
    sections: Mapping[str, Mapping[str, Any]]
    eta: float = 1
    too_old: str = "mask"
    mini_batch: int = 4
    epochs: int = 1
    ranks: int = 1
    correction: Mapping[str, Any] = field(default_factory=dict)
    change: Change = field(default=lambda parts: parts)


def update(case: Case) -> dict[str, Any]:
    """Run the update and return its metrics; ``left`` contains the keys of the rows that had left, and the flag."""
    with pytest.MonkeyPatch.context() as patched:
        run = _Run(case, patched)
        try:
            return run.train()
        finally:
            run.made.add_ons.end()


class _Run:
    def __init__(self, case: Case, patched: pytest.MonkeyPatch) -> None:
        from recipe.offpolicy.trainer import corrected_v1
        from recipe.offpolicy.trainer.corrected_run import choose_v1
        from recipe.offpolicy.trainer.corrected_v1 import CorrectedV1
        from recipe.offpolicy.trainer.supervision import Supervision
        from recipe.offpolicy.worker.verl_workers import adopt
        from verl.trainer.ppo import padding_utils
        from verl.trainer.ppo.v1 import trainer_base
        from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync

        self.case, self.queue = case, RowQueue()
        for module in (trainer_base, padding_utils, corrected_v1):
            patched.setattr(module, "tq", self.queue)
        for name in ("kv_batch_get", "kv_batch_put"):
            patched.setattr(f"transfer_queue.{name}", getattr(self.queue, name))
        self.trainer: Any = object.__new__(PPOTrainerSeparateAsync)
        self.trainer.config = OmegaConf.create(self._config())
        self.trainer.global_steps, self.trainer.parameter_sync_step = STEP, 1
        self.trainer.use_critic = False
        self.trainer.tokenizer = SimpleNamespace(eos_token_id=1)
        workers = SimpleNamespace(
            _dispatch_info={"actor": [*range(case.ranks)]},
            update_actor=self._update,
            compute_log_prob=self._score,
            set_loss_fn=lambda loss: setattr(self, "loss", loss),
        )
        self.trainer.actor_rollout_wg = workers
        self.made: Any = CorrectedV1(self.trainer, choose_v1)
        spec = CorrectionSpec.from_mapping(case.correction)
        self.made.add_ons.begin(self.trainer.config)
        self.made.supervision = Supervision(spec, self.trainer.config, self.made.add_ons)
        self.made.shadows = {}
        patched.setattr(self.made.add_ons, "batch_flags", lambda: {FLAG: True})
        self.made.recording = SimpleNamespace(
            announce_update=lambda plan, **kwargs: plan, write_proof=lambda *args: None, finish=lambda patience: None
        )
        patched.setattr(self.made, "_hand_over_loss", lambda: None)
        self.made.verls._compute_old_log_prob = lambda batch, metrics: batch
        self.loss = OffPolicyLoss(spec, tw.actor_config(), prove=True, extensions=self.made.add_ons.worker_halves())
        adopt(workers, self.made._update_and_collect)

    def _config(self) -> dict[str, Any]:
        case = self.case
        staleness = {"eta": case.eta, "too_old": case.too_old}
        return {
            "data": {"train_batch_size": 4, "max_response_length": 64},
            "trainer": {"use_v1": True, "v1": {"trainer_mode": "separate_async"}, "critic_warmup": 0},
            "algorithm": {
                "adv_estimator": "grpo",
                "gamma": 1.0,
                "lam": 1.0,
                "use_kl_in_reward": False,
                "norm_adv_by_std_in_grpo": True,
            },
            "actor_rollout_ref": {
                "rollout": {"n": 2, "temperature": 1.0, "dtype": "float32"},
                "actor": {
                    "strategy": "fsdp2",
                    "ppo_mini_batch_size": case.mini_batch // 2,
                    "ppo_epochs": case.epochs,
                    "data_loader_seed": 1,
                    "shuffle": False,
                    "calculate_entropy": False,
                    "entropy_coeff": 0.0,
                    "loss_agg_mode": "token-mean",
                },
            },
            "offpolicy": {
                "staleness": read_shipped_defaults("staleness") | staleness,
                "allow_identical_log_probs": False,
                "allow_unrelated_log_probs": False,
            },
            **copy.deepcopy(dict(case.sections)),
        }

    def train(self) -> dict[str, Any]:
        from transfer_queue import KVBatchMeta

        case, generator = self.case, torch.Generator().manual_seed(1)
        keys, tags = [], []
        for row, (age, length, score) in enumerate(zip(case.ages, case.lengths, case.scores, strict=True)):
            key = f"u{row // 2}_{row % 2}_0"
            version = STEP - 1 - age
            span = {"min_global_steps": version, "max_global_steps": version}
            pi = -3 * torch.rand(length, generator=generator) - 0.1
            responses = torch.randint(3, 30, (length,), generator=generator)
            prompts = torch.full((3,), 3 + row // 2)
            values = {
                "ends": [length],
                "values": [-2.0, -1.0 - row / 9],
                "version": version,
                "answers": [([4], 1)],
                "best": [0, 0],
            }
            scores = torch.zeros(length)
            scores[-1] = score
            self.queue.rows[key] = {
                "prompts": prompts, "responses": responses, "input_ids": torch.cat([prompts, responses]),
                "attention_mask": torch.ones(3 + length, dtype=torch.int64), "position_ids": torch.arange(3 + length),
                "response_mask": torch.ones(length, dtype=torch.int64),
                "loss_mask": torch.ones(length, dtype=torch.int64), "rm_scores": scores, "old_log_probs": pi,
                "rollout_log_probs": pi + 0.02 * torch.randn(length, generator=generator), "uid": f"u{row // 2}",
                "extra_fields": span | {FIELD: values}, "multi_modal_inputs": {},
            }  # fmt: skip
            keys.append(key)
            tags.append(
                span | {"global_steps": version + 1, "prompt_len": 3, "response_len": length, "seq_len": 3 + length}
            )
        batch = KVBatchMeta(keys=keys, tags=tags, partition_id="train", extra_info={})
        self.queue.meta = batch
        metrics: dict[str, Any] = {}
        self.made.add_ons.next_batch(SimpleNamespace(step=STEP, uids=[]))
        batch = self.queue.meta = self.trainer._balance_batch(batch, metrics)
        # Padding gets no pi_old from the rollout.
        for key in batch.keys:
            row = self.queue.rows[key]
            row["old_log_probs"] = row["old_log_probs"][: len(row["responses"])]
        batch = self.trainer._compute_old_log_prob(batch, metrics)
        batch = self.trainer._compute_advantage(batch, metrics)
        self.left: list[str] = []
        self.trainer._update_actor(batch, metrics)
        return metrics | {"left": self.left, "flagged": self.flagged}

    def _update(self, batch: Any) -> dict[str, Any]:
        """Do what the engines of ``ranks`` workers do: each takes its share, in mini-batches of micro-batches, epoch by
        epoch.
        """
        case, packets = self.case, []
        self.left = [key for key in batch.keys if not self.queue.rows[key]["response_mask"].any()]
        self.flagged = batch.extra_info.get(FLAG, False)
        told, share = dict(batch.extra_info), len(batch.keys) // case.ranks
        mini = case.mini_batch // case.ranks
        for first in [*range(0, share, mini)] * case.epochs:
            # verl's engines count the tokens of a mini-batch over all ranks.
            starts = [rank * share + first for rank in range(case.ranks)]
            of_ranks = [[batch.keys[at : at + 2] for at in range(start, start + mini, 2)] for start in starts]
            whole = [[self.queue.kv_batch_get(keys, "train") for keys in parts] for parts in of_ranks]
            tokens = sum(int(part["response_mask"].values().sum()) for parts in whole for part in parts)
            for part in (part for parts in whole for part in case.change(parts)):
                tu.assign_non_tensor(part, dp_size=case.ranks, batch_num_tokens=max(tokens, 1), **told)
                packets.append(self._run(part))
        return {"metrics": {METRIC_KEY: packets, "mfu": 0.0}}

    def _score(self, batch: Any) -> None:
        """The trainer's own forward pass: each token has log-prob -1.5, also an answer after a prefix."""
        for key in batch.keys:
            row = self.queue.rows[key]
            row["log_probs"] = torch.full((len(row["input_ids"]),), -1.5)

    def _run(self, data: TensorDict) -> Any:
        flat = []
        for prompt, old in zip(data["prompts"].unbind(), data["old_log_probs"].unbind(), strict=True):
            flat.append(torch.cat([torch.full((len(prompt) - 1,), -1.0), old, torch.zeros(1)]))
        offsets = torch.tensor([0, *map(len, flat)]).cumsum(0)
        leaf = torch.cat(flat).requires_grad_()
        value, metrics = self.loss({"log_probs": torch.nested.nested_tensor_from_jagged(leaf * 1, offsets)}, data)
        value.backward()
        return metrics[METRIC_KEY]
