"""Score centering in verl's real FSDP engines, in this process: by hand, over the whole vocabulary, with splits, and
with sabotage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from recipe.offpolicy.batch.micro_batch import LIKELIEST_LOG_PROBS as LOG_PROBS
from recipe.offpolicy.batch.padding import flatten
from recipe.offpolicy.centering import score_centering as centering_engine
from recipe.offpolicy.centering.score_centering import FLAG, CenteringError, install_centering
from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.proof.verify import LivenessError, verify
from recipe.offpolicy.worker.metrics import take_packets
from recipe.offpolicy.worker.terms import compute_centering_term
from scripts.benchmark.simulated_parts import build_note
from tests.support import specs
from tests.support import supporting_worker as sw
from tests.support import training_worker as tw
from tests.support.examples import each_nth_by_default
from tests.support.first_update import adapter
from verl.utils import tensordict_utils as tu

pytestmark = pytest.mark.verl("==0.9.1")

TRUNCATED = {"weight": {"level": "token", "kind": "truncate", "lower": None, "upper": 1.2}}
ICEPOP = {"weight": {"level": "token", "kind": "reject", "lower": 0.7, "upper": 1.4}}
MASK: dict[str, Any] = specs.GSM | {"level": "token", "aggregate": "product", "lower": 0.7, "upper": 1.4}
MASKED, GSM = {"masks": {"tm": MASK}}, {"masks": {"gsm": specs.GSM}}


@pytest.fixture(scope="module")
def start(dense_model: Path) -> Callable[..., Any]:
    return partial(start_centering, dense_model)


@pytest.fixture(scope="module")
def worker(start: Callable[..., Any]) -> Any:
    return start(use_remove_padding=True)


@pytest.fixture(scope="module")
def sampler(dense_model: Path, worker: Any) -> Sampler:
    return Sampler(dense_model, worker)


@pytest.fixture(scope="module")
def enumerated(dense_model: Path, sampler: Sampler) -> Any:
    """The reference's gradient for each correction and K."""
    return cache(lambda name, size: sampler.enumerate_gradient(dense_model, PLAIN[name], size))


def start_centering(dense_model: Path, **settings: Any) -> Any:
    from types import SimpleNamespace

    worker = tw.start_worker(dense_model, **settings)
    install_centering(SimpleNamespace(actor=worker))
    return worker


class Sampler:
    """Rows, and a sampler whose logits are the model's logits plus noise; q is its distribution at each position."""

    def __init__(self, dense_model: Path, worker: Any) -> None:
        from transformers import AutoModelForCausalLM

        self.rows = tw.add_log_probs(worker, tw.make_rollout(), mismatch=0.0)
        reference = AutoModelForCausalLM.from_pretrained(dense_model, dtype=torch.float64)
        generator = torch.Generator().manual_seed(3)
        self.log_q = []
        for prompt, response in zip(self.rows.prompts, self.rows.responses, strict=True):
            logits = reference(torch.cat([prompt, response])[None]).logits[0][len(prompt) - 1 : -1].detach()
            noise = torch.randn(logits.shape, generator=generator, dtype=torch.float64)
            self.log_q.append((logits + 0.4 * noise).log_softmax(-1))
        pairs = zip(self.log_q, self.rows.responses, strict=True)
        self.rows.rollout_log_probs = [q.gather(-1, ids[:, None])[:, 0].float() for q, ids in pairs]

    def batch(self, size: int, change: Callable[[list[Any]], list[Any]] = lambda notes: notes) -> TensorDict:
        """The rows as the trainer sends them, with the K likeliest tokens of each position in their notes."""
        rows = zip(self.rows.prompts, self.rows.responses, self.log_q, strict=True)
        notes = [build_note(prompt.tolist(), response, log_q, size)[1] for prompt, response, log_q in rows]
        data = sw.with_notes(self.rows, change(notes))
        tu.assign_non_tensor(data, **{FLAG: True})
        return data

    def enumerate_gradient(self, dense_model: Path, plain: dict[str, Any], size: int) -> dict[str, Tensor]:
        """Compute the gradient of the paper's loss explicitly: -A f log p(token) + A sum_H sg(m - a p) log p, in
        float64.
        """
        from transformers import AutoModelForCausalLM

        reference = AutoModelForCausalLM.from_pretrained(dense_model, dtype=torch.float64)
        total, count = torch.zeros((), dtype=torch.float64), 0
        for row, (prompt, response) in enumerate(zip(self.rows.prompts, self.rows.responses, strict=True)):
            log_p = reference(torch.cat([prompt, response])[None]).logits[0][len(prompt) - 1 : -1].log_softmax(-1)
            log_ratio = (log_p.detach() - self.log_q[row]).gather(-1, response[:, None])[:, 0]
            mask = self.rows.response_mask[row].double()
            mean = float((log_ratio * mask).sum() / mask.sum())
            for place, token in enumerate(response.tolist()):
                if not mask[place]:
                    continue
                count += 1
                if plain is GSM and not 0.9 <= np.exp(mean) <= 1.1:
                    continue
                p, q = log_p[place].detach().exp(), self.log_q[row][place].exp()
                head = q.topk(size).indices
                rho = (1 - q[head].sum()) / max(1 - float(p[head].sum()), 1e-6)
                centre = torch.zeros((), dtype=torch.float64)
                for v in head.tolist():
                    centre = centre + (weigh(plain, p[v], q[v]) - weigh(plain, 1.0, rho) * p[v]) * log_p[place, v]
                factor = weigh(plain, p[token], q[token]) / q[token]
                advantage = float(self.rows.advantages[row][place])
                total = total + advantage * (centre - factor * log_p[place, token])
        (total / count).backward()
        return {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}


