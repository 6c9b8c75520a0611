"""Training runs with a known injected fault, with which the search for causes is tuned and tested."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

Part = Literal["tuning", "held_out"]
DATA: Final = Path(__file__).resolve().parents[3] / "tests" / "data" / "faults"
"""Folder of the recordings: PART/NAME-SEED."""

_ROLLOUT: Final = "actor_rollout_ref.rollout"
_TRUNCATED: Final = "correction.allow_truncated_sampling=true"
_CONVERSATION: Final = (
    "actor_rollout_ref.model.path={models}/merging",
    "data.max_response_length=64",
    f"{_ROLLOUT}.agent.default_agent_loop=conversation",
    f"{_ROLLOUT}.agent.agent_loop_config_path={{here}}/conversation.yaml",
)


@dataclass(frozen=True)
class FaultCase:
    """One run of the quickstart.

    Attributes:
        name: name of its recording.
        part: ``tuning`` or ``held_out``. Thresholds were chosen on ``tuning``; ``held_out`` was examined only after
            they had been fixed.
        seed: seed of the data; every run has a different seed.
        causes: causes that should be found, from ``recipe.offpolicy.analysis.attribution.cause.NAMES``; empty for a
            healthy run.
        steps: number of training steps.
        overrides: Hydra overrides; {models} and {here} stand for the models' folder and this file's folder.
        environment: environment variables for ``inject`` and ``conversation``.
        needs: a model or questions, made by ``make.make_needed``, that replace the quickstart's own.
    """

    name: str
    part: Part
    seed: int
    causes: frozenset[str] = frozenset()
    steps: int = 3
    overrides: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    needs: str = ""


def _case(name: str, part: Part, seed: int, *causes: str, steps: int = 3, needs: str = "", **rest: Any) -> FaultCase:
    overrides = tuple(rest.pop("overrides", ()))
    return FaultCase(name, part, seed, frozenset(causes), steps, overrides, rest, needs)


def _padded(extra: int) -> tuple[str, ...]:
    return (f"actor_rollout_ref.model.path={{models}}/padded-{extra}",)


def _asked(questions: str, rate: float) -> tuple[str, ...]:
    """Build repeated questions that fill the blocks of vLLM's cache, which have 16 tokens."""
    return (
        f"data.train_files={{models}}/{questions}/train.parquet",
        f"+{_ROLLOUT}.engine_kwargs.vllm.block_size=16",
        f"actor_rollout_ref.actor.optim.lr={rate:g}",
    )


CASES: Final = (
    _case("healthy", "tuning", 1, steps=4),
    _case("top_p-0.9", "tuning", 1, "truncated sampling", steps=4, overrides=(f"{_ROLLOUT}.top_p=0.9", _TRUNCATED)),
    _case("top_k-4", "tuning", 1, "truncated sampling", steps=4, overrides=(f"{_ROLLOUT}.top_k=4", _TRUNCATED)),
    _case("temperature-0.8", "tuning", 1, "temperature", steps=4, OFFPOLICY_INJECT="temperature:0.8"),
    _case("shift-late", "tuning", 1, "misalignment", steps=4, OFFPOLICY_INJECT="shift:1"),
    _case("stale-3", "tuning", 1, "stale weights", steps=6, OFFPOLICY_INJECT="stale:3"),
    _case("round-3", "tuning", 1, "numerics", steps=4, OFFPOLICY_INJECT="round:3"),
    _case("extra-256", "tuning", 1, "extra vocabulary", steps=4, needs="padded-256", overrides=_padded(256)),
    _case(
        "history", "tuning", 1, "re-tokenisation",
        steps=4, needs="merging", overrides=_CONVERSATION, OFFPOLICY_CONVERSATION="history",
    ),
    _case("turns", "tuning", 1, steps=4, needs="merging", overrides=_CONVERSATION, OFFPOLICY_CONVERSATION="kept"),
    _case(
        "cache-3", "tuning", 1, "stale weights",
        steps=6, needs="again-16", overrides=_asked("again-16", 1e-3), OFFPOLICY_INJECT="cache:3",
    ),
    _case(
        "stale-4", "tuning", 19, "stale weights",
        steps=3, needs="again-8-new-128", overrides=_asked("again-8-new-128", 6e-4), OFFPOLICY_INJECT="stale:4",
    ),
    _case("temperature-1.2", "held_out", 2, "temperature", OFFPOLICY_INJECT="temperature:1.2"),
    _case("extra-1024", "held_out", 3, "extra vocabulary", needs="padded-1024", overrides=_padded(1024)),
    _case(
        "context", "held_out", 4, "re-tokenisation",
        needs="merging", overrides=_CONVERSATION, OFFPOLICY_CONVERSATION="context",
    ),
    _case("top_p-0.7", "held_out", 5, "truncated sampling", overrides=(f"{_ROLLOUT}.top_p=0.7", _TRUNCATED)),
    _case(
        "raw-0.7", "held_out", 6, "temperature",
        overrides=(f"{_ROLLOUT}.temperature=0.7", f"{_ROLLOUT}.logprobs_mode=raw_logprobs"),
    ),
    _case(
        "stale-2", "held_out", 7, "stale weights",
        steps=5, overrides=("actor_rollout_ref.actor.optim.lr=1e-3",), OFFPOLICY_INJECT="stale:2",
    ),
    _case("round-2", "held_out", 8, "numerics", OFFPOLICY_INJECT="round:2"),
    _case("shift-early", "held_out", 9, "misalignment", OFFPOLICY_INJECT="shift:-1"),
    _case("healthy", "held_out", 10, steps=4),
    _case("float32", "held_out", 11, overrides=(f"{_ROLLOUT}.dtype=float32",)),
    _case(
        "history-2", "held_out", 12, "re-tokenisation",
        needs="merging", overrides=_CONVERSATION, OFFPOLICY_CONVERSATION="history", OFFPOLICY_TURNS="2",
    ),
    _case("top_k-3", "held_out", 13, "truncated sampling", overrides=(f"{_ROLLOUT}.top_k=3", _TRUNCATED)),
    _case(
        "colocate_async", "held_out", 14, "stale weights",
        steps=4, overrides=("trainer.v1.trainer_mode=colocate_async", "actor_rollout_ref.actor.optim.lr=3e-3"),
    ),
    _case("turns", "held_out", 15, needs="merging", overrides=_CONVERSATION, OFFPOLICY_CONVERSATION="kept"),
    _case(
        "cache-2", "held_out", 16, "stale weights",
        steps=4, needs="again-16", overrides=_asked("again-16", 5e-4), OFFPOLICY_INJECT="cache:2",
    ),
    _case(
        "cache-9", "held_out", 17, "stale weights",
        steps=4, needs="again-8-new-128", overrides=_asked("again-8-new-128", 3e-4), OFFPOLICY_INJECT="cache:9",
    ),
    _case(
        "cache-1", "held_out", 18,
        steps=4, needs="again-8-new-128", overrides=_asked("again-8-new-128", 1e-3), OFFPOLICY_INJECT="cache:1",
    ),
    _case(
        "stale-3", "held_out", 20, "stale weights",
        steps=4, needs="again-8-new-128", overrides=_asked("again-8-new-128", 3e-4), OFFPOLICY_INJECT="stale:3",
    ),
)  # fmt: skip
