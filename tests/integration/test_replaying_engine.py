"""Routing replay in verl's real FSDP engines, in this process: own and foreign routes, splits, exceptions and
sabotage.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict
from torch import Tensor

from recipe.offpolicy.batch.plan import take_reports
from recipe.offpolicy.batch.weight_versions import read_extra_fields
from recipe.offpolicy.replay import fsdp_engine
from recipe.offpolicy.replay.expert_choice import ReplayError, RouterSlot
from recipe.offpolicy.replay.fsdp_engine import REPORT
from recipe.offpolicy.replay.routed_model import install_replay
from tests.support import replaying_worker as rw
from tests.support import training_worker as tw
from tests.support.examples import each_nth_by_default
from verl.trainer.ppo.padding_utils import construct_minimal_padding_template

pytestmark = pytest.mark.verl("==0.9.1")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tw.join_process_group()
    return rw.tiny_mixture(tmp_path_factory.mktemp("mixture"))


@pytest.fixture(scope="module")
def start(model: Path) -> Callable[..., Any]:
    return partial(rw.start, model)


@pytest.fixture(scope="module")
def plain(start: Callable[..., Any]) -> Any:
    """verl's own worker, with padding."""
    return start(None)


@pytest.fixture(scope="module")
def rows(plain: Any) -> tw.Rollout:
    return tw.add_log_probs(plain, tw.make_rollout(), mismatch=0.1)


@pytest.fixture
def data(rows: tw.Rollout) -> TensorDict:
    return rows.to_tensordict()


@pytest.fixture(scope="module")
def foreign(rows: tw.Rollout) -> Tensor:
    return rw.draw_routes(sum(len(a) + len(b) for a, b in zip(rows.prompts, rows.responses, strict=True)))


