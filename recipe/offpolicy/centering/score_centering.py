"""Score centering in a run: the servers, the client, the workers that compute the likeliest tokens' log-probs, and the
proof.

``support.fsdp_engine`` lists the patched functions of verl's FSDP engine, and ``verl_patches.rollout_seams`` all
others.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from ..batch.micro_batch import LIKELIEST_LOG_PROBS, LIKELIEST_ROLLOUT_LOG_PROBS
from ..batch.micro_batch import ROLLOUT_LOG_PROBS as MU
from ..batch.plan import take_reports
from ..proof.verify import LivenessError
from ..support.fsdp_engine import Forward, LikeliestEngine, LikeliestTally, nest
from ..support.support_replay import LikeliestTokens
from ..support.support_settings import CENTERING
from ..support.token_supports import MASS, BatchSupports

logger = logging.getLogger("verl.offpolicy")
MU_ERROR = 1e-5
"""Largest accepted difference, in nats, between a sampled token's mu and its mu in the position's top-k list. Both are
returned in the same answer of the rollout server."""


class CenteringError(RuntimeError):
    """The likeliest tokens of a position are missing, or belong to another position."""


@dataclass(frozen=True)
class CenteringReport:
    """Report of one rank on one mini-batch, in plain Python values.

    Attributes:
        tokens: number of response tokens in the loss.
        members: total number of likeliest tokens, over all of these tokens.
        compared: number of rows whose checksums were compared.
        checked: number of sampled tokens that are also in their position's top-k list, so that their mu could be
            compared.
        bytes: number of bytes of ids and log-probs, as received.
        mass: sum over tokens of mu's total probability on the likeliest tokens.
    """

    tokens: int
    members: int
    compared: int
    checked: int
    bytes: int
    mass: float


class CenteringTally(LikeliestTally):
    """Counts for score centering, summed over micro-batches."""

    key, error = CENTERING, CenteringError
    own, shipped = "the likeliest tokens of their position", "likeliest tokens or log-probs"

    def __init__(self) -> None:
        super().__init__()
        self._masses: list[Tensor] = [torch.zeros(3, dtype=torch.float64)]

    def add(self, forward: Forward, mu: Tensor, pi: Tensor) -> None:
        """Add one forward pass.

        Args:
            mu: column of the responses.
            pi: (n, K) log pi of the likeliest tokens.
        """
        likeliest, responses = forward.supports, forward.responses
        there = forward.trained[likeliest.places]
        sampled = torch.full_like(forward.trained, torch.nan, dtype=torch.float32)
        sampled.index_put_((responses.places,), responses.read(mu).float())
        own = (likeliest.ids == forward.tokens[:, None]) & there[:, None]
        wrong = own & ~((likeliest.log_probs - sampled[likeliest.places, None]).abs() <= MU_ERROR)
        members = (likeliest.sizes * there).sum()
        self.count(forward, likeliest.sizes > 0, members=members, checked=own.sum(), wrong=wrong.sum())
        of_mu = likeliest.log_probs.double().exp().sum(-1) * there
        of_pi = pi.double().exp().mul(likeliest.ids >= 0).sum(-1) * there
        largest = [torch.cat([each, each.new_zeros(1)]).max() for each in (of_mu, of_pi)]
        self._masses.append(torch.stack([of_mu.sum(), *largest]))

    def report(self) -> CenteringReport:
        """Copy the counts to the host, and build the report.

        Raises:
            CenteringError: some tokens have no likeliest tokens, or have likeliest tokens of other positions.
        """
        found = self.total()
        if found["wrong"]:
            raise CenteringError(
                f"for {found['wrong']} of {found['checked']} sampled tokens, mu differs from its value in the list of "
                "the position's likeliest tokens. Fix: find the code that changes mu or the list between rollout "
                "server and trainer, or set correction.centering=null."
            )
        device = self._masses[-1].device
        mass, of_mu, of_pi = torch.stack([each.to(device) for each in self._masses]).unbind(-1)
        if (most := float(of_mu.max())) > 1 + MASS:
            raise CenteringError(
                f"mu sums to {most:.4f} over the likeliest tokens of a position, so these are not log-probs of a "
                "distribution. Fix: set actor_rollout_ref.rollout.logprobs_mode=processed_logprobs, or "
                "correction.centering=null."
            )
        if (most := float(of_pi.max())) > 1 + MASS:
            raise CenteringError(
                f"pi sums to {most:.4f} over the likeliest tokens of a position, so the model's logits do not match "
                "its log-probs. Fix: find the code that changes either of them, or set correction.centering=null."
            )
        shown = {name: found[name] for name in ("tokens", "members", "compared", "checked")}
        return CenteringReport(**shown, bytes=self.bytes, mass=float(mass.sum()))


REPORT = "offpolicy_centering_report"
"""Key of the ``CenteringReport`` in the metrics of an update."""
FLAG = "offpolicy_centered"
"""Key of a batch whose rows have likeliest tokens."""


class CenteringEngine(LikeliestEngine):
    """Score centering in one engine."""

    flag, report, tally = FLAG, REPORT, CenteringTally  # type: ignore[assignment]

    def change_outputs(
        self, log_probs: Tensor, logits: Tensor, output_args: dict[str, Any], micro_batch: TensorDict
    ) -> dict[str, Any]:
        """For an update, add the log-probs of the likeliest tokens."""
        if not self._trains:
            return {}
        forward, values = Forward.of(logits, output_args, micro_batch), log_probs.values()
        likeliest = forward.supports
        laid = compute_log_probs(forward, values)
        self._tally.add(forward, micro_batch[MU], laid.detach())
        mu = likeliest.log_probs.to(laid.device)
        return {
            # The loss receives the sampled tokens' log-probs as a separate tensor, from which the proof reads only the
            # loss's own gradient from it.
            "log_probs": nest(values.view_as(values), log_probs),
            LIKELIEST_LOG_PROBS: nest(_spread(laid, likeliest, len(values)), log_probs),
            LIKELIEST_ROLLOUT_LOG_PROBS: nest(_spread(mu, likeliest, len(values), -torch.inf), log_probs),
        }


def _spread(values: Tensor, likeliest: BatchSupports, total: int, fill: float = 0.0) -> Tensor:
    """Store each token's K values one position before the token: (n, K) -> (total, K)."""
    if not values.shape[1]:
        # If rows have no likeliest tokens, the tally reports this at the end of the mini-batch.
        values = torch.nn.functional.pad(values, (0, 1), value=fill)
    laid = values.new_full((total, values.shape[1]), fill)
    return laid.index_put((likeliest.places - 1,), values)


