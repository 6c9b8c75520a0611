"""The hooks of every path fit the installed verl, and a hook whose target has changed stops the run and is named."""

from __future__ import annotations

import inspect
import pkgutil
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from omegaconf import OmegaConf

from verl_patches import rollout_seams, trainer_seams, worker_seams
from verl_patches.contract import PatchError, check_all

V1 = pytest.mark.verl(">=0.9")
NEWEST = pytest.mark.verl(">=0.9.1")
"""Releases that record versions per token, replay routes and supports, and support a staleness limit."""
CLIENTS = ("LLMServerClient", "FullyAsyncLLMServerClient")
SCORING = pytest.mark.verl("!=0.7.1")
"""Releases that score prompts and have the asynchronous programs."""
GROUPS = [
    pytest.param(lambda: worker_seams.LOSS, id="loss"),
    pytest.param(lambda: trainer_seams.V0, id="v0"),
    pytest.param(lambda: (rollout_seams.WEIGHT_SYNC,), id="weight_sync"),
    pytest.param(lambda: rollout_seams.TURNS, id="rewards of turns"),
    pytest.param(lambda: trainer_seams.V1, id="v1", marks=V1),
    pytest.param(lambda: rollout_seams.AGENT_LOOPS_V1, id="agent_loops of v1", marks=V1),
    pytest.param(lambda: trainer_seams.STALENESS, id="staleness", marks=NEWEST),
    pytest.param(lambda: trainer_seams.SNAPSHOTS, id="snapshots", marks=NEWEST),
    pytest.param(lambda: rollout_seams.VERSIONS, id="versions", marks=NEWEST),
    pytest.param(lambda: worker_seams.ROUTER_REPLAY, id="router_replay", marks=NEWEST),
    pytest.param(lambda: rollout_seams.SUPPORT, id="support", marks=NEWEST),
    pytest.param(rollout_seams.build_support_server, id="servers that return supports", marks=NEWEST),
    pytest.param(lambda: worker_seams.OPTIMIZER, id="optimizer", marks=NEWEST),
    pytest.param(lambda: rollout_seams.AGENT_LOOPS, id="agent_loops", marks=SCORING),
    pytest.param(rollout_seams.build_scoring_server, id="servers that score", marks=SCORING),
    pytest.param(lambda: trainer_seams.PROGRAMS, id="asynchronous programs", marks=SCORING),
]


@pytest.mark.parametrize("group", GROUPS)
def test_every_seam_is_where_it_was(group: Any) -> None:
    check_all(group())


@NEWEST
def test_megatrons_routers_are_where_they_were() -> None:
    pytest.importorskip("megatron.core")
    check_all(worker_seams.MEGATRON_REPLAY)


def test_a_loss_that_no_longer_reads_the_weights_is_named() -> None:
    (seam,) = [seam for seam in worker_seams.LOSS if seam.name == "ppo_loss"]
    with pytest.raises(PatchError, match="some_other_weights"):
        check_all([replace(seam, keys=("rollout_is_weights", "some_other_weights"))])


@V1
def test_whatever_the_v1_trainer_overrides_is_a_seam() -> None:
    """If verl no longer called an overridden hook, the correction would silently be dead."""
    from recipe.offpolicy.trainer.corrected_v1 import CorrectedV1
    from verl.trainer.ppo.v1 import PPOTrainer

    names = {name for name in CorrectedV1.METHODS if hasattr(PPOTrainer, name)}
    of_trainers = (*trainer_seams.V1, *trainer_seams.STALENESS, *trainer_seams.SNAPSHOTS)
    held = {seam.name for seam in (*of_trainers, *rollout_seams.VERSIONS)}
    assert names <= held
    assert all(getattr(CorrectedV1, name) for name in CorrectedV1.METHODS)
    # Of 0.9.0, which fills its warm-up in one place.
    assert set(CorrectedV1.METHODS) - names <= {"_add_async_warmup_batches"}


CLIENT, FULLY_ASYNC = (f"verl.workers.rollout.llm_server:{each}" for each in CLIENTS)
ENGINE = "verl.workers.engine.fsdp.transformer_impl:FSDPEngineWithLMHead"
OF_BUFFER = {"sample", "wait_for_sampleable", "_wait_for_next_poll", "_has_enough_samples"}
OF_BUFFER |= {"_stale_terminal_keys", "_terminal_eviction_reasons", "_evict_terminal_groups"}
OF_REPLAY = {"prepare_model_inputs", "forward_step", "forward_backward_batch"}
OF_SUPPORT = {"prepare_model_outputs", "forward_backward_batch"}


