"""The two stages in a compiled graph, and on a device without synchronisation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from recipe.offpolicy.correction import CorrectionSpec, StepStage, rollout_stage, step_stage, turns
from tests.support.corrections import GSM, TIS, opsm, spec
from tests.support.packed import noisy

# Compiled ---------------------------------------------------------------------------------------------------

CORRECTIONS = {
    "token": spec(TIS | {"upper": 1.05}),
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


@pytest.mark.extended
@pytest.mark.parametrize(
    ("name", "measure"), [("stack", "nothing"), ("stack", "all"), ("token", "nothing"), ("turn", "nothing")]
)
def test_one_graph_for_all_shapes(name: str, measure: Any) -> None:
    """There is no graph break, no compilation per shape, and the same result as in eager execution."""
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
