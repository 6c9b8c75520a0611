"""Checks of the likeliest tokens over the micro-batches of one mini-batch; on the device until its end."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..support.batch_supports import BatchSupports, ResponseTokens
from ..support.token_supports import MASS

MU_ERROR = 1e-5
"""Largest accepted difference, in nats, between mu of a sampled token and that of the same token among the likeliest:
both come from one answer of the rollout server."""
_COUNTS = ("tokens", "lacking", "members", "compared", "other", "checked", "wrong")
_FIX = "Fix: find the code that changes them between rollout server and trainer, or set correction.centering=null."


class CenteringError(RuntimeError):
    """The likeliest tokens of a position are missing, or belong to another position."""


@dataclass(frozen=True)
class CenteringReport:
    """Report of one rank on one mini-batch, in plain Python.

    Attributes:
        tokens: number of response tokens in the loss.
        members: sum of the numbers of their likeliest tokens.
        compared: number of rows whose checksums were compared.
        checked: number of tokens that are among their likeliest ones, whose mu was compared.
        bytes: bytes of ids and log-probs, as received.
        mass: sum over tokens of the mass of mu on the likeliest tokens.
    """

    tokens: int
    members: int
    compared: int
    checked: int
    bytes: int
    mass: float


@dataclass
class CenteringTally:
    """Sums over micro-batches."""

    bytes: int = 0
    _counts: list[Tensor] = field(default_factory=list)
    _masses: list[Tensor] = field(default_factory=list)

    def add(
        self, likeliest: BatchSupports, tokens: Tensor, responses: ResponseTokens, mu: Tensor, like: Tensor, pi: Tensor
    ) -> None:
        """Add one forward.

        Args:
            tokens: (n,) int64, the sampled tokens.
            mu: column of the responses.
            like: (total,), in the layout of the tokens.
            pi: (n, K) log pi of the likeliest tokens.
        """
        self.bytes += likeliest.bytes
        trained, noted = (torch.zeros_like(like, dtype=torch.bool) for _ in range(2))
        # Padding has position 0, which belongs to a prompt.
        trained.index_put_((responses.places,), responses.trained)
        sampled = torch.full_like(like, torch.nan, dtype=torch.float32)
        sampled.index_put_((responses.places,), responses.read(mu).float())
        noted[likeliest.places] = likeliest.sizes > 0
        there = trained[likeliest.places]
        own = (likeliest.ids == tokens[:, None]) & there[:, None]
        expected = sampled[likeliest.places][:, None].expand_as(own)
        apart = ~((likeliest.log_probs - expected).abs() <= MU_ERROR) & own
        compared = likeliest.compared & torch.zeros_like(likeliest.compared).index_put_(
            (likeliest.rows,), torch.ones_like(likeliest.rows, dtype=torch.bool)
        )
        masses = likeliest.log_probs.double().exp().sum(-1) * there
        of_pi = pi.double().exp().mul(likeliest.ids >= 0).sum(-1) * there
        self._counts.append(
            torch.stack(
                [
                    trained.sum(),
                    (trained & ~noted).sum(),
                    (likeliest.sizes * there).sum(),
                    compared.sum(),
                    (compared & (likeliest.hash_rows(tokens) != likeliest.checksums)).sum(),
                    own.sum(),
                    apart.sum(),
                ]
            )
        )
        largest = [torch.cat([each, each.new_zeros(1)]).max() for each in (masses, of_pi)]
        self._masses.append(torch.stack([masses.sum(), *largest]))

    def report(self) -> CenteringReport:
        """Copy the counts to the host.

        Raises:
            CenteringError: tokens have no likeliest tokens, or those of other positions.
        """
        counts = torch.stack(self._counts).sum(0).tolist() if self._counts else [0] * len(_COUNTS)
        found = dict(zip(_COUNTS, counts, strict=True))
        masses = torch.stack(self._masses) if self._masses else torch.zeros(1, 3, dtype=torch.float64)
        if found["lacking"]:
            raise CenteringError(
                f"{found['lacking']} of {found['tokens']} tokens in the loss arrived without the likeliest tokens of "
                f"their position. {_FIX}"
            )
        if found["other"]:
            raise CenteringError(
                f"{found['other']} of {found['compared']} sequences arrived with other likeliest tokens or log-probs "
                f"than the rollout servers' client recorded: their checksums differ. {_FIX}"
            )
        if found["wrong"]:
            raise CenteringError(
                f"{found['wrong']} of {found['checked']} sampled tokens have another mu than the same token has among "
                f"the likeliest of its position. {_FIX}"
            )
        if (largest := float(masses[:, 1].max())) > 1 + MASS:
            raise CenteringError(
                f"mu sums to {largest:.4f} over the likeliest tokens of a position: these are not log-probs of a "
                f"distribution. Fix: set actor_rollout_ref.rollout.logprobs_mode=processed_logprobs, or "
                f"correction.centering=null."
            )
        if (largest := float(masses[:, 2].max())) > 1 + MASS:
            raise CenteringError(
                f"pi sums to {largest:.4f} over the likeliest tokens of a position: the model's logits are not those "
                f"of its log-probs. Fix: find the code that changes one of them, or set correction.centering=null."
            )
        return CenteringReport(
            tokens=found["tokens"],
            members=found["members"],
            compared=found["compared"],
            checked=found["checked"],
            bytes=self.bytes,
            mass=float(masses[:, 0].sum()),
        )
