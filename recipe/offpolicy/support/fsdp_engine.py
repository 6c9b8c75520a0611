"""Reads the likeliest tokens of each position in verl's FSDP engine, and renormalises over them (support replay).

Patched functions in verl 0.9.1, see ``verl_patches.rollout_seams``: ``prepare_model_outputs(self, output,
output_args, micro_batch, logits_processor_func)`` turns logits into log-probs, and ``forward_backward_batch(self, data,
loss_function, forward_only=False)`` returns an update's metrics.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.tensor import DTensor

from verl.utils import tensordict_utils as tu

from ..batch.micro_batch import FULL_LOG_PROBS, LAST, ROLLOUT_LOG_PROBS, SUPPORT_SIZE, WITHHELD
from ..correction.correction_parts import SupportUnknown
from ..replay.batch_routes import TokenLayout
from .support_settings import SUPPORT
from .token_supports import (
    MASS,
    BatchSupports,
    ResponseTokens,
    SupportError,
    compute_truncated_log_probs,
    find_inside,
    lay_out_supports,
)


@dataclass(frozen=True)
class Forward:
    """A forward pass over a micro-batch, with the engine's likeliest tokens at each of the n sampled positions.

    Attributes:
        logits: (positions, V) of the whole forward pass.
        supports: the likeliest tokens.
        tokens: (n,) int64, the sampled tokens.
        places: (n,) int64, the row of ``logits`` from which each token was sampled.
        temperature: (n,) float.
        responses: positions of the response tokens.
        trained: (total,) bool, the response mask over all tokens of the micro-batch.
    """

    logits: Tensor
    supports: BatchSupports
    tokens: Tensor
    places: Tensor
    temperature: Tensor
    responses: ResponseTokens
    trained: Tensor

    @classmethod
    def of(cls, logits: Tensor, output_args: dict[str, Any], micro_batch: TensorDict) -> Forward:
        """Read the forward pass of verl's engine."""
        layout = TokenLayout.of(micro_batch["input_ids"], logits[..., 0])
        supports = lay_out_supports(micro_batch, layout, logits.shape[-1])
        places = layout.places[supports.places - 1]
        packed = output_args.get("temperature_rmpad")
        responses = ResponseTokens.of(micro_batch, layout.offsets)
        # Padding has position 0, which belongs to a prompt.
        trained = torch.zeros_like(layout.places, dtype=torch.bool).index_put_((responses.places,), responses.trained)
        return cls(
            logits=logits.reshape(-1, logits.shape[-1]),
            supports=supports,
            tokens=micro_batch["input_ids"].values()[supports.places],
            places=places,
            temperature=output_args["temperature"][supports.rows] if packed is None else packed[places],
            responses=responses,
            trained=trained,
        )


class LikeliestTally:
    """Counts of the likeliest tokens in the loss, summed over the micro-batches of a mini-batch.

    Attributes:
        bytes: bytes of the likeliest tokens, as received.
    """

    key: ClassVar[str] = SUPPORT
    error: ClassVar[type[RuntimeError]] = SupportError
    own, shipped = "a support", "supports or tokens"
    """Names used in errors: the data that each token needs, and the data that the checksums cover."""

    def __init__(self) -> None:
        self.bytes = 0
        self._counts: list[dict[str, Tensor]] = []

    def count(self, forward: Forward, noted: Tensor, **counts: Tensor) -> None:
        """Add the counts of one forward pass.

        Args:
            noted: (n,) bool, the sampled tokens for which likeliest tokens arrived.
            counts: further counts, () int64 each.
        """
        supports = forward.supports
        self.bytes += supports.bytes
        lacking = forward.trained.clone()
        lacking[supports.places] &= ~noted  # a mask as index would synchronise with the device
        seen = torch.zeros_like(supports.compared)
        seen[supports.rows] = True
        compared = supports.compared & seen
        other = compared & (supports.hash_rows(forward.tokens) != supports.checksums)
        sets = {"tokens": forward.trained, "lacking": lacking, "compared": compared, "other": other}
        self._counts.append({name: each.sum() for name, each in sets.items()} | counts)

    def total(self) -> Counter[str]:
        """Copy the counts to the host; without a forward pass, all counts are 0.

        Raises:
            RuntimeError: ``error``, if likeliest tokens are missing or have changed.
        """
        found: Counter[str] = Counter()
        if self._counts:
            sums = torch.stack([torch.stack(list(each.values())) for each in self._counts]).sum(0)
            found.update(dict(zip(self._counts[0], sums.tolist(), strict=True)))
        wrong = ""
        if found["lacking"]:
            wrong = f"{found['lacking']} of {found['tokens']} tokens reached the loss without {self.own}."
        elif found["other"]:
            wrong = (
                f"the {self.shipped} of {found['other']} of {found['compared']} sequences changed after the rollout "
                "servers' client recorded them: their checksums differ."
            )
        if wrong:
            fix = (
                f"find the code that drops or changes them between rollout server and trainer, or set {self.key}=null."
            )
            raise self.error(f"{wrong} Fix: {fix}")
        return found


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