@NEWEST
@pytest.mark.parametrize(
    ("ours", "theirs", "wrapped", "seams"),
    [
        ("staleness.client:Attempts", CLIENT, {"generate"}, rollout_seams.VERSIONS),
        ("staleness.client:Requests", FULLY_ASYNC, {"generate"}, rollout_seams.VERSIONS),
        (
            "staleness.buffer:BoundedReplayBuffer",
            "verl.trainer.ppo.v1.replay_buffer:ReplayBufferAsync",
            OF_BUFFER,
            (*trainer_seams.V1, *trainer_seams.STALENESS),
        ),
        ("replay.fsdp_engine:ReplayingEngine", ENGINE, OF_REPLAY, (*worker_seams.ROUTER_REPLAY, *trainer_seams.V1)),
        ("support.fsdp_engine:LikeliestEngine", ENGINE, OF_SUPPORT, rollout_seams.SUPPORT),
    ],
)
def test_whatever_a_part_overrides_is_a_seam(ours: str, theirs: str, wrapped: set[str], seams: Any) -> None:
    """If verl took another code path, the part would silently be skipped."""
    mine, verls = pkgutil.resolve_name(f"recipe.offpolicy.{ours}"), pkgutil.resolve_name(theirs)
    assert {name for name in vars(mine) if not name.startswith("__") and hasattr(verls, name)} == wrapped
    assert wrapped <= {seam.target.rpartition(".")[2].rpartition(":")[2] for seam in seams}


@NEWEST
def test_each_attempt_of_a_resumed_request_goes_by_the_client_that_notes() -> None:
    from recipe.offpolicy.staleness.client import NotingResumingClient

    names = [each.__name__ for each in NotingResumingClient.__mro__]
    assert names[1:5] == ["Requests", CLIENTS[1], "Attempts", CLIENTS[0]]


def test_whatever_the_v0_trainer_overrides_is_a_seam() -> None:
    from recipe.offpolicy.trainer.corrected_v0 import CorrectedV0
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    # Of programs that sample elsewhere.
    elsewhere = {"_init_models", "fit_step"}
    names = {name for name in CorrectedV0.METHODS if hasattr(RayPPOTrainer, name)}
    assert names == set(CorrectedV0.METHODS) - elsewhere
    assert names <= {seam.name for seam in trainer_seams.V0}
    assert all(getattr(CorrectedV0, name) for name in CorrectedV0.METHODS)


def is_corrected(trainer: Any) -> bool:
    from recipe.offpolicy.trainer.corrected_run import CorrectedRun

    return isinstance(getattr(vars(trainer).get("_update_actor"), "__self__", None), CorrectedRun)


@V1
def test_every_v1_trainer_that_verl_makes_is_corrected(monkeypatch: pytest.MonkeyPatch) -> None:
    from recipe.offpolicy.trainer import hooked
    from verl.trainer.ppo.v1 import get_trainer_cls, trainer_base
    from verl_patches.releases import V1_MODES

    hook(monkeypatch, trainer_base.PPOTrainer, hooked._correct_v1)
    monkeypatch.setattr("recipe.offpolicy.preflight.checks.path.demand_seams", lambda config: None)
    ours = OmegaConf.create({"trainer": {"v1": {"trainer_mode": "sync"}}, "offpolicy": {}})
    hooked.mark(ours)
    for mode in V1_MODES:
        trainer = get_trainer_cls(mode)
        assert is_corrected(trainer.__new__(trainer, config=ours))
        assert not is_corrected(trainer.__new__(trainer, OmegaConf.create({})))


def test_every_v0_trainer_that_a_program_makes_is_corrected(monkeypatch: pytest.MonkeyPatch) -> None:
    from recipe.offpolicy.trainer import hooked
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    hook(monkeypatch, RayPPOTrainer, hooked._correct_v0)
    ours = OmegaConf.create({"trainer": {}, "offpolicy": {}})
    others = OmegaConf.create({"trainer": {}})
    hooked.mark(ours)

    class Own(RayPPOTrainer):  # type: ignore[misc]
        """A fork's trainer, whose constructor does not call the constructor of its base class."""

        def __init__(self, config: Any) -> None:
            self.config = config

    class FullyAsyncRollouter(RayPPOTrainer):  # type: ignore[misc]
        """A rollouter, which samples and does not train."""

    for trainer in (RayPPOTrainer, Own):
        assert is_corrected(trainer.__new__(trainer, ours))
        assert not is_corrected(trainer.__new__(trainer, others))
        assert is_corrected(trainer.__new__(trainer, "tokenizer", ours))
        assert not is_corrected(trainer.__new__(trainer, "tokenizer", config=others))
        # Ray makes an actor without arguments.
        assert is_corrected(trainer.__new__(trainer))
    assert not is_corrected(FullyAsyncRollouter.__new__(FullyAsyncRollouter, ours))


