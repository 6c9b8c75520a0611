"""Monitors routing replay in verl's Megatron engine, which has its own implementation of replay.

Wrapped functions in verl 0.9.1, see ``verl_patches.worker_seams``: ``prepare_model_inputs(self, batch)`` returns the
routes of a micro-batch, ``forward_step(self, batch_iter, model, ...)`` passes the routes to the routers of a model
chunk and runs this chunk, and ``forward_backward_batch(self, data, loss_function, forward_only=False)`` ends with the
last backward. A router stores its targets in ``RouterReplay.target_topk_idx``; the second value of its forward contains
the experts of each token.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from verl.utils import tensordict_utils as tu

from ..batch.plan import take_reports
from ..extensions.add_on import AddOn
from ..proof.verify import LivenessError
from .batch_routes import ROUTES, Mode
from .expert_choice import ReplayError

REPORT = "offpolicy_megatron_routing"
"""Key of the ``MegatronReport`` in the metrics of an update."""


@dataclass(frozen=True)
class MegatronReport:
    """Routes that one rank replayed in one mini-batch. The rank's routers are known to have followed all of them.

    Attributes:
        layers: numbers of the layers with routers on this rank, from 0.
        tokens: number of tokens whose routes were replayed, in each layer.
        forwarded: number of tokens in the rank's forwards, including padding.
        placed: True if replayed ids were also compared with the shipped ids by layer and token. This is not possible if
            tokens are split over ranks.
    """

    layers: tuple[int, ...]
    tokens: int
    forwarded: int
    placed: bool


_FLAG = "enable_routing_replay"
_ODD = 0x9E3779B97F4A7C15 - 2**64


class WatchedEngine:
    """Monitor of one engine's routers.

    Args:
        engine: verl's engine, initialised, with replay in its routers.
        mode: R2 or R3.
    """

    def __init__(self, engine: Any, mode: Mode) -> None:
        from verl.utils.megatron.router_replay_utils import iter_model_routers

        self.engine, self.mode = engine, mode
        self._list_routers = iter_model_routers
        self._prepare, self._step = engine.prepare_model_inputs, engine.forward_step
        self._run = engine.forward_backward_batch
        self._watches = self._keeps = False
        self._routes: Tensor | None = None
        self._sent: dict[Any, Tensor] = {}
        """Per router, (tokens, experts) bool: the experts to which each token of the last forward was sent."""
        self._forwards: dict[Any, list[Tensor]] = {}
        """Per router, (tokens,) checksums of the forwards that will be recomputed."""
        self._counts: defaultdict[int, list[Tensor]] = defaultdict(list)
        """Per layer, the (5,) counts of each forward, including recomputed forwards, see ``count_replayed``."""
        for chunk in engine.module:
            for module in chunk.modules():
                if getattr(module, "router_replay", None) is not None:
                    module.register_forward_hook(self._note)
        engine.prepare_model_inputs, engine.forward_step = self.prepare_model_inputs, self.forward_step
        engine.forward_backward_batch = self.forward_backward_batch

    @property
    def places(self) -> bool:
        """True if a rank forwards a micro-batch's tokens in the order of the shipped routes."""
        config, engine = self.engine.tf_config, self.engine.engine_config
        split = config.tensor_model_parallel_size * config.context_parallel_size > 1 or engine.dynamic_context_parallel
        return not (split or config.fp8 or getattr(config, "experimental_attention_variant", None))

    @property
    def _recomputes(self) -> bool:
        config = self.engine.tf_config
        return config.recompute_granularity is not None or config.moe_layer_recompute

    def forward_backward_batch(self, data: TensorDict, loss_function: Any, forward_only: bool = False) -> Any:
        """Run verl's method; on ranks with a report, add the report to an update's metrics.

        Raises:
            ReplayError: a router did not send tokens to its target experts, or its targets are not the shipped routes.
        """
        flagged = bool(tu.get_non_tensor_data(data, _FLAG, default=False))
        self._watches = flagged and not (self.mode == "R2" and forward_only)
        self._keeps = not forward_only and self._recomputes
        self._sent, self._forwards, self._counts = {}, {}, defaultdict(list)
        try:
            output = self._run(data, loss_function, forward_only=forward_only)
        finally:
            watched, self._watches, self._routes = self._watches, False, None
            self._sent, self._forwards = {}, {}
        if watched:
            report = self._report()
            if not forward_only and "metrics" in output:
                output["metrics"][REPORT] = [report]
        return output

    def prepare_model_inputs(self, batch: TensorDict) -> Any:
        """Prepare the inputs as verl does, and keep a copy of the shipped routes."""
        inputs = self._prepare(batch)
        routes = inputs[ROUTES]
        self._routes = routes.values() if routes is not None and routes.is_nested else routes
        return inputs

    def forward_step(self, batch_iter: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Run verl's method, and compare the targets and the output of its routers."""
        from verl.utils.megatron_utils import unwrap_model

        output = self._step(batch_iter, model, *args, **kwargs)
        if self._watches and self._routes is not None:
            drops = self.engine.tf_config.moe_expert_capacity_factor is not None
            for number, router in self._list_routers(unwrap_model(model)):
                layer, target = number - 1, router.target_topk_idx
                shipped = self._select(self._routes, layer) if self.places else None
                counts = count_replayed(layer, self._sent[router], target, router.target_replay_mask, shipped, drops)
                self._counts[layer].append(counts)
        return output

    def _select(self, routes: Tensor, layer: int) -> Tensor:
        """Select a layer's routes; R2 omits dense layers."""
        frequency = self.engine.tf_config.moe_layer_freq
        if routes.shape[1] == self.engine.tf_config.num_layers:
            return routes[:, layer]
        below = (frequency[at] if isinstance(frequency, list) else at % frequency == 0 for at in range(layer))
        return routes[:, sum(map(bool, below))]

    def _note(self, module: Any, args: Any, output: tuple[Tensor, Tensor]) -> None:
        if not self._watches:
            return
        router, sent = module.router_replay, output[1].detach().bool()
        # The graph task's id is -1 outside of a backward; in a backward, the oldest forward is recomputed.
        if torch._C._current_graph_task_id() == -1:
            self._sent[router] = sent
            if self._keeps:
                self._forwards.setdefault(router, []).append(hash_rows(sent))
        elif self._keeps:
            other = (self._forwards[router].pop(0) != hash_rows(sent)).sum()
            self._counts[module.layer_number - 1].append(torch.stack([*other.new_zeros(4), other]))

    def _report(self) -> MegatronReport:
        sums = {layer: torch.stack(counts).sum(0).tolist() for layer, counts in sorted(self._counts.items())}
        for layer, (_, replayed, sent, placed, recomputed) in sums.items():
            if sent != replayed:
                raise ReplayError(
                    f"the router of layer {layer} did not send {replayed - sent} of {replayed} tokens to the experts "
                    "listed in its RouterReplay. Fix: find the code that overrides verl's replay in Megatron's "
                    "router, or set router_replay.mode=disabled."
                )
            if placed != replayed:
                raise ReplayError(
                    f"for {replayed - placed} of {replayed} tokens, the RouterReplay of layer {layer} does not list "
                    f"the shipped experts. Fix: check how verl maps layers and tokens of {ROUTES}, or set "
                    "router_replay.mode=disabled."
                )
            if recomputed:
                raise ReplayError(
                    f"layer {layer} was recomputed for its backward with other experts for {recomputed} tokens. Fix: "
                    f"turn activation recomputation off, or set router_replay.mode=disabled."
                )
        forwarded, replayed = next(((each[0], each[1]) for each in sums.values()), (0, 0))
        return MegatronReport(tuple(sums), replayed, forwarded, self.places)


def count_replayed(
    layer: int,
    sent: Tensor,
    target: Tensor,
    mask: Tensor | None = None,
    shipped: Tensor | None = None,
    drops: bool = False,
) -> Tensor:
    """Count the tokens of one router's forward, and how many were sent to the required experts.

    Args:
        layer: number of the router's layer, for messages.
        sent: (tokens, experts) bool, the experts to which each token was sent.
        target: (tokens, k) target ids of the router.
        mask: bool, tokens to replay; None: all tokens.
        shipped: (tokens, k) ids that were shipped; None if they are not known per token.
        drops: True if experts at full capacity drop tokens.

    Returns:
        (5,) int64: tokens; tokens to replay; among these, tokens sent to their target, and tokens whose target was
        shipped for them; 0.

    Raises:
        ReplayError: the number of tokens differs from the number of routes.
    """
    if len(target) != len(sent):
        raise ReplayError(
            f"the router of layer {layer} forwarded {len(sent)} tokens, including padding, but has routes for "
            f"{len(target)} tokens, so the routes were assigned to the wrong tokens. Fix: set "
            "actor_rollout_ref.actor.megatron.use_remove_padding=true, which makes verl pack tokens and routes in "
            "the same way."
        )
    if shipped is not None and len(shipped) != len(target):
        raise ReplayError(
            f"the router of layer {layer} needs routes for {len(target)} tokens, but received routes for "
            f"{len(shipped)} tokens. Fix: pass routes for every token, and zeros for tokens without routes."
        )
    rows = torch.ones_like(sent[:, 0]) if mask is None else mask.flatten().to(sent.device, torch.bool)
    wanted = torch.zeros_like(sent).scatter(1, target.to(sent.device), True)
    followed = ~(sent & ~wanted).any(-1) if drops else (sent == wanted).all(-1)
    same = torch.ones_like(rows) if shipped is None else (shipped.to(target) == target).all(-1).to(sent.device)
    tokens, none = rows.new_full((), len(sent), dtype=torch.int64), rows.new_zeros((), dtype=torch.int64)
    return torch.stack([tokens, rows.sum(), (rows & followed).sum(), (rows & same).sum(), none])


def hash_rows(sent: Tensor) -> Tensor:
    """Compute a checksum of the experts of each token: (tokens, experts) bool to (tokens,) int64."""
    experts = torch.arange(sent.shape[1], device=sent.device) + 1
    return (sent * (experts * _ODD)).sum(-1) ^ (sent * experts**3).sum(-1)


def watch_actor(worker: Any, mode: Mode) -> WatchedEngine:
    """Monitor the routers of the engine of verl's actor worker.

    Raises:
        PatchError: a function or attribute of verl is not where it is expected.
    """
    from verl_patches import worker_seams
    from verl_patches.contract import check_all

    check_all(worker_seams.MEGATRON_REPLAY)
    return WatchedEngine(worker.actor.engine, mode)


def judge_megatron(reports: Sequence[MegatronReport], mode: Mode) -> str:
    """Check the reports of one update, one per mini-batch from every rank of the last pipeline stage.

    If replay failed on any stage, the worker has already stopped the run.

    Returns:
        A sentence for the log.

    Raises:
        LivenessError: no router replayed a route.
    """
    layers = sorted({layer for report in reports for layer in report.layers})
    replayed, forwarded = (sum(getattr(report, name) for report in reports) for name in ("tokens", "forwarded"))
    if not replayed:
        seen = f"{len(layers)} layers replayed no token" if layers else "no router of the last stage replays routes"
        raise LivenessError(
            f"routing replay: actor_rollout_ref.actor.megatron.router_replay.mode={mode}, but {seen}. Fix: train a "
            f"mixture of experts with verl's own Megatron engine, or set the key to disabled."
        )
    compared = "equal the shipped routes"
    if not all(report.placed for report in reports):
        compared = "were not compared with the shipped routes, because verl splits them"
    return (
        f"routing replay {mode} LIVE on Megatron, in layers {layers} of the last stage: {replayed / forwarded:.1%} of "
        f"tokens sent to the experts listed in verl's RouterReplay, which {compared}."
    )


logger = logging.getLogger("verl.offpolicy")


class MegatronReplay(AddOn):
    """Add-on that proves that verl's own replay takes effect.

    Args:
        mode: verl's replay mode.
    """

    def __init__(self, mode: Mode) -> None:
        self._mode: Mode = mode
        self._seen = False

    def engine_part(self) -> Callable[[Any], object]:
        return partial(watch_actor, mode=self._mode)

    def on_update(self, metrics: dict[str, Any], batch: Any) -> None:
        proof = judge_megatron(take_reports(metrics, REPORT), self._mode)
        if not self._seen:
            logger.info(proof)
        self._seen = True
