"""SkyRL's own losses and config classes."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from recipe.offpolicy.correction import CorrectionSpec
from tests.support.conformance import Loss, Options, Rows, compare, install, load, our_loss

pytestmark = pytest.mark.extended

UTILS = "skyrl.backends.skyrl_train.utils"
LOSS = "trainer.algorithm.policy_loss_type"
ALGORITHM, SECTION = "trainer.algorithm", "trainer.algorithm.off_policy_correction"
CORRECTION: dict[str, list[Any]] = {
    f"{SECTION}.tis_ratio_type": [None, "token", "sequence"],
    f"{SECTION}.token_tis_ratio_clip_high": [1.1, 2.0],
    f"{SECTION}.sequence_tis_ratio_clip_high": [1.2, 5.0],
    f"{SECTION}.sequence_mask_metric": [None, "geometric", "product"],
    f"{SECTION}.geo_mask_high": [1.05, 1.3],
    f"{SECTION}.geo_mask_low": [0.7, 0.95],
    f"{SECTION}.product_mask_high": [1.5, 4.0],
    f"{SECTION}.product_mask_low": [0.2, 0.8],
    f"{SECTION}.outlier_token_is_threshold_low": [None, 0.5],
    f"{SECTION}.outlier_token_is_threshold_high": [None, 2.0],
    f"{SECTION}.token_mask_is_threshold_low": [None, 0.8],
    f"{SECTION}.token_mask_is_threshold_high": [None, 1.3],
    f"{ALGORITHM}.use_tis": [False, True],
    f"{ALGORITHM}.tis_imp_ratio_cap": [1.2, 3.0],
    LOSS: ["regular", "dual_clip", "gspo", "sapo", "cispo"],
}
AROUND_MU: dict[str, list[Any]] = {
    LOSS: ["rollout_is", "dppo", "cispo"],
    f"{ALGORITHM}.eps_clip_low": [0.1, 0.5],
    f"{ALGORITHM}.eps_clip_high": [0.2, 1.0],
    f"{ALGORITHM}.cispo.cispo_anchor": ["rollout"],
    f"{ALGORITHM}.cispo.cispo_eps_clip_low": [0.1, 1.0],
    f"{ALGORITHM}.cispo.cispo_eps_clip_high": [0.2, 4.0],
    f"{ALGORITHM}.dppo.dppo_type": ["binary_tv", "binary_kl"],
    f"{ALGORITHM}.dppo.delta_low": [0.01, 0.2],
    f"{ALGORITHM}.dppo.delta_high": [0.01, 0.2],
}


@pytest.fixture(scope="module")
def skyrl() -> Any:
    folder = install("skyrl")
    config = load(folder, "skyrl.train.config", "skyrl")
    losses = load(folder, f"{UTILS}.ppo_utils", "skyrl.backends", "skyrl.backends.skyrl_train", UTILS)
    return SimpleNamespace(config=config, losses=losses)


def configure(skyrl: Any, options: Options) -> Any:
    """Set the options on SkyRL's own config object; SkyRL's trainer translates ``use_tis``, and so does this
    function.
    """
    whole = skyrl.config.SkyRLTrainConfig()
    for path, value in options.items():
        *above, name = path.split(".")
        node = functools.reduce(getattr, above, whole)
        assert hasattr(node, name), path
        setattr(node, name, value)
    algorithm = whole.trainer.algorithm
    if algorithm.use_tis:
        algorithm.off_policy_correction.tis_ratio_type = "token"
        algorithm.off_policy_correction.token_tis_ratio_clip_high = algorithm.tis_imp_ratio_cap
    return algorithm


def by_sequence(options: Options) -> bool:
    return options.get(LOSS, "regular") in ("gspo", "sapo")


def theirs(skyrl: Any, options: Options, rows: Rows) -> Loss:
    algorithm = configure(skyrl, options)
    mask = rows.mask.double()
    tokens = len(mask) * mask.sum(-1, keepdim=True) if by_sequence(options) else mask.sum()

    def compute(pi: Tensor) -> Tensor:
        policy_loss = skyrl.losses.PolicyLossRegistry.get(algorithm.policy_loss_type)
        # SkyRL divides the advantages before the loss, which is a sum.
        loss, _ = policy_loss(pi, rows.old, rows.advantages / tokens, algorithm, mask, rows.mu)
        return loss

    return compute


def ours(spec: CorrectionSpec, options: Options, rows: Rows) -> Loss:
    loss = options.get(LOSS, "regular")
    changes: dict[str, Any] = dict(clip_ratio_low=0.2, clip_ratio_high=0.2)
    if loss == "cispo" and spec.proximal != "bypass":
        changes = dict(clip_ratio_low=1.0, clip_ratio_high=4.0)
    if loss == "dual_clip":
        changes |= {"clip_ratio_c": 3.0}
    mode = "gpg" if spec.proximal == "bypass" else {"regular": "vanilla", "dual_clip": "vanilla"}.get(loss, loss)
    aggregation = "seq-mean-token-mean" if by_sequence(options) else "token-mean"
    return our_loss(spec, rows, mode=mode, aggregation=aggregation, **changes)


def test_losses_under_the_correction(skyrl: Any) -> None:
    compare("skyrl", CORRECTION, functools.partial(theirs, skyrl), ours, draws=600)


def test_losses_around_mu(skyrl: Any) -> None:
    """DPPO's own loss is -r A; the translated loss is -sg(r) A log pi, which has the same gradient."""
    around = {f"{ALGORITHM}.cispo.cispo_anchor": "rollout", LOSS: "rollout_is"}
    compare(
        "skyrl",
        AROUND_MU,
        functools.partial(theirs, skyrl),
        ours,
        always=around,
        gradient_alone=lambda options: options[LOSS] == "dppo",
    )
