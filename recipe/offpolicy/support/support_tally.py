"""Counts of replayed supports over the micro-batches of one mini-batch, kept on the device until its end."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .batch_supports import BatchSupports, ResponseTokens
from .token_supports import MASS, SupportError, find_inside

_COUNTS = ("tokens", "lacking", "known", "members", "outside", "after", "before", "compared", "other")
_FIX = "Fix: find the code that changes them between rollout server and trainer, or set correction.support=null."


@dataclass(frozen=True)
class SupportReport:
    """Report of one rank on one mini-batch, in plain Python.

    Attributes:
        tokens: number of response tokens in the loss.
        known: number of these tokens whose support is known.
        members: sum of the sizes of these supports.
        largest: largest of these sizes.
        compared: number of rows whose checksums were compared.
        bytes: bytes of the supports, as received.
        least_mass, greatest_mass: minimum and maximum of mu's sum over known supports.
        unknown_mass: sum of mu over the ids returned for tokens of unknown support.
        k3_tokens: number of tokens with a known support in an update's first mini-batch.
        k3, k3_without: sums of k3(mu, pi) over these tokens, with pi over the support and over the vocabulary.
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
    """Sums over micro-batches."""

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
        """Add one forward.

        Args:
            tokens: (n,) int64, at the supports' positions.
            truncated, full: (total,) log-probs over the support and over the vocabulary, detached, each one position
                before its token.
            mu: column of the responses; None if there is none.
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
            sums = [_sum_k3(each[places], sampled, counted) for each in (truncated, full)]
            self._k3.append(torch.stack([*sums, counted.sum().double()]))

    def report(self) -> SupportReport:
        """Copy the counts to the host.

        Raises:
            SupportError: tokens have no support, or the support of another token.
        """
        counts = torch.stack(self._counts).sum(0).tolist() if self._counts else [0] * len(_COUNTS)
        found = dict(zip(_COUNTS, counts, strict=True))
        if found["lacking"]:
            raise SupportError(
                f"{found['lacking']} of {found['tokens']} tokens in the loss arrived without the support that they "
                f"were sampled from. {_FIX}"
            )
        if found["other"]:
            raise SupportError(
                f"{found['other']} of {found['compared']} sequences arrived with other supports or tokens than the "
                f"rollout servers' client recorded: their checksums differ. {_FIX}"
            )
        if found["outside"]:
            raise SupportError(_describe_outside(found))
        if max(1.0 - self.least_mass, self.greatest_mass - 1.0) > MASS:
            raise SupportError(
                f"mu sums to {self.least_mass:.4f} to {self.greatest_mass:.4f} over the supports, but must sum to 1: "
                f"the engine did not return the log-probs that it sampled from. Fix: set "
                f"actor_rollout_ref.rollout.logprobs_mode=processed_logprobs, or correction.support=null."
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


def _describe_outside(found: dict[str, int]) -> str:
    shifts = {"after": "the token after", "before": "the token before"}
    nearest = min(shifts, key=lambda each: found[each])
    whose = (
        f"they fit {shifts[nearest]} in all but {found[nearest]} cases, so the supports are off by one token"
        if found[nearest] < found["outside"] / 2
        else "they belong to another sequence, or come from another engine"
    )
    return (
        f"{found['outside']} of {found['known']} tokens are not in the support that they arrived with: {whose}. "
        f"Fix: give each token the support that it was sampled from, or set correction.support=null."
    )


def _sum_k3(pi: Tensor, mu: Tensor, counted: Tensor) -> Tensor:
    gap = torch.where(counted, pi.double() - mu.double(), 0.0)
    return (gap.expm1() - gap).sum()
