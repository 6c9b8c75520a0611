"""Seals of a worker's log-probs for pi_old or the reference policy, and of the routes that it records.

Patched function in verl 0.8.0 to 0.9.1: ``verl.workers.engine_workers.TrainingWorker.infer_batch(self, data:
TensorDict)``, which ``ActorRolloutRefWorker`` calls on its ``actor`` and ``ref``. It returns "log_probs" over each
row's prompt and response.
"""

from __future__ import annotations

import functools
from typing import Any

from tensordict import TensorDict

from verl.utils import tensordict_utils as tu

from ..batch.padding import Layout, flatten, pad_column
from ..batch.seals import key_of, seal_columns
from ..replay.batch_routes import ROUTES, hash_routes_by_row

_READ = ("prompts", "responses", "response_mask")
_MARK = "__offpolicy__"


def seal_scores() -> None:
    """Make each worker in this process seal the log-probs that the worker computes. Idempotent."""
    from verl.workers.engine_workers import TrainingWorker

    scores = TrainingWorker.infer_batch
    if getattr(scores, _MARK, False):
        return

    @functools.wraps(scores)
    def infer_batch(self: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
        # verl removes this entry from the batch. verl's dispatch passes only the rows' names; ``actor`` and ``ref``
        # receive the rows.
        is_rows = isinstance(data, TensorDict)
        of_reference = is_rows and (tu.get(data, "no_lora_adapter", False) or self.engine_config.forward_only)
        output = scores(self, data, *args, **kwargs)
        if is_rows and output is not None and "log_probs" in output.keys() and {*_READ} <= {*data.keys()}:
            name = "ref_log_prob" if of_reference else "old_log_probs"
            output[key_of(name)] = _seal(data, output["log_probs"])
        if is_rows and output is not None and ROUTES in output.keys():
            output[key_of(ROUTES)] = hash_routes_by_row(output[ROUTES])
        return output

    setattr(infer_batch, _MARK, True)
    TrainingWorker.infer_batch = infer_batch


def _seal(data: TensorDict, log_probs: Any) -> Any:
    # The rows on the host are used, because verl puts the result there.
    rows = data.select(*_READ, "attention_mask", strict=False).cpu()
    layout = Layout.of(rows)
    tokens, mask = (pad_column(rows[name], layout, name) for name in _READ[1:])
    (seal,) = seal_columns(tokens, mask, [layout.responses_of(flatten(log_probs))])
    return seal
