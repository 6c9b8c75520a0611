"""Routing replay in verl's FSDP engine; wraps three methods of the engine instance.

For equal inputs, a router usually chooses the same experts for a token as the other engine did (98 % of choices at
equal weights). If the router's choices agree better with the routes of another row or layer, the routes are misplaced.

Patched functions in verl 0.9.1, see ``verl_patches.worker_seams``: ``prepare_model_inputs(self, micro_batch)`` arms
the routers, ``forward_step(self, micro_batch, loss_function, forward_only)`` counts what they did and returns recorded
routes, ``forward_backward_batch(self, data, loss_function, forward_only=False)`` disarms them. In between, the routers
stay armed, because a forward may be recomputed in its backward.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import response_from_nested

from ..batch.micro_batch import ROLLOUT_LOG_PROBS
from ..batch.padding import with_tensors
from ..batch.seals import key_of
from .batch_routes import (
    REPLAY_STEP,
    ROUTES,
    BatchRoutes,
    Mode,
    ReplaySettings,
    TokenLayout,
    check_checksums,
    read_routes,
)
from .expert_choice import ChoiceRecord, ReplayError, equal_sets
from .routed_model import RoutedModel, install_replay

_DEVIATIONS = 3.0
"""Routes count as misplaced if one count of agreements exceeds the other by this many standard deviations."""


def compare_layers(records: Mapping[int, ChoiceRecord]) -> Tensor:
    """Count, for each pair of layers, the replayed rows in which one layer chose the experts recorded for the other.

    Args:
        records: records of one forward, by layer.

    Returns:
        (layers, layers) int64, indexed by the choosing layer and then by the other layer, in the order of the records.
    """
    pairs = [(chooser, other) for chooser in records.values() for other in records.values()]
    counts = [(equal_sets(chooser.own, other.ids) & chooser.replayed).sum() for chooser, other in pairs]
    return torch.stack(counts).view(len(records), -1)


def check_layer_order(records: Mapping[int, ChoiceRecord]) -> None:
    """Check that no layer chooses the experts that were recorded for another layer.

    Args:
        records: records of one replayed forward, by layer.

    Raises:
        ReplayError: a layer chooses such experts. The message names the first such layer, and the layer whose routes
            match its choices.
    """
    layers = list(records)
    for place, counts in enumerate(compare_layers(records).tolist()):
        other = max(range(len(counts)), key=lambda each: counts[each])
        if _exceeds(counts[other], counts[place]):
            rows = int(records[layers[place]].count_replayed())
            raise ReplayError(
                f"layer {layers[place]} chooses the experts recorded for layer {layers[other]} in {counts[other]} of "
                f"{rows} rows, but the experts recorded for itself in only {counts[place]} rows, so the layers of the "
                "routes are not in the model's order. Fix: order routes by absolute layer number."
            )


def check_row_order(records: Mapping[int, ChoiceRecord]) -> None:
    """Check that routers do not choose the experts that were recorded for the previous or next row.

    Args:
        records: records of one replayed forward, by layer.

    Raises:
        ReplayError: the routers choose such experts; the message names the shift.
    """
    own = sum(int(record.count_equal()) for record in records.values())
    for shift, where in ((1, "after"), (-1, "before")):
        shifted = sum(_count_shifted(record, shift) for record in records.values())
        if _exceeds(shifted, own):
            rows = sum(int(record.count_replayed()) for record in records.values())
            raise ReplayError(
                f"routers choose the experts recorded for the row {where} in {shifted} of {rows} choices, but the "
                f"experts recorded for their own row in only {own} choices, so the routes are off by one row. Fix: "
                "give each row the routes of its input token, not of the token that it predicts."
            )


def _count_shifted(record: ChoiceRecord, shift: int) -> int:
    """Count the rows whose own choice equals the routes ``shift`` rows later, if both rows are replayed."""
    ids, rows = record.ids.roll(-shift, 0), record.replayed & record.replayed.roll(-shift, 0)
    # A row that has wrapped around from the other end is not a neighbour.
    rows[-1 if shift > 0 else 0] = False
    return int((equal_sets(record.own, ids) & rows).sum())


def _exceeds(other: int, own: int) -> bool:
    return other - own > _DEVIATIONS * math.sqrt(other + own)


OLDEST_BUCKET = 3
"""The last age group, which includes all higher ages."""
AGES = ("is0", "is1", "is2", "ge3")


@dataclass
class FirstLook:
    """Values that are measured once, in the first update.

    Attributes:
        checksums: number of rows whose routes were compared with the client's notes.
        tokens: number of response tokens over which k3 is summed.
        k3, k3_without: sums of k3(mu, pi) from a forward with the routes, and from a forward without routes.
    """

    checksums: int = 0
    tokens: int = 0
    k3: float = 0.0
    k3_without: float = 0.0


@dataclass(frozen=True)
class RoutingReport:
    """Report of one rank on the routes of one mini-batch, in plain Python values.

    Attributes:
        layers: absolute numbers of the layers with experts.
        top_k: number of experts per token.
        tokens: number of tokens of all forwards, without padding.
        replayed, entered, equal: by layer, see ``RoutedModel.count_entered``.
        ages: for each of ``AGES``, over all layers: (number of choices replayed, number of these choices that equal the
            router's own choice).
        withheld: number of tokens whose routes were too old to be replayed.
        size: bytes of the routes, as received.
        gradients: sum of |gradient| of the routers' scores by layer; empty if gradients were not watched.
        first: measurements of the first update.
    """

    layers: tuple[int, ...]
    top_k: int
    tokens: int
    replayed: tuple[int, ...]
    entered: tuple[int, ...]
    equal: tuple[int, ...]
    ages: tuple[tuple[int, int], ...]
    withheld: int
    size: int
    gradients: tuple[float, ...] = ()
    first: FirstLook | None = None


@dataclass
class RoutingTally:
    """Counts of replayed routes, summed over micro-batches.

    Args:
        layers: absolute numbers of the layers with experts.
        top_k: number of experts per token.
    """

    layers: tuple[int, ...]
    top_k: int
    tokens: int = 0
    size: int = 0
    _sums: list[Tensor] = field(default_factory=list)

    def add(self, tokens: int, routes: BatchRoutes, counts: Tensor, records: Mapping[int, ChoiceRecord]) -> None:
        """Add the counts of one forward.

        Args:
            tokens: number of tokens, without padding.
            counts: (layers, 3) of ``RoutedModel.count_entered``.
            records: records by layer.
        """
        self.tokens += tokens
        self.size += routes.size
        self._sums.append(torch.cat([counts.flatten(), _count_by_age(routes, records), routes.withheld[None]]))

    def report(self) -> RoutingReport:
        """Copy the counts to the host.

        Raises:
            ReplayError: experts of a layer were called with ids that differ from the shipped ones.
        """
        width = len(self.layers)
        sums = torch.stack(self._sums).sum(0).tolist() if self._sums else [0] * (3 * width + 2 * len(AGES) + 1)
        replayed, entered, equal = (tuple(sums[place : 3 * width : 3]) for place in range(3))
        for layer, wanted, found in zip(self.layers, replayed, entered, strict=True):
            if found != wanted:
                raise ReplayError(
                    f"for {wanted - found} of {wanted} tokens, the experts of layer {layer} were not called with the "
                    "shipped ids. Fix: find the code that changes the router's choice between its forward and its "
                    "experts, or turn routing replay off."
                )
        ages = sums[3 * width : -1]
        pairs = tuple(zip(ages[::2], ages[1::2], strict=True))
        return RoutingReport(
            self.layers, self.top_k, self.tokens, replayed, entered, equal, pairs, withheld=sums[-1], size=self.size
        )


def _count_by_age(routes: BatchRoutes, records: Mapping[int, ChoiceRecord]) -> Tensor:
    """Count the choices replayed at each age, and how many of these equal the router's own choice: (2 * AGES,)."""
    replayed = torch.stack([record.replayed for record in records.values()])
    equal = torch.stack([equal_sets(record.ids, record.own) for record in records.values()]) & replayed
    pairs = torch.stack([replayed.sum(0), equal.sum(0)], -1)
    sums = pairs.new_zeros(len(AGES), 2)
    if routes.ages is not None:
        sums.index_add_(0, routes.ages.clamp(max=OLDEST_BUCKET), pairs)
    return sums.flatten()


REPORT = "offpolicy_routing"
"""Key of the ``RoutingReport`` in the metrics of an update."""
_FLAG = "enable_routing_replay"
"""verl's flag, True in calls whose routes are recorded or replayed; it is not set in calls of the reference policy."""


class ReplayingEngine:
    """Routing replay in one engine; wraps the engine's methods.

    Args:
        engine: verl's engine, initialised.
        model: the routers of the engine's module.
        mode: R2 records routes in the forward of pi_old and replays them in updates; R3 replays the rollout engine's
            routes in both.
        oldest: largest age, in versions of the weights, at which routes are replayed; None: any age.
    """

    def __init__(self, engine: Any, model: RoutedModel, mode: Mode, oldest: int | None = None) -> None:
        self.engine, self.model, self.mode, self.oldest = engine, model, mode, oldest
        self._prepare, self._step = engine.prepare_model_inputs, engine.forward_step
        self._run = engine.forward_backward_batch
        self._records = self._suspended = False
        self._layout: TokenLayout | None = None
        self._routes: BatchRoutes | None = None
        self._tally = self._new_tally()
        self._first: FirstLook | None = None
        self._compares = self._updated = self._differentiated = False
        engine.prepare_model_inputs, engine.forward_step = self.prepare_model_inputs, self.forward_step
        engine.forward_backward_batch = self.forward_backward_batch

    def forward_backward_batch(self, data: TensorDict, loss_function: Any, forward_only: bool = False) -> Any:
        """Run verl's method, and add a report to an update's metrics."""
        self._records = self.mode == "R2" and forward_only
        self._tally = self._new_tally()
        replays = not forward_only and _wants_replay(data)
        self._first = FirstLook() if replays and not self._updated else None
        self._compares = self._first is not None
        watches = replays and not self._differentiated
        self.model.watch_gradients(watches)
        try:
            output = self._run(data, loss_function, forward_only=forward_only)
        finally:
            self.model.disarm()
            self._routes = None
        # The check also runs after a forward without a loss, so that the run stops if experts were called with other
        # ids.
        report = self._tally.report()
        if replays:
            gradients = tuple(self.model.get_gradients()) if watches else ()
            report = replace(report, gradients=gradients, first=self._first)
            output["metrics"][REPORT] = [report]
            self._updated = True
            self._differentiated |= any(gradients)
        self.model.watch_gradients(False)
        return output

    def prepare_model_inputs(self, micro_batch: TensorDict) -> Any:
        """Prepare the inputs as verl does, and arm the routers for this micro-batch."""
        self.model.disarm()
        self._layout = self._routes = None
        inputs, arguments = self._prepare(micro_batch=micro_batch)
        if _wants_replay(micro_batch) and not self._suspended:
            self._layout = TokenLayout.of(micro_batch["input_ids"], inputs["input_ids"])
            if self._records:
                self.model.record_own()
            else:
                step = tu.get_non_tensor_data(micro_batch, REPLAY_STEP, default=None)
                self._routes = read_routes(micro_batch, self._layout, self.mode, step, self.oldest)
                self.model.arm(self._routes.routes, self._routes.replayed)
        return inputs, arguments

    def forward_step(self, micro_batch: TensorDict, loss_function: Any, forward_only: bool) -> Any:
        """Run verl's method, and count the routers' choices."""
        first, native = self._first, None
        if self._compares and ROLLOUT_LOG_PROBS in micro_batch.keys():
            self._compares = False
            native = self._compute_native(micro_batch)
        loss, output = self._step(micro_batch, loss_function=loss_function, forward_only=forward_only)
        if self._layout is None:
            return loss, output
        if self._routes is None:
            output["model_output"][ROUTES] = self._collect_recorded(self._layout)
            return loss, output
        records = self.model.get_records()
        self._tally.add(len(self._layout.places), self._routes, self.model.count_entered(), records)
        device = self._layout.offsets.device
        hashed = not forward_only and (self.mode == "R3" or key_of(ROUTES) in micro_batch.keys())
        compared = check_checksums(micro_batch.to(device), self._layout) if hashed else 0
        if first is not None:
            check_row_order(records)
            check_layer_order(records)
            first.checksums += compared
            if native is not None:
                _add_k3(first, micro_batch, output["model_output"]["log_probs"], native)
        return loss, output

    def _new_tally(self) -> RoutingTally:
        return RoutingTally(self.model.layout.layers, self.model.layout.top_k)

    def _compute_native(self, micro_batch: TensorDict) -> Tensor:
        """Compute log-probs, nested by row, with the routers' own choice of experts; all ranks must call this
        function."""
        plain = with_tensors(micro_batch)
        tu.assign_non_tensor(plain, calculate_entropy=False, distillation_use_topk=False, distillation_only=False)
        self._suspended = True
        try:
            with torch.no_grad():
                _, output = self._step(plain, loss_function=None, forward_only=True)
        finally:
            self._suspended = False
        log_probs: Tensor = output["model_output"]["log_probs"]
        return log_probs

    def _collect_recorded(self, layout: TokenLayout) -> Tensor:
        ids = layout.collect(self.model.stack_ids()).to(torch.int16)
        return torch.nested.nested_tensor_from_jagged(ids, layout.offsets)


def install_in_engine(engine: Any, mode: Mode, oldest: int | None = None) -> ReplayingEngine:
    """Install replay in an initialised engine; all ranks must call this function together.

    Raises:
        ReplayError: the engine's model chooses experts in an unsupported way.
    """
    from verl.utils.device import get_device_id

    with engine.eval_mode():  # brings offloaded parameters to the device
        ids = torch.arange(8, device=get_device_id())[None]
        model = install_replay(engine.module, {"input_ids": ids, "use_cache": False})
    return ReplayingEngine(engine, model, mode, oldest)


def _wants_replay(data: TensorDict) -> bool:
    wants = tu.get_non_tensor_data(data, _FLAG, default=False)
    return bool(wants and tu.get_non_tensor_data(data, REPLAY_STEP, default=None))


def _add_k3(first: FirstLook, micro_batch: TensorDict, log_probs: Tensor, native: Tensor) -> None:
    """Add k3(mu, pi) of the response tokens, with and without replay."""
    mask = micro_batch["response_mask"]
    mu = micro_batch[ROLLOUT_LOG_PROBS]
    there = _flatten(mask).bool()
    first.tokens += int(there.sum())
    for name, found in (("k3", log_probs), ("k3_without", native)):
        gap = _flatten(response_from_nested(found, mask)).float() - _flatten(mu).float()
        k3 = gap.exp() - 1 - gap
        setattr(first, name, getattr(first, name) + float(k3[there.to(k3.device)].sum()))


def _flatten(nested: Tensor) -> Tensor:
    return torch.cat([row.flatten() for row in nested.unbind()])


def install_in_worker(worker: Any, settings: ReplaySettings) -> None:
    """Make the actor's engine replay routes; flag batches in the actor's calls, but not in the reference policy's."""
    worker.enable_routing_replay = True
    install_in_engine(worker.actor.engine, settings.mode, settings.oldest)
