"""Routes of a row as recorded by a client, routes of a micro-batch in one forward pass, and the settings of replay.

A note is ``[tokens, checksum]``: the number of the row's first tokens that the rollout engine forwarded, and a checksum
of their routes. The last token of a response was sampled but never forwarded, so it has no routes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import torch
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict
from torch import Tensor

from verl_patches.execution_path import LivePath, live_path

from ..batch.declared_keys import Section, count, read_shipped_defaults
from ..batch.seals import key_of
from ..batch.weight_versions import CHUNKS, OLDEST_VERSION, UNKNOWN, read_extra_fields
from ..correction import Problem
from ..correction.problem import Requirement
from .expert_choice import ReplayError

NOTE = "offpolicy_routes"
"""Key of a row's note in its extra fields."""
_ODD = 0x9E3779B97F4A7C15 - 2**64
_FIRST = 0xBF58476D1CE4E5B9 - 2**64


class RouteNote(list[int]):
    """The note of one row, and the row's tokens and routes, which are not part of the note as sent."""

    def __init__(self) -> None:
        super().__init__([0, 0])
        self.tokens: list[int] = []
        self.routes: Tensor | None = None

    # verl sends the routes in its own column.
    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)

    def keep_sampled(self, tokens: Sequence[int], routes: Tensor) -> Tensor:
        """Append the routes of a later request to those with which the row's earlier tokens were sampled.

        A later turn runs the earlier tokens through the model again, in other batches or with newer weights, so its
        routes for these tokens can differ from those with which they were sampled.

        Args:
            tokens: ids of the request's prompt and response.
            routes: (n, layers, k), routes of the request's first n tokens.

        Returns:
            (n, layers, k): the earlier routes up to the first token that differs, then the routes of the later request.
        """
        if self.routes is not None:
            shared = count_shared(self.tokens, tokens, min(len(self.routes), len(routes)))
            routes = torch.cat([self.routes[:shared], routes[shared:]])
        self.tokens, self.routes = list(tokens), routes
        self[:] = [len(routes), hash_routes(routes)]
        return routes


def count_shared(first: Sequence[int], second: Sequence[int], most: int) -> int:
    """Count the common leading tokens of two sequences, up to ``most``.

    Example:
        >>> count_shared([5, 6, 7], [5, 6, 8, 9], 3), count_shared([5, 6, 7], [5, 6, 7], 2)
        (2, 2)
    """
    pairs = zip(first[:most], second[:most], strict=False)
    return next((place for place, (one, other) in enumerate(pairs) if one != other), min(most, len(first), len(second)))


def hash_routes(routes: Tensor) -> int:
    """Compute the checksum of one row's routes, (n, layers, k) of any integer dtype."""
    return int(hash_tokens(routes, torch.arange(len(routes))).sum()) if len(routes) else 0


def hash_tokens(routes: Tensor, places: Tensor) -> Tensor:
    """Compute each token's contribution to its row's checksum, from expert, layer, order and position.

    Args:
        routes: (tokens, layers, k) integers.
        places: (tokens,) int64, the token's position in its row.

    Returns:
        (tokens,) int64, to be summed over a row; wraps around.
    """
    ids = routes.flatten(1).long() + 1
    columns = _spread(torch.arange(ids.shape[1], device=ids.device) + 1)
    return (ids * columns).sum(-1) * _spread(places.to(ids.device) + 1)


def _spread(number: Tensor) -> Tensor:
    """Spread small numbers over 64 bits; the results are odd numbers."""
    mixed = number * _ODD
    return ((mixed ^ (mixed >> 29)) * _FIRST) | 1


Mode = Literal["R2", "R3"]
ROUTES = "routed_experts"
"""verl's column of routes: nested by row, (tokens, layers, k) each."""
REPLAY_STEP = "offpolicy_replay_step"
"""Key of the trainer's step in a batch whose routes must be recorded or replayed."""


