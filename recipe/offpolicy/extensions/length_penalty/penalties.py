"""Computes length penalties of a group and of a batch, anchor lengths, length statistics, and verl's advantages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...proof.rewards import measure_spread
from ..batch_view import BatchView, Sessions, identify_prompts, read_sessions
from .settings import LengthSettings, read_length

Answer = tuple[bool, float]
"""(correct, tokens): whether the answer is correct, and its number of response tokens."""


@dataclass(frozen=True)
class Anchor:
    """An anchor length that no longer changes.

    Attributes:
        length: mean number of tokens of the correct answers in the window, at least 1.
        step: step at which the anchor was frozen.
        answers: number of correct answers over which the mean was taken.
    """

    length: float
    step: int
    answers: int


@dataclass
class Anchors:
    """Anchors of a run, by prompt or by data source.

    A prompt's answers are collected step by step until the share of correct answers among at least ``min_samples``
    answers exceeds ``pass_rate``. The anchor is then frozen, and the answers are discarded. The order of answers within
    a step does not matter, because whole steps enter and leave the window.

    Attributes:
        pass_rate: in (0, 1); the share of correct answers must exceed this value.
        min_samples: smallest number of answers from which the share of correct answers is computed.
        window: number of most recent answers to keep, rounded up to whole steps.
    """

    pass_rate: float
    min_samples: int
    window: int
    frozen: dict[str, Anchor] = field(default_factory=dict)
    _open: dict[str, list[list[Answer]]] = field(default_factory=dict)

    def add(self, step: int, answers: Iterable[tuple[str, bool, float]]) -> int:
        """Add one step's answers, as (prompt, correct, tokens); return how many anchors this step froze."""
        by_prompt: dict[str, list[Answer]] = {}
        for name, right, tokens in answers:
            if name not in self.frozen:
                by_prompt.setdefault(name, []).append((right, tokens))
        before = len(self.frozen)
        for name, new in by_prompt.items():
            steps = self._open.setdefault(name, [])
            steps.append(new)
            while sum(map(len, steps)) - len(steps[0]) >= self.window:
                steps.pop(0)
            lengths = [tokens for each in steps for right, tokens in each if right]
            total = sum(map(len, steps))
            if total >= self.min_samples and len(lengths) > self.pass_rate * total:
                # Sums of rounded floats depend on their order.
                length = max(math.fsum(lengths) / len(lengths), 1.0)  # empty answers may be correct
                self.frozen[name] = Anchor(length, step, len(lengths))
                del self._open[name]
        return len(self.frozen) - before

    def length_of(self, name: str) -> float | None:
        """Return the anchor of a prompt; None if the prompt has no anchor."""
        return self.frozen[name].length if name in self.frozen else None

    def to_json(self) -> dict[str, Any]:
        """Return the state as JSON."""
        return {"frozen": {name: asdict(anchor) for name, anchor in self.frozen.items()}, "open": self._open}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what ``to_json`` returned."""
        self.frozen = {name: Anchor(**values) for name, values in state["frozen"].items()}
        self._open = {
            name: [[(bool(right), float(tokens)) for right, tokens in step] for step in steps]
            for name, steps in state["open"].items()
        }


EASY, HARD = 0.9, 0.1
"""Minimum share of correct answers in an easy group, and maximum share in a hard group."""
CLASSES = ("right", "wrong", "easy", "hard")


def summarize_lengths(tokens: Tensor, right: Tensor, groups: Mapping[str, Sequence[int]]) -> dict[str, float]:
    """Compute the mean, median and 90th percentile of lengths for correct and wrong answers, and easy and hard prompts.

    Args:
        tokens: (S,) response tokens of each session.
        right: (S,) bool.
        groups: sessions of each group.

    Returns:
        ``CLASS/mean``, ``CLASS/p50`` and ``CLASS/p90``, which are NaN for a class without sessions;
        ``CLASS/sequences``; and ``correlation`` of length and correctness within groups, which is NaN if either is
        constant.
    """
    members = {name: torch.zeros(len(tokens), dtype=torch.bool) for name in ("easy", "hard")}
    counted = torch.zeros(len(tokens), dtype=torch.bool)
    length, mark = tokens.double().clone(), right.double()
    for sessions in groups.values():
        at = torch.tensor(sessions)
        share = float(right[at].double().mean())
        counted[at] = True
        members["easy"][at] = share >= EASY
        members["hard"][at] = share <= HARD
        length[at] -= length[at].mean()
        mark[at] -= right[at].double().mean()
    chosen = {"right": right.bool() & counted, "wrong": ~right.bool() & counted} | members
    found: dict[str, float] = {}
    for name in CLASSES:
        values = tokens[chosen[name]].double()
        found[f"{name}/sequences"] = float(len(values))
        found[f"{name}/mean"] = float(values.mean()) if len(values) else math.nan
        for share in (50, 90):
            found[f"{name}/p{share}"] = float(values.quantile(share / 100)) if len(values) else math.nan
    length, mark = length[counted], mark[counted]
    scale = float(length.square().sum() * mark.square().sum()) ** 0.5
    return found | {"correlation": float((length * mark).sum()) / scale if scale > 0 else math.nan}


EPSILON = 1e-6
"""Constant that verl adds to the standard deviation."""


def compute_shift(penalty: Tensor, scores: Tensor, groups: Mapping[str, Sequence[int]], *, by_std: bool) -> Tensor:
    """Compute how far each normalised advantage is lowered: (P_i - mean P) / s in each group, (S,) float64.

    s is the standard deviation by which verl has divided the group's rewards. If the rewards are equal within float32
    rounding, s is 1, so the penalty is applied unscaled. If penalties differ by more than rewards, 1 / s is bounded: no
    shift exceeds the group's largest advantage in verl (at most sqrt(n - 1) for n rows) or the largest |P_i - mean P|,
    whichever is larger. The mean advantage of each group does not change.

    Args:
        penalty: (S,) penalty of each session.
        scores: (S,) raw rewards.
        groups: sessions of each group; other sessions are not shifted.
        by_std: True if verl divides by the standard deviation.
    """
    shift = torch.zeros_like(penalty)
    for members in groups.values():
        at = torch.tensor(members)
        centred = penalty[at] - penalty[at].mean()
        shift[at] = centred * (_compute_factor(scores[at], float(centred.abs().max())) if by_std else 1.0)
    return shift


def _compute_factor(scores: Tensor, largest: float) -> float:
    """Compute 1 / s for one group whose penalties deviate from their mean by at most ``largest``."""
    scores = scores.double()
    spread = measure_spread(scores, centred=True)
    verls = 1 / (spread.value + EPSILON)
    own = spread.certainty * verls * float((scores - scores.mean()).abs().max())
    bound = max(1.0, own / largest) if largest > 0 else 1.0
    return spread.certainty * min(verls, bound) + (1 - spread.certainty)


def compare_rewards(scores: Tensor, groups: Mapping[str, Sequence[int]]) -> dict[str, float]:
    """Compute a confidence in [0, 1] that each group's rewards differ: 0 if they agree within float32 rounding."""
    return {name: measure_spread(scores[torch.tensor(at)], centred=True).certainty for name, at in groups.items()}


