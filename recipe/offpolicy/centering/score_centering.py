"""Score centering in a run: the servers, the client, the workers that compute the likeliest tokens' log-probs, and the
proof.

The patched functions of verl's FSDP engine are those of ``support.fsdp_engine``; ``verl_patches.rollout_seams``
lists the others.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from omegaconf import DictConfig
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.tensor import DTensor

from verl.utils import tensordict_utils as tu
from verl_patches import rollout_seams
from verl_patches.contract import check_all

from ..batch.micro_batch import LIKELIEST_LOG_PROBS, LIKELIEST_ROLLOUT_LOG_PROBS
from ..batch.micro_batch import ROLLOUT_LOG_PROBS as MU
from ..batch.plan import take_reports
from ..extensions.add_on import AddOn
from ..proof.verify import LivenessError
from ..replay.batch_routes import TokenLayout
from ..support.support_replay import note_supports, serve_supports
from ..support.support_settings import CENTERING, SupportSettings
from ..support.token_supports import MASS, BatchSupports, ResponseTokens, lay_out_supports

logger = logging.getLogger("verl.offpolicy")
MU_ERROR = 1e-5
"""Largest accepted difference, in nats, between a sampled token's mu and its mu in the position's top-k list; both come
from the same answer of the rollout server."""
_COUNTS = ("tokens", "lacking", "members", "compared", "other", "checked", "wrong")
_FIX = "Fix: find the code that changes them between rollout server and trainer, or set correction.centering=null."


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


@dataclass
class CenteringTally:
    """Sums over micro-batches."""

    bytes: int = 0
    _counts: list[Tensor] = field(default_factory=list)
    _masses: list[Tensor] = field(default_factory=list)

    def add(
        self, likeliest: BatchSupports, tokens: Tensor, responses: ResponseTokens, mu: Tensor, like: Tensor, pi: Tensor
    ) -> None:
        """Add one forward pass.

        Args:
            tokens: (n,) int64, the sampled tokens.
            mu: column of the responses.
            like: (total,) tensor in the layout of the forward's tokens.
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
        """Copy the counts to the host, and build the report.

        Raises:
            CenteringError: some tokens have no likeliest tokens, or have likeliest tokens of other positions.
        """
        counts = torch.stack(self._counts).sum(0).tolist() if self._counts else [0] * len(_COUNTS)
        found = dict(zip(_COUNTS, counts, strict=True))
        masses = torch.stack(self._masses) if self._masses else torch.zeros(1, 3, dtype=torch.float64)
        if found["lacking"]:
            raise CenteringError(
                f"{found['lacking']} of {found['tokens']} tokens reached the loss without the likeliest tokens of "
                f"their position. {_FIX}"
            )
        if found["other"]:
            raise CenteringError(
                f"the likeliest tokens or log-probs of {found['other']} of {found['compared']} sequences differ from "
                f"what the rollout servers' client recorded: their checksums differ. {_FIX}"
            )
        if found["wrong"]:
            raise CenteringError(
                f"for {found['wrong']} of {found['checked']} sampled tokens, mu differs from its value in the list of "
                f"the position's likeliest tokens. {_FIX}"
            )
        of_mu, of_pi = masses[:, 1:].amax(0).tolist()
        if of_mu > 1 + MASS:
            raise CenteringError(
                f"mu sums to {of_mu:.4f} over the likeliest tokens of a position, so these are not log-probs of a "
                "distribution. Fix: set actor_rollout_ref.rollout.logprobs_mode=processed_logprobs, or "
                "correction.centering=null."
            )
        if of_pi > 1 + MASS:
            raise CenteringError(
                f"pi sums to {of_pi:.4f} over the likeliest tokens of a position, so the model's logits do not match "
                "its log-probs. Fix: find the code that changes either of them, or set correction.centering=null."
            )
        shown = {name: found[name] for name in ("tokens", "members", "compared", "checked")}
        return CenteringReport(**shown, bytes=self.bytes, mass=float(masses[:, 0].sum()))


REPORT = "offpolicy_centering_report"
"""Key of the ``CenteringReport`` in the metrics of an update."""
FLAG = "offpolicy_centered"
"""Key of a batch whose rows have likeliest tokens."""