@dataclass(frozen=True)
class TokenLayout:
    """Positions of a micro-batch's tokens in a forward.

    Attributes:
        total: number of tokens of the forward, padding included.
        places: (n,) int64, position of each token in the forward.
        rows: (n,) int64, the row of each token.
        within: (n,) int64, position of each token in its row.
        lengths: (B,) int64, number of tokens per row.
        offsets: (B + 1,) int64, start of each row.
    """

    total: int
    places: Tensor
    rows: Tensor
    within: Tensor
    lengths: Tensor
    offsets: Tensor

    @classmethod
    def of(cls, input_ids: Tensor, forwarded: Tensor) -> TokenLayout:
        """Build the layout of one forward.

        Args:
            input_ids: ids of the micro-batch, nested by row.
            forwarded: ids that the model receives: (1, n + padding) packed, or (B, S) padded on the right.
        """
        offsets: Tensor = input_ids.offsets()  # type: ignore[attr-defined]
        lengths = offsets.diff()
        count = len(input_ids.values())
        rows = torch.repeat_interleave(torch.arange(len(lengths), device=offsets.device), lengths, output_size=count)
        flat = torch.arange(count, device=offsets.device)
        within = flat - offsets[rows]
        packed = len(forwarded) == 1
        places = flat if packed else rows * forwarded.shape[1] + within
        return cls(forwarded.numel(), places, rows, within, lengths, offsets)

    def spread(self, values: Tensor) -> Tensor:
        """Scatter the (n, ...) values of tokens over the forward: (total, ...), zeros on padding."""
        if len(values) == self.total:
            return values
        laid = values.new_zeros((self.total, *values.shape[1:]))
        laid[self.places] = values
        return laid

    def collect(self, values: Tensor) -> Tensor:
        """Select the tokens' values, (n, ...), from the (total, ...) values of the forward."""
        return values if len(self.places) == self.total else values[self.places]


@dataclass(frozen=True)
class BatchRoutes:
    """Routes of a micro-batch.

    Attributes:
        routes: (total, layers, k) integers, in the order of the forward.
        replayed: (total,) bool, tokens whose routes are replayed.
        ages: (total,) int64, versions of the weights since the tokens were sampled; None if unknown.
        withheld: () int64, number of tokens whose routes are too old to be replayed.
        size: bytes of the routes as received.
    """

    routes: Tensor
    replayed: Tensor
    ages: Tensor | None
    withheld: Tensor
    size: int


def read_routes(data: TensorDict, layout: TokenLayout, mode: Mode, step: int, oldest: int | None) -> BatchRoutes:
    """Read the routes of a micro-batch.

    Args:
        mode: source of the routes: R2, the trainer, for all tokens; R3, the rollout engine, for tokens in its notes.
        step: the trainer's step.
        oldest: largest age, in versions, at which routes are replayed; None: any age.

    Raises:
        ReplayError: routes or notes are missing, or the routes belong to other tokens.
    """
    routes = _read_column(data, layout, mode)
    counts, ages = layout.lengths, None
    if mode == "R3":
        counts = torch.tensor(read_counts(data), device=layout.offsets.device)
        ages = _read_ages(data, step, layout)
    if oldest is not None and ages is None:
        raise ReplayError(
            f"offpolicy.replay.oldest={oldest} needs the age of the weights, but the version of the weights that "
            "sampled one sequence is missing. Fix: pass on the server's extra_fields in the agent loop, or set "
            f"{OLDEST}=null."
        )
    routed = layout.within < counts[layout.rows]
    replayed = routed if oldest is None or ages is None else routed & (ages <= oldest)
    return BatchRoutes(
        routes=layout.spread(routes),
        replayed=layout.spread(replayed),
        ages=None if ages is None else layout.spread(ages),
        withheld=(routed & ~replayed).sum(),
        size=routes.numel() * routes.element_size(),
    )


def read_counts(data: TensorDict) -> list[int]:
    """Read how many of each row's tokens have routes; 0 for rows without a token in the loss, such as padding rows.

    Raises:
        ReplayError: a row has no note.
    """
    fields = read_extra_fields(data)
    trained = _flag_trained(data)
    if missing := [
        row for row, there in enumerate(trained) if there and (row >= len(fields) or NOTE not in fields[row])
    ]:
        raise ReplayError(
            f"{len(missing)} sequences have no note of the routes with which they were sampled ({NOTE}). Fix: pass on "
            f"the server's extra_fields in the agent loop, or set router_replay.mode=disabled."
        )
    return [int(fields[row][NOTE][0]) if there else 0 for row, there in enumerate(trained)]


