"""The checkpoint engine for CPU: what is sent arrives, and what cannot arrive ends in a bounded time with its cause."""

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

from tests.support.applications import application
from tests.support.fresh_python import CPU, ok

pytest.importorskip("verl")

from verl.checkpoint_engine import CheckpointEngineRegistry
from verl.utils.import_utils import import_external_libs
from verl_patches.cpu.checkpoint_engine import NAME, POLL, FileCheckpointEngine, WeightSyncError

pytestmark = pytest.mark.verl(">=0.8")

KEY = f"actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.{NAME}"

HANGS = 300.0
"""Seconds after which whatever is waited for will not come."""

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
    """As verl's workers make one."""
    import_external_libs("verl_patches.cpu.checkpoint_engine")
    return CheckpointEngineRegistry.new(NAME, bucket_size=256, folder=str(folder), **kwargs)


def connect(actors: list[Any], rollouts: list[Any]) -> None:
    """As verl's manager does before each synchronisation."""
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
    """One synchronisation, receivers first, as each of verl's managers drives it."""

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


@pytest.mark.verl(">=0.9.1")
def test_the_option_for_cpu_names_this_engine_and_fits_the_quickstart() -> None:
    """What verl asserts, and what Ray's placement groups wait for without a word."""
    with application("+mode=separate_async_cpu", primary="quickstart") as config:
        actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
        assert rollout.checkpoint_engine.backend == NAME
        assert rollout.checkpoint_engine.custom_backend_module == FileCheckpointEngine.__module__
        updates = config.trainer.v1[config.trainer.v1.trainer_mode].parameter_sync_step
        assert config.data.train_batch_size == updates * actor.ppo_mini_batch_size
        rows = actor.ppo_mini_batch_size * rollout.n
        assert rows % rollout.log_prob_micro_batch_size_per_gpu == 0
        slots = [each.nnodes * each.n_gpus_per_node for each in (config.trainer, rollout)]
        assert config.ray_kwargs.ray_init.num_gpus == sum(slots)


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
    """A view is saved without what it views; what the sender changes later does not reach the receiver."""
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
    """Gathering a sharded weight is a collective: a rank that does not iterate would hang the others."""
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


def test_a_model_without_weights_is_an_error(tmp_path: Path) -> None:
    master = engine(tmp_path, is_master=True)
    connect([master], [])
    with pytest.raises(WeightSyncError, match="has no weights to send"):
        asyncio.run(master.send_weights(iter(()), global_steps=1))


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
    """The process, and what it tells before it hangs."""
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


def test_a_sender_that_hangs_is_waited_for_as_long_as_was_said(
    tmp_path: Path, sender: tuple[BaseProcess, dict[str, str]]
) -> None:
    """A minute passes between two looks at a clock: when each of two buckets is first waited for, and at each look."""
    process, metadata = sender
    rollout = engine(tmp_path, timeout=180.0)
    minutes: list[float] = []

    def clock() -> float:
        minutes.append(60.0 * len(minutes))
        return minutes[-1]

    rollout.clock = clock
    rollout.init_process_group(**metadata)
    with pytest.raises(WeightSyncError) as caught:
        asyncio.run(received(rollout, 1))
    assert minutes == [0.0, 60.0, 120.0, 180.0, 240.0, 300.0]
    assert f"process {process.pid} on" in str(caught.value)
    assert "is alive but wrote nothing for 180 s after 1 buckets" in str(caught.value)
    assert f"{KEY}.timeout=SECONDS" in str(caught.value)


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

    with pytest.raises(WeightSyncError, match="has ended after 1 buckets"):
        asyncio.run(killed_while_receiving())


def test_a_folder_that_is_not_shared_is_named(tmp_path: Path) -> None:
    rollout = engine(tmp_path)
    with pytest.raises(WeightSyncError, match=f"{KEY}.folder to a folder that all machines share"):
        rollout.init_process_group(folder=str(tmp_path / "elsewhere"), sender="process 1 on another")


def test_a_topology_without_a_sender_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightSyncError, match="must write the weights, found 0"):
        FileCheckpointEngine.build_topology(1, 1, [engine(tmp_path).prepare()] * 2)


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan")])
def test_a_timeout_that_is_none_is_refused(tmp_path: Path, timeout: float) -> None:
    with pytest.raises(ValueError, match=f"{KEY}.timeout={timeout}: give a number of seconds above 0"):
        engine(tmp_path, timeout=timeout)


MOVES = {
    "send = base.send_weights; base.send_weights = lambda self, weights: None": "Expected (self, weights, global_st",
    "base.send_weights = send; base.number = abc.abstractmethod(lambda self: 0); abc.update_abstractmethods(base)": (
        "also requires number"
    ),
}


def test_a_moved_base_class_stops_the_import() -> None:
    """One process for all moves, each of which the import must refuse."""
    out = ok(
        "import abc, sys\n"
        "from verl.checkpoint_engine import CheckpointEngine as base\n"
        f"for move in {list(MOVES)!r}:\n"
        "    exec(move)\n"
        "    try: import verl_patches.cpu.checkpoint_engine\n"
        "    except Exception as error: print(type(error).__name__, error)\n",
        **CPU,
    )
    lines = out.splitlines()[-len(MOVES) :]
    for line, expected in zip(lines, MOVES.values(), strict=True):
        assert line.startswith("PatchError patch 'checkpoint_engine': the target verl.checkpoint_engine:")
        assert expected in line
