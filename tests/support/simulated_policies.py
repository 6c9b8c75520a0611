"""Rows sampled from small softmax policies with faults of known size, to test the cause finder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recipe.offpolicy.recording import Rows, concatenate
from tests.support.recordings import drawn_rows

VOCABULARY = 48
Logits = NDArray[np.float64]
Engine = Callable[[Logits, int], Logits]
"""Maps the trainer's logits and the step to the engine's log-probs."""


@dataclass(frozen=True)
class Size:
    """Size of a simulated run; ``tokens`` per turn."""

    steps: int = 3
    prompts: int = 16
    group: int = 8
    tokens: int = 6
    turns: int = 1


def log_softmax(logits: Logits) -> Logits:
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def healthy(logits: Logits, step: int) -> Logits:
    return log_softmax(logits)


def noisy(deviation: float, seed: int = 0) -> Engine:
    """Logits with an additional error, as from another precision."""
    rng = np.random.default_rng(seed)
    return lambda logits, step: log_softmax(logits + deviation * rng.standard_normal(len(logits)))


def at_temperature(temperature: float) -> Engine:
    return lambda logits, step: log_softmax(logits / temperature)


def top_p(share: float) -> Engine:
    """Keep the fewest likeliest tokens whose probabilities add up to ``share``."""

    def engine(logits: Logits, step: int) -> Logits:
        log_prob = log_softmax(logits)
        order = np.argsort(-log_prob)
        before = np.cumsum(np.exp(log_prob[order])) - np.exp(log_prob[order])
        kept = np.full(len(logits), -np.inf)
        kept[order[before < share]] = logits[order[before < share]]
        return log_softmax(kept)

    return engine


def top_k(count: int) -> Engine:
    """Keep the likeliest ``count`` tokens."""

    def engine(logits: Logits, step: int) -> Logits:
        kept = np.full(len(logits), -np.inf)
        chosen = np.argsort(-logits)[:count]
        kept[chosen] = logits[chosen]
        return log_softmax(kept)

    return engine


def stale(period: int, size: float) -> Engine:
    """Logits that move by one update per step, and are reset every ``period`` steps."""
    rng = np.random.default_rng(7)
    return lambda logits, step: log_softmax(
        logits + size * ((step - 1) % period) * rng.standard_normal(len(logits)) + 0.003 * rng.standard_normal()
    )


def draw(weights: NDArray[np.float64], rng: np.random.Generator) -> int:
    """Draw an index by its weight, like ``rng.choice`` but without its checks, which take longer than the draw."""
    below = (weights / weights.sum()).cumsum()
    return int((below / below[-1]).searchsorted(rng.random(), side="right"))


def simulated(
    engine: Engine = healthy,
    *,
    extra: float = 0.0,
    turns: dict[int, Engine] | None = None,
    size: Size | None = None,
    seed: int = 0,
    floor: float = 0.01,
    **columns: object,
) -> Rows:
    """Simulate the rows of a run.

    Args:
        engine: what samples, and gives log mu.
        extra: logit of one more id that the trainer counts and the engine masks; 0: none.
        turns: turn -> an engine of its own whose log-probs are noted there.
        floor: deviation of the logits between healthy engines.
    """
    shape = size or Size()
    rng = np.random.default_rng(seed)
    parts = []
    for step in range(1, shape.steps + 1):
        values: dict[str, list[float]] = {name: [] for name in ("ids", "mu", "old", "turn")}
        for prompt in range(shape.prompts):
            table: dict[tuple[int, ...], tuple[Logits, Logits]] = {}  # logits, and log pi_old
            for _ in range(shape.group):
                said: tuple[int, ...] = ()
                for place in range(shape.tokens * shape.turns):
                    # The same prefix of the same prompt has the same logits, peaked at some places and flat at others.
                    if said not in table:
                        fresh = np.random.default_rng(abs(hash((seed, step, prompt, said))) % 2**32)
                        logits = fresh.uniform(1.0, 4.0) * fresh.standard_normal(VOCABULARY)
                        table[said] = logits, log_softmax(np.append(logits, extra) if extra else logits)
                    logits, old = table[said]
                    log_mu = engine(logits + floor * rng.standard_normal(VOCABULARY), step)
                    turn = place // shape.tokens
                    noted = turns[turn](logits, step) if turns and turn in turns else log_mu
                    token = draw(np.exp(log_mu), rng)
                    said = (*said, token)
                    for name, value in zip(values, (token, noted[token], old[token], turn), strict=True):
                        values[name].append(value)
        rows, length = shape.prompts * shape.group, shape.tokens * shape.turns
        old_log_prob = np.array(values["old"], dtype=np.float32)
        parts.append(
            drawn_rows(
                [length] * rows,
                step=step,
                seed=step,
                group=shape.group,
                response_ids=np.array(values["ids"], dtype=np.int32),
                rollout_log_prob=np.array(values["mu"], dtype=np.float32),
                old_log_prob=old_log_prob,
                log_prob=old_log_prob,
                turn=np.array(values["turn"], dtype=np.int16),
                **columns,
            )
        )
    return concatenate(parts)