class SupportTally(LikeliestTally):
    """Counts of replayed supports, summed over micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self._masses: list[tuple[float, float, float]] = [(1.0, 1.0, 0.0)]
        self._largest: list[Tensor] = []
        self._k3: list[Tensor] = []

    def add(self, forward: Forward, truncated: Tensor, full: Tensor, mu: Tensor | None) -> None:
        """Add the counts of one forward pass.

        Args:
            truncated, full: (total,) log-probs over the support and over the vocabulary, detached, each one position
                before its token.
            mu: log mu, as a column of the responses; None if the batch has no such column.
        """
        supports, responses = forward.supports, forward.responses
        self._masses += supports.masses
        there = forward.trained[supports.places] & (supports.sizes > 0)
        shifted = {"outside": 0, "after": -1, "before": 1}
        outside = {
            name: (there & ~find_inside(forward.tokens.roll(by), supports.ids)).sum() for name, by in shifted.items()
        }
        sizes = supports.sizes * there
        self.count(forward, torch.ones_like(there), known=there.sum(), members=sizes.sum(), **outside)
        self._largest.append(torch.cat([sizes, sizes.new_zeros(1)]).max())
        if mu is not None:
            known = torch.zeros_like(forward.trained)
            known[supports.places[supports.known]] = True
            places = (responses.places - 1).clamp(min=0)
            sampled = responses.read(mu)
            counted = responses.trained & known[responses.places] & torch.isfinite(sampled)
            pi = torch.stack([truncated[places], full[places]]).double()
            gap = torch.where(counted, pi - sampled.double(), 0.0)
            self._k3.append(torch.cat([(gap.expm1() - gap).sum(-1), counted.sum()[None].double()]))

    def report(self) -> SupportReport:
        """Copy the counts to the host.

        Raises:
            SupportError: a token has no support, or the support of another token.
        """
        found = self.total()
        if found["outside"]:
            nearest = min("after", "before", key=found.__getitem__)
            whose = (
                f"the supports match the token {nearest} in all but {found[nearest]} cases, so they are off by one "
                "token"
                if found[nearest] < found["outside"] / 2
                else "the supports belong to another sequence, or come from another engine"
            )
            raise SupportError(
                f"{found['outside']} of {found['known']} tokens are not in their own support: {whose}. Fix: give each "
                "token the support from which it was sampled, or set correction.support=null."
            )
        least, greatest, unknown = zip(*self._masses, strict=True)
        if max(1.0 - min(least), max(greatest) - 1.0) > MASS:
            raise SupportError(
                f"mu sums to {min(least):.4f} to {max(greatest):.4f} over the supports, but must sum to 1. "
                f"Fix: set actor_rollout_ref.rollout.logprobs_mode=processed_logprobs, or correction.support=null."
            )
        k3 = torch.stack(self._k3).sum(0).tolist() if self._k3 else [0.0, 0.0, 0.0]
        return SupportReport(
            **{name: found[name] for name in ("tokens", "known", "members", "compared")},
            largest=int(torch.stack(self._largest).max()) if self._largest else 0,
            bytes=self.bytes,
            least_mass=min(least),
            greatest_mass=max(greatest),
            unknown_mass=sum(unknown),
            k3_tokens=int(k3[2]),
            k3=k3[0],
            k3_without=k3[1],
        )


REPORT = "offpolicy_support_report"
"""Key of the ``SupportReport`` in the metrics of an update."""
FLAG = "offpolicy_support_replayed"
"""Key that marks a batch whose log-probs are normalised over the support: in forward passes of pi_old and in
updates."""


class LikeliestEngine:
    """Wraps the methods of one engine to read the likeliest tokens in each forward pass of a flagged batch.

    Args:
        engine: verl's engine, initialised.
    """

    flag, report, tally = FLAG, REPORT, SupportTally
    """Key of a flagged batch, key of a report in an update's metrics, and class of the counts."""

    def __init__(self, engine: Any) -> None:
        self._prepare, self._run = engine.prepare_model_outputs, engine.forward_backward_batch
        self._trains, self._fresh = False, True
        self._tally: Any = self.tally()
        engine.prepare_model_outputs = self.prepare_model_outputs
        engine.forward_backward_batch = self.forward_backward_batch

    def forward_backward_batch(self, data: TensorDict, loss_function: Any, forward_only: bool = False) -> Any:
        """Run verl's method, and add a report to an update's metrics.

        Raises:
            RuntimeError: the error of the ``tally``, before the optimizer steps.
        """
        self._tally, self._trains = self.tally(), not forward_only
        output = self._run(data, loss_function, forward_only=forward_only)
        if tu.get_non_tensor_data(data, self.flag, default=False):
            report = self._tally.report()
            if self._trains:
                output["metrics"][self.report] = [report]
                self._fresh = bool(tu.get_non_tensor_data(data, LAST, default=True))
        return output

    def prepare_model_outputs(
        self, output: Any, output_args: dict[str, Any], micro_batch: TensorDict, logits_processor_func: Any
    ) -> dict[str, Any]:
        """Prepare the outputs as verl does, and apply ``change_outputs``."""
        found: dict[str, Any] = self._prepare(
            output=output,
            output_args=output_args,
            micro_batch=micro_batch,
            logits_processor_func=logits_processor_func,
        )
        if not tu.get_non_tensor_data(micro_batch, self.flag, default=False):
            return found
        if isinstance(output.logits, DTensor):
            key = self.tally.key
            raise self.tally.error(
                f"{key}: the logits are split over ranks. Fix: train without tensor parallelism, or set {key}=null."
            )
        return found | self.change_outputs(found["log_probs"], output.logits, output_args, micro_batch)

    def change_outputs(
        self, log_probs: Tensor, logits: Tensor, output_args: dict[str, Any], micro_batch: TensorDict
    ) -> dict[str, Any]:
        """Compute the outputs that replace verl's, or are added to them.

        Args:
            log_probs: verl's log-probs, nested by row, each one position before its token.
        """
        raise NotImplementedError


