"""A rollout engine that fuses weights as vLLM does, and a trainer's module: equal weights, and each fault."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from recipe.offpolicy.delivery.checksums import DeliverySettings, add_method, watch_sent, weigh_own
from recipe.offpolicy.delivery.engine_side import (
    METHOD,
    Sources,
    extend_server,
    extend_worker,
    load_observed,
    observe_update,
    weigh_parameters,
)
from recipe.offpolicy.delivery.weight_delivery import WeightDelivery
from recipe.offpolicy.fault_tolerance.watchdog import FAILURE
from recipe.offpolicy.proof.verify import LivenessError

WIDTH = 4
EXPERTS = 2
Weights = list[tuple[str, Tensor]]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.norm = nn.Linear(WIDTH, 1, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, 3, bias=False) for _ in range(EXPERTS))


class Model(nn.Module):
    """The trainer's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.embed = nn.Embedding(5, WIDTH)


class EngineModel(nn.Module):
    """An engine with fused queries and keys, stacked experts, and padding rows after the embedding's rows, in
    bfloat16.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        shapes = {"qk_weight": (6, WIDTH), "qk_bias": (6,), "norm": (1, WIDTH), "w": (2, 3, WIDTH)}
        for layer in range(2):
            for kind, shape in shapes.items():
                self.register_parameter(f"l{layer}_{kind}", nn.Parameter(torch.ones(shape).bfloat16()))
        self.embed = nn.Parameter(torch.zeros(8, WIDTH).bfloat16())

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        self.calls += 1
        loaded = set()
        with torch.no_grad():
            for name, tensor in weights:
                parts = name.split(".")
                if parts[0] == "embed":
                    target, place = "embed", self.embed[:5]
                elif "experts" in name:
                    target = f"l{parts[1]}_w"
                    place = self.get_parameter(target)[int(parts[3])]
                elif "norm" in name:
                    target = f"l{parts[1]}_norm"
                    place = self.get_parameter(target)
                else:
                    target = f"l{parts[1]}_qk_{parts[-1]}"
                    held = self.get_parameter(target)
                    place = held[:4] if "q_proj" in name else held[4:]
                place.copy_(tensor)
                loaded.add(target)
        return loaded


class Server:
    """A rollout server with one worker."""

    def __init__(self) -> None:
        model = EngineModel()
        self.worker = SimpleNamespace(model_runner=SimpleNamespace(model=model), list_loras=lambda: {1})
        self.model = model
        self.collective_rpc = SimpleNamespace(remote=self.weigh)

    def load(self, worker: Any, weights: Weights, peft_config: Any, base_sync_done: Any) -> None:
        if not (peft_config and base_sync_done):
            self.model.load_weights(weights)

    def receive(self, weights: Weights, adapter: bool = False) -> None:
        """In two buckets."""
        for part in (weights[:3], weights[3:]):
            observe_update(self.load, self.worker, part, {"r": 2} if adapter else None, adapter, quantised=False)

    def weigh(self, method: str) -> list[Any]:
        return [weigh_parameters(self.worker)]


class World:
    """A trainer whose optimizer moves every parameter, and one server."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seed: int = 0) -> None:
        torch.manual_seed(seed)
        monkeypatch.setattr("recipe.offpolicy.delivery.weight_delivery.ray.get", lambda asked: asked)
        self.module, self.server = Model(), Server()
        worker = SimpleNamespace(actor=SimpleNamespace(engine=SimpleNamespace(module=self.module)))
        workers = SimpleNamespace(weigh_offpolicy=lambda *args: [weigh_own(worker, *args)])
        self.lines: list[Any] = []
        record = SimpleNamespace(write_delivery=self.lines.append)
        self.run: Any = SimpleNamespace(workers=workers, recording=record, global_steps=3)
        self.delivery = WeightDelivery(self.run, DeliverySettings(sums=1, probe=None))
        self.delivery._rollout = SimpleNamespace(name="vllm", get=lambda key: "bfloat16")
        self.manager = SimpleNamespace(replicas=[SimpleNamespace(servers=[self.server])], backend="naive")

    def update(self, size: float = 1e-2) -> None:
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter += size * torch.randn_like(parameter)

    def weights(self) -> Weights:
        return [(name, tensor.clone()) for name, tensor in self.module.state_dict().items()]

    def sync(self, weights: Weights | None = None) -> None:
        sent = self.weights() if weights is None else weights
        if sent:
            self.server.receive(sent)
        self.judge()

    def judge(self) -> None:
        """Synchronise and validate; answers are compared before the validation."""
        self.delivery.on_sync(self.manager)
        self.delivery.validate(None, dict)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_healthy_synchronisations_are_equal(world: World) -> None:
    for _ in range(20):
        world.sync()
        world.update(1e-4)  # some of which bfloat16 rounds away
    metrics = world.delivery.metrics()
    assert metrics["offpolicy/delivery/equal"] == len(world.module.state_dict())
    assert metrics["offpolicy/delivery/unknown"] == 0
    assert 0 < metrics["offpolicy/delivery/changed"] < 1
    # Each name is loaded alone once, the experts of a layer as one: 2 x 6 + 1; 2 buckets a time, and the later ones.
    assert world.server.model.calls <= 13 + 2 * 20 + 2


