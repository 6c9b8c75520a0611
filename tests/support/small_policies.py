"""Policies that are trained in a second: a window of tokens before it decides on the next one.

The task: a prompt of three letters between markers, and an answer with the successor of each and an end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

OPENS, CLOSES, END = 0, 1, 2
LETTERS = range(3, 13)
WORDS, LETTERS_OF_A_PROMPT, WINDOW = 13, 3, 6
NOTHING = WORDS
"""Stands before the first token."""

Token = int | Tensor
Template = Callable[[Sequence[Token]], list[Token]]


def own_template(letters: Sequence[Token]) -> list[Token]:
    return [OPENS, *letters, CLOSES]


def other_template(letters: Sequence[Token]) -> list[Token]:
    return [OPENS, *letters, CLOSES, OPENS]


def answer(letters: Sequence[Token]) -> list[Token]:
    return [(letter - LETTERS[0] + 1) % len(LETTERS) + LETTERS[0] for letter in letters] + [END]


@dataclass
class Policy:
    """A trained policy and the template of its prompts."""

    net: nn.Module
    template: Template

    def log_probs(self, ids: Sequence[int], first: int = 0) -> Tensor:
        """Of all tokens at each position from ``first`` on, given those before, (len - first, WORDS)."""
        windows = [([NOTHING] * WINDOW + list(ids[:place]))[-WINDOW:] for place in range(first, len(ids))]
        with torch.no_grad():
            return self.net(torch.tensor(windows)).log_softmax(-1)

    def score(self, ids: Sequence[int]) -> list[float]:
        """Of each token but the first, as a teacher's server does."""
        return self.log_probs(ids)[torch.arange(len(ids)), torch.tensor(ids)][1:].tolist()

    def sample(self, prompt: Sequence[int], generator: torch.Generator) -> list[int]:
        """A response up to its end, or of four tokens."""
        ids = list(prompt)
        while len(ids) < len(prompt) + LETTERS_OF_A_PROMPT + 1 and END not in ids[len(prompt) :]:
            chances = self.log_probs([*ids, END], len(ids))[0].exp()
            ids.append(int(torch.multinomial(chances, 1, generator=generator)))
        return ids[len(prompt) :]


def train(mistakes: float, template: Template = own_template, seed: int = 0, steps: int = 250) -> Policy:
    """Train on answers of which a share of the letters is drawn at random."""
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Embedding(WORDS + 1, 16), nn.Flatten(), nn.Linear(16 * WINDOW, 64), nn.ReLU())
        net.append(nn.Linear(64, WORDS))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)

    def draw() -> Tensor:
        return torch.randint(LETTERS[0], WORDS, (64, LETTERS_OF_A_PROMPT), generator=generator)

    for _ in range(steps):
        letters = draw()
        prompt, right = (_stack(part(letters.unbind(1))) for part in (template, answer))
        wrong = torch.rand(letters.shape, generator=generator) < mistakes
        said = torch.cat([torch.where(wrong, draw(), right[:, :-1]), right[:, -1:]], 1)
        whole = torch.cat([torch.full((64, WINDOW), NOTHING), prompt, said], 1)
        windows = whole.unfold(1, WINDOW, 1)[:, prompt.shape[1] : -1]
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(windows.flatten(0, 1)), said.flatten()).backward()
        optimizer.step()
    return Policy(net, template)


def _stack(parts: Sequence[Token]) -> Tensor:
    """Tokens of 64 prompts, (64, parts)."""
    return torch.stack([part if isinstance(part, Tensor) else torch.full((64,), part) for part in parts], 1)
