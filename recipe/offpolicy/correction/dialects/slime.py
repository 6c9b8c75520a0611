"""Converter of slime's and miles' arguments about the rollout engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ..validation import read_number
from .mapping import build_mask, build_weight, pick_options, read_choice, read_flag, read_ratio_bound, refuse

_ARGUMENTS: Final[dict[str, Any]] = {
    "use_rollout_logprobs": False,
    "use_tis": False,
    "tis_clip": 2.0,
    "tis_clip_low": 0.0,
    "custom_tis_function_path": None,
    "use_opsm": False,
    "opsm_delta": 1e-4,
}
_MIS: Final[dict[str, Any]] = {
    "tis_level": "token",
    "tis_mode": "truncate",
    "tis_lower_bound": None,
    "tis_upper_bound": 2.0,
    "tis_batch_normalize": False,
    "use_rs": False,
    "rs_level": "token",
    "rs_lower_bound": None,
    "rs_upper_bound": None,
    "rs_veto_threshold": None,
}
_LEVELS: Final = {
    "token": ("token", "product"),
    "sequence": ("sequence", "product"),
    "geometric": ("sequence", "geometric"),
}


def convert_slime(source: Mapping[str, Any] | Any) -> dict[str, Any]:
    """Convert slime's arguments, with underscores, to our plain values; miles has the same.

    * ``use_tis`` clamps pi_old / mu to [tis_clip_low, tis_clip]; with ``use_rollout_logprobs`` pi_old is mu.
    * ``custom_tis_function_path`` to ``mis.py`` reads the keys of ``mis.yaml``: level and mode of the weight, a
      rejection (``use_rs``) and a veto of rows with a token below ``rs_veto_threshold``.
    * ``use_opsm`` masks tokens of negative advantage in rows with mean log(pi_old / pi) > opsm_delta.

    Args:
        source: the arguments, with the keys of ``mis.yaml`` where that is used; others are not read.

    Raises:
        SpecError: malformed values, another custom function, and what has no equivalent here.

    Example:
        >>> convert_slime({"use_tis": True})["weight"]
        {'level': 'token', 'kind': 'truncate', 'lower': None, 'upper': 2.0}
    """
    where = "slime"
    values = pick_options(source, _ARGUMENTS, where, ("tis_", "opsm_", "rs_"), _MIS)
    bypass = read_flag(values, "use_rollout_logprobs", where)
    plain: dict[str, Any] = {"proximal": "bypass" if bypass else "recompute", "masks": {}}
    path = values["custom_tis_function_path"]
    tis = read_flag(values, "use_tis", where)
    if bypass and tis:
        reason = "old and rollout log-probs are one, so that every ratio is 1."
        raise refuse(reason, f"{where}.use_tis", True, f"Set {where}.use_rollout_logprobs=false.")
    if tis and path is None:
        lower, upper = _bounds(values, ("tis_clip_low", "tis_clip"), where)
        plain["weight"] = build_weight("token", lower, upper)
    elif tis and str(path).rpartition(".")[2].startswith("icepop"):
        lower, upper = _bounds(values, ("tis_clip_low", "tis_clip"), where)
        plain["weight"] = build_weight("token", lower, upper, reject=True)
    elif tis and "compute_mis_weights" in str(path):
        plain |= _convert_mis(pick_options(source, _MIS, where), where)
    elif path is not None and tis:
        reason = "what a function of your own does is not known; compute_mis_weights_with_cp and icepop_function are."
        raise refuse(reason, f"{where}.custom_tis_function_path", path)
    if read_flag(values, "use_opsm", where):
        delta = read_number(values["opsm_delta"], f"{where}.opsm_delta")
        ratio = "full" if bypass else "ppo"
        opsm = {"ratio": ratio, "level": "sequence", "aggregate": "geometric", "delta": delta, "when": "negative"}
        plain["masks"] = plain["masks"] | {"opsm": opsm | {"sign": "token"}}
    return plain


def _bounds(values: Mapping[str, Any], keys: tuple[str, str], where: str) -> tuple[float | None, float | None]:
    low, high = (read_ratio_bound(values[key] or None, f"{where}.{key}") for key in keys)
    return low, high


def _convert_mis(values: dict[str, Any], where: str) -> dict[str, Any]:
    mode = read_choice(values["tis_mode"], ("truncate", "clip", "mask"), f"{where}.tis_mode", optional=False)
    kind = str(read_choice(values["tis_level"], tuple(_LEVELS), f"{where}.tis_level", optional=False))
    upper = read_ratio_bound(values["tis_upper_bound"], f"{where}.tis_upper_bound")
    if upper is None:
        raise refuse("it has no default.", f"{where}.tis_upper_bound", None, "Set it to 2.0 for example.")
    given = read_ratio_bound(values["tis_lower_bound"], f"{where}.tis_lower_bound")
    lower = 1 / upper if given is None else given
    normalize = read_flag(values, "tis_batch_normalize", where)
    if normalize and kind == "geometric":
        raise refuse("mis.py has no mean of geometric weights.", f"{where}.tis_batch_normalize", True)
    if normalize and mode == "mask":
        reason = "mis.py counts what it rejects in the mean that it divides by, and here it counts as 0."
        raise refuse(reason, f"{where}.tis_batch_normalize", True, "Set it to false.")
    level, aggregate = _LEVELS[kind]
    weight = build_weight(level, None if mode == "truncate" else lower, upper, reject=mode == "mask")
    plain: dict[str, Any] = {"weight": weight | {"aggregate": aggregate, "normalize": normalize}, "masks": {}}
    if read_flag(values, "use_rs", where):
        level, aggregate = _LEVELS[str(read_choice(values["rs_level"], tuple(_LEVELS), f"{where}.rs_level"))]
        low = read_ratio_bound(values["rs_lower_bound"], f"{where}.rs_lower_bound")
        high = read_ratio_bound(values["rs_upper_bound"], f"{where}.rs_upper_bound")
        band = build_mask(level, aggregate, lower if low is None else low, upper if high is None else high)
        plain["masks"]["rejection"] = band
        veto = read_ratio_bound(values["rs_veto_threshold"], f"{where}.rs_veto_threshold")
        if veto is not None:
            plain["masks"]["veto"] = build_mask("sequence", "any", veto, None)
    return plain
