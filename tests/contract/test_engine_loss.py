"""The seams of the engine path hold on the installed verl, and a seam that moves stops the run by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from verl_patches import engine_loss
from verl_patches.contract import PatchError, bare_signature, resolve


def test_every_seam_is_where_it_was() -> None:
    engine_loss.check()


@pytest.mark.parametrize("seam", [seam for seam in engine_loss.SEAMS if seam.signature], ids=lambda seam: seam.name)
def test_a_moved_seam_is_named(seam: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_loss, "SEAMS", (replace(seam, signature="(self, something_else)"),))
    with pytest.raises(PatchError) as caught:
        engine_loss.check()
    assert seam.target in str(caught.value)
    assert bare_signature(resolve(seam.target)) in str(caught.value)


def test_another_release_needs_consent(monkeypatch: pytest.MonkeyPatch) -> None:
    newer = tuple(replace(seam, releases="==0.9.2") for seam in engine_loss.SEAMS)
    monkeypatch.setattr(engine_loss, "SEAMS", newer)
    with pytest.raises(PatchError, match="OFFPOLICY_ALLOW_UNTESTED_VERL=1"):
        engine_loss.check()
    monkeypatch.setenv("OFFPOLICY_ALLOW_UNTESTED_VERL", "1")
    engine_loss.check()


def test_whatever_the_trainer_overrides_is_a_seam() -> None:
    """An override of a hook that verl no longer calls would leave the correction dead in silence."""
    from verl.trainer.ppo.v1 import PPOTrainer

    from recipe.offpolicy.trainer_v1 import OffPolicyTrainer

    names = {seam.name for seam in engine_loss.SEAMS}
    overridden = {name for name in vars(OffPolicyTrainer) if not name.startswith("__") and hasattr(PPOTrainer, name)}
    assert overridden == {"on_init_end", "_compute_old_log_prob", "_compute_advantage", "_update_actor"}
    assert overridden <= names


def test_the_covered_trainers_take_the_correction_under_verls_own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.trainer.ppo.v1 import get_trainer_cls, trainer_base

    from recipe.offpolicy.checks import TRAINER_MODES
    from recipe.offpolicy.trainer_v1 import OffPolicyTrainer, install_trainers

    monkeypatch.setattr(trainer_base, "TRAINER_REGISTRY", dict(trainer_base.TRAINER_REGISTRY))
    before = {mode: get_trainer_cls(mode) for mode in TRAINER_MODES}
    install_trainers()
    install_trainers()
    for mode, trainer in before.items():
        ours = get_trainer_cls(mode)
        assert issubclass(ours, OffPolicyTrainer)
        assert issubclass(ours, trainer)
        assert ours.__mro__[1:3] == (OffPolicyTrainer, trainer)


def test_verl_ships_the_correction_defaults_that_the_checks_know() -> None:
    import verl.trainer.config
    import yaml

    from recipe.offpolicy.checks import VERL_CORRECTION_DEFAULTS

    shipped = Path(verl.trainer.config.__file__).parent / "algorithm" / "rollout_correction.yaml"
    assert yaml.safe_load(shipped.read_text()) == VERL_CORRECTION_DEFAULTS


@pytest.mark.parametrize("ranks", [1, 2])
def test_verl_deals_rows_to_mini_batches_as_the_denominator_counts_them(ranks: int) -> None:
    """Contiguous shares by rank, cut in order: ``make_iterator`` is what a worker cuts its share with."""
    import torch
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu

    from recipe.offpolicy.correction.denominator import mini_batches

    rows, size = 12, 6
    expected = mini_batches(rows, ranks=ranks, rows_a_mini_batch=size)
    batch = TensorDict({"row": torch.arange(rows), "group": expected}, batch_size=rows)
    for share in batch.chunk(ranks):
        pieces = tu.make_iterator(
            share, mini_batch_size=size // ranks, epochs=1, seed=1, dataloader_kwargs={"shuffle": False}
        )
        seen = [piece["group"].unique().tolist() for piece in pieces]
        assert seen == [[number] for number in range(rows // size)]
