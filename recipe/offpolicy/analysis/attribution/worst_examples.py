"""Tokens and rows with the largest mismatch, with their context."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ...recording import Rows
from .profiles import ValidTokens, compute_k3
from .token_text import TokenDecoder

BEFORE: Final = 12
AFTER: Final = 4
"""Tokens of context."""
EXCERPT: Final = 60
"""Tokens of a row that are shown."""


@dataclass(frozen=True)
class WorstToken:
    """A token in its context, with its k3 of log pi/mu.

    Attributes:
        position: in its response, from 0.
        count: rows of the same step that sampled this token after the same ids; the one with the largest k3 is shown.
        mu, old, pi: log-probs.
        share: of all of them together, of the sum of k3(log pi/mu) over all tokens.
        before, token, after: text, escaped; or ids.
    """

    step: int
    uid: str
    row: int
    position: int
    turn: int
    staleness: int
    count: int
    mu: float
    old: float
    pi: float
    share: float
    before: str
    token: str
    after: str

    @property
    def total(self) -> float:
        """log pi - log mu."""
        return self.pi - self.mu


@dataclass(frozen=True)
class WorstRow:
    """A row, with its mean k3 of log pi/mu.

    Attributes:
        length: valid tokens.
        count: rows of the same step with these ids, prompt and response; the one with the largest k3 is shown.
        k3: mean a token.
        log_ratio: sum of log pi/mu, nats.
        share: of all of them together, of the sum of k3 over all rows.
        text: its beginning, escaped; or ids.
    """

    step: int
    uid: str
    row: int
    length: int
    staleness: int
    count: int
    k3: float
    log_ratio: float
    share: float
    text: str


def find_worst_tokens(rows: Rows, tokens: ValidTokens, reader: TokenDecoder, most: int) -> list[WorstToken]:
    """Find the ``most`` tokens with the largest k3, each context once; none where all log-probs agree."""
    loss = compute_k3(tokens.total)
    whole = loss.sum()
    token_id = rows.response_ids[tokens.index]
    ages = rows.token_staleness
    shown = np.zeros(len(loss), dtype=bool)
    worst: list[WorstToken] = []
    for place in np.argsort(-loss, kind="stable"):
        if len(worst) == most or not loss[place] > 0:
            break
        if shown[place]:
            continue
        row, index = int(tokens.row[place]), int(tokens.index[place])
        step, end = int(rows.step[row]), int(rows.offsets[row + 1])
        before = _before(rows, row, index)
        alike = (tokens.place == tokens.place[place]) & (token_id == token_id[place]) & (rows.step[tokens.row] == step)
        if not len(rows.prompt_ids):  # unrecorded prompts are distinguished by uid
            alike &= (rows.uid == rows.uid[row])[tokens.row]
        found = np.flatnonzero(alike)
        same = np.array([np.array_equal(_before(rows, tokens.row[i], tokens.index[i]), before) for i in found])
        # Rows of one group share their first tokens: the same mismatch is listed once, with its count.
        siblings = found[same]
        shown[siblings] = True
        worst.append(
            WorstToken(
                step=step,
                uid=str(rows.uid[row]),
                row=row,
                position=int(tokens.place[place]),
                turn=int(tokens.turn[place]),
                staleness=int(ages[index]),
                count=len(siblings),
                mu=float(tokens.mu[place]),
                old=float(tokens.old[place]),
                pi=float(tokens.pi[place]),
                share=float(loss[siblings].sum() / whole),
                before=reader.decode(before[-BEFORE:].tolist()),
                token=reader.decode([int(token_id[place])]),
                after=reader.decode(rows.response_ids[index + 1 : min(end, index + 1 + AFTER)].tolist()),
            )
        )
    return worst


def _before(rows: Rows, row: int, index: int) -> NDArray[np.int32]:
    """Return the ids of the prompt and of the response up to the token at ``index``."""
    prompt = rows.prompt_ids[rows.prompt_offsets[row] : rows.prompt_offsets[row + 1]]
    return np.concatenate([prompt, rows.response_ids[rows.offsets[row] : index]])


def find_worst_rows(rows: Rows, tokens: ValidTokens, reader: TokenDecoder, most: int) -> list[WorstRow]:
    """Find the ``most`` rows with the largest mean k3, each text once; none where all log-probs agree."""
    loss = compute_k3(tokens.total)
    count = np.bincount(tokens.row, minlength=len(rows))
    total = np.bincount(tokens.row, weights=loss, minlength=len(rows))
    log_ratio = np.bincount(tokens.row, weights=tokens.total, minlength=len(rows))
    mean = np.divide(total, count, out=np.zeros(len(rows)), where=count > 0)
    alike: dict[tuple[int, str, bytes], list[int]] = {}
    for row in np.argsort(-mean, kind="stable"):
        if mean[row] > 0:
            alike.setdefault(_identity(rows, int(row)), []).append(int(row))
    return [
        WorstRow(
            step=int(rows.step[row]),
            uid=str(rows.uid[row]),
            row=row,
            length=int(count[row]),
            staleness=int(rows.staleness[row]),
            count=len(same),
            k3=float(mean[row]),
            log_ratio=float(log_ratio[row]),
            share=float(total[same].sum() / total.sum()),
            text=reader.decode(rows.response_ids[rows.offsets[row] : rows.offsets[row + 1]][:EXCERPT].tolist()),
        )
        for row, same in ((found[0], found) for found in itertools.islice(alike.values(), most))
    ]


def _identity(rows: Rows, row: int) -> tuple[int, str, bytes]:
    """Return step, prompt and ids of a row; the uid stands in for a prompt that was not recorded."""
    name = "" if len(rows.prompt_ids) else str(rows.uid[row])
    return int(rows.step[row]), name, _before(rows, row, int(rows.offsets[row + 1])).tobytes()
