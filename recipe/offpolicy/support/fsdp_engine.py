"""Support replay in verl's FSDP engine: wraps two methods of the engine's instance, and copies no code.

Patched functions in verl 0.9.1, see ``verl_patches.truncated_sampling``: ``prepare_model_outputs(self, output,
output_args, micro_batch, logits_processor_func)`` turns logits into log-probs, and ``forward_backward_batch(self, data,
loss_function, forward_only=False)`` returns an update's metrics.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.tensor import DTensor

from verl.utils import tensordict_utils as tu

from ..batch.micro_batch import FULL_LOG_PROBS, LAST, ROLLOUT_LOG_PROBS, SUPPORT_SIZE, WITHHELD
from ..correction.correction_parts import SupportUnknown
from ..replay.batch_routes import TokenLayout
from .batch_supports import BatchSupports, ResponseTokens, lay_out_supports
from .support_tally import SupportTally
from .token_supports import SupportError, compute_truncated_log_probs

REPORT = "offpolicy_support_report"
"""Key of the ``SupportReport`` in the metrics of an update."""
FLAG = "offpolicy_support_replayed"
"""Key of a batch whose log-probs are taken over the support: in the forward pass of pi_old and in updates."""


class SupportEngine:
    """Replay around one engine.

    Args:
        engine: verl's engine, initialised.
        unknown: treatment of tokens whose support is unknown.
    """

    def __init__(self, engine: Any, unknown: SupportUnknown) -> None:
        self.engine, self.unknown = engine, unknown
        self._prepare, self._run = engine.prepare_model_outputs, engine.forward_backward_batch
        self._trains, self._fresh = False, True
        self._tally = SupportTally()
        engine.prepare_model_outputs = self.prepare_model_outputs
        engine.forward_backward_batch = self.forward_backward_batch

    def forward_backward_batch(self, data: TensorDict, loss_function: Any, forward_only: bool = False) -> Any:
        """Run verl's method; an update's metrics get a report.

        Raises:
            SupportError: tokens have no support, or the support of another token; raised before the optimizer steps.
        """
        self._tally, self._trains = SupportTally(), not forward_only
        output = self._run(data, loss_function, forward_only=forward_only)
        if tu.get_non_tensor_data(data, FLAG, default=False):
            report = self._tally.report()
            if self._trains:
                output["metrics"][REPORT] = [report]
                self._fresh = bool(tu.get_non_tensor_data(data, LAST, default=True))
        return output

    def prepare_model_outputs(
        self, output: Any, output_args: dict[str, Any], micro_batch: TensorDict, logits_processor_func: Any
    ) -> dict[str, Any]:
        """Prepare like verl, and renormalise log-probs over the support; the entropy stays verl's.

        Outputs of an update also get ``FULL_LOG_PROBS``, which the KL term reads, ``SUPPORT_SIZE``, which is recorded,
        and ``WITHHELD`` if tokens are removed from the policy term.
        """
        found: dict[str, Any] = self._prepare(
            output=output,
            output_args=output_args,
            micro_batch=micro_batch,
            logits_processor_func=logits_processor_func,
        )
        if not tu.get_non_tensor_data(micro_batch, FLAG, default=False):
            return found
        logits, full = output.logits, found["log_probs"]
        if isinstance(logits, DTensor):
            raise SupportError(
                "correction.support=engine: logits are split over ranks. Fix: train without tensor parallelism, or "
                "set correction.support=null."
            )
        layout = TokenLayout.of(micro_batch["input_ids"], logits[..., 0])
        supports = lay_out_supports(micro_batch, layout, logits.shape[-1])
        values = full.values()
        tokens = micro_batch["input_ids"].values()[supports.places]
        truncated = _truncate(logits, output_args, layout, supports, tokens)
        # A token's values are stored at the position before the token.
        mixed = values
        if truncated is not None:
            whole = len(supports.truncated) < len(supports.known) or (len(supports.unknown) and self.unknown == "full")
            # If no token uses the whole vocabulary, the gradient of the full log-probs is not computed.
            mixed = values if whole else values.detach()
            mixed = mixed.index_put((supports.places[supports.truncated] - 1,), truncated.to(values.dtype))
        found["log_probs"] = torch.nested.nested_tensor_from_jagged(mixed, full.offsets())
        responses = ResponseTokens.of(micro_batch, layout.offsets)
        # Before an update's first step, pi is the policy that sampled the tokens, unless the data is stale.
        mu = micro_batch[ROLLOUT_LOG_PROBS] if self._fresh else None
        self._tally.add(supports, tokens, responses, mixed.detach(), values.detach(), mu)
        if self._trains:
            found |= {FULL_LOG_PROBS: full, SUPPORT_SIZE: _spread(supports.sizes.float(), supports.places, full)}
            if self.unknown == "mask" and len(supports.unknown):
                withheld = torch.ones_like(supports.unknown, dtype=torch.bool)
                found[WITHHELD] = _spread(withheld, supports.places[supports.unknown], full)
        return found


def _spread(values: Tensor, places: Tensor, like: Any) -> Tensor:
    """Arrange values of the tokens at these positions like log-probs: nested, each one position before its token."""
    laid = values.new_zeros(like.values().shape)
    laid[places - 1] = values
    return torch.nested.nested_tensor_from_jagged(laid, like.offsets())


def _truncate(
    logits: Tensor, output_args: dict[str, Any], layout: TokenLayout, supports: BatchSupports, tokens: Tensor
) -> Tensor | None:
    """Compute the log-probs of tokens whose support is smaller than the vocabulary; None if there are none."""
    chosen = supports.truncated
    if not len(chosen):
        return None
    before = supports.places[chosen] - 1
    places = layout.places[before]
    if "temperature_rmpad" in output_args:
        temperature = output_args["temperature_rmpad"][places]
    else:
        temperature = output_args["temperature"][supports.rows[chosen]]
    flat = logits.reshape(-1, logits.shape[-1])
    return compute_truncated_log_probs(flat, places, tokens[chosen], supports.ids[chosen], temperature)


def install_support(worker: Any, unknown: SupportUnknown) -> None:
    """Make the engine of verl's actor worker renormalise its policy over the replayed support."""
    SupportEngine(worker.actor.engine, unknown)