class SupportEngine(LikeliestEngine):
    """Support replay in one engine.

    Args:
        engine: verl's engine, initialised.
        unknown: treatment of tokens whose support is unknown.
    """

    def __init__(self, engine: Any, unknown: SupportUnknown) -> None:
        super().__init__(engine)
        self.unknown = unknown

    def change_outputs(
        self, log_probs: Tensor, logits: Tensor, output_args: dict[str, Any], micro_batch: TensorDict
    ) -> dict[str, Any]:
        """Renormalise log-probs over the support; the entropy is verl's own.

        Outputs of an update also contain ``FULL_LOG_PROBS``, which the KL term reads, ``SUPPORT_SIZE``, which is
        recorded, and ``WITHHELD`` if tokens are removed from the policy term.
        """
        forward = Forward.of(logits, output_args, micro_batch)
        supports, values = forward.supports, log_probs.values()
        chosen = supports.truncated
        mixed = values
        if len(chosen):
            given = forward.places, forward.tokens, supports.ids, forward.temperature
            truncated = compute_truncated_log_probs(forward.logits, *(each[chosen] for each in given))
            whole = len(chosen) < len(supports.known) or (len(supports.unknown) and self.unknown == "full")
            # If no token uses the whole vocabulary, the gradient of the full log-probs is not computed.
            mixed = values if whole else values.detach()
            # A token's values are stored at the position before the token.
            mixed = mixed.index_put((supports.places[chosen] - 1,), truncated.to(values.dtype))
        # Before an update's first step, the tokens were sampled by pi, unless the data is stale.
        mu = micro_batch[ROLLOUT_LOG_PROBS] if self._fresh else None
        self._tally.add(forward, mixed.detach(), values.detach(), mu)
        found = {"log_probs": nest(mixed, log_probs)}
        if self._trains:
            sizes = _spread(supports.sizes.float(), supports.places, log_probs)
            found |= {FULL_LOG_PROBS: log_probs, SUPPORT_SIZE: sizes}
            if self.unknown == "mask" and len(supports.unknown):
                withheld = torch.ones_like(supports.unknown, dtype=torch.bool)
                found[WITHHELD] = _spread(withheld, supports.places[supports.unknown], log_probs)
        return found


def nest(values: Tensor, like: Any) -> Tensor:
    """Nest values by row like log-probs."""
    return torch.nested.nested_tensor_from_jagged(values, like.offsets())


def _spread(values: Tensor, places: Tensor, like: Any) -> Tensor:
    """Arrange tokens' values at these positions like log-probs: nested, each one position before its token."""
    laid = values.new_zeros(like.values().shape)
    laid[places - 1] = values
    return nest(laid, like)


def install_support(worker: Any, unknown: SupportUnknown) -> None:
    """Make the engine of verl's actor worker renormalise its policy over the replayed support."""
    SupportEngine(worker.actor.engine, unknown)
