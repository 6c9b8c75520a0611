"""Every FSDP path of every release makes the same corrected update as a plain float64 reference.

parity.json fixes the reference's results for all releases, so paths of different releases agree with each other.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import training_worker as tw
from tests.support.parity_case import CORRECTIONS, MODES, ROWS, TEMPERATURE, Case, tiny_model
from tests.support.parity_paths import (
    Witness,
    actor_settings,
    batch_v0,
    batch_v1,
    build_case_plan,
    register_witness,
    update_by_engine,
)
from tests.support.parity_update import Update, assert_same, expected, fingerprint

pytestmark = pytest.mark.slow
RECORDED = json.loads(Path(__file__).with_name("parity.json").read_text())
BY_ROW = [(name, mode) for name in ("stacked", "excluded") for mode in MODES[1:]]
CASES = [(name, "token-mean") for name in CORRECTIONS] + BY_ROW
cases = pytest.mark.parametrize(("name", "mode"), CASES, ids=["-".join(case) for case in CASES])
ENGINES = [
    pytest.param(("fsdp2", True), id="fsdp2-packed"),
    pytest.param(("fsdp", True), id="fsdp-packed"),
    # verl 0.7.1's engine gets other log-probs than the model's there, and the checks refuse it.
    pytest.param(("fsdp2", False), id="fsdp2-padded", marks=pytest.mark.verl(">=0.8")),
]


@pytest.fixture(scope="module", autouse=True)
def own_process_group() -> Iterator[None]:
    """Restore the process group that the process had, because workers of other modules may use it."""
    found = torch.distributed.is_initialized()
    yield
    if not found and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def case(folder: Path) -> Case:
    return Case.of(folder)


@pytest.fixture(scope="module", params=ENGINES)
def worker(request: pytest.FixtureRequest, folder: Path) -> Any:
    strategy, packed = request.param
    if not torch.distributed.is_initialized():
        tw.join_process_group()
    return tw.start_worker(folder, strategy=strategy, use_remove_padding=packed)


@pytest.fixture(scope="module")
def demanded(case: Case) -> Callable[..., Update]:
    """Compute the reference's update for a correction, given by its name, the mode and the teacher's effect."""

    @functools.cache
    def compute(name: str, mode: str, distilled: str = "") -> Update:
        return expected(case.of_correction(name).with_teacher(distilled), CORRECTIONS[name], mode, range(ROWS))

    return compute


@pytest.fixture
def witness(case: Case, monkeypatch: pytest.MonkeyPatch) -> Witness:
    return register_witness(case, monkeypatch)


@cases
def test_the_reference_is_the_same_in_every_release(demanded: Callable[..., Update], name: str, mode: str) -> None:
    found = fingerprint(demanded(name, mode))
    # The model computes its norms in float32, which processors round differently.
    assert found == pytest.approx(RECORDED[f"{name}-{mode}"], rel=1e-4, abs=1e-6)


def test_the_cases_differ() -> None:
    """No two corrections make the same update, so a dropped correction would be detected."""
    losses = {key: numbers[0] for key, numbers in RECORDED.items()}
    assert len({round(loss, 5) for loss in losses.values()}) == len(CASES)


V1 = pytest.mark.verl(">=0.9")


def each_path() -> Iterator[Any]:
    """Every case on every path; by default those of V1 in micro-batches of two rows, and every fourth of V0."""
    for layout, split in product([batch_v0, batch_v1], ["dynamic", 2, 8]):
        marks = [V1] if layout is batch_v1 else []
        for index, case in enumerate(CASES):
            usual = split == 2 if layout is batch_v1 else split == "dynamic" and index % 4 == 0
            extended = [] if usual else [pytest.mark.extended]
            name = f"{layout.__name__}-{split}-{'-'.join(case)}"
            yield pytest.param(layout, split, *case, id=name, marks=[*marks, *extended])


@pytest.mark.parametrize(("layout", "split", "name", "mode"), [*each_path()])
def test_the_engine_makes_the_update_of_the_reference(
    worker: Any,
    case: Case,
    witness: Witness,
    demanded: Callable[..., Update],
    layout: Any,
    split: Any,
    name: str,
    mode: str,
) -> None:
    witness.case = case.of_correction(name)
    found = update_by_engine(worker, witness, layout, name, mode, split)
    assert len(witness.losses) == {2: 4, 8: 1}.get(split, len(witness.losses))
    assert split != "dynamic" or len(witness.losses) > 2
    assert_same(found, demanded(name, mode))


TAUGHT = [
    pytest.param("stacked", "token-mean", "loss", id="loss"),
    pytest.param("kept", "token-mean", "loss", id="loss, kept"),
    pytest.param("stacked", "seq-mean-token-mean", "loss", id="loss, by row"),
    pytest.param("stacked", "token-mean", "advantage", id="advantage"),
]
taught = pytest.mark.parametrize(("name", "mode", "distilled"), TAUGHT)


@pytest.mark.parametrize(
    ("layout", "split"),
    [
        pytest.param(batch_v0, "dynamic", id="v0", marks=pytest.mark.extended),
        pytest.param(batch_v1, 2, id="v1", marks=V1),
    ],
)
@taught
def test_the_engine_makes_the_distilled_update_of_the_reference(
    worker: Any,
    case: Case,
    demanded: Callable[..., Update],
    monkeypatch: pytest.MonkeyPatch,
    layout: Any,
    split: Any,
    name: str,
    mode: str,
    distilled: str,
) -> None:
    """The teacher's term with weights, masks and denominators, and the hashes of its inputs."""
    asked = case.with_teacher(distilled)
    found = update_by_engine(worker, register_witness(asked, monkeypatch), layout, name, mode, split)
    assert_same(found, demanded(name, mode, distilled))
    with pytest.raises(AssertionError):
        assert_same(found, demanded(name, mode))


