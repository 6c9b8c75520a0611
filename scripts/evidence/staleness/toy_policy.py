"""A policy and a task so small that a training run takes seconds: eight prompts, answers of eight tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn

VOCABULARY, LENGTH, PROMPTS = 8, 8, 8
WIDTH = 48


class ToyPolicy(nn.Module):
    """A GRU over the tokens of an answer, told the prompt and the place of each token."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY + 1, WIDTH)
        self.prompt = nn.Embedding(PROMPTS, WIDTH)
        self.place = nn.Embedding(LENGTH, WIDTH)
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def _step(self, place: int, last: Tensor, prompts: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        seen = self.token(last) + self.prompt(prompts) + self.place.weight[place]
        hidden = self.cell(seen, hidden)
        return self.head(hidden).log_softmax(-1), hidden

    @torch.no_grad()
    def sample(self, prompts: Tensor) -> tuple[Tensor, Tensor]:
        """Sample an answer to each of B prompts: its tokens and their log mu, (B, LENGTH) each."""
        last, hidden = torch.full_like(prompts, VOCABULARY), torch.zeros(len(prompts), WIDTH)
        tokens, log_probs = [], []
        for place in range(LENGTH):
            all_log_probs, hidden = self._step(place, last, prompts, hidden)
            last = torch.multinomial(all_log_probs.exp(), 1)[:, 0]
            tokens.append(last)
            log_probs.append(all_log_probs.gather(1, last[:, None])[:, 0])
        return torch.stack(tokens, 1), torch.stack(log_probs, 1)

    def forward(self, prompts: Tensor, tokens: Tensor) -> Tensor:
        """Compute the log-probs of given answers, (B, LENGTH)."""
        last, hidden = torch.full_like(prompts, VOCABULARY), torch.zeros(len(prompts), WIDTH)
        log_probs = []
        for place in range(LENGTH):
            all_log_probs, hidden = self._step(place, last, prompts, hidden)
            last = tokens[:, place]
            log_probs.append(all_log_probs.gather(1, last[:, None])[:, 0])
        return torch.stack(log_probs, 1)


def compute_rewards(prompts: Tensor, tokens: Tensor) -> Tensor:
    """Compute the share of tokens that are right, (B,): at place t the answer to prompt p is (p + 3 t) mod 8."""
    right = (prompts[:, None] + 3 * torch.arange(LENGTH)) % VOCABULARY
    return (tokens == right).float().mean(1)
