"""The checkpoint engine for CPUs: weights arrive unchanged, and a failed transfer ends in bounded time and names its
cause.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("verl")

from verl.checkpoint_engine import CheckpointEngineRegistry
from verl.utils.import_utils import import_external_libs
from verl_patches.cpu.checkpoint_engine import NAME, POLL, FileCheckpointEngine, WeightSyncError

pytestmark = pytest.mark.verl(">=0.8")

HANGS = 300.0
"""Seconds after which a transfer counts as hanging."""

Weights = list[tuple[str, Tensor]]


@pytest.fixture
def weights() -> Weights:
    whole = torch.arange(1000.0)
    return [
        ("embedding", torch.randn(7, 5)),
        ("view", whole[10:16].view(2, 3)),
        ("transposed", torch.arange(6.0).view(2, 3).T),
        ("half", torch.randn(11).bfloat16()),
        ("large", torch.randn(300)),
        ("count", torch.tensor(3)),
    ]


def engine(folder: Path, **kwargs: Any) -> Any:
    """Create an engine as verl's workers do."""
    import_external_libs("verl_patches.cpu.checkpoint_engine")
    return CheckpointEngineRegistry.new(NAME, bucket_size=256, folder=str(folder), **kwargs)


def connect(actors: list[Any], rollouts: list[Any]) -> None:
    """Connect the ranks as verl's manager does before each synchronisation."""
    metadata = [each.prepare() for each in actors + rollouts]
    for group, arguments in zip(
        (actors, rollouts),
        FileCheckpointEngine.build_topology(len(actors), len(rollouts), metadata),
        strict=True,
    ):
        for i, each in enumerate(group):
            each.init_process_group(**{key: values[i] for key, values in arguments.items()})


async def received(rollout: Any, step: int | None) -> Weights:
    return [(name, weight.clone()) async for name, weight in rollout.receive_weights(global_steps=step)]


def synchronise(actors: list[Any], rollouts: list[Any], weights: Weights, step: int | None = 1) -> list[Weights]:
    """Run one synchronisation, receivers first, as each of verl's managers does."""

    async def both() -> list[Weights]:
        receiving = [asyncio.create_task(received(rollout, step)) for rollout in rollouts]
        await asyncio.sleep(2 * POLL)  # they wait
        await asyncio.gather(*(actor.send_weights(iter(weights), global_steps=step) for actor in actors))
        return await asyncio.gather(*receiving)

    connect(actors, rollouts)
    got = asyncio.run(both())
    for each in actors + rollouts:
        each.finalize()
    return got


def test_every_rollout_gets_every_weight_to_the_bit_at_each_synchronisation(tmp_path: Path, weights: Weights) -> None:
    actors = [engine(tmp_path, is_master=True), engine(tmp_path)]
    rollouts = [engine(tmp_path) for _ in range(3)]
    for step in (1, 2):
        weights[0][1].add_(1.0)  # in place, as an optimizer does
        for got in synchronise(actors, rollouts, weights, step):
            assert [name for name, _ in got] == [name for name, _ in weights]
            for (_, there), (_, here) in zip(got, weights, strict=True):
                assert there.dtype == here.dtype
                assert torch.equal(there, here)
        assert list(tmp_path.iterdir()) == []


def test_a_bucket_holds_copies_and_is_no_larger_than_it_must_be(tmp_path: Path, weights: Weights) -> None:
    """A view is sent without the rest of its storage, and later changes on the sender do not reach the receiver."""
    master, rollout = engine(tmp_path, is_master=True), engine(tmp_path)
    connect([master], [rollout])
    asyncio.run(master.send_weights(iter(weights), global_steps=1))
    sizes = [path.stat().st_size for path in tmp_path.rglob("*.pt")]
    assert len(sizes) == 2  # 140 + 24 + 24 + 22 + 1200 bytes, which reach 256, and 8
    assert sum(sizes) < 1418 + 4000 + 1200  # the weights, their files' own overhead, and not the 4000 bytes viewed
    assert list(tmp_path.rglob("*.draft")) == []
    before = weights[0][1].clone()
    weights[0][1].zero_()
    assert torch.equal(asyncio.run(received(rollout, 1))[0][1], before)


def test_all_ranks_of_the_trainer_take_part_in_gathering(tmp_path: Path, weights: Weights) -> None:
    """Gathering a sharded weight is a collective operation, so a rank that did not iterate would block the others."""
    follower = engine(tmp_path)
    taken: list[str] = []

    def gathered() -> Iterator[tuple[str, Tensor]]:
        for name, weight in weights:
            taken.append(name)
            yield name, weight

    connect([engine(tmp_path, is_master=True), follower], [])
    asyncio.run(follower.send_weights(gathered(), global_steps=1))
    assert taken == [name for name, _ in weights]


def test_weights_of_another_step_are_refused(tmp_path: Path, weights: Weights) -> None:
    master, rollout = engine(tmp_path, is_master=True), engine(tmp_path)
    connect([master], [rollout])
    asyncio.run(master.send_weights(iter(weights), global_steps=4))
    with pytest.raises(
        WeightSyncError, match=r"expected the weights of step 5, but process \d+ on .* sends those of step 4"
    ):
        asyncio.run(received(rollout, 5))


def test_a_sender_that_fails_tells_the_receivers_why_and_cleans_up_at_the_next(
    tmp_path: Path, weights: Weights
) -> None:
    master, rollout = engine(tmp_path, is_master=True), engine(tmp_path)

    def broken() -> Iterator[tuple[str, Tensor]]:
        yield from weights[:5]
        raise ValueError("a shard is missing")

    connect([master], [rollout])
    with pytest.raises(ValueError, match="a shard is missing"):
        asyncio.run(master.send_weights(broken(), global_steps=1))
    with pytest.raises(WeightSyncError, match="failed with ValueError: a shard is missing"):
        asyncio.run(received(rollout, 1))
    (left,) = tmp_path.iterdir()
    assert len(synchronise([master], [rollout], weights)[0]) == len(weights)
    assert not left.exists()


def send_one_bucket_and_hang(folder: Path, metadata: Any) -> None:
    """A trainer's process."""
    master = engine(folder, is_master=True)
    told = master.prepare()
    master.init_process_group(**told)

    def weights() -> Iterator[tuple[str, Tensor]]:
        yield "first", torch.zeros(100)
        metadata.send(told)
        signal.pause()

    asyncio.run(master.send_weights(weights(), global_steps=1))


@pytest.fixture
def sender(tmp_path: Path) -> Iterator[tuple[BaseProcess, dict[str, str]]]:
    """The sending process, and the message that it sends before it hangs."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=send_one_bucket_and_hang, args=(tmp_path, there), daemon=True)
    process.start()
    try:
        assert here.poll(HANGS)
        yield process, here.recv()
    finally:
        process.kill()
        process.join()


def test_a_sender_that_was_killed_is_noticed_at_once(
    tmp_path: Path, sender: tuple[BaseProcess, dict[str, str]]
) -> None:
    process, metadata = sender
    rollout = engine(tmp_path, timeout=600.0)
    rollout.init_process_group(**metadata)

    async def killed_while_receiving() -> None:
        receiving = asyncio.create_task(received(rollout, 1))
        await asyncio.sleep(10 * POLL)
        assert not receiving.done()
        process.kill()
        process.join()
        await asyncio.wait_for(receiving, HANGS)

    with pytest.raises(WeightSyncError, match="exited after 1 buckets"):
        asyncio.run(killed_while_receiving())