class CenteringEngine:
    """Score centering for one engine, whose methods it wraps.

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
        """Run verl's method, and add a report to the metrics of an update.

        Raises:
            CenteringError: some tokens have no likeliest tokens, or have likeliest tokens of other positions; raised
                before the optimizer steps.
        """
        self._tally, self._trains = CenteringTally(), not forward_only
        output = self._run(data, loss_function, forward_only=forward_only)
        if self._trains and tu.get_non_tensor_data(data, FLAG, default=False):
            output["metrics"][REPORT] = [self._tally.report()]
        return output

    def prepare_model_outputs(
        self, output: Any, output_args: dict[str, Any], micro_batch: TensorDict, logits_processor_func: Any
    ) -> dict[str, Any]:
        """Prepare the outputs as verl does; for an update, add the log-probs of the likeliest tokens."""
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
                "correction.centering: the logits are split over ranks. Fix: train without tensor parallelism, or set "
                "correction.centering=null."
            )
        layout = TokenLayout.of(micro_batch["input_ids"], logits[..., 0])
        likeliest = lay_out_supports(micro_batch, layout, logits.shape[-1])
        tokens = micro_batch["input_ids"].values()[likeliest.places]
        responses = ResponseTokens.of(micro_batch, layout.offsets)
        values = log_probs.values()
        laid = compute_log_probs(logits, output_args, layout, likeliest, tokens, values)
        self._tally.add(likeliest, tokens, responses, micro_batch[MU], values.detach(), laid.detach())
        # The loss receives the sampled tokens' log-probs as a separate tensor, so that the proof reads only the loss's
        # own gradient from it.
        found["log_probs"] = _nest(values.view_as(values), log_probs)
        found[LIKELIEST_LOG_PROBS] = _nest(_spread(laid, likeliest, len(values)), log_probs)
        mu = likeliest.log_probs.to(laid.device)
        found[LIKELIEST_ROLLOUT_LOG_PROBS] = _nest(_spread(mu, likeliest, len(values), -torch.inf), log_probs)
        return found


def _nest(values: Tensor, like: Any) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(values, like.offsets())


def _spread(values: Tensor, likeliest: BatchSupports, total: int, fill: float = 0.0) -> Tensor:
    """Store each token's K values one position before the token: (n, K) -> (total, K)."""
    if not values.shape[1]:
        # If rows have no likeliest tokens, the tally reports this at the end of the mini-batch.
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

    The forward pass creates no further tensor of vocabulary size, unless verl's log-probs have fewer than 32 bits. The
    backward pass creates one such tensor, the gradient of the logits.

    Args:
        logits: (..., V) logits of the whole forward pass.
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
    # The logits are divided in their own dtype, as in verl: a difference in rounding would change the mass of all
    # likeliest tokens.
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


class ScoreCentering(AddOn):
    """Feature for both trainers that requests and transports the likeliest tokens.

    Args:
        settings: settings of the request.
    """

    def __init__(self, settings: SupportSettings) -> None:
        self._settings = settings
        self._metrics: Mapping[str, float] = MappingProxyType({})
        self._logged = False

    def begin(self, config: DictConfig) -> None:
        check_all(rollout_seams.SUPPORT)
        serve_supports(self._settings)

    def engine_part(self) -> Callable[[Any], object]:
        return install_centering

    def rollout_client(self, client: Any) -> Any:
        return note_supports(client, CENTERING)

    def batch_flags(self) -> dict[str, Any]:
        return {FLAG: True}

    def on_update(self, metrics: dict[str, Any], batch: Any) -> None:
        reports: list[CenteringReport] = take_reports(metrics, REPORT)
        if not reports:
            raise LivenessError(
                "correction.centering: the update returned no report, so no score was centred. The run uses a "
                "different worker or engine from the one that computes log-probs of the likeliest tokens."
            )
        tokens, checked, rows = (
            sum(getattr(each, name) for each in reports) for name in ("tokens", "checked", "compared")
        )
        mass = math.fsum(each.mass for each in reports) / tokens if tokens else math.nan
        size = sum(each.bytes for each in reports)
        self._metrics = {
            "head_mass": mass,
            "sampled_share": checked / tokens if tokens else math.nan,
            "bytes": float(size),
            "bytes_a_token": size / tokens if tokens else math.nan,
        }
        if not self._logged:
            logger.info(
                "score centering LIVE: log-probs of the %s likeliest tokens, %.1f%% of mu; checksums of %s rows as "
                "sampled; mu of %s of %s tokens equals its value in the list of likeliest tokens.",
                *(self._settings.size, 100 * mass, rows, checked, tokens),
            )
        self._logged = True

    def metrics(self) -> dict[str, float]:
        return {f"offpolicy/centering/{name}": value for name, value in self._metrics.items()}