def hash_routes_by_row(routes: Tensor) -> Tensor:
    """Hash the routes of all tokens of each row, (B,) int64.

    Args:
        routes: nested by row, (tokens, layers, k) each.
    """
    offsets: Tensor = routes.offsets()  # type: ignore[attr-defined]
    rows = torch.repeat_interleave(offsets.diff(), output_size=len(routes.values()))
    within = torch.arange(len(rows), device=offsets.device) - offsets[rows]
    return torch.zeros_like(offsets[1:]).index_add_(0, rows, hash_tokens(routes.values(), within))


def check_checksums(data: TensorDict, layout: TokenLayout) -> int:
    """Check received routes against the checksums stored by the rollout engine's client or the recording worker.

    Rows that verl has truncated are skipped.

    Returns:
        Number of rows that were compared.

    Raises:
        ReplayError: the routes of a row differ.
    """
    if (recorded := key_of(ROUTES)) in data.keys():
        counts, noted = layout.lengths.tolist(), data[recorded].tolist()
    else:
        counts, fields = read_counts(data), read_extra_fields(data)
        noted = [int(fields[row][NOTE][1]) if count else 0 for row, count in enumerate(counts)]
    there = layout.within < torch.tensor(counts, device=layout.offsets.device)[layout.rows]
    parts = hash_tokens(data[ROUTES].values(), layout.within) * there
    found = torch.zeros_like(layout.lengths).index_add_(0, layout.rows, parts).tolist()
    lengths = layout.lengths.tolist()
    compared = [row for row, count in enumerate(counts) if 0 < count <= lengths[row]]
    if wrong := [row for row in compared if found[row] != noted[row]]:
        raise ReplayError(
            f"the route checksums of {len(wrong)} of {len(compared)} sequences differ, so these routes are not those "
            f"with which the sequences were sampled; the first is at position {wrong[0]} of its micro-batch. Fix: "
            f"find the code that changes the column {ROUTES} between rollout and trainer."
        )
    return len(compared)


def _read_column(data: TensorDict, layout: TokenLayout, mode: Mode) -> Tensor:
    if ROUTES not in data.keys():
        source = (
            "the rollout engine returned no routes" if mode == "R3" else "the forward pass of pi_old recorded no routes"
        )
        raise ReplayError(
            f"the micro-batch has no {ROUTES}: {source} no routes. Fix: set router_replay.mode=disabled to train "
            "without replay."
        )
    column = data[ROUTES]
    routes: Tensor = column.values()
    if not torch.equal(column.offsets(), layout.offsets):
        raise ReplayError(
            f"{ROUTES} cover {column.offsets().diff().tolist()} tokens per sequence, but the sequences have "
            f"{layout.lengths.tolist()} tokens. Fix: pass routes for each token, and zeros for tokens without routes."
        )
    return routes


def _flag_trained(data: TensorDict) -> list[bool]:
    mask = data["response_mask"]
    rows = mask.unbind() if mask.is_nested else list(mask)
    return torch.stack([row.bool().any() for row in rows]).tolist()


def _read_ages(data: TensorDict, step: int, layout: TokenLayout) -> Tensor | None:
    versions = [_find_oldest(fields) for fields in read_extra_fields(data)]
    if None in versions:
        return None
    ages = (step - 1 - torch.tensor(versions, device=layout.offsets.device)).clamp(min=0)
    return ages[layout.rows]


def _find_oldest(fields: Mapping[str, Any]) -> int | None:
    """Find the oldest version of the weights that sampled a token of the row; None if it is not recorded."""
    noted = [version for turn in fields.get(CHUNKS) or () for version, _ in turn]
    # verl's value comes from the first attempt, which may have been aborted before it sampled a token.
    return min(noted) if noted and UNKNOWN not in noted else fields.get(OLDEST_VERSION)