PLAIN = {"none": {}, "tis": TRUNCATED, "icepop": ICEPOP, "mask": MASKED, "gsm": GSM}


def weigh(plain: dict[str, Any], p: Any, q: Any) -> float:
    """Compute m of the paper, q times a token's factor, and the coefficient a of the tail, with 1 and rho as its
    masses.
    """
    p, q = float(p), float(q)
    if plain is TRUNCATED:
        return min(p, 1.2 * q)
    if plain is ICEPOP:
        return p if 0.7 <= p / max(q, 1e-300) <= 1.4 else 0.0
    if plain is MASKED:
        return q if 0.7 <= p / max(q, 1e-300) <= 1.4 else 0.0
    return q


def correct(plain: dict[str, Any], size: int, *, prove: bool = False) -> Any:
    return adapter({**plain, "centering": size}, prove=prove)


@pytest.mark.parametrize(
    ("size", "layout"),
    each_nth_by_default(2, zip((8, tw.VOCABULARY, 8), tw.LAYOUTS, strict=True)),
    ids=str,
)
def test_the_gradient_is_the_stated_formulas(
    start: Callable[..., Any], sampler: Sampler, enumerated: Any, layout: dict[str, Any], size: int
) -> None:
    worker = start(**layout)
    for name, plain in PLAIN.items():
        _, found = tw.gradients(worker, correct(plain, size), sampler.batch(size), micro_batch_size=4)
        assert tw.close(found, enumerated(name, size))


@pytest.mark.parametrize(("plain", "size"), [*((plain, 8) for plain in PLAIN.values()), ({}, 1)], ids=str)
def test_it_is_proved_live(worker: Any, sampler: Sampler, plain: dict[str, Any], size: int) -> None:
    metrics, _ = tw.gradients(worker, correct(plain, size, prove=True), sampler.batch(size), micro_batch_size=4)
    packets = take_packets(metrics)
    rows = [row for packet in packets for row in packet.rows]
    spec = CorrectionSpec.from_mapping({**plain, "centering": size})
    assert verify(packets, spec, sampled_rows=rows)["proved"] == 1.0
    errors = [packet.proof.shifts["centering"].error for packet in packets if packet.proof]
    assert len(errors) == 2
    assert max(errors) < 1e-5
    drift = [packet.statistics["drift/mean"].value() for packet in packets if packet.statistics]
    assert len(drift) == 1
    assert 0.0 < drift[0] < 1.0


SABOTAGES = {
    "the term is dropped": lambda found: found * 0,
    "its sign is flipped": lambda found: -found,
    "a tenth is missing": lambda found: 0.9 * found,
}


