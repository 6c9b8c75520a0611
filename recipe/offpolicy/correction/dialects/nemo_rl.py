"""Converter of NeMo-RL's ``loss_fn`` section about the generation engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ..validation import read_number
from .mapping import build_mask, build_weight, pick_options, read_choice, read_flag, read_ratio_bound, refuse

_LOSS: Final[dict[str, Any]] = {
    "use_importance_sampling_correction": False,
    "sequence_level_importance_ratios": False,
    "truncated_importance_sampling_type": None,
    "truncated_importance_sampling_ratio": None,
    "truncated_importance_sampling_ratio_min": None,
    "force_on_policy_ratio": False,
}
_TYPE: Final = "truncated_importance_sampling_type"
_RATIO: Final = "truncated_importance_sampling_ratio"


def convert_nemo_rl(source: Mapping[str, Any] | Any, threshold: float | None = None) -> dict[str, Any]:
    """Convert the keys of NeMo-RL's ``loss_fn`` about prev / generation log-probs to our plain values.

    ``tis`` clamps the weight, ``icepop`` leaves it inside the bounds and drops what is outside, ``seq-mask-tis`` drops
    rows by their geometric mean and leaves token weights unbounded. Without a type the weight has no bound. Rows that
    ``threshold`` drops leave NeMo-RL's counts, so that it sets ``denominator: kept``.

    Args:
        source: the section, or an object with its keys as attributes; other keys are not read.
        threshold: ``grpo.seq_logprob_error_threshold``.

    Raises:
        SpecError: malformed values, what NeMo-RL refuses, and what has no equivalent here.

    Example:
        >>> loss = {"use_importance_sampling_correction": True, "truncated_importance_sampling_type": "tis"}
        >>> convert_nemo_rl(loss | {"truncated_importance_sampling_ratio": 2.0})["weight"]
        {'level': 'token', 'kind': 'truncate', 'lower': None, 'upper': 2.0}
    """
    where = "loss_fn"
    values = pick_options(source, _LOSS, where, ("truncated_importance_sampling_",))
    kind = read_choice(values[_TYPE], ("tis", "icepop", "seq-mask-tis"), f"{where}.{_TYPE}")
    by_row = read_flag(values, "sequence_level_importance_ratios", where)
    plain: dict[str, Any] = {"proximal": "recompute"}
    if read_flag(values, "force_on_policy_ratio", where):
        plain["proximal"] = "reuse"
    corrects = read_flag(values, "use_importance_sampling_correction", where)
    if kind is not None and not corrects:
        fix = f"Set {where}.use_importance_sampling_correction=true."
        raise refuse("NeMo-RL needs the correction for it.", f"{where}.{_TYPE}", kind, fix)
    level = "sequence" if by_row else "token"
    if corrects:
        lower, upper = (read_ratio_bound(values[key] or None, f"{where}.{key}") for key in (f"{_RATIO}_min", _RATIO))
        if kind is not None and upper is None:
            raise refuse("a type has a ratio.", f"{where}.{_RATIO}", None, "Set it to 2.0 for example.")
        if kind in ("icepop", "seq-mask-tis") and lower is None:
            raise refuse("it has two bounds.", f"{where}.{_RATIO}_min", None, "Set it to 0.5 for example.")
        if kind == "seq-mask-tis":
            if by_row:
                raise refuse(
                    "seq-mask-tis weighs tokens.",
                    f"{where}.sequence_level_importance_ratios",
                    True,
                    "Set it to false.",
                )
            plain |= {"weight": build_weight("token", None, None)}
            plain["masks"] = {"geometric": build_mask("sequence", "geometric", lower, upper)}
        elif kind is None:
            plain["weight"] = build_weight(level, None, None)
        else:
            plain["weight"] = build_weight(level, lower, upper, reject=kind == "icepop")
    key = "grpo.seq_logprob_error_threshold"
    error = read_number(threshold, key)
    if error is not None:
        if kind in ("icepop", "seq-mask-tis"):
            reason = (
                f"rows that it drops leave the counts, and what {kind} drops does not: no denominator here is both."
            )
            raise refuse(reason, key, error, f"Set {key}=null, or {where}.{_TYPE}=tis.")
        outlier = build_mask("sequence", "exp_abs_mean", None, read_ratio_bound(error, key))
        plain |= {"masks": {"outlier": outlier}, "denominator": "kept"}
        plain["proximal"] = "recompute"
    return plain
