"""Converter of SkyRL's ``trainer.algorithm``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ..problem import SpecError
from .mapping import (
    build_dppo_masks,
    build_mask,
    build_weight,
    read_choice,
    read_flag,
    read_ratio_bound,
    read_width,
    refuse,
)
from .peer import SCORE_CENTERING, Options, Peer, words

SKYRL_DEFAULTS: Final[dict[str, Any]] = {
    "tis_ratio_type": None,
    "token_tis_ratio_clip_high": 2.0,
    "sequence_tis_ratio_clip_high": 5.0,
    "sequence_mask_metric": None,
    "geo_mask_high": 1.01,
    "geo_mask_low": 0.99,
    "product_mask_high": 2.0,
    "product_mask_low": 0.5,
    "outlier_token_is_threshold_low": None,
    "outlier_token_is_threshold_high": None,
    "token_mask_is_threshold_low": None,
    "token_mask_is_threshold_high": None,
}
_ALGORITHM: Final = "trainer.algorithm"
_SECTION: Final = f"{_ALGORITHM}.off_policy_correction"
_LOSS: Final = f"{_ALGORITHM}.policy_loss_type"
_UNCORRECTED: Final = ("clip_cov", "kl_cov", "importance_sampling", "cross_entropy")
_CORRECTED: Final = ("regular", "dual_clip", "gspo", "cispo", "sapo", "rollout_is", "dppo")


def _convert(options: Options) -> dict[str, Any]:
    plain = _convert_correction(options)
    corrects = plain["weight"] is not None or bool(plain["masks"])
    replay = read_flag(
        options[f"{_ALGORITHM}.enable_sample_support_replay"], f"{_ALGORITHM}.enable_sample_support_replay"
    )
    support = {"support": "engine"} if replay else {}
    loss = read_choice(options[_LOSS], (*_CORRECTED, *_UNCORRECTED), _LOSS, optional=False)
    if corrects and loss in _UNCORRECTED:
        raise refuse(f"SkyRL does not correct under it, and {_SECTION} is set.", _LOSS, loss)
    anchor = f"{_ALGORITHM}.cispo.cispo_anchor"
    rollout = read_choice(options[anchor], ("old", "rollout"), anchor, optional=False) == "rollout"
    if loss not in ("rollout_is", "dppo") and not (loss == "cispo" and rollout):
        return plain | support
    if corrects:
        reason = f"its ratio is pi / mu, which corrects already, and {_SECTION} would also correct pi_old / mu."
        raise refuse(reason, _LOSS, loss)
    return {"rollout_is": _reject, "cispo": _clip, "dppo": _mask_divergence}[str(loss)](options) | support


def _reject(options: Options) -> dict[str, Any]:
    """Convert the loss -sg(r 1[1 - low <= r <= 1 + high]) A log pi, r = pi / mu."""
    low, high = _read_widths(options, f"{_ALGORITHM}.eps_clip")
    return {"proximal": "bypass", "weight": build_weight("token", max(1 - low, 0), 1 + high, reject=True, ratio="full")}


def _clip(options: Options) -> dict[str, Any]:
    """Convert CISPO with mu as the anchor: -sg(clamp(r, 1 - low, 1 + high)) A log pi, r = pi / mu."""
    low, high = _read_widths(options, f"{_ALGORITHM}.cispo.cispo_eps_clip")
    return {"proximal": "bypass", "weight": build_weight("token", max(1 - low, 0), 1 + high, ratio="full")}


def _mask_divergence(options: Options) -> dict[str, Any]:
    """Convert DPPO: -r A, r = pi / mu, for tokens whose update does not move p_pi more than delta away from p_mu."""
    key = f"{_ALGORITHM}.dppo.dppo_type"
    kind = read_choice(options[key], ("binary_tv", "binary_kl"), key, optional=False)
    low, high = _read_widths(options, f"{_ALGORITHM}.dppo.delta")
    if kind == "binary_kl":
        if low != high:
            at = f"{_ALGORITHM}.dppo.delta_low"
            reason = f"a mask with when=outward has one bound for both signs, but delta_high={high:g}."
            raise refuse(reason, at, low, f"Set {at}={high:g}.")
        mask = build_mask("token", "binary_kl_forward", None, high, "full") | {"when": "outward", "sign": "token"}
        masks = {"dppo_kl": mask}
    else:
        masks = build_dppo_masks(low, high)
    return {"proximal": "bypass", "weight": build_weight("token", None, None, ratio="full"), "masks": masks}


def _read_widths(options: Options, stem: str) -> list[float]:
    return [read_width(options[key], key) for key in (f"{stem}_low", f"{stem}_high")]


def _convert_correction(options: Options) -> dict[str, Any]:
    values = {key: options[f"{_SECTION}.{key}"] for key in SKYRL_DEFAULTS}
    # This is how SkyRL itself translates its older keys.
    old, cap_of_old = f"{_ALGORITHM}.use_tis", f"{_ALGORITHM}.tis_imp_ratio_cap"
    if read_flag(options[old], old):
        if options[cap_of_old] in (None, -1, -1.0):
            raise refuse(
                "a truncated weight needs a cap.", cap_of_old, options[cap_of_old], "Set it to 2.0 for example."
            )
        values["tis_ratio_type"] = "token"
        values["token_tis_ratio_clip_high"] = read_ratio_bound(options[cap_of_old], cap_of_old)
    bounds = {
        key: read_ratio_bound(values[key], f"{_SECTION}.{key}") for key in values if key.endswith(("_high", "_low"))
    }
    weight: dict[str, Any] | None = None
    level = read_choice(values["tis_ratio_type"], ("token", "sequence"), f"{_SECTION}.tis_ratio_type")
    if level is not None:
        cap = f"{level}_tis_ratio_clip_high"
        if bounds[cap] is None:
            raise SpecError(
                "a truncated weight needs a cap.",
                "Set it to 2.0 for example.",
                key=f"{_SECTION}.{cap}",
                alongside={f"{_SECTION}.tis_ratio_type": level},
            )
        weight = {"level": level, "kind": "truncate", "lower": None, "upper": bounds[cap]}
    masks: dict[str, Any] = {}
    if _any_set(bounds, "outlier_token_is_threshold"):
        masks["outlier"] = build_mask(
            "sequence", "any", *_read_band(bounds, "outlier_token_is_threshold", half_open=True)
        )
    if _any_set(bounds, "token_mask_is_threshold"):
        masks["token"] = build_mask("token", "product", *_read_band(bounds, "token_mask_is_threshold"))
    metric = read_choice(values["sequence_mask_metric"], ("geometric", "product"), f"{_SECTION}.sequence_mask_metric")
    if metric is not None:
        stem = "geo_mask" if metric == "geometric" else "product_mask"
        masks[metric] = build_mask("sequence", metric, *_read_band(bounds, stem))
    by_sequence = metric is not None or level == "sequence"
    return {"weight": weight, "masks": masks, "skyrl_compat": "token" in masks and by_sequence}


def _read_band(
    bounds: Mapping[str, float | None], stem: str, *, half_open: bool = False
) -> tuple[float | None, float | None]:
    low, high = f"{stem}_low", f"{stem}_high"
    lower, upper = bounds[low], bounds[high]
    for key, other in () if half_open else ((low, high), (high, low)):
        if bounds[key] is None:
            raise SpecError(
                "SkyRL needs both bounds of this mask.",
                f"Set {_SECTION}.{key}.",
                key=f"{_SECTION}.{key}",
                alongside={f"{_SECTION}.{other}": bounds[other]},
            )
    if lower is not None and upper is not None and lower > upper:
        alongside = {f"{_SECTION}.{high}": upper}
        raise SpecError(
            "nothing lies between.", "Swap them.", key=f"{_SECTION}.{low}", value=lower, alongside=alongside
        )
    return lower, upper


def _any_set(bounds: Mapping[str, float | None], stem: str) -> bool:
    return bounds[f"{stem}_low"] is not None or bounds[f"{stem}_high"] is not None


SKYRL: Final = Peer(
    name="SkyRL",
    releases="0.1.0 to 0.4.0",
    sections=(_SECTION, _ALGORITHM),
    read={f"{_SECTION}.{key}": value for key, value in SKYRL_DEFAULTS.items()}
    | {
        f"{_ALGORITHM}.{key}": value
        for key, value in {
            "use_tis": False,
            "tis_imp_ratio_cap": -1.0,
            "enable_sample_support_replay": False,
            "policy_loss_type": "regular",
            "eps_clip_low": 0.2,
            "eps_clip_high": 0.2,
            "cispo.cispo_anchor": "old",
            "cispo.cispo_eps_clip_low": 1.0,
            "cispo.cispo_eps_clip_high": 4.0,
            "dppo.dppo_type": "binary_tv",
            "dppo.delta_low": 0.2,
            "dppo.delta_high": 0.2,
        }.items()
    },
    convert=_convert,
    unsaid={f"{_ALGORITHM}.score_centering": SCORE_CENTERING},
    plain=words(
        "advantage_batch_normalize advantage_estimator clip_cov clip_ratio_c dynamic_sampling entropy_loss_coef"
        " gamma grpo_norm_by_std kl_cov kl_ctrl kl_estimator_type kl_loss_coef lambd loss_reduction max_seq_len sapo"
        " temperature use_entropy_loss use_kl_in_reward use_kl_loss value_clip value_head_prefix zero_variance_filter"
        " zero_variance_filter_tol",
        _ALGORITHM,
    ),
    elsewhere=words(
        "enable_return_sample_support_set fused_lm_head_logprob fused_lm_head_logprob_backend logprobs"
        " logprobs_chunk_size moe_enable_routing_replay recompute_old_logprobs_per_minibatch"
    ),
    switches=frozenset({f"{_SECTION}.tis_ratio_type", f"{_SECTION}.sequence_mask_metric", f"{_ALGORITHM}.use_tis"}),
    context=frozenset({_LOSS})
    | words("eps_clip_low eps_clip_high cispo.cispo_eps_clip_low cispo.cispo_eps_clip_high", _ALGORITHM),
)
"""SkyRL's rules.

SkyRL applies a token mask before anything that decides by sequence; if both are configured, ``skyrl_compat`` reproduces
that order. Its outlier mask drops whole rows, so it makes no difference that it acts first. Its losses anchored at mu
(``rollout_is``, ``dppo`` by total variation, and ``cispo`` with ``cispo_anchor=rollout``) become weights on pi / mu for
``actor.policy_loss.loss_mode=gpg``; its other losses keep pi_old and are set by verl's own keys.
"""