@pytest.mark.parametrize(("size", "warned"), [(1e-5, True), (1e-2, False)])
def test_rounded_updates_are_told(world: World, caplog: pytest.LogCaptureFixture, size: float, warned: bool) -> None:
    world.module.load_state_dict({name: tensor.bfloat16().float() for name, tensor in world.weights()})
    for _ in range(6):
        world.sync()
        world.update(size)
    assert caplog.text.count("of the last 3 updates") == warned
    assert "rollout.dtype=float32" in caplog.text or not warned


def _one_expert_stale(now: Weights, before: Weights) -> Weights:
    return [old if "experts.1" in new[0] else new for new, old in zip(now, before, strict=True)]


FAULTS: dict[str, tuple[Callable[[Weights, Weights], Weights], str]] = {
    "nothing": (lambda now, before: [], "15 of 15 tensors differ.*the weights from 1 synchronisation earlier"),
    "an expert": (_one_expert_stale, "4 of 15 tensors differ: layers.0.experts.0.weight"),
    "another model": (
        lambda now, before: [(name, tensor * 1.01) for name, tensor in now],
        "15 of 15 tensors differ.*match none of the last",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_stops_the_run_at_its_synchronisation(world: World, fault: str) -> None:
    spoil, message = FAULTS[fault]
    world.sync()
    before = world.weights()
    world.update()
    with pytest.raises(LivenessError, match=message):
        world.sync(spoil(world.weights(), before))
    assert [line["verdict"] for line in world.lines] == ["equal", "different"]


def test_an_engine_that_is_never_sent_weights(world: World) -> None:
    with pytest.raises(LivenessError, match="received no weights"):
        world.sync([])


def test_trained_parameters_that_are_never_sent(world: World) -> None:
    sent = [(name, tensor) for name, tensor in world.weights() if "norm" not in name]
    with pytest.raises(LivenessError, match="2 of 15 trained tensors are not among the 13"):
        world.sync(sent)


def test_an_adapter_is_compared_as_it_was_sent(world: World) -> None:
    world.server.receive(world.weights())
    lora = torch.randn(2, WIDTH)
    for block in world.module.layers:
        block.lora_A = nn.Parameter(lora.clone())
    adapter = [(f"base_model.model.layers.{layer}.lora_A", lora) for layer in range(2)]
    world.server.receive(adapter, adapter=True)
    world.judge()
    with torch.no_grad():
        world.module.layers[1].lora_A += 1e-6
    with pytest.raises(LivenessError, match=r"1 of 17 tensors differ: layers\.1\.lora_A"):
        world.judge()


def test_a_tied_tensor_that_is_refused_alone_is_left_out() -> None:
    """vLLM 0.31 rejects it, because its model reads only the embedding; another rejection is raised."""
    calls: list[list[str]] = []

    def load(weights: Weights) -> set[str]:
        names = [name for name, _ in weights]
        if names == ["lm_head"]:
            raise ValueError("'lm_head' was skipped because it is tied to 'embed' in M, but 'embed' was not found")
        if "other" in names:
            raise ValueError("There is no module or parameter named 'other'")
        calls.append(names)
        return {*names} - {"lm_head"}

    sources = Sources()
    for _ in range(2):
        load_observed(load, sources, [("embed", torch.ones(1)), ("w", torch.ones(1))])
        load_observed(load, sources, [("lm_head", torch.ones(1))])
    assert calls == [["embed"], ["w"], ["embed", "w"]]
    assert sources.targets == {"embed": {"embed"}, "w": {"w"}}
    with pytest.raises(ValueError, match="named 'other'"):
        load_observed(load, sources, [("other", torch.ones(1))])


def test_quantised_weights_are_not_judged(world: World, caplog: pytest.LogCaptureFixture) -> None:
    observe_update(world.server.load, world.server.worker, world.weights(), None, False, quantised=True)
    world.judge()
    assert "quantises" in caplog.text


def test_an_engine_that_merges_lora_is_weighed_as_it_sends(world: World) -> None:
    """What is sent is not a parameter of the module, but base and adapter together."""
    merged = [("w", torch.tensor([1.0, 2.0]))]
    module = nn.Linear(1, 1)
    module.peft_config = {}  # type: ignore[assignment]
    engine = SimpleNamespace(
        module=module,
        model_config=SimpleNamespace(lora={"merge": True}),
        get_per_tensor_param=lambda **kwargs: (iter(merged), None),
    )
    worker: Any = SimpleNamespace(actor=SimpleNamespace(engine=engine))
    watch_sent(worker, "bfloat16")
    assert weigh_own(worker, "bfloat16", {})["weights"] == {}
    tensors, _ = engine.get_per_tensor_param()
    assert list(tensors) == merged
    weights = {"w": [2, 32640, 532_692_992, 1]}
    assert weigh_own(worker, "bfloat16", {}) == {"weights": weights, "sent": True, "update": []}


def test_what_is_sent_as_it_is_and_what_is_not() -> None:
    class FSDPEngine(SimpleNamespace):
        """verl's, by name."""

    class Renamed(nn.Linear):
        _checkpoint_conversion_mapping: ClassVar[dict[str, str]] = {"^visual": "model.visual"}

    def watched(engine: type, module: Any) -> bool:
        made = engine(module=module, model_config=None, get_per_tensor_param=lambda: None)
        worker: Any = SimpleNamespace(actor=SimpleNamespace(engine=made))
        watch_sent(worker, "bfloat16")
        return weigh_own(worker, "bfloat16", {})["sent"]

    assert not watched(FSDPEngine, nn.Linear(1, 1))
    assert watched(FSDPEngine, Renamed(1, 1))
    assert watched(FSDPEngine, [nn.Linear(1, 1)])
    assert watched(SimpleNamespace, nn.Linear(1, 1))
    flat = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    nn.Module.__init__(flat)
    assert watched(FSDPEngine, nn.Sequential(flat))


def test_a_legacy_worker_is_weighed_as_it_sends(world: World) -> None:
    sent = []

    async def update_weights(weights: Any, peft_config: Any = None) -> None:
        sent.extend(weights)

    worker: Any = SimpleNamespace(
        actor=SimpleNamespace(), actor_module_fsdp=None, rollout=SimpleNamespace(update_weights=update_weights)
    )
    watch_sent(worker, "bfloat16")
    asyncio.run(worker.rollout.update_weights([("w", torch.tensor([1.0, 2.0]))], peft_config=None))
    assert len(sent) == 1
    assert weigh_own(worker, "bfloat16", {})["weights"] == {"w": [2, 32640, 532_692_992, 1]}


def test_synchronisations_that_stop_coming(world: World) -> None:
    for _ in range(3):  # a critic is trained alone
        world.sync()
    for _ in range(4):
        world.sync()
        world.delivery.on_update({}, None)
        world.delivery.on_update({}, None)
    for _ in range(6):
        world.delivery.on_update({}, None)
    with pytest.raises(LivenessError, match=r"9 updates were made since .* previous interval was 2 updates"):
        world.delivery.on_update({}, None)


@pytest.mark.slow
@pytest.mark.verl(">=0.7.1")
def test_workers_get_their_methods() -> None:
    class Worker:
        pass

    add_method(Worker)
    assert callable(Worker.weigh_offpolicy)  # type: ignore[attr-defined]
    pytest.importorskip("vllm")
    from verl.workers.rollout.vllm_rollout import utils, vllm_async_server

    extend_worker()
    extend_server()
    assert callable(getattr(utils.vLLMColocateWorkerExtension, METHOD))
    assert ask(vllm_async_server.vLLMHttpServer, METHOD) == ["answer"]
    assert ask(vllm_async_server.vLLMHttpServer, "other") is None
    for method, kept in (("update_weights_from_ipc", True), ("other", False)):
        server = SimpleNamespace(engine=None, replica_rank=3)
        with pytest.raises(AttributeError):
            asyncio.run(vllm_async_server.vLLMHttpServer.collective_rpc(server, method))
        assert getattr(server, FAILURE, "").startswith(f"rollout server 3 could not run {method}: ") == kept


def ask(server: Any, method: str) -> Any:
    async def collective_rpc(**kwargs: Any) -> list[str]:
        return ["answer"]

    made = SimpleNamespace(engine=SimpleNamespace(collective_rpc=collective_rpc))
    return asyncio.run(server.collective_rpc(made, method))