KINDS = ("uniform", "group", "anchor", "reference")


def penalties(
    kind: str,
    lengths: Tensor | Sequence[float],
    right: Tensor | Sequence[bool],
    *,
    coefficient: float,
    anchor: float | None = None,
) -> Tensor:
    """Compute the penalties of one group, (N,) float64, positive where the reward is lowered, and not capped.

    ``uniform``: coefficient T. ``group``: with lam = 1/2 - (T - min) / (max - min), -coefficient lam for a correct row
    and -coefficient min(0, lam) for a wrong row, or 0 if all rows are equally long (Kimi k1.5, arXiv 2501.12599,
    section 2.3.3). ``anchor``: coefficient max(0, (T - A) / A), 0 without an anchor; ``reference``: the same with a
    given length as A. Both divide by at least one token.

    Args:
        lengths: (N,) response tokens T.
        right: (N,) bool, or 0 and 1.
        coefficient: 0 or more.
        anchor: A, above 0; None if there is no anchor yet.

    Example:
        >>> lengths, right = [100, 300, 500], [True, True, False]
        >>> penalties("group", lengths, right, coefficient=0.1).tolist()
        [-0.05, 0.0, 0.05]
        >>> penalties("anchor", lengths, right, coefficient=0.1, anchor=200).tolist()
        [0.0, 0.05, 0.15000000000000002]
    """
    tokens, marks = (torch.as_tensor(values).double() for values in (lengths, right))
    if kind == "uniform" or len(tokens) == 0:
        return coefficient * tokens
    if kind != "group":
        above = torch.zeros_like(tokens) if anchor is None else (tokens - anchor) / max(anchor, 1.0)
        return coefficient * above.clamp(min=0)
    least, most = tokens.amin(), tokens.amax()
    # Lengths are whole tokens, so a range below 1 is 0.
    standing = ((least + most) / 2 - tokens) / (most - least).clamp(min=1)
    return 0.0 - coefficient * torch.where(marks.bool(), standing, standing.clamp(max=0))


