"""Log-probs of the likeliest tokens in verl's FSDP engine: wraps two methods of the engine's instance, copies nothing.

The patched functions are those of ``support.fsdp_engine``.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.tensor import DTensor

from verl.utils import tensordict_utils as tu

from ..batch.likeliest_tokens import LOG_PROBS, ROLLOUT_LOG_PROBS
from ..batch.micro_batch import ROLLOUT_LOG_PROBS as MU
from ..replay.batch_routes import TokenLayout
from ..support.batch_supports import BatchSupports, ResponseTokens, lay_out_supports
from .centering_tally import CenteringError, CenteringTally

REPORT = "offpolicy_centering_report"
"""Key of the ``CenteringReport`` in the metrics of an update."""
FLAG = "offpolicy_centered"
"""Key of a batch whose rows have likeliest tokens."""


class CenteringEngine:
    """Score centering around one engine.

    Args:
        engine: verl's engine, initialised.
    """

    def __init__(self, engine: Any) -> None:
        self._prepare, self._run = engine.prepare_model_outputs, engine.forward_backward_batch
        self._trains = False
        self._tally = CenteringTally()
        engine.prepare_model_outputs = self.prepare_model_outputs
        engine.forward_backward_batch = self.forward_backward_batch

    def forward_backward_batch(self, data: TensorDict, loss_function: Any, forward_only: bool = False) -> Any:
        """Run verl's method; an update's metrics get a report.

        Raises:
            CenteringError: tokens have no likeliest tokens, or those of others; raised before the optimizer steps.
        """
        self._tally, self._trains = CenteringTally(), not forward_only
        output = self._run(data, loss_function, forward_only=forward_only)
        if self._trains and tu.get_non_tensor_data(data, FLAG, default=False):
            output["metrics"][REPORT] = [self._tally.report()]
        return output

    def prepare_model_outputs(
        self, output: Any, output_args: dict[str, Any], micro_batch: TensorDict, logits_processor_func: Any
    ) -> dict[str, Any]:
        """Prepare like verl; outputs of an update also get the log-probs of the likeliest tokens."""
        found: dict[str, Any] = self._prepare(
            output=output,
            output_args=output_args,
            micro_batch=micro_batch,
            logits_processor_func=logits_processor_func,
        )
        if not self._trains or not tu.get_non_tensor_data(micro_batch, FLAG, default=False):
            return found
        logits, log_probs = output.logits, found["log_probs"]
        if isinstance(logits, DTensor):
            raise CenteringError(
                "correction.centering: logits are split over ranks. Fix: train without tensor parallelism, or set "
                "correction.centering=null."
            )
        layout = TokenLayout.of(micro_batch["input_ids"], logits[..., 0])
        likeliest = lay_out_supports(micro_batch, layout, logits.shape[-1])
        tokens = micro_batch["input_ids"].values()[likeliest.places]
        responses = ResponseTokens.of(micro_batch, layout.offsets)
        values = log_probs.values()
        laid = compute_log_probs(logits, output_args, layout, likeliest, tokens, values)
        self._tally.add(likeliest, tokens, responses, micro_batch[MU], values.detach(), laid.detach())
        # The loss gets the sampled log-probs as a tensor of their own, at which the proof sees its gradient alone.
        found["log_probs"] = _nest(values.view_as(values), log_probs)
        found[LOG_PROBS] = _nest(_spread(laid, likeliest, len(values)), log_probs)
        mu = likeliest.log_probs.to(laid.device)
        found[ROLLOUT_LOG_PROBS] = _nest(_spread(mu, likeliest, len(values), -torch.inf), log_probs)
        return found


def _nest(values: Tensor, like: Any) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(values, like.offsets())


def _spread(values: Tensor, likeliest: BatchSupports, total: int, fill: float = 0.0) -> Tensor:
    """Put values of the tokens, (n, K), one position before each: (total, K)."""
    if not values.shape[1]:
        # Rows without likeliest tokens; the tally says so at the end of the mini-batch.
        values = torch.nn.functional.pad(values, (0, 1), value=fill)
    laid = values.new_full((total, values.shape[1]), fill)
    return laid.index_put((likeliest.places - 1,), values)


def compute_log_probs(
    logits: Tensor,
    output_args: dict[str, Any],
    layout: TokenLayout,
    likeliest: BatchSupports,
    tokens: Tensor,
    log_probs: Tensor,
) -> Tensor:
    """Compute log p of the likeliest tokens: the sampled token's log-prob plus the difference of their logits.

    The forward pass makes no further tensor of vocabulary size, unless verl's log-probs have less than 32 bits; the
    gradient of the logits is one.

    Args:
        logits: (..., V) of the whole forward.
        tokens: (n,) int64, the sampled tokens.
        log_probs: (total,) log p of all tokens, each one position before its token.

    Returns:
        (n, K) float32 or wider, differentiable; 0 where there is no token.
    """
    before = likeliest.places - 1
    places = layout.places[before]
    if "temperature_rmpad" in output_args:
        temperature = output_args["temperature_rmpad"][places]
    else:
        temperature = output_args["temperature"][likeliest.rows]
    dtype = torch.promote_types(logits.dtype, torch.float32)
    # In the logits' dtype, as verl divides: a difference in rounding would change the mass of all likeliest tokens.
    scale = temperature.clamp(min=1e-8).to(logits.dtype)[:, None]
    flat = logits.reshape(-1, logits.shape[-1])
    ids = torch.cat([tokens[:, None], likeliest.ids.clamp(min=0)], 1)
    chosen = (flat[places[:, None], ids] / scale).to(dtype)
    if log_probs.dtype == dtype:
        norm = chosen[:, :1] - log_probs[before][:, None]
    else:
        norm = (flat[places] / scale).to(dtype).logsumexp(-1, keepdim=True)
    return torch.where(likeliest.ids >= 0, chosen[:, 1:] - norm, 0.0)


def install_centering(worker: Any) -> None:
    """Make the engine of verl's actor worker compute the log-probs of the likeliest tokens."""
    CenteringEngine(worker.actor.engine)
