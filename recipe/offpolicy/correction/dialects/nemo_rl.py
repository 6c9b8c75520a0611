"""Converter of the keys in NeMo-RL's ``loss_fn`` section that concern the generation engine."""

from __future__ import annotations

from typing import Any, Final

from ..validation import read_number
from .mapping import build_mask, build_weight, read_choice, read_flag, read_ratio_bound, refuse
from .peer import SCORE_CENTERING, Options, Peer, words

_LOSS: Final[dict[str, Any]] = {
    "use_importance_sampling_correction": False,
    "sequence_level_importance_ratios": False,
    "truncated_importance_sampling_type": None,
    "truncated_importance_sampling_ratio": None,
    "truncated_importance_sampling_ratio_min": None,
    "force_on_policy_ratio": False,
    "use_on_policy_kl_approximation": False,
    "reference_policy_kl_penalty": 0.01,
    "use_kl_in_reward": False,
}
_CORRECTS: Final = "loss_fn.use_importance_sampling_correction"
_TYPE: Final = "loss_fn.truncated_importance_sampling_type"
_RATIO: Final = "loss_fn.truncated_importance_sampling_ratio"
_PENALTY: Final = "loss_fn.reference_policy_kl_penalty"
_THRESHOLD: Final = "grpo.seq_logprob_error_threshold"


def _convert(options: Options) -> dict[str, Any]:
    flags = {key: read_flag(options[f"loss_fn.{key}"], f"loss_fn.{key}") for key in _LOSS if _LOSS[key] is False}
    kind = read_choice(options[_TYPE], ("tis", "icepop", "seq-mask-tis"), _TYPE)
    by_row = flags["sequence_level_importance_ratios"]
    plain: dict[str, Any] = {"proximal": "reuse" if flags["force_on_policy_ratio"] else "recompute"}
    corrects = flags["use_importance_sampling_correction"]
    if not corrects:
        for key in (_TYPE, _RATIO, f"{_RATIO}_min"):
            if options[key] is not None:
                raise refuse("NeMo-RL reads it only if it corrects.", key, options[key], f"Set {_CORRECTS}=true.")
    if corrects:
        lower = read_ratio_bound(options[f"{_RATIO}_min"], f"{_RATIO}_min", zero_opens=True)
        upper = read_ratio_bound(options[_RATIO], _RATIO)
        if kind is None and upper is not None:
            if lower is not None:
                raise refuse("a lower bound needs a type.", f"{_RATIO}_min", lower, f"Set {_TYPE}.")
            # Up to 0.5.0, which had no types, this was the only rule.
            kind = "tis"
        if kind is not None and upper is None:
            raise refuse("a type needs a ratio.", _RATIO, None, "Set it to 2.0 for example.")
        if kind in ("icepop", "seq-mask-tis") and options[f"{_RATIO}_min"] is None:
            raise refuse("this type needs two bounds.", f"{_RATIO}_min", None, "Set it to 0.5 for example.")
        level = "sequence" if by_row else "token"
        if kind == "seq-mask-tis":
            if by_row:
                key = "loss_fn.sequence_level_importance_ratios"
                raise refuse("seq-mask-tis weights tokens.", key, True, "Set it to false.")
            plain |= {"weight": build_weight("token", None, None)}
            plain["masks"] = {"geometric": build_mask("sequence", "geometric", lower, upper)}
        elif kind is None:
            if f"{_RATIO}_min" in options.given and lower is not None:
                raise refuse("a lower bound needs a type.", f"{_RATIO}_min", lower, f"Set {_TYPE}.")
            plain["weight"] = build_weight(level, None, None)
        else:
            plain["weight"] = build_weight(level, lower, upper, reject=kind == "icepop")
    penalty = read_number(options[_PENALTY], _PENALTY)
    in_loss = not flags["use_kl_in_reward"] and bool(penalty)
    if flags["use_on_policy_kl_approximation"] and in_loss:
        plain["kl_weight"] = {"ratio": "full", "upper": None}
    error = read_number(options[_THRESHOLD], _THRESHOLD)
    if error is not None:
        if kind in ("icepop", "seq-mask-tis"):
            reason = (
                f"rows that it drops are no longer counted, but what {kind} drops still is, and no denominator "
                "here does both."
            )
            raise refuse(reason, _THRESHOLD, error, f"Set {_THRESHOLD}=null, or {_TYPE}=tis.")
        outlier = build_mask("sequence", "exp_abs_mean", None, read_ratio_bound(error, _THRESHOLD))
        plain |= {"masks": {"outlier": outlier}, "denominator": "kept", "proximal": "recompute"}
    return plain


NEMO_RL: Final = Peer(
    name="NeMo-RL",
    releases="0.5.0 to 0.7.0",
    sections=("loss_fn",),
    read={f"loss_fn.{key}": value for key, value in _LOSS.items()} | {_THRESHOLD: None},
    convert=_convert,
    unsaid={"loss_fn.score_centering": SCORE_CENTERING},
    plain=words(
        "disable_ppo_ratio kl_input_clamp_value kl_output_clamp_value positive_example_nll_weight ratio_clip_c"
        " ratio_clip_max ratio_clip_min reference_policy_kl_type token_level_loss use_cispo",
        "loss_fn",
    ),
    elsewhere=words(
        "logprob_batch_size logprob_chunk_size logprob_mb_tokens offload_optimizer_for_logprob only_unmask_final"
        " preference_average_log_probs router_replay skip_reference_policy_logprobs_calculation"
    ),
    context=words("reference_policy_kl_penalty sequence_level_importance_ratios use_kl_in_reward", "loss_fn"),
    switches=frozenset({_CORRECTS, "loss_fn.force_on_policy_ratio", "loss_fn.use_on_policy_kl_approximation"}),
)
"""NeMo-RL's rules, on the ratio of prev to generation log-probs.

``tis`` clamps the weight. ``icepop`` leaves the weight unchanged inside the bounds and drops the tokens outside them.
``seq-mask-tis`` drops rows by their geometric mean and leaves token weights unbounded. A ratio without a type is a cap,
as in 0.5.0; later releases stop with an error. With neither a ratio nor a type, the weight has no bound. NeMo-RL does
not count rows that ``grpo.seq_logprob_error_threshold`` drops, so this key sets ``denominator: kept``. With
``use_on_policy_kl_approximation``, the KL term in the loss has the weight pi / generation.
"""
