"""Checks of verl's base loss, by a probe on a small batch.

A correction multiplies the policy term of each token, so with f = weight x keep, the loss must satisfy dL/dlog_prob = f
x dL_uncorrected/dlog_prob, and neither loss nor gradient may depend on how a mini-batch is split into micro-batches.
Both conditions are tested on a small synthetic batch before Ray starts.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import re
from collections.abc import Iterator
from typing import Any

import torch
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict
from torch import Tensor

from ...batch.padding import with_tensors
from ...correction.problem import EVERYTHING, Problem, find_closest, remove, set_to
from ..composed import ACTOR, BYPASS, LOSS_MODE, Composed, name_part
from .run_keys import CHOICES

_DEMANDED = "ppo_micro_batch_size_per_gpu"
_AGGREGATION, _SCALE = f"{ACTOR}.loss_agg_mode", f"{ACTOR}.loss_scale_factor"
_SECTION = re.compile(r"full_key: ([\w.]+)")
"""Matches the section that verl failed to instantiate, at the end of Hydra's message."""
_TOLERANCE = 1e-6  # relative, in float64
_LENGTHS = (7, 3, 5, 1, 6, 4)  # rows of different lengths, because a split must not change the result


def check_base_loss(run: Composed) -> Iterator[Problem]:
    """Check that the base loss applies this package's weights."""
    if not run.spec.is_none:
        yield from _check(run, EVERYTHING)


def check_base_loss_of_verl(run: Composed) -> Iterator[Problem]:
    """Check that the base loss applies the weights of verl's own correction."""
    if run.spec.is_none and "rollout_is" in run.active and BYPASS not in run.active:
        # verl's own correction need not be independent of how a mini-batch is split.
        yield from _check(run, (name_part("rollout_is"),), split=False)


def _check(run: Composed, parts: tuple[str, ...], *, split: bool = True) -> Iterator[Problem]:
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
    from verl.utils.config import omega_conf_to_dataclass

    actor = run.actor
    try:
        actor_config: Any = omega_conf_to_dataclass(actor)
    except Exception as error:
        cause = error.__cause__ or error
        section = _SECTION.search(str(error))
        unknown = _find_unknown_keys(run, section[1], parts) if section else None
        yield unknown or _build_refusal(run, str(cause) or type(cause).__name__, parts)
        return
    if run.registrar and actor.policy_loss.loss_mode not in POLICY_LOSS_REGISTRY:
        reason = (
            f"verl has no such loss; {run.registrar} may register it, but this cannot be checked before the "
            f"first update."
        )
        yield run.problem(LOSS_MODE, reason, "", (), parts, "NOTE")
        return
    try:
        wrong = probe(actor_config, split=split)
    except Exception as error:
        wrong = f"the loss fails on a small batch: {error}"
    if not wrong:
        return
    fix = (
        f"No override corrects {actor.policy_loss.loss_mode}; switching to vanilla, gspo or cispo would change the "
        f"objective."
    )
    sets: dict[str, Any] = {}
    misspelt = actor.policy_loss.loss_mode not in POLICY_LOSS_REGISTRY
    if misspelt and (near := find_closest(str(actor.policy_loss.loss_mode), POLICY_LOSS_REGISTRY)):
        fix, sets = f"Did you mean {near}?", {LOSS_MODE: near}
    if actor.loss_agg_mode == "seq-mean-token-sum-norm" and actor.loss_scale_factor is None:
        fix = f"Set {_SCALE} to a constant, such as data.max_response_length."
        sets = {_SCALE: run.config.data.max_response_length}
    yield run.problem(LOSS_MODE, f"{wrong}.", fix, sets, parts, alongside=(_AGGREGATION,))


def _find_unknown_keys(run: Composed, section: str, parts: tuple[str, ...]) -> Problem | None:
    """Find all keys of a section that its verl dataclass does not have; None if there are none.

    If another section of the actor has a key of this name, the fix moves the key there, so that its value is not lost.
    """
    node = run.get(section)
    target: Any = node.get("_target_") if isinstance(node, DictConfig) else None
    known = {field.name for field in dataclasses.fields(get_class(target))} if target else set()
    extra = [str(name) for name in node if name not in known and name != "_target_"] if target else []
    if not extra:
        return None
    overrides: list[str] = []
    sentences: list[str] = []
    for name in extra:
        key, value = f"{section}.{name}", node[name]
        if instead := next((place for place in _find_keys(run, name) if place != key), None):
            overrides += [*remove(key, value), set_to(instead, value)]
            sentences.append(f"Set {instead} instead of {key}.")
        elif name == "grad_offload":  # a key of verl up to 0.9.0
            overrides += remove(key, value)
            sentences.append("Delete it: param_offload frees the gradients' memory too.")
        else:
            sentences.append(f"{key} would have no effect.")
    reason = f"verl has no such key there: {target.rpartition('.')[2]} does not accept {', '.join(extra)}."
    return run.problem(f"{section}.{extra[0]}", reason, " ".join(sentences), overrides, parts)


def _build_refusal(run: Composed, said: str, parts: tuple[str, ...]) -> Problem:
    """Report an actor section that verl's dataclasses reject, under the key that verl's message names, if any."""
    reason = f"verl rejects it: {' '.join(said.split()).rstrip('.?')}."
    named = [key for key, choice in CHOICES.items() if key.startswith(ACTOR) and choice.rejects(run.get(key, ...))]
    named += [key for word in re.findall(r"\w+_\w+", said) for key in itertools.islice(_find_keys(run, word), 1)]
    name = next((key for key in named if key.endswith(_DEMANDED)), named[0] if named else "")
    if not name:
        fix = f"Change the key of {ACTOR} that verl's message names."
        return run.problem("", f"{ACTOR}: {reason}", fix, (), parts, value=None)
    if name.endswith(_DEMANDED):
        whole = f"{ACTOR}.ppo_micro_batch_size"
        return run.problem(name, reason, "", {whole: None} if run.get(whole) is not None else {name: 1}, parts)
    if name in CHOICES:
        names = CHOICES[name].list_names()
        near = find_closest(str(run.get(name)), names)
        return run.problem(name, reason, f"Set one of {', '.join(names)}.", {name: near} if near else (), parts)
    return run.problem(name, reason, f"Set {name} to a value that verl accepts.", (), parts)


