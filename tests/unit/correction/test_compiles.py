"""The two stages in a compiled graph, and on a device that is never waited for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from recipe.offpolicy.correction import CorrectionSpec, StepStage, rollout_stage, step_stage, turns
from tests.support.corrections import GSM, TIS, opsm, spec
from tests.support.drawn import Rows, constants_of
from tests.support.packed import both_stages, noisy, pack
from tests.support.presets import PRESETS

WAITS = {
    "aten::_local_scalar_dense",
    "aten::equal",
    "aten::is_nonzero",
    "aten::item",
    "aten::masked_select",
    "aten::nonzero",
    "aten::unique",
    "aten::_unique2",
}


class Waits(TorchDispatchMode):
    """Collects what would have to bring a number from the device to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name
        by_bool = name.startswith("aten::index") and any(
            isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)
            for argument in args[1:]
            if isinstance(argument, list | tuple)
            for index in argument
        )
        if name in WAITS or by_bool:
            self.found.append(name)
        return function(*args, **(kwargs or {}))


def test_waiting_is_noticed() -> None:
    values = torch.ones(2, 2)
    with Waits() as waits:
        values[values > 0].sum().item()
        bool(values.any())
        values.nonzero()
        torch.equal(values, values)
    assert {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal"} <= set(waits.found)
    assert any(name.startswith("aten::index") for name in waits.found)


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("name", sorted(PRESETS))
def test_no_preset_waits_for_the_device(name: str, layout: str) -> None:
    rows, lengths = noisy()
    constants = constants_of(PRESETS[name], rows)
    if layout == "packed":
        rows = pack(rows, lengths)
        # One tensor of offsets, as rows of one batch have them: others would be compared, on CPU by the host.
        rows = Rows(**{key: _with_offsets(getattr(rows, key), rows.mask) for key in vars(rows)})
    staleness = torch.arange(len(lengths))
    for measure in ("all", "decisions", "nothing"):
        with Waits() as waits:
            both_stages(PRESETS[name], rows, constants=constants, staleness=staleness, measure=measure)
        assert waits.found == []


def _with_offsets(tensor: Tensor, of: Tensor) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(tensor.values(), of.offsets())


# Compiled ---------------------------------------------------------------------------------------------------

CORRECTIONS = {
    "token": spec(TIS | {"upper": 1.05}),
    "gsm": spec(gsm=GSM),
    "opsm": spec(opsm=opsm(0.01)),
    "turn": spec(TIS | {"level": "turn"}, gsm=GSM | {"level": "turn"}),
    "stack": spec(TIS | {"upper": 1.05}, gsm=GSM, opsm=opsm(0.01)),
}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def outputs(step: StepStage) -> list[Tensor]:
    parts = [part for statistic in step.statistics.values() for part in statistic.parts]
    return [step.weight, step.keep, *step.rejected.values(), *(torch.as_tensor(part) for part in parts)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "measure"),
    [
        ("stack", "all"),
        *(pytest.param(name, "nothing", marks=pytest.mark.extended) for name in ("token", "gsm", "opsm", "turn")),
    ],
)
def test_one_graph_for_all_shapes(name: str, measure: Any) -> None:
    """Not a graph break, no compilation a shape, and what eager execution gives."""
    correction: CorrectionSpec = CORRECTIONS[name]
    graphs = []

    def decide(mu: Tensor, old: Tensor, pi: Tensor, mask: Tensor, advantages: Tensor) -> list[Tensor]:
        stage = rollout_stage(
            correction,
            old_log_prob=old,
            rollout_log_prob=mu,
            response_mask=mask,
            segment_ids=turns(mask),
            measure=measure,
        )
        return outputs(step_stage(correction, stage, log_prob=pi, advantages=advantages))

    def backend(graph: torch.fx.GraphModule, example: list[Tensor]) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        graphs.append(graph)
        return aot_eager(graph, example)

    compiled = torch.compile(decide, fullgraph=True, dynamic=True, backend=backend)
    made = []
    for rows, _ in (noisy(1, 9, 40), noisy(2, 12, 7), noisy(3, 17, 64)):
        given = (rows.mu, rows.old, rows.pi, rows.mask, rows.advantages)
        for got, want in zip(compiled(*given), decide(*given), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12, equal_nan=True)
        made.append(len(graphs))
    # Tracing may start again while the first batch is compiled, with bounds as constants, but no batch after it.
    assert made[0] > 0
    assert made[1:] == made[:1] * 2
