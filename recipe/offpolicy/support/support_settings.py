"""The keys of support replay under ``correction``, and the settings with which support replay is incompatible."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import DictConfig, OmegaConf

from ..correction.correction_parts import SupportUnknown
from ..correction.problem import Requirement

_ACTOR, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
_ROLLOUT = "actor_rollout_ref.rollout"
_REFERENCE = "the reference is the same engine without its adapter."
_SPLIT = "sequence parallelism splits tokens over ranks, but not their likeliest tokens."
_SERVER = (
    "this feature uses its own servers or workers, which have not been tested with the return of likeliest tokens."
)
_FULL = "this feature reads log-probs over the whole vocabulary, but the worker computes them over the support."
_OF_BOTH = (
    Requirement(f"{_ROLLOUT}.name", ("vllm",), "only verl's vLLM servers return the likeliest tokens."),
    Requirement(f"{_ROLLOUT}.mtp.enable_rollout", (False,), "with this setting, a draft model proposes the tokens."),
    Requirement(
        f"{_ROLLOUT}.disaggregation.enabled", (False,), "with this setting, each request passes through two servers."
    ),
    Requirement(f"{_MODEL}.use_fused_kernels", (False,), "fused kernels hide the logits."),
    Requirement(f"{_MODEL}.mtp.enable", (False,), "the engine itself predicts further tokens."),
    Requirement(f"{_ACTOR}.ulysses_sequence_parallel_size", (1,), _SPLIT),
    Requirement(f"{_ACTOR}.fsdp_config.ulysses_sequence_parallel_size", (1,), _SPLIT),
    Requirement(f"{_ACTOR}.fsdp_config.router_replay.mode", ("disabled",), _SERVER),
    Requirement("offpolicy.late_weights.snapshots", (None,), _SERVER),
    Requirement("process_reward", (None,), _SERVER),
)
OF_CENTERING = (*_OF_BOTH, Requirement("opd", (None,), _SERVER))
"""Requirements on settings that hide the logits or the likeliest tokens; an enabled section has the value "on"."""
REQUIREMENTS = (
    *_OF_BOTH,
    Requirement(f"{_MODEL}.lora_rank", (0,), _REFERENCE),
    Requirement(f"{_MODEL}.lora.rank", (0,), _REFERENCE),
    Requirement(f"{_MODEL}.lora_adapter_path", (None,), _REFERENCE),
    Requirement("algorithm.use_kl_in_reward", (False,), _FULL, ((f"{_ACTOR}.use_kl_loss", True),)),
    Requirement("distillation.enabled", (False,), _FULL),
    Requirement("opd", (None,), _FULL),
)
"""Requirements on settings that hide the logits or the support, or that read log-probs over the whole vocabulary."""


SUPPORT = "correction.support"
CENTERING = "correction.centering"
SIZE = "correction.support_size"
ROLLOUT = "actor_rollout_ref.rollout"
DEFAULT_SIZE = 32
"""Number of ids requested per token if top-k does not bound the support."""
TIES = 4
"""Number of ids requested in addition to top-k, because top-k also keeps ids that tie with the last id."""


@dataclass(frozen=True)
class SupportSettings:
    """Settings of support replay.

    Attributes:
        size: K, number of ids requested per token in addition to the sampled id.
        unknown: treatment of a token whose support has more than K ids: ``mask`` removes the token from the policy
            term, ``full`` does not renormalise its log-prob.
        min_p: min-p of each request, for which verl has no key; None for no min-p.
        likeliest: True if the ids are requested together with their log-probs, for score centering.
    """

    size: int
    unknown: SupportUnknown
    min_p: float | None = None
    likeliest: bool = False

    @classmethod
    def from_config(cls, config: DictConfig) -> SupportSettings | None:
        """Read the settings from a configuration that passed the start-up checks; None if no support is replayed."""
        if OmegaConf.select(config, SUPPORT) is None:
            return None
        size = OmegaConf.select(config, SIZE)
        return cls(
            size=choose_size(OmegaConf.select(config, f"{ROLLOUT}.top_k")) if size is None else int(size),
            unknown=OmegaConf.select(config, "correction.support_unknown", default="mask"),
            min_p=OmegaConf.select(config, "correction.support_min_p"),
        )

    @classmethod
    def for_centering(cls, config: DictConfig) -> SupportSettings | None:
        """Read the settings of the requests for score centering; None if score centering is off."""
        size = OmegaConf.select(config, CENTERING)
        return None if size is None else cls(size=int(size), unknown="full", likeliest=True)


def choose_size(top_k: int | None) -> int:
    """Choose K from top-k; top-k is off at -1 or 0.

    Example:
        >>> choose_size(5), choose_size(-1)
        (9, 32)
    """
    return top_k + TIES if top_k is not None and top_k > 0 else DEFAULT_SIZE