def hook(monkeypatch: pytest.MonkeyPatch, trainer: type, correct: Any) -> None:
    """Hook a class of verl for one test."""
    from recipe.offpolicy.trainer import hooked

    monkeypatch.setattr(trainer, "__new__", trainer.__new__)
    monkeypatch.setattr(trainer, "__offpolicy__", None, raising=False)
    monkeypatch.delattr(trainer, "__offpolicy__")
    monkeypatch.setattr(hooked, "_set_up", lambda: None)
    hooked._replace(trainer, correct)


@NEWEST
def test_clients_of_the_v0_trainer_go_through_the_last_that_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.workers.rollout.llm_server import LLMServerManager

    def get_client(self: Any, client_cls: Any = None, **kwargs: Any) -> Any:
        return "verl's"

    monkeypatch.setattr(LLMServerManager, "get_client", get_client)
    monkeypatch.setattr(rollout_seams, "_notes", [])
    for run in ("a run of before", "this one"):
        rollout_seams.note_clients(lambda client, run=run: f"{run} noting {client}")
    assert object.__new__(LLMServerManager).get_client() == "this one noting verl's"


@pytest.mark.verl(">=0.9.1")
def test_clients_of_fully_async_go_through_what_notes_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.experimental.fully_async_policy.fully_async_rollouter import FullyAsyncLLMServerManager as Manager
    from verl.workers.rollout.llm_server import LLMServerManager

    monkeypatch.setattr(Manager, "get_client", inspect.unwrap(Manager.get_client))
    monkeypatch.setattr(LLMServerManager, "get_client", lambda self, client_cls, **kwargs: "verl's")
    rollout_seams.note_fully_async_clients(lambda client: f"noting {client}")
    manager = object.__new__(Manager)
    manager.rollout_replicas = []
    assert manager.get_client() == "noting verl's"


def test_what_is_put_around_the_advantages_is_what_fit_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.trainer.ppo import ray_trainer

    plain = trainer_seams.plain_advantage()
    monkeypatch.setattr(ray_trainer, "compute_advantage", ray_trainer.compute_advantage)
    monkeypatch.setattr(trainer_seams, "_around", [])  # what modules of verl's have wrapped by name reads it, too
    seen: list[object] = []
    trainer_seams.hook_advantage()
    trainer_seams.around_advantage(lambda compute, data, *args, **kwargs: seen.append((compute, data)))
    trainer_seams.around_advantage(lambda compute, data, *args, **kwargs: ("second", data))
    assert ray_trainer.compute_advantage("a batch") == ("second", "a batch")
    assert seen == []
    assert trainer_seams.plain_advantage() is plain is not ray_trainer.compute_advantage
    assert "compute_advantage" in ray_trainer.RayPPOTrainer.fit.__code__.co_names
    assert ray_trainer.RayPPOTrainer.fit.__globals__ is vars(ray_trainer)


def test_modules_that_imported_the_estimator_by_name_get_the_wrapped_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program's ``__main__`` is imported before the hooks are installed, and Ray ships its functions with the objects
    that they name.
    """
    from verl.trainer.ppo import ray_trainer

    monkeypatch.setattr(ray_trainer, "compute_advantage", plain := trainer_seams.plain_advantage())
    program = ModuleType("program")
    monkeypatch.setitem(sys.modules, "program", program)
    vars(program).update(compute_advantage=plain, estimate=plain, other=len)
    trainer_seams.hook_advantage()
    assert program.compute_advantage is program.estimate is ray_trainer.compute_advantage is not plain
    assert program.other is len


def test_verl_ships_the_correction_defaults_that_the_checks_know() -> None:
    import yaml

    import verl.trainer.config
    from recipe.offpolicy.correction.dialects.verl import VERL_DEFAULTS

    shipped = Path(verl.trainer.config.__file__).parent / "algorithm" / "rollout_correction.yaml"
    assert yaml.safe_load(shipped.read_text()) == VERL_DEFAULTS


@pytest.mark.parametrize("ranks", [1, 2])
def test_verl_deals_rows_to_mini_batches_as_the_denominator_counts_them(ranks: int) -> None:
    """Each rank gets contiguous rows and splits them in order, as a worker's ``make_iterator`` does."""
    import torch
    from tensordict import TensorDict

    from recipe.offpolicy.correction.decisions import assign_mini_batches
    from verl.utils import tensordict_utils as tu

    rows, size = 12, 6
    expected = assign_mini_batches(rows, ranks=ranks, rows_a_mini_batch=size)
    batch = TensorDict({"row": torch.arange(rows), "group": expected}, batch_size=rows)
    for share in batch.chunk(ranks):
        pieces = tu.make_iterator(
            share, mini_batch_size=size // ranks, epochs=1, seed=1, dataloader_kwargs={"shuffle": False}
        )
        seen = [piece["group"].unique().tolist() for piece in pieces]
        assert seen == [[number] for number in range(rows // size)]
