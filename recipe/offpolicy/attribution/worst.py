"""The tokens and rows with the largest mismatch, with what stands around them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from ..recording import Rows
from .profiles import Tokens, k3
from .text import Reader

BEFORE: Final = 12
AFTER: Final = 4
"""Tokens of context."""
EXCERPT: Final = 60
"""Tokens of a row that are shown."""


@dataclass(frozen=True)
class WorstToken:
    """A token, by k3 of log pi/mu.

    Attributes:
        position: in its response, from 0.
        mu, old, pi: log-probs.
        share: of the sum of k3(log pi/mu) over all tokens.
        before, token, after: text, escaped; or ids.
    """

    step: int
    uid: str
    row: int
    position: int
    turn: int
    staleness: int
    mu: float
    old: float
    pi: float
    share: float
    before: str
    token: str
    after: str


@dataclass(frozen=True)
class WorstRow:
    """A row, by its mean k3 of log pi/mu.

    Attributes:
        length: valid tokens.
        k3: mean a token.
        log_ratio: sum of log pi/mu, nats.
        share: of the sum of k3 over all rows.
        text: its beginning, escaped; or ids.
    """

    step: int
    uid: str
    row: int
    length: int
    staleness: int
    k3: float
    log_ratio: float
    share: float
    text: str


def worst_tokens(rows: Rows, tokens: Tokens, reader: Reader, most: int) -> list[WorstToken]:
    """The ``most`` tokens with the largest k3, largest first; none where all log-probs agree."""
    loss = k3(tokens.total)
    whole = loss.sum()
    chosen = np.argsort(-loss, kind="stable")[:most]
    worst = []
    for place in chosen[loss[chosen] > 0]:
        row, index = int(tokens.row[place]), int(tokens.index[place])
        start, end = int(rows.offsets[row]), int(rows.offsets[row + 1])
        prompt = rows.prompt_ids[rows.prompt_offsets[row] : rows.prompt_offsets[row + 1]]
        before = np.concatenate([prompt, rows.response_ids[start:index]])[-BEFORE:]
        worst.append(
            WorstToken(
                step=int(rows.step[row]),
                uid=str(rows.uid[row]),
                row=row,
                position=int(tokens.place[place]),
                turn=int(tokens.turn[place]),
                staleness=int(rows.staleness[row]),
                mu=float(tokens.mu[place]),
                old=float(tokens.old[place]),
                pi=float(tokens.pi[place]),
                share=float(loss[place] / whole),
                before=reader.text(before.tolist()),
                token=reader.text([int(rows.response_ids[index])]),
                after=reader.text(rows.response_ids[index + 1 : min(end, index + 1 + AFTER)].tolist()),
            )
        )
    return worst


def worst_rows(rows: Rows, tokens: Tokens, reader: Reader, most: int) -> list[WorstRow]:
    """The ``most`` rows with the largest mean k3, largest first; none where all log-probs agree."""
    loss = k3(tokens.total)
    count = np.bincount(tokens.row, minlength=len(rows))
    total = np.bincount(tokens.row, weights=loss, minlength=len(rows))
    log_ratio = np.bincount(tokens.row, weights=tokens.total, minlength=len(rows))
    mean = np.divide(total, count, out=np.zeros_like(total), where=count > 0)
    chosen = np.argsort(-mean, kind="stable")[:most]
    return [
        WorstRow(
            step=int(rows.step[row]),
            uid=str(rows.uid[row]),
            row=int(row),
            length=int(count[row]),
            staleness=int(rows.staleness[row]),
            k3=float(mean[row]),
            log_ratio=float(log_ratio[row]),
            share=float(total[row] / total.sum()),
            text=reader.text(rows.response_ids[rows.offsets[row] : rows.offsets[row + 1]][:EXCERPT].tolist()),
        )
        for row in chosen
        if mean[row] > 0
    ]
