"""Find the modules that choose experts, in models of transformers and in small models that choose in other ways."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor, nn

from recipe.offpolicy.replay.expert_choice import ReplayError
from recipe.offpolicy.replay.routed_model import find_routers
from tests.support.mixtures import build_mixture


class Gate(nn.Module):
    """A gate that chooses a given number of times."""

    def __init__(self, choices: int = 1) -> None:
        super().__init__()
        self.choices = choices

    def forward(self, scores: Tensor) -> Tensor:
        for _ in range(self.choices):
            scores.topk(2, dim=-1)
        return scores


class MaskedGate(nn.Module):
    """A gate that chooses among the first half of its experts, and weights by the scores before or after this mask."""

    def __init__(self, mask: float, weighs_by_masked: bool) -> None:
        super().__init__()
        self.mask, self.weighs_by_masked = mask, weighs_by_masked

    def forward(self, scores: Tensor) -> Tensor:
        scores = scores.softmax(-1)
        masked = scores.clone()
        masked[:, 2:] = self.mask
        values, ids = masked.topk(2, dim=-1)
        return scores + (values if self.weighs_by_masked else scores.gather(-1, ids)).sum(-1, keepdim=True)


class Tiny(nn.Module):
    """A model of gates under a name, which also balances their load if asked."""

    def __init__(self, *gates: nn.Module, name: str = "layers", balanced: bool = False, **config: Any) -> None:
        super().__init__()
        sizes = {"num_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": len(gates), "vocab_size": 8, **config}
        self.config = SimpleNamespace(**sizes)
        self.config.get_text_config = lambda: self.config
        self.embed = nn.Embedding(8, 4)
        self.balanced = balanced
        setattr(self, name, nn.ModuleList(nn.ModuleDict({"gate": gate}) for gate in gates))
        self.blocks: Any = getattr(self, name)

    def forward(self, input_ids: Tensor, use_cache: bool) -> Tensor:
        scores = self.embed(input_ids[0])
        for block in self.blocks:
            for module in block.values():
                scores = module(scores)
        if self.balanced:
            scores.topk(2, dim=-1)
        return scores


def test_the_loss_that_balances_the_load_is_no_router() -> None:
    model = build_mixture("Qwen3Moe", output_router_logits=True)
    assert find_routers(model)[0].layers == (0, 1, 2)
    assert find_routers(Tiny(Gate(), Gate(), balanced=True))[0].layers == (0, 1)


def test_a_model_with_another_kind_of_choice_is_refused_by_name() -> None:
    with pytest.raises(ReplayError, match=r"phimoe: layer\(s\) \[0, 1, 2\] make no choice of 2 among 8"):
        find_routers(build_mixture("Phimoe"))


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Tiny(Gate(), Gate(2)), r"Tiny: layer 1 makes 2 choices .*\['layers.1.gate', 'layers.1.gate'\]"),
        (Tiny(Gate(), name="stages"), "module stages.0.gate chooses experts, but its path contains no `layers.<n>.`"),
        (Tiny(Gate(0), balanced=True), r"module \(the model itself\) chooses experts"),
        (Tiny(Gate(), num_experts=None), "config contains none of the keys num_experts, num_local_experts"),
        (Tiny(Gate(), Gate(), num_hidden_layers=1), "layer 1 chooses experts, but the model has num_hidden_layers=1"),
        (Tiny(Gate(), MaskedGate(0.0, True)), "weights experts by scores that it masks"),
        (Tiny(MaskedGate(float("-inf"), True)), "weights experts by scores that it masks"),
    ],
)
def test_models_made_otherwise_are_refused_by_name(model: Tiny, reason: str) -> None:
    with pytest.raises(ReplayError, match=reason):
        find_routers(model)
