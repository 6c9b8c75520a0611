"""What is read from Megatron's routers, and the verdict; tests/integration/test_megatron_routes.py uses a
real engine.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from recipe.offpolicy.proof.verify import LivenessError
from recipe.offpolicy.replay.expert_choice import ReplayError
from recipe.offpolicy.replay.megatron_engine import MegatronReport, judge_megatron

pytestmark = pytest.mark.verl("==0.9.1")
pytest.importorskip("verl")
TARGET = torch.tensor([[0, 1], [2, 3], [1, 3]])


def send(*ids: list[int]) -> Tensor:
    """(tokens, 4) bool."""
    sent = torch.zeros(len(ids), 4, dtype=torch.bool)
    for row, chosen in enumerate(ids):
        sent[row, chosen] = True
    return sent


@pytest.mark.parametrize(
    ("sent", "given", "counts"),
    [
        (send([0, 1], [2, 3], [1, 3]), {}, [3, 3, 3, 3, 0]),
        # The last token keeps its own route and is not looked at.
        (send([1, 0], [2, 3], [0, 2]), {"mask": torch.tensor([[True, True, False]])}, [3, 2, 2, 2, 0]),
        (send([0, 1], [2, 0], [0, 2]), {}, [3, 3, 1, 3, 0]),
        (send([0, 1], [2, 3], [1, 3]), {"shipped": TARGET.flip(0).to(torch.int16)}, [3, 3, 3, 1, 0]),
        # An expert that is full drops tokens, and takes none of another's.
        (send([0], [2, 3], []), {"drops": True}, [3, 3, 3, 3, 0]),
        (send([0], [2, 3], []), {}, [3, 3, 1, 3, 0]),
        (send([0, 2], [2, 3], []), {"drops": True}, [3, 3, 2, 3, 0]),
    ],
    ids=str,
)
def test_what_a_router_did_by_hand(sent: Tensor, given: dict[str, Any], counts: list[int]) -> None:
    from recipe.offpolicy.replay.megatron_engine import count_replayed

    assert count_replayed(5, sent, TARGET, **given).tolist() == counts


def test_routes_of_another_number_of_tokens_are_refused() -> None:
    from recipe.offpolicy.replay.megatron_engine import count_replayed

    with pytest.raises(
        ReplayError, match=r"layer 5 forwarded 4 tokens, .* routes for 3 tokens.*use_remove_padding=true"
    ):
        count_replayed(5, torch.zeros(4, 4, dtype=torch.bool), TARGET)
    with pytest.raises(ReplayError, match="layer 5 needs routes for 3 tokens, but received routes for 2 tokens"):
        count_replayed(5, send([0], [1], [2]), TARGET, shipped=TARGET[:2])


def build_engine(**changes: Any) -> Any:
    sizes = dict(tensor_model_parallel_size=1, context_parallel_size=1, fp8=None, num_layers=4, moe_layer_freq=1)
    made = {**sizes, "recompute_granularity": None, "moe_layer_recompute": False, **changes}
    config = SimpleNamespace(dynamic_context_parallel=made.pop("dynamic", False))
    methods = dict.fromkeys(("prepare_model_inputs", "forward_step", "forward_backward_batch"))
    return SimpleNamespace(tf_config=SimpleNamespace(**made), engine_config=config, module=[], **methods)


@pytest.mark.parametrize(
    ("changes", "places"),
    [
        ({}, True),
        ({"tensor_model_parallel_size": 2}, False),
        ({"context_parallel_size": 2}, False),
        ({"fp8": "e4m3"}, False),
        ({"dynamic": True}, False),
        ({"experimental_attention_variant": "dsa"}, False),
    ],
    ids=str,
)
def test_places_are_compared_where_a_rank_has_all_tokens(changes: dict[str, Any], places: bool) -> None:
    pytest.importorskip("megatron.core")
    from recipe.offpolicy.replay.megatron_engine import WatchedEngine

    assert WatchedEngine(build_engine(**changes), "R3").places is places


@pytest.mark.parametrize(("layers", "places"), [(4, [0, 1, 2, 3]), (2, [0, 0, 0, 1])])
def test_routes_are_those_of_the_layers_number(layers: int, places: list[int]) -> None:
    """Layers 1 and 3 have experts: R2 records only these, R3 has all layers."""
    pytest.importorskip("megatron.core")
    from recipe.offpolicy.replay.megatron_engine import WatchedEngine

    watched = WatchedEngine(build_engine(moe_layer_freq=[0, 1, 0, 1]), "R2")
    routes = torch.arange(layers)[None, :, None].expand(5, layers, 2)
    chosen = [1, 3] if layers == 2 else range(4)
    assert [int(watched._select(routes, layer)[0, 0]) for layer in chosen] == [places[layer] for layer in chosen]


@pytest.mark.parametrize(
    ("reports", "words"),
    [
        ([], "mode=R3, but no router of the last stage replays"),
        ([MegatronReport((), 0, 0, True)], "no router of the last stage replays"),
        ([MegatronReport((1, 3), 0, 40, True)], "2 layers replayed no token"),
    ],
    ids=str,
)
def test_an_update_in_which_nothing_was_replayed_stops_the_run(reports: list[MegatronReport], words: str) -> None:
    with pytest.raises(LivenessError, match=words):
        judge_megatron(reports, "R3")