ACTORS = [
    pytest.param("plain", False, id="padded"),
    pytest.param("plain", True, id="packed"),
    pytest.param("fsdp", False, id="fsdp"),
    pytest.param("fsdp2", True, id="fsdp2-packed"),
]


def legacy_actor(folder: Path, kind: str, packed: bool, **settings: Any) -> Any:
    """verl 0.7.1's own actor with the model in ``folder``, wrapped as its worker wraps it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from transformers import AutoModelForCausalLM

    from verl.workers.actor.dp_actor import DataParallelPPOActor
    from verl.workers.config import FSDPActorConfig, FSDPEngineConfig

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (1,))
        model = FullyShardedDataParallel(model, use_orig_params=True, device_mesh=mesh, device_id=torch.device("cpu"))
    elif kind == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    config = FSDPActorConfig(
        strategy="fsdp",
        ppo_mini_batch_size=ROWS,
        rollout_n=1,
        use_torch_compile=False,
        use_remove_padding=packed,
        fsdp_config=FSDPEngineConfig(dtype="float32"),
        **settings,
    )
    return DataParallelPPOActor(config, model, torch.optim.SGD(model.parameters(), lr=1.0))


@pytest.mark.verl("==0.7.1")
@pytest.mark.parametrize(("kind", "packed"), ACTORS)
@pytest.mark.parametrize("split", ["dynamic", *(pytest.param(rows, marks=pytest.mark.extended) for rows in (2, 8))])
@cases
def test_the_legacy_actor_makes_the_update_of_the_reference(
    folder: Path,
    case: Case,
    witness: Witness,
    demanded: Callable[..., Update],
    kind: str,
    packed: bool,
    split: Any,
    name: str,
    mode: str,
) -> None:
    """With one mini-batch and one epoch, verl's own actor would use the current log-probs as pi_old."""
    witness.case = case.of_correction(name)
    found = update_by_legacy_actor(folder, witness, kind, packed, split, name, mode)
    assert len(witness.losses) > 1 or split == 8
    assert_same(found, demanded(name, mode))


@pytest.mark.verl("==0.7.1")
@pytest.mark.parametrize(("kind", "packed"), ACTORS)
@taught
def test_the_legacy_actor_makes_the_distilled_update_of_the_reference(
    folder: Path,
    case: Case,
    demanded: Callable[..., Update],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    packed: bool,
    name: str,
    mode: str,
    distilled: str,
) -> None:
    witness = register_witness(case.with_teacher(distilled), monkeypatch)
    found = update_by_legacy_actor(folder, witness, kind, packed, 2, name, mode)
    assert_same(found, demanded(name, mode, distilled))


def update_by_legacy_actor(
    folder: Path, witness: Witness, kind: str, packed: bool, split: Any, name: str, mode: str
) -> Update:
    """Run verl 0.7.1's actor on the reference's batch, and return its update."""
    import verl_patches
    from recipe.offpolicy.correction import CorrectionSpec
    from recipe.offpolicy.worker.legacy_loss import Handover
    from recipe.offpolicy.worker.metrics import take_packets
    from verl import DataProto
    from verl_patches.legacy.handover import HANDOVER

    verl_patches.install("legacy")
    if not torch.distributed.is_initialized():
        tw.join_process_group()
        torch.distributed.init_process_group("gloo")
    sizes: dict[str, Any] = (
        dict(use_dynamic_bsz=True, ppo_max_token_len_per_gpu=24)
        if split == "dynamic"
        else dict(ppo_micro_batch_size_per_gpu=split)
    )
    actor = legacy_actor(folder, kind, packed, **actor_settings(mode), **sizes)
    spec = CorrectionSpec.from_mapping(CORRECTIONS[name])
    plan, columns = build_case_plan(witness.case, spec, mode, ROWS)
    handover = Handover(spec, plan, extensions=witness.case.extensions)
    meta = {"temperature": TEMPERATURE, "pad_token_id": 2, HANDOVER: handover}
    gradients: dict[str, torch.Tensor] = {}

    def hold() -> torch.Tensor:
        for parameter_name, parameter in actor.actor_module.named_parameters():
            if parameter.grad is not None:
                gradient = parameter.grad
                whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
                gradients[parameter_name.replace("_fsdp_wrapped_module.", "")] = whole.detach().clone()
        return torch.zeros(())

    actor._optimizer_step = hold
    metrics = actor.update_policy(DataProto.from_dict(columns, meta_info=meta))
    if witness.case.distilled:
        witness.case.check_taught(take_packets(metrics))
    return witness.update(gradients)
