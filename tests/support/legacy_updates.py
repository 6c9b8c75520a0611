"""Updates of verl 0.7.1's legacy FSDP actor with a correction, and the corrections that its tests share."""

from __future__ import annotations

from typing import Any

from tests.support import legacy_actor as la

Settings = dict[str, Any]
EXACT = 1e-10
"""Of updates in float64, relative to the greatest move of a parameter."""
KL: Settings = dict(use_kl_loss=True, kl_loss_coef=0.3, kl_loss_type="low_var_kl")
MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
TWO_STEPS: Settings = dict(ppo_mini_batch_size=4, ppo_micro_batch_size_per_gpu=2)
DYNAMIC: Settings = dict(use_dynamic_bsz=True, ppo_max_token_len_per_gpu=17)


def corrected(mapping: Settings, batch: Any = None, *, prove: bool = False, **config: Any) -> la.Parameters:
    """Parameters after the actor's update with the correction."""
    return update(mapping, batch, prove=prove, **config)[0]


def update(
    mapping: Settings, batch: Any = None, *, prove: bool = True, sent: Settings | None = None, **config: Any
) -> tuple[la.Parameters, Settings]:
    batch = la.rollout() if batch is None else batch
    actor = la.actor(**config)
    mode, rows = actor.config.loss_agg_mode, actor.config.ppo_mini_batch_size
    data = la.handed(batch, mapping, prove=prove, mode=mode, mini_rows=rows, **(sent or {}))
    return la.moved(actor, data)


def verdict(mapping: Settings, batch: Any = None, **config: Any) -> Settings:
    """What the trainer makes of the first update."""
    from tensordict import TensorDict

    from recipe.offpolicy.correction import CorrectionSpec
    from recipe.offpolicy.proof.verify import verify
    from recipe.offpolicy.worker.metrics import take_packets
    from tests.support.sampled_rows import compute_sampled_checksums

    batch = la.rollout() if batch is None else batch
    sampled = compute_sampled_checksums(TensorDict(batch, batch_size=len(batch["responses"])))
    _, metrics = update(mapping, batch, **config)
    epochs = config.get("ppo_epochs", 1)
    return verify(take_packets(metrics), CorrectionSpec.from_mapping(mapping), sampled_rows=sampled, epochs=epochs)
