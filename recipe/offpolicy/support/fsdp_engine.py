"""Support replay in verl's FSDP engine, which wraps two methods of the engine's instance and counts replays.

Patched functions in verl 0.9.1, see ``verl_patches.rollout_seams``: ``prepare_model_outputs(self, output,
output_args, micro_batch, logits_processor_func)`` turns logits into log-probs, and ``forward_backward_batch(self, data,
loss_function, forward_only=False)`` returns an update's metrics.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.tensor import DTensor

from verl.utils import tensordict_utils as tu

from ..batch.micro_batch import FULL_LOG_PROBS, LAST, ROLLOUT_LOG_PROBS, SUPPORT_SIZE, WITHHELD
from ..correction.correction_parts import SupportUnknown
from ..replay.batch_routes import TokenLayout
from .token_supports import (
    MASS,
    BatchSupports,
    ResponseTokens,
    SupportError,
    compute_truncated_log_probs,
    find_inside,
    lay_out_supports,
)

_COUNTS = ("tokens", "lacking", "known", "members", "outside", "after", "before", "compared", "other")
_FIX = "Fix: find the code that changes them between rollout server and trainer, or set correction.support=null."


@dataclass(frozen=True)
class SupportReport:
    """Report of one rank on the supports of one mini-batch, in plain Python values.

    Attributes:
        tokens: number of response tokens in the loss.
        known: number of these tokens whose support is known.
        members: total number of ids in these supports.
        largest: number of ids in the largest of these supports.
        compared: number of rows whose checksums were compared.
        bytes: bytes of the supports, as received.
        least_mass, greatest_mass: minimum and maximum of mu's sum over known supports.
        unknown_mass: sum of mu over the ids returned for tokens of unknown support.
        k3_tokens: number of tokens with a known support in an update's first mini-batch.
        k3, k3_without: sums of k3(mu, pi) over these tokens, with pi normalised over the support and over the
            vocabulary.
    """

    tokens: int
    known: int
    members: int
    largest: int
    compared: int
    bytes: int
    least_mass: float
    greatest_mass: float
    unknown_mass: float
    k3_tokens: int
    k3: float
    k3_without: float


@dataclass
class SupportTally:
    """Counts of replayed supports, summed over micro-batches."""

    bytes: int = 0
    least_mass: float = 1.0
    greatest_mass: float = 1.0
    unknown_mass: float = 0.0
    _counts: list[Tensor] = field(default_factory=list)
    _largest: list[Tensor] = field(default_factory=list)
    _k3: list[Tensor] = field(default_factory=list)

    def add(
        self,
        supports: BatchSupports,
        tokens: Tensor,
        responses: ResponseTokens,
        truncated: Tensor,
        full: Tensor,
        mu: Tensor | None,
    ) -> None:
        """Add the counts of one forward.

        Args:
            tokens: (n,) int64, at the supports' positions.
            truncated, full: (total,) log-probs over the support and over the vocabulary, detached, each one position
                before its token.
            mu: log mu, as a column of the responses; None if the batch has no such column.
        """
        self.bytes += supports.bytes
        self.least_mass = min(self.least_mass, supports.masses[0])
        self.greatest_mass = max(self.greatest_mass, supports.masses[1])
        self.unknown_mass += supports.unknown_mass
        trained, noted, known = (torch.zeros_like(full, dtype=torch.bool) for _ in range(3))
        # Padding has position 0, which belongs to a prompt.
        trained.index_put_((responses.places,), responses.trained)
        noted[supports.places] = True
        known[supports.places[supports.known]] = True
        there = trained[supports.places] & (supports.sizes > 0)
        inside = find_inside(tokens, supports.ids)
        after, before = (find_inside(tokens.roll(shift), supports.ids) for shift in (-1, 1))
        compared = supports.compared & torch.zeros_like(supports.compared).index_put_(
            (supports.rows,), torch.ones_like(supports.rows, dtype=torch.bool)
        )
        self._counts.append(
            torch.stack(
                [
                    trained.sum(),
                    (trained & ~noted).sum(),
                    there.sum(),
                    (supports.sizes * there).sum(),
                    (there & ~inside).sum(),
                    (there & ~after).sum(),
                    (there & ~before).sum(),
                    compared.sum(),
                    (compared & (supports.hash_rows(tokens) != supports.checksums)).sum(),
                ]
            )
        )
        self._largest.append(torch.cat([supports.sizes * there, supports.sizes.new_zeros(1)]).max())
        if mu is not None:
            places = (responses.places - 1).clamp(min=0)
            sampled = responses.read(mu)
            counted = responses.trained & known[responses.places] & torch.isfinite(sampled)
            pi = torch.stack([truncated[places], full[places]]).double()
            gap = torch.where(counted, pi - sampled.double(), 0.0)
            self._k3.append(torch.cat([(gap.expm1() - gap).sum(-1), counted.sum()[None].double()]))

    def report(self) -> SupportReport:
        """Copy the counts to the host.

        Raises:
            SupportError: tokens have no support, or have the support of another token.
        """
        counts = torch.stack(self._counts).sum(0).tolist() if self._counts else [0] * len(_COUNTS)
        found = dict(zip(_COUNTS, counts, strict=True))
        if found["lacking"]:
            raise SupportError(
                f"{found['lacking']} of {found['tokens']} tokens reached the loss without a support. {_FIX}"
            )
        if found["other"]:
            raise SupportError(
                f"the supports or tokens of {found['other']} of {found['compared']} sequences differ from what the "
                f"rollout servers' client recorded: their checksums differ. {_FIX}"
            )
        if found["outside"]:
            nearest = min("after", "before", key=found.__getitem__)
            whose = (
                f"the supports fit the token {nearest} in all but {found[nearest]} cases, so they are off by one token"
                if found[nearest] < found["outside"] / 2
                else "the supports belong to another sequence, or come from another engine"
            )
            raise SupportError(
                f"{found['outside']} of {found['known']} tokens are not in their own support: {whose}. Fix: give each "
                "token the support from which it was sampled, or set correction.support=null."
            )
        if max(1.0 - self.least_mass, self.greatest_mass - 1.0) > MASS:
            raise SupportError(
                f"mu sums to {self.least_mass:.4f} to {self.greatest_mass:.4f} over the supports, but must sum to 1. "
                f"Fix: set actor_rollout_ref.rollout.logprobs_mode=processed_logprobs, or correction.support=null."
            )
        k3 = torch.stack(self._k3).sum(0).tolist() if self._k3 else [0.0, 0.0, 0.0]
        return SupportReport(
            **{name: found[name] for name in ("tokens", "known", "members", "compared")},
            largest=int(torch.stack(self._largest).max()) if self._largest else 0,
            bytes=self.bytes,
            least_mass=self.least_mass,
            greatest_mass=self.greatest_mass,
            unknown_mass=self.unknown_mass,
            k3_tokens=int(k3[2]),
            k3=k3[0],
            k3_without=k3[1],
        )


REPORT = "offpolicy_support_report"
"""Key of the ``SupportReport`` in the metrics of an update."""
FLAG = "offpolicy_support_replayed"
"""Key that marks a batch whose log-probs are normalised over the support: in forward passes of pi_old and in
updates."""


class SupportEngine:
    """Support replay for one engine, whose methods it wraps.

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
        """Run verl's method, and add a report to an update's metrics.

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
        """Prepare outputs as verl does, and renormalise log-probs over the support; the entropy is verl's own.

        Outputs of an update also contain ``FULL_LOG_PROBS``, which the KL term reads, ``SUPPORT_SIZE``, which is
        recorded, and ``WITHHELD`` if tokens are removed from the policy term.
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
                "correction.support=engine: the logits are split over ranks. Fix: train without tensor parallelism, "
                "or set correction.support=null."
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
