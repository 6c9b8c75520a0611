"""AReaL's own PPO loss, its interpolation of pi_old, and its config classes, compared with ours."""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from recipe.offpolicy.correction import CorrectionSpec
from tests.support.conformance import (
    Loss,
    Options,
    Rows,
    choose_old,
    compare,
    draw_rows,
    excerpt,
    importable,
    install,
    measure,
    our_loss,
)

pytestmark = pytest.mark.extended

SECTION = "actor.rejection_sampling"
GRID: dict[str, list[Any]] = {
    "actor.use_decoupled_loss": [False, True],
    "actor.recompute_logprob": [False, True],
    "actor.importance_sampling_level": ["token", "sequence"],
    f"{SECTION}.level": ["token", "sequence"],
    f"{SECTION}.action": ["mask", "clamp"],
    f"{SECTION}.metric": ["ratio", "kl_k1", "kl_k2"],
    f"{SECTION}.agg": ["sum", "mean", "max"],
    f"{SECTION}.upper": [0.02, 0.5, 1.2, 5.0],
    f"{SECTION}.lower": [None, 0.001, 0.8],
}
BARE = ("areal", "areal.utils", "areal.api", "areal.engine", "areal.engine.fsdp_utils", "areal.utils.functional")


@pytest.fixture(scope="module")
def areal() -> Any:
    folder = install("areal")
    with importable(folder, *BARE, "areal.infra"):
        from areal.api import cli_args
        from areal.utils import constants
        from areal.utils.functional import functional
    # The file imports the trainer's controllers; the function needs torch and two names.
    names = {name: value for name, value in vars(constants).items() if name.startswith("PROX_")}
    found = excerpt(folder / "areal/trainer/ppo/actor.py", "compute_prox_logp_approximations", **names)
    return SimpleNamespace(
        config=cli_args, loss=functional.ppo_actor_loss_fn, interpolate=found["compute_prox_logp_approximations"]
    )


def theirs(areal: Any, options: Options, rows: Rows) -> Loss:
    """Call the loss as AReaL's trainer does: pi_old is mu unless it is computed, and rejection needs the decoupled
    loss.
    """
    rejection = {path.rpartition(".")[2]: value for path, value in options.items() if path.startswith(SECTION)}
    decoupled = options.get("actor.use_decoupled_loss", False)
    config = areal.config.RejectionSamplingConfig(**rejection) if rejection and decoupled else None
    recomputed = decoupled or options.get("actor.recompute_logprob", False)

    def compute(pi: Tensor) -> Tensor:
        loss, _ = areal.loss(
            logprobs=pi,
            proximal_logprobs=rows.old if recomputed else rows.mu,
            old_logprobs=rows.mu,
            advantages=rows.advantages,
            eps_clip=0.2,
            loss_mask=rows.mask,
            rejection_sampling=config,
            importance_sampling_level=options.get("actor.importance_sampling_level", "token"),
        )
        return loss

    return compute


def ours(spec: CorrectionSpec, options: Options, rows: Rows) -> Loss:
    by_row = options.get("actor.importance_sampling_level") == "sequence"
    return our_loss(spec, rows, mode="gspo" if by_row else "vanilla")


def test_loss_with_rejection_sampling(areal: Any) -> None:
    compare("areal", GRID, functools.partial(theirs, areal), ours, draws=1200)


def test_interpolated_pi_old(areal: Any) -> None:
    """Tokens were sampled by versions 0 to 3, and the current version is 4, so their ages are 4 to 1."""
    decoupled = {"actor.use_decoupled_loss": True, "actor.prox_logp_method": "loglinear"}
    spec = CorrectionSpec.from_peer("areal", decoupled)
    rows = draw_rows(1)
    versions = torch.arange(rows.mu.numel()).view(rows.mu.shape) % 4
    expected = areal.interpolate(rows.mu, rows.pi, versions, 4, "loglinear")["loglinear"]
    old = choose_old(spec, rows, ages=4 - versions)
    torch.testing.assert_close(old, expected, rtol=1e-6, atol=1e-6)
    found = measure(our_loss(spec, rows, old=old), rows)
    for left, right in zip(
        measure(theirs(areal, decoupled, dataclasses.replace(rows, old=expected)), rows), found, strict=True
    ):
        torch.testing.assert_close(right, left, rtol=1e-6, atol=1e-6)
