"""Support replay in verl's real FSDP engines, in this process: by hand, whole supports, splits and sabotage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from recipe.offpolicy.batch.plan import take_reports
from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.support.fsdp_engine import REPORT
from recipe.offpolicy.support.token_supports import SupportError
from recipe.offpolicy.worker.loss import OffPolicyLoss
from recipe.offpolicy.worker.metrics import take_packets
from tests.support import supporting_worker as sw
from tests.support import training_worker as tw
from tests.support.examples import each_nth_by_default
from verl.workers.utils.losses import ppo_loss

pytestmark = pytest.mark.verl("==0.9.1")

Supports = list[list[list[int]]]


@pytest.fixture(scope="module")
def start(dense_model: Path) -> Callable[..., Any]:
    return cache(partial(sw.start, dense_model))


@pytest.fixture(scope="module")
def plain(start: Callable[..., Any]) -> Any:
    """verl's own worker, with padding."""
    return start(None)


@pytest.fixture(scope="module")
def worker(start: Callable[..., Any]) -> Any:
    """A worker that replays supports on packed rows."""
    return start(use_remove_padding=True)


@pytest.fixture(scope="module")
def rows(plain: Any) -> tw.Rollout:
    return tw.add_log_probs(plain, tw.make_rollout(), mismatch=0.1)


@pytest.fixture(scope="module")
def supports(rows: tw.Rollout) -> Supports:
    return [sw.draw_supports(response, seed=row) for row, response in enumerate(rows.responses)]


@pytest.fixture(scope="module")
def on_policy(worker: Any, rows: tw.Rollout, supports: Supports) -> tw.Rollout:
    """The rows with pi_old over the supports, so that PPO's clip leaves the gradient of each token unchanged."""
    data = sw.with_supports(rows, supports)
    return replace(rows, old_log_probs=tw.responses(forward(worker, data), data))