@pytest.mark.parametrize("what", SABOTAGES)
def test_a_term_that_is_lost_or_changed_fails_the_proof(
    worker: Any, sampler: Sampler, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    changed = "recipe.offpolicy.worker.loss.compute_centering_term"
    monkeypatch.setattr(changed, lambda *given: SABOTAGES[what](compute_centering_term(*given)))
    metrics, _ = tw.gradients(worker, correct(TRUNCATED, 8, prove=True), sampler.batch(8))
    packets = take_packets(metrics)
    rows = [row for packet in packets for row in packet.rows]
    with pytest.raises(LivenessError):
        verify(packets, CorrectionSpec.from_mapping({**TRUNCATED, "centering": 8}), sampled_rows=rows)


def alter(at: int, **changes: Any) -> Callable[[list[Any]], list[Any]]:
    """Change the arrays of one row's note after its checksum was computed."""

    def change(notes: list[Any]) -> list[Any]:
        supports = notes[at].supports
        arrays = {name: edit(getattr(supports, name).copy()) for name, edit in changes.items()}
        return [*notes[:at], replace(notes[at], supports=replace(supports, **arrays)), *notes[at + 1 :]]

    return change


def swap(values: Any) -> Any:
    values[[0, 1]] = values[[1, 0]]
    return values


FAULTS = {
    "missing": (lambda notes: [None, *notes[1:]], "reached the loss without"),
    "missing in a whole micro-batch": (lambda notes: [None, None, *notes[2:]], "reached the loss without"),
    "of another row": (lambda notes: [notes[1], notes[0], *notes[2:]], "without the likeliest"),
    "two ids swapped": (alter(2, ids=swap), "checksums differ"),
    "log-probs rounded to half precision": (
        alter(2, log_probs=lambda each: each.astype(np.float16).astype(np.float32)),
        "checksums differ",
    ),
}


@pytest.mark.parametrize("what", FAULTS)
def test_likeliest_tokens_that_changed_stop_the_update(worker: Any, sampler: Sampler, what: str) -> None:
    change, said = FAULTS[what]
    with pytest.raises(CenteringError, match=said):
        tw.gradients(worker, correct({}, 8, prove=True), sampler.batch(8, change), micro_batch_size=2)


def test_another_mu_than_that_of_the_likeliest_stops_the_update(
    worker: Any, sampler: Sampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = [row - 0.01 for row in sampler.rows.rollout_log_probs]
    monkeypatch.setattr(sampler, "rows", replace(sampler.rows, rollout_log_probs=raw))
    with pytest.raises(CenteringError, match="mu differs from its value in the list"):
        tw.gradients(worker, correct({}, 8), sampler.batch(8))


def test_a_run_that_no_engine_centres_is_told(worker: Any, sampler: Sampler) -> None:
    data = sampler.batch(8)
    tu.assign_non_tensor(data, **{FLAG: False})
    with pytest.raises(KeyError, match=r"correction\.centering=null"):
        tw.gradients(worker, correct({}, 8), data)


def test_logits_that_are_not_those_of_the_log_probs_stop_the_update(
    worker: Any, sampler: Sampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = centering_engine.compute_log_probs
    monkeypatch.setattr(centering_engine, "compute_log_probs", lambda *given: compute(*given) + 0.5)
    with pytest.raises(CenteringError, match="pi sums to 1"):
        tw.gradients(worker, correct({}, tw.VOCABULARY), sampler.batch(tw.VOCABULARY))


def test_a_token_without_mu_adds_nothing(worker: Any, sampler: Sampler, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row.clone() for row in sampler.rows.rollout_log_probs]
    (place,) = find_unlikely(sampler, 1, row=2)
    rows[2][place] = torch.nan
    masks = [mask.clone() for mask in sampler.rows.response_mask]
    masks[2][place] = 0
    _, found = train(worker, sampler, monkeypatch, rollout_log_probs=rows)
    count = sum(int(mask.sum()) for mask in masks)
    _, without = train(worker, sampler, monkeypatch, response_mask=masks)
    expected = {name: gradient * count / (count + 1) for name, gradient in without.items()}
    assert tw.close(found, expected)


def find_unlikely(sampler: Sampler, size: int, row: int) -> list[int]:
    """Find the first sampled token of a row that is not among the K likeliest tokens."""
    own = sampler.log_q[row].topk(size).indices == sampler.rows.responses[row][:, None]
    return (~own.any(-1)).nonzero()[:1, 0].tolist()


def train(worker: Any, sampler: Sampler, monkeypatch: pytest.MonkeyPatch, **columns: Any) -> Any:
    with monkeypatch.context() as patched:
        patched.setattr(sampler, "rows", replace(sampler.rows, **columns))
        return tw.gradients(worker, correct({}, 1, prove=True), sampler.batch(1))


def test_a_policy_without_a_tail_is_no_fault(worker: Any, sampler: Sampler) -> None:
    """If rho is in the thousands, rounding errors of C are relative to its coefficients."""
    loss = correct({}, 1, prove=True)

    class Peaked(type(loss)):  # type: ignore[misc]
        """A model that moves the policy's probability mass to the likeliest token of each position."""

        def __call__(self, model_output: Any, data: Any, dp_group: Any = None) -> Any:
            given = model_output[LOG_PROBS]
            values = flatten(given)
            moved = values - values.detach() - 1e-7
            changed = torch.nested.nested_tensor_from_jagged(moved, given.offsets())
            return super().__call__({**model_output, LOG_PROBS: changed}, data, dp_group)

    loss.__class__ = Peaked
    metrics, _ = tw.gradients(worker, loss, sampler.batch(1))
    (proof,) = [packet.proof for packet in take_packets(metrics)]
    assert proof is not None
    assert proof.gradient_error is not None
    assert proof.gradient_error < 1e-6