def gradients(worker: Any, data: TensorDict, **split: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    return tw.gradients(worker, tw.plain_loss(), data, **split)


def record(worker: Any, rows: tw.Rollout, micro_batch_size: int = 4) -> TensorDict:
    """Run the forward pass for pi_old and record its routes."""
    return tw.forward(worker, rw.flagged(rows.to_tensordict()), micro_batch_size)


def report_of(metrics: dict[str, Any]) -> Any:
    (report,) = reports_of(metrics)
    return report


def reports_of(metrics: dict[str, Any]) -> list[Any]:
    return take_reports(metrics, REPORT)


@pytest.fixture
def unproved(start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """A worker with R3 that accepts routes which no router would choose."""
    for name in ("check_row_order", "check_layer_order"):
        monkeypatch.setattr(fsdp_engine, name, lambda records: None)
    return start("R3")


layouts = pytest.mark.parametrize("layout", each_nth_by_default(2, tw.LAYOUTS), ids=str)


@layouts
def test_own_routes_are_the_plain_engine_to_the_bit(
    start: Callable[..., Any], rows: tw.Rollout, data: TensorDict, layout: dict[str, Any]
) -> None:
    verls, own = start(None, **layout), start("R2", **layout)
    metrics, wanted = gradients(verls, data, micro_batch_size=4)
    recorded = record(own, rows)
    assert equal_rows(recorded["log_probs"], record(verls, rows)["log_probs"])
    assert recorded["routed_experts"].dtype == torch.int16
    data["routed_experts"] = recorded["routed_experts"]
    replayed, found = gradients(own, rw.flagged(data), micro_batch_size=4)
    assert replayed["loss"] == metrics["loss"]
    assert tw.equal(found, wanted)
    report = report_of(replayed)
    assert report.tokens == report.replayed[0] == sum(data["input_ids"].offsets().diff().tolist())
    assert report.replayed == report.entered == report.equal
    assert all(value > 0 for value in report.gradients)
    # The same routes, as if the rollout engine had sent them.
    theirs = start("R3", **layout)
    metrics, found = gradients(theirs, rw.flagged(rw.with_routes(data, recorded["routed_experts"].values())))
    assert tw.close(found, wanted)
    first = report_of(metrics).first
    assert (first.checksums, first.tokens) == (len(data), sum(int(mask.sum()) for mask in rows.response_mask))
    assert first.k3 == pytest.approx(compute_k3(rows, rows.old_log_probs), rel=1e-3)
    assert first.k3_without == pytest.approx(first.k3, rel=1e-3)


def compute_k3(rows: tw.Rollout, log_probs: list[Tensor]) -> float:
    """Compute k3(mu, pi), summed over the loss's tokens, in float64."""
    gap = torch.cat(log_probs).double() - torch.cat(rows.rollout_log_probs).double()
    return float(((gap.exp() - 1 - gap) * torch.cat(rows.response_mask)).sum())


def equal_rows(one: Tensor, other: Tensor) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.unbind(), other.unbind(), strict=True))


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_foreign_routes_equal_the_model_with_these_routes(
    unproved: Any, start: Callable[..., Any], rows: tw.Rollout, data: TensorDict, foreign: Tensor, packed: bool
) -> None:
    """The reference is one Hugging Face model in float64, which processes one row at a time."""
    unproved = start("R3", use_remove_padding=True) if packed else unproved
    from transformers import AutoModelForCausalLM

    metrics, found = gradients(unproved, rw.flagged(rw.with_routes(data, foreign)))
    reference = AutoModelForCausalLM.from_pretrained(
        unproved.model_config.path, dtype=torch.float64, experts_implementation="eager"
    )
    routed = install_replay(reference)
    parts = foreign.split(data["input_ids"].offsets().diff().tolist())
    tokens, total = sum(int(mask.sum()) for mask in rows.response_mask), torch.zeros((), dtype=torch.float64)
    for place, routes in enumerate(parts):
        prompt, response, mask = rows.prompts[place], rows.responses[place], rows.response_mask[place]
        routed.arm(routes, torch.arange(len(routes)) < len(routes) - 1)
        logits = reference(torch.cat([prompt, response])[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
        log_prob = logits.log_softmax(-1).gather(-1, response[:, None])[:, 0]
        ratio, advantage = (log_prob - rows.old_log_probs[place].double()).exp(), rows.advantages[place].double()
        objective = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        # verl's dual clip, which routes that are far off reach.
        objective = torch.where(advantage < 0, torch.maximum(objective, 3.0 * advantage), objective)
        total = total - (objective * mask).sum() / tokens
    total.backward()
    wanted = {name: weight.grad for name, weight in reference.named_parameters() if weight.grad is not None}
    assert metrics["loss"][0] == pytest.approx(float(total.detach()), rel=1e-5)
    assert tw.close({name: gradient.double() for name, gradient in found.items()}, wanted)
    native = gradients(unproved, data)[1]
    assert not tw.close(native, found, 1e-1)


@pytest.mark.parametrize("split", [{"micro_batch_size": 2}, {"max_token_len": 24}], ids=str)
def test_a_split_changes_nothing(unproved: Any, data: TensorDict, foreign: Tensor, split: dict[str, Any]) -> None:
    sent = rw.with_routes(data, foreign)
    whole, wanted = gradients(unproved, rw.flagged(sent))
    parts, found = gradients(unproved, rw.flagged(sent), **split)
    assert sum(parts["loss"][0:]) == pytest.approx(sum(whole["loss"][0:]), rel=1e-5)
    assert tw.close(found, wanted)
    assert report_of(parts).replayed == report_of(whole).replayed


def test_padding_rows_of_the_trainer_are_native(unproved: Any, data: TensorDict, foreign: Tensor) -> None:
    """verl fills a batch with rows that have the first row's note, zeros as routes, and no token in the loss."""
    sent = rw.with_routes(data, foreign)
    source = {name: sent[name][0] for name in sent.keys()}
    tag = {"prompt_len": 0, "response_len": 0, "seq_len": 0, "is_padding": False}
    pad, tag = construct_minimal_padding_template(source, tag, eos_token_id=1)
    rows = {name: [*column.unbind(), *[pad[name]] * 4] for name, column in sent.items() if isinstance(column, Tensor)}
    # Columns that verl keeps at the length of the response that they were copied from.
    for name in ("advantages", "old_log_probs"):
        rows[name] = [*sent[name].unbind(), *[torch.zeros(1)] * 4]
    columns = {name: torch.nested.as_nested_tensor(values, layout=torch.jagged) for name, values in rows.items()}
    notes = [*read_extra_fields(sent), *[getattr(pad["extra_fields"], "data", pad["extra_fields"])] * 4]
    filled = TensorDict({**columns, "extra_fields": NonTensorStack(*notes)}, batch_size=len(notes))
    whole, wanted = gradients(unproved, rw.flagged(sent), micro_batch_size=4)
    metrics, found = gradients(unproved, rw.flagged(filled), micro_batch_size=4)
    assert tw.close(found, wanted)
    report, of_whole = report_of(metrics), report_of(whole)
    assert report.replayed == of_whole.replayed
    assert report.tokens == of_whole.tokens + 4 * tag["seq_len"]


def test_the_references_forward_is_native(unproved: Any, plain: Any, data: TensorDict, foreign: Tensor) -> None:
    """The reference's forward pass has no replay flag."""
    metrics, found = gradients(unproved, rw.flagged(rw.with_routes(data, foreign), on=False))
    assert tw.equal(found, gradients(plain, data)[1])
    assert "offpolicy_routing" not in metrics


def test_rows_that_are_too_old_are_native(
    start: Callable[..., Any], plain: Any, data: TensorDict, foreign: Tensor
) -> None:
    """In step 5, version 2 is two versions old."""
    worker = start("R3", oldest=1)
    metrics, found = gradients(worker, rw.flagged(rw.with_routes(data, foreign, version=2)))
    assert tw.equal(found, gradients(plain, data)[1])
    report = report_of(metrics)
    assert (report.replayed, report.withheld) == ((0, 0, 0), len(foreign) - len(data))


def test_replay_ends_with_the_call_also_where_it_fails(
    unproved: Any, plain: Any, data: TensorDict, foreign: Tensor
) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise ArithmeticError("of the loss")

    with pytest.raises(ArithmeticError):
        tw.update(unproved, fail, rw.flagged(rw.with_routes(data, foreign)))
    unproved.engine.optimizer.zero_grad()
    assert tw.equal(gradients(unproved, data)[1], gradients(plain, data)[1])


def own_routes(start: Callable[..., Any], rows: tw.Rollout) -> Tensor:
    routes: Tensor = record(start("R2"), rows)["routed_experts"].values().long()
    return routes


MISPLACED = {
    "a row late": (lambda routes: routes.roll(1, 0), "the row after .* off by one row"),
    "a row early": (lambda routes: routes.roll(-1, 0), "the row before .* off by one row"),
    "layers in another order": (lambda routes: routes[:, [1, 0, 2]], "layer 0 chooses the experts recorded"),
}


@pytest.mark.parametrize("name", MISPLACED)
def test_routes_out_of_place_stop_the_first_update(
    start: Callable[..., Any], rows: tw.Rollout, data: TensorDict, name: str
) -> None:
    misplace, words = MISPLACED[name]
    sent = rw.with_routes(data, misplace(own_routes(start, rows)))
    with pytest.raises(ReplayError, match=words):
        gradients(start("R3"), rw.flagged(sent))


def test_routes_that_were_changed_on_the_way_stop_the_first_update(
    unproved: Any, data: TensorDict, foreign: Tensor
) -> None:
    sent = rw.with_routes(data, foreign)
    routes = list(sent["routed_experts"].unbind())
    routes[3] = torch.cat([routes[3][:-1].roll(1, 0), routes[3][-1:]])
    sent["routed_experts"] = torch.nested.as_nested_tensor(routes, layout=torch.jagged)
    with pytest.raises(ReplayError, match=r"1 of 8 sequences differ, so these routes .* position 3"):
        gradients(unproved, rw.flagged(sent))


def test_sabotage_native_routes_enter_the_experts(
    unproved: Any, data: TensorDict, foreign: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record says that the shipped ids were chosen, but the experts are called with other ids."""
    choose = RouterSlot.choose

    def pretend(slot: RouterSlot, scores: Tensor, own: Any) -> Any:
        choose(slot, scores, own)
        return own

    monkeypatch.setattr(RouterSlot, "choose", pretend)
    with pytest.raises(ReplayError, match="experts of layer 0 were not called with the shipped ids"):
        gradients(unproved, rw.flagged(rw.with_routes(data, foreign)))


def test_the_trainers_routes_make_pi_equal_pi_old(start: Callable[..., Any], rows: tw.Rollout) -> None:
    """pi equals pi_old bitwise in the first of four mini-batches; without replay, the last mini-batch routes tokens
    differently.
    """
    seen: dict[str, list[Tensor]] = {}

    def watch(name: str) -> Any:
        base = tw.plain_loss()

        def watched(model_output: Any, data: Any, dp_group: Any = None) -> Any:
            seen.setdefault(name, []).append(model_output["log_probs"].values().detach().clone())
            return base(model_output=model_output, data=data, dp_group=dp_group)

        return watched

    worker = start("R2")
    recorded = record(worker, rows, micro_batch_size=2)
    sent = rows.to_tensordict()
    sent["routed_experts"] = recorded["routed_experts"]
    metrics = tw.update(worker, watch("R2"), rw.flagged(sent), mini_batches=4)
    first = torch.cat(list(recorded["log_probs"].unbind())[:2])
    assert torch.equal(seen["R2"][0], first)
    reports = reports_of(metrics)
    assert len(reports) == 4
    assert reports[0].equal == reports[0].replayed
    assert sum(reports[3].equal) < sum(reports[3].replayed) == sum(reports[3].entered)


@pytest.mark.extended
def test_two_ranks_equal_one(
    unproved: Any, rows: tw.Rollout, data: TensorDict, foreign: Tensor, model: Path, tmp_path: Path
) -> None:
    """The trainer receives the reports of both ranks."""
    torch.save({"rows": rows, "routes": foreign}, tmp_path / "rows.pt")
    found = tw.run_two_ranks("replaying", model, tmp_path)
    wanted = gradients(unproved, rw.flagged(rw.with_routes(data, foreign)))[1]
    assert tw.close(found["gradient"], wanted)
    assert found["reports"] == 2
    assert found["metrics"]["replayed_token_share"] == 1 - len(data) / len(foreign)
    assert found["metrics"]["gate_gradient"] == 1.0