@dataclass(frozen=True)
class Measured:
    """The values of one batch, with S sessions, that the penalty uses.

    Attributes:
        right: (S,) bool.
        anchors: (S,) anchor or reference length of each session.
        new: number of anchors that were frozen with this batch.
        groups: sessions of each group, without silent sessions.
        equal: number of groups whose rewards are equal within float32 rounding.
        penalty: (S,) float64, including the warm-up factor; 0 for sessions in no group.
        weight: warm-up factor.
    """

    sessions: Sessions
    right: Tensor
    anchors: list[float | None]
    new: int
    groups: dict[str, list[int]]
    equal: int
    penalty: Tensor
    weight: float


def measure(
    section: str, settings: LengthSettings, anchors: Anchors, batch: BatchView, most_tokens: int | None
) -> Measured:
    """Add a batch's answers to the anchors, then measure the batch.

    Raises:
        ValueError: a row has no reference length.
    """
    sessions = read_sessions(batch, most_tokens)
    right = sessions.find_right(settings.correct_at_least)
    groups = sessions.groups()
    differ = compare_rewards(sessions.scores, groups)
    held, new = _find_anchors(section, settings, anchors, batch, sessions, right)
    weight = settings.compute_warmup(batch.step)
    penalty = torch.zeros_like(sessions.tokens)
    for name, members in groups.items():
        share = weight * (differ[name] if settings.zero_variance == "skip" else 1.0)
        if settings.kind == "none" or share == 0:
            continue
        at = torch.tensor(members)
        of_group = sessions.tokens[at], right[at]
        found = penalties(settings.kind, *of_group, coefficient=settings.coefficient, anchor=held[members[0]])
        penalty[at] = share * (found if settings.most is None else found.clamp(-settings.most, settings.most))
    if settings.applies_to == "correct":
        penalty = torch.where(right, penalty, 0.0)
    equal = sum(not certainty for certainty in differ.values())
    return Measured(sessions, right, held, new, groups, equal, penalty, weight)


def _find_anchors(
    section: str, settings: LengthSettings, anchors: Anchors, batch: BatchView, sessions: Sessions, right: Tensor
) -> tuple[list[float | None], int]:
    """Find the anchor or reference length of each session, and count the anchors that this batch freezes.

    Raises:
        ValueError: a row of the data set has no reference length.
    """
    last = sessions.last.tolist()
    if settings.kind == "anchor":
        if settings.anchor.per == "source":
            sources = batch.rows("data_source")["data_source"]
            names = [str(sources[row]) for row in last]
        else:
            names = identify_prompts(batch, sessions)
        new = anchors.add(batch.step, zip(names, right.tolist(), sessions.tokens.tolist(), strict=True))
        return [anchors.length_of(name) for name in names], new
    reference = settings.reference if settings.kind == "reference" else None
    if not isinstance(reference, str):
        return [reference] * len(last), 0
    infos = batch.rows("extra_info")["extra_info"]
    found = [read_length(infos[row], reference) for row in last]
    if None in found:
        row = last[found.index(None)]
        raise ValueError(
            f"{section}.reference={reference}: the extra_info of sequence {row} in step {batch.step} is "
            f"{infos[row]!r:.200}, and has no length above 0 under this name. Fix: fill the column, or set "
            f"{section}.reference to a number of tokens."
        )
    return found, 0


RESOLUTION = 2.0**-23
"""Rounding error of float32, the dtype in which verl subtracts means."""


def state_advantages(rewards: Sequence[float], *, estimator: str, by_std: bool) -> list[float]:
    """Compute the advantages that verl's GRPO or RLOO computes for one group."""
    count = len(rewards)
    if estimator.startswith("rloo"):
        total = sum(rewards)
        return [each - (total - each) / (count - 1) if count > 1 else each for each in rewards]
    middle = sum(rewards) / count if count > 1 else 0.0
    divisor = (_spread(rewards) if count > 1 else 1.0) + 1e-6 if by_std else 1.0
    return [(each - middle) / divisor for each in rewards]


def bound_error(rewards: Sequence[float], *, by_std: bool) -> float:
    """Bound the float32 error of verl's advantages; it is large if nearly equal rewards make the divisor small."""
    largest = max(abs(each) for each in rewards)
    divisor = _spread(rewards) + 1e-6 if by_std and len(rewards) > 1 else 1.0
    return 1e-5 + 8 * RESOLUTION * largest * (1 + 1 / divisor)


def _spread(values: Sequence[float]) -> float:
    """Compute the sample standard deviation."""
    if len(values) < 2:
        return 0.0
    middle = sum(values) / len(values)
    return (sum((each - middle) ** 2 for each in values) / (len(values) - 1)) ** 0.5