def gradients(worker: Any, data: TensorDict, **split: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    return tw.gradients(worker, tw.plain_loss(), data, **split)


def forward(worker: Any, data: TensorDict, temperature: float = 1.0) -> TensorDict:
    """Run the forward pass for pi_old, in micro-batches of four rows."""
    return tw.forward(worker, data, 4, entropy=True, temperature=temperature)


def report_of(metrics: dict[str, Any]) -> Any:
    (report,) = take_reports(metrics, REPORT)
    return report


def enumerate_log_probs(dense_model: Path, rows: tw.Rollout, supports: Supports, temperature: float) -> list[Tensor]:
    """Compute by hand the model's float64 softmax at a temperature, summed over each token's support."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(dense_model, dtype=torch.float64)
    found = []
    for prompt, response, given in zip(rows.prompts, rows.responses, supports, strict=True):
        logits = reference(torch.cat([prompt, response])[None]).logits[0] / temperature
        probabilities = logits.softmax(-1)[len(prompt) - 1 :]
        row = [
            (probabilities[place, token] / (probabilities[place, ids].sum() if ids else 1.0)).log()
            for place, (token, ids) in enumerate(zip(response.tolist(), given, strict=True))
        ]
        found.append(torch.stack(row))
    return found


layouts = pytest.mark.parametrize("layout", each_nth_by_default(2, tw.LAYOUTS), ids=str)


@layouts
def test_log_probs_are_those_over_the_support(
    start: Callable[..., Any],
    dense_model: Path,
    rows: tw.Rollout,
    supports: Supports,
    layout: dict[str, Any],
) -> None:
    temperature = 0.7
    data = sw.with_supports(rows, supports)
    output = forward(start(**layout), data, temperature)
    wanted = enumerate_log_probs(dense_model, rows, supports, temperature)
    for found, exact in zip(tw.responses(output, data), wanted, strict=True):
        torch.testing.assert_close(found.double(), exact.detach(), rtol=0, atol=2e-5)
    # Entropy stays over the vocabulary, and nothing else of the worker's is handed out.
    plain = forward(start(None, **layout), rows.to_tensordict(), temperature)
    assert all(map(torch.equal, tw.responses(output, data, "entropy"), tw.responses(plain, data, "entropy")))
    assert {"offpolicy_full_log_probs", "offpolicy_withheld"}.isdisjoint(output.keys())


@layouts
def test_whole_supports_are_the_plain_engine_to_the_bit(
    start: Callable[..., Any], rows: tw.Rollout, layout: dict[str, Any]
) -> None:
    whole = [
        [[token, *(each for each in range(tw.VOCABULARY) if each != token)] for token in response.tolist()]
        for response in rows.responses
    ]
    data = sw.with_supports(rows, whole)
    ours, verls = start(**layout), start(None, **layout)
    one, other = forward(ours, data), forward(verls, rows.to_tensordict())
    assert torch.equal(one["log_probs"].values(), other["log_probs"].values())
    metrics, found = gradients(ours, data, micro_batch_size=4)
    wanted_metrics, wanted = gradients(verls, rows.to_tensordict(), micro_batch_size=4)
    assert metrics["loss"] == wanted_metrics["loss"]
    assert tw.equal(found, wanted)
    assert report_of(metrics).largest == tw.VOCABULARY


@layouts
def test_the_gradient_is_that_of_the_truncated_policy(
    start: Callable[..., Any], dense_model: Path, on_policy: tw.Rollout, supports: Supports, layout: dict[str, Any]
) -> None:
    """verl's loss where pi equals pi_old: each token's gradient is -A grad log pi over the support, divided by the
    number of tokens.
    """
    from transformers import AutoModelForCausalLM

    data = sw.with_supports(on_policy, supports)
    _, found = gradients(start(**layout), data, micro_batch_size=4)
    reference = AutoModelForCausalLM.from_pretrained(dense_model, dtype=torch.float64)
    total, count = torch.zeros((), dtype=torch.float64), 0
    for row, (prompt, response) in enumerate(zip(on_policy.prompts, on_policy.responses, strict=True)):
        logits = reference(torch.cat([prompt, response])[None]).logits[0][len(prompt) - 1 :]
        for place, (token, ids) in enumerate(zip(response.tolist(), supports[row], strict=True)):
            mask = float(on_policy.response_mask[row][place])
            log_pi = logits[place, token] - logits[place, ids].logsumexp(-1)
            total = total - mask * float(on_policy.advantages[row][place]) * log_pi
            count += int(mask)
    (total / count).backward()
    wanted = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    assert tw.close({name: found[name].double() for name in wanted}, wanted, 1e-4)


@pytest.mark.parametrize("split", [{"micro_batch_size": 2}, {"max_token_len": 40}])
def test_the_split_into_micro_batches_does_not_matter(
    worker: Any, on_policy: tw.Rollout, supports: Supports, split: dict[str, int]
) -> None:
    data = sw.with_supports(on_policy, supports)
    metrics, wanted = gradients(worker, data)
    again, found = gradients(worker, data, **split)
    assert tw.close(found, wanted)
    one, other = report_of(metrics), report_of(again)
    assert (one.tokens, one.known, one.members, one.compared) == (other.tokens, other.known, other.members, 8)
    assert one.k3 == pytest.approx(other.k3)


def unknown_at(supports: Supports, row: int, place: int) -> Supports:
    changed = [list(each) for each in supports]
    changed[row][place] = []
    return changed


@pytest.mark.parametrize("unknown", ["mask", "full"])
def test_a_token_of_unknown_support_leaves_the_policy_term_or_stays_whole(
    start: Callable[..., Any], on_policy: tw.Rollout, supports: Supports, unknown: str
) -> None:
    spec = CorrectionSpec(support="engine", support_unknown=unknown)  # type: ignore[arg-type]
    ours = OffPolicyLoss(spec, tw.actor_config())
    given = unknown_at(supports, 1, 2)
    worker = start(unknown)
    data = sw.with_supports(on_policy, given)
    metrics, found = tw.gradients(worker, ours, data)
    without = replace(on_policy, advantages=[row.clone() for row in on_policy.advantages])
    if unknown == "mask":
        without.advantages[1][2] = 0.0
    plain = start("full")
    _, wanted = tw.gradients(plain, tw.plain_loss(), sw.flagged(sw.with_notes(without, sw.note_rows(on_policy, given))))
    assert tw.close(found, wanted)
    report = report_of(metrics)
    assert (report.tokens - report.known, report.unknown_mass) == (1, pytest.approx(0.7))


def test_a_correction_is_proved_beside_tokens_of_unknown_support(
    start: Callable[..., Any], rows: tw.Rollout, supports: Supports
) -> None:
    """The proof works although some tokens are withheld; statistics leave them out, and the recording contains the
    sizes.
    """
    from tests.support.corrections import GSM, TIS, spec

    given = unknown_at(unknown_at(supports, 1, 2), 5, 0)
    worker = start(use_remove_padding=True)
    noted = sw.with_supports(rows, given)
    old = tw.responses(forward(worker, noted), noted)
    here = replace(rows, old_log_probs=old, rollout_log_probs=[row + 0.01 for row in old])
    data = sw.with_supports(here, given)
    correction = replace(spec(TIS, gsm=GSM), support="engine")
    metrics, _ = tw.gradients(
        worker, OffPolicyLoss(correction, tw.actor_config(), prove=True), data, micro_batch_size=4
    )
    packets = take_packets(metrics)
    for packet in packets:
        assert packet.proof is not None
        assert packet.proof.gradient_error is not None
        assert packet.proof.gradient_error < 1e-4
        assert all(shift.error < 1e-4 for shift in packet.proof.shifts.values())
    statistics = [packet.statistics for packet in packets if packet.statistics]
    # Neither is mu of such a token counted as one that is not finite.
    assert sum(each["nonfinite/rollout_log_prob"].value() for each in statistics) == 0
    tokens = sum(int(mask.sum()) for mask in rows.response_mask)
    (measured,) = [each["log_prob_difference/mean"] for each in statistics]
    assert measured.parts[1] == tokens - 2


def test_the_kl_term_reads_the_whole_vocabulary(
    start: Callable[..., Any], on_policy: tw.Rollout, supports: Supports
) -> None:
    generator = torch.Generator().manual_seed(9)
    ref = [row + 0.3 * torch.randn(row.shape, generator=generator) for row in on_policy.old_log_probs]
    here = replace(on_policy, ref_log_probs=ref)
    config = tw.actor_config(use_kl_loss=True, kl_loss_coef=0.5, kl_loss_type="low_var_kl")
    spec = CorrectionSpec(support="engine")
    noted = sw.with_supports(here, supports)
    worker = start()
    both_metrics, both = tw.gradients(worker, OffPolicyLoss(spec, config), noted)
    _, policy = tw.gradients(worker, OffPolicyLoss(spec, tw.actor_config()), noted)

    silent = replace(here, advantages=[torch.zeros_like(row) for row in here.advantages])
    metrics, kl = tw.gradients(start(None), partial(ppo_loss, config=config), silent.to_tensordict())
    assert tw.close(both, {name: policy[name] + kl[name] for name in kl})
    assert both_metrics["kl_loss"] == pytest.approx(metrics["kl_loss"])


def shifted(rows: tw.Rollout, supports: Supports) -> list[Any]:
    """A note from a client that is off by one token, with a matching checksum."""
    return sw.note_rows(rows, [[*row[1:], row[0]] for row in supports])


def swapped(rows: tw.Rollout, supports: Supports) -> list[Any]:
    """A note with the supports of another row."""
    length = min(len(supports[0]), len(supports[1]))
    other = [list(row) for row in supports]
    other[0][:length], other[1][:length] = supports[1][:length], supports[0][:length]
    return sw.note_rows(rows, other)


def dropped(rows: tw.Rollout, supports: Supports) -> list[Any]:
    return [None, *sw.note_rows(rows, supports)[1:]]


def altered(rows: tw.Rollout, supports: Supports) -> list[Any]:
    """One id is changed after the client wrote the note."""
    notes = sw.note_rows(rows, supports)
    row = next(number for number, each in enumerate(supports) if len(each[-1]) > 1)
    ids = notes[row].supports.ids.copy()
    ids[-1] = (ids[-1] + 1) % tw.VOCABULARY
    notes[row] = replace(notes[row], supports=replace(notes[row].supports, ids=ids))
    return notes


def of_raw_log_probs(rows: tw.Rollout, supports: Supports) -> list[Any]:
    notes = sw.note_rows(rows, supports)
    return [replace(notes[0], masses=(0.93, 1.0, 0.0)), *notes[1:]]


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (shifted, "the supports match the token after in all but .* off by one token"),
        (swapped, "the supports belong to another sequence"),
        (dropped, "tokens reached the loss without a support"),
        (altered, "the supports or tokens of 1 of 8 sequences changed after"),
        (of_raw_log_probs, r"mu sums to 0\.9300 to 1\.0000 over the supports"),
    ],
)
def test_supports_that_are_not_the_tokens_own_stop_the_first_update(
    worker: Any, rows: tw.Rollout, supports: Supports, spoil: Callable[..., list[Any]], named: str
) -> None:
    data = sw.flagged(sw.with_notes(rows, spoil(rows, supports)))
    with pytest.raises(SupportError, match=named):
        gradients(worker, data)
    with pytest.raises(SupportError, match=named):
        forward(worker, data)


def test_a_batch_that_is_not_flagged_is_verls_own(worker: Any, plain: Any, rows: tw.Rollout) -> None:
    one, other = (forward(each, rows.to_tensordict()) for each in (worker, plain))
    assert (one["log_probs"].values() - other["log_probs"].values()).abs().max() < 1e-5