def _find_keys(run: Composed, name: str) -> Iterator[str]:
    """List the keys with this name in the actor and its sections."""
    return (f"{path}.{name}" for path, node in _list_sections(run.actor, ACTOR) if name in node)


def _list_sections(node: DictConfig, path: str) -> Iterator[tuple[str, DictConfig]]:
    """List a section and all sections below it, with their paths."""
    yield path, node
    for name in map(str, node):
        if isinstance(below := OmegaConf.select(node, name), DictConfig):
            yield from _list_sections(below, f"{path}.{name}")


def probe(actor_config: Any, *, split: bool = True) -> str | None:
    """Test the policy loss of ``actor_config`` (verl's ActorConfig) on a small synthetic batch.

    Args:
        split: whether to also test that the loss does not depend on the split into micro-batches.

    Returns:
        None if the loss applies weights as intended; otherwise a sentence that describes what it does instead.
    """
    actor_config = copy.deepcopy(actor_config)
    batch, factor = _build_batch(torch.Generator().manual_seed(0))
    ones = torch.ones_like(factor)
    # devices=[]: by default, fork_rng saves the state of every GPU, which would initialise CUDA in the launcher.
    with torch.random.fork_rng(devices=[]):
        plain_loss, plain = _run(actor_config, batch, ones)
        _, weighted = _run(actor_config, batch, factor)
        # The contribution of terms that weights must not change, such as KL.
        _, rest = _run(actor_config, batch, torch.zeros_like(factor))
        if _is_close(plain, rest):
            return "the loss ignores the weights that it is given"
        if not _is_close(weighted - rest, factor * (plain - rest)):
            return "its gradient under weights w is not w times its gradient without weights"
        if split:
            split_loss, gradient = _run(actor_config, batch, ones, pieces=(2, 3, 1))
            if not (_is_close(gradient, plain) and _is_close(split_loss, plain_loss)):
                return "its loss or gradient changes with the split into micro-batches"
    return None


def _build_batch(generator: torch.Generator) -> tuple[TensorDict, Tensor]:
    rows, width = len(_LENGTHS), max(_LENGTHS)
    mask = torch.arange(width)[None, :] < torch.tensor(_LENGTHS)[:, None]
    prompt = torch.ones(rows, 1, dtype=torch.int64)

    def normal() -> Tensor:
        return torch.randn(rows, width, generator=generator, dtype=torch.float64)

    log_prob = -normal().abs() - 0.5  # a log-prob is negative
    batch = TensorDict(
        {
            "prompts": prompt,
            "responses": torch.ones(rows, width, dtype=torch.int64),
            "attention_mask": torch.cat([prompt, mask.long()], dim=-1),
            "response_mask": mask.long(),
            "log_prob": log_prob,
            # Some ratios pi / pi_old lie inside PPO's clip range and some outside it.
            "old_log_probs": log_prob + 0.2 * normal(),
            # Some losses select tokens by their covariance with the advantage; these values are large enough for that.
            "advantages": 3.0 * normal()[:, :1].expand(rows, width).contiguous(),
            "ref_log_prob": log_prob + 0.1 * normal(),
        },
        batch_size=rows,
    )
    factor = 2.0 * torch.rand(rows, width, generator=generator, dtype=torch.float64)
    factor[1] = 0.0  # a masked row
    return batch, factor * mask


def _run(
    actor_config: Any, batch: TensorDict, factor: Tensor, pieces: tuple[int, ...] = (len(_LENGTHS),)
) -> tuple[Tensor, Tensor]:
    """Return the loss summed over the micro-batches, and the (B, T) gradient of its policy term w.r.t. log_prob."""
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.losses import ppo_loss

    from ...batch.micro_batch import WEIGHTS

    log_prob = batch["log_prob"].clone().requires_grad_()
    loss = torch.zeros((), dtype=torch.float64)
    start = 0
    for size in pieces:
        torch.manual_seed(0)  # some losses select tokens at random
        rows = slice(start, start + size)
        piece = with_tensors(batch[rows], **{WEIGHTS: factor[rows]})
        tu.assign_non_tensor(
            piece, dp_size=1, batch_num_tokens=int(batch["response_mask"].sum()), global_batch_size=len(_LENGTHS)
        )
        mask = piece["response_mask"].bool()
        # verl's layout: log-probs flat over prompt and response, shifted left by one token.
        shifted = [torch.cat([r[m], r.new_zeros(1)]) for r, m in zip(log_prob[rows], mask, strict=True)]
        # Each piece is padded to its longest row, as in a run.
        loss = loss + ppo_loss(actor_config, {"log_probs": torch.cat(shifted)}, _trim(piece))[0]
        start += size
    return loss.detach(), torch.autograd.grad(loss, log_prob)[0]


def _trim(piece: TensorDict) -> TensorDict:
    width = int(piece["response_mask"].sum(-1).max())
    trimmed = piece.copy()
    for key, value in piece.items():
        if isinstance(value, Tensor) and key not in {"prompts", "attention_mask"}:
            trimmed[key] = value[:, :width]
    trimmed["attention_mask"] = piece["attention_mask"][:, : width + 1]
    return trimmed


def _is_close(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() <= _TOLERANCE * b.abs().max())