def compute_log_probs(forward: Forward, log_probs: Tensor) -> Tensor:
    """Compute log p of the likeliest tokens: the sampled token's log-prob plus the difference of their logits.

    The forward pass creates no further tensor of vocabulary size, unless verl's log-probs have fewer than 32 bits. The
    backward pass creates one such tensor, the gradient of the logits.

    Args:
        log_probs: (total,) log p of all tokens, each one position before its token.

    Returns:
        (n, K) float32 or wider, differentiable; 0 where there is no token.
    """
    logits, places, ids = forward.logits, forward.places, forward.supports.ids
    dtype = torch.promote_types(logits.dtype, torch.float32)
    # The logits are divided in their own dtype, as in verl: a difference in rounding would change the mass of all
    # likeliest tokens.
    scale = forward.temperature.clamp(min=1e-8).to(logits.dtype)[:, None]
    read = torch.cat([forward.tokens[:, None], ids.clamp(min=0)], 1)
    chosen = (logits[places[:, None], read] / scale).to(dtype)
    if log_probs.dtype == dtype:
        norm = chosen[:, :1] - log_probs[forward.supports.places - 1][:, None]
    else:
        norm = (logits[places] / scale).to(dtype).logsumexp(-1, keepdim=True)
    return torch.where(ids >= 0, chosen[:, 1:] - norm, 0.0)


def install_centering(worker: Any) -> None:
    """Make the engine of verl's actor worker compute the log-probs of the likeliest tokens."""
    CenteringEngine(worker.actor.engine)


class ScoreCentering(LikeliestTokens):
    """Feature for both trainers that requests and transports the likeliest tokens."""

    key, flag, prefix = CENTERING, FLAG, "offpolicy/centering"

    def engine_part(self) -> Callable[[Any], object]:
        return install_centering

    def on_update(self, metrics: dict[str, Any], batch: Any) -> None:
        reports: list[CenteringReport] = take_reports(metrics, REPORT)
        if not reports:
            raise LivenessError(
                "correction.centering: the update returned no report, so no score was centred. The run uses a worker "
                "or engine that does not compute log-probs of the likeliest tokens."
            )
        names = ("tokens", "checked", "compared", "bytes")
        tokens, checked, rows, size = (sum(getattr(each, name) for each in reports) for name in names)
        mass = math.fsum(each.mass for each in reports)
        shares = {"head_mass": mass, "sampled_share": checked, "bytes_a_token": size}
        self._metrics = {name: value / tokens if tokens else math.nan for name, value in shares.items()}
        self._metrics["bytes"] = float(size)
        if not self._proved:
            logger.info(
                "score centering LIVE: log-probs of the %s likeliest tokens, %.1f%% of mu; checksums of %s rows as "
                "sampled; for %s of %s tokens, mu equals its value in the list of likeliest tokens.",
                *(self._settings.size, 100 * self._metrics["head_mass"], rows, checked, tokens),
            )
        self._proved = True