_ACTOR, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
_REFERENCE = "the reference is the same engine without its adapter, and would also replay routes."
_SPLIT = "sequence parallelism splits tokens over ranks, but not their routes."
_OF_ANY_MODE = (
    Requirement(f"{_MODEL}.use_fused_kernels", (False,), "fused kernels replace the model's forward."),
    Requirement(f"{_MODEL}.mtp.enable", (False,), "the layers for multi-token prediction choose their own experts."),
    Requirement(f"{_MODEL}.lora_rank", (0,), _REFERENCE),
    Requirement(f"{_MODEL}.lora.rank", (0,), _REFERENCE),
    Requirement(f"{_MODEL}.lora_adapter_path", (None,), _REFERENCE),
    Requirement(f"{_ACTOR}.ulysses_sequence_parallel_size", (1,), _SPLIT),
    Requirement(f"{_ACTOR}.fsdp_config.ulysses_sequence_parallel_size", (1,), _SPLIT),
)
_OF_R3 = Requirement("actor_rollout_ref.rollout.name", ("vllm",), "R3 has been tested only with routes from vLLM.")


def list_requirements(mode: Mode) -> tuple[Requirement, ...]:
    """List the configuration values that this mode of replay requires."""
    return (*_OF_ANY_MODE, _OF_R3) if mode == "R3" else _OF_ANY_MODE


SECTION = "offpolicy.replay"
OLDEST = f"{SECTION}.oldest"
ROUTER_REPLAY = "actor_rollout_ref.actor.fsdp_config.router_replay"
MEGATRON_ROUTER_REPLAY = "actor_rollout_ref.actor.megatron.router_replay"
RECORDED = "actor_rollout_ref.rollout.enable_rollout_routing_replay"
STRATEGIES = ("fsdp", "fsdp2")


@dataclass(frozen=True)
class ReplaySettings:
    """Settings of routing replay on FSDP.

    Attributes:
        mode: R2 or R3.
        oldest: largest age, in versions of the weights, at which routes are replayed; None: any age.
    """

    mode: Mode
    oldest: int | None

    @classmethod
    def from_config(cls, config: DictConfig, path: LivePath | None = None) -> ReplaySettings | None:
        """Read the settings from a checked configuration; None if FSDP replays nothing."""
        mode = OmegaConf.select(config, f"{ROUTER_REPLAY}.mode")
        if mode not in get_args(Mode) or not replays_on_fsdp(path or live_path(config)):
            return None
        return cls(cast(Mode, mode), OmegaConf.select(config, OLDEST))


def replays_on_fsdp(path: LivePath) -> bool:
    """Return True if verl's FSDP replay key takes effect on a path."""
    return path.attributes.fsdp_replay and _is_v1_engine(path, STRATEGIES)


def read_megatron_mode(config: DictConfig, path: LivePath | None = None) -> Mode | None:
    """Read verl's replay mode for Megatron if its routers can be monitored; None otherwise."""
    mode = OmegaConf.select(config, f"{MEGATRON_ROUTER_REPLAY}.mode")
    if mode in (None, "disabled"):
        return None
    path = path or live_path(config)
    return cast(Mode, mode) if path.attributes.watched_replay and _is_v1_engine(path, ("megatron",)) else None


def _is_v1_engine(path: LivePath, strategies: tuple[str, ...]) -> bool:
    return path.trainer == "v1" and path.strategy in strategies


KEYS = Section(
    SECTION,
    read_shipped_defaults("replay"),
    {"oldest": count("a number of versions, 0 or more, or null for all", 0, null=True)},
)


def find_problems(config: DictConfig) -> Iterator[Problem]:
    """Find invalid values of ``offpolicy.replay``."""
    found = list(KEYS.find_problems(config))
    yield from found
    oldest = None if found else OmegaConf.select(config, OLDEST)
    if oldest is not None and ((settings := ReplaySettings.from_config(config)) is None or settings.mode != "R3"):
        reason, fix = f"used only with {ROUTER_REPLAY}.mode=R3.", f"Set {ROUTER_REPLAY}.mode=R3, or {OLDEST}=null."
        yield Problem(OLDEST, oldest, reason, fix, parts=())
