"""Converter of slime's and miles' arguments that concern the rollout engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from ..validation import read_number
from .mapping import (
    build_mask,
    build_weight,
    check_weight_of_rows,
    read_choice,
    read_flag,
    read_ratio_bound,
    read_width,
    refuse,
)
from .peer import Options, Peer, words

_PER_TOKEN: Final = "calculate_per_token_loss"
_ARGUMENTS: Final[dict[str, Any]] = {
    "use_rollout_logprobs": False,
    "use_tis": False,
    "tis_clip": 2.0,
    "tis_clip_low": 0.0,
    "custom_tis_function_path": None,
    "get_mismatch_metrics": False,
    "use_opsm": False,
    "opsm_delta": 1e-4,
    "use_kl_loss": False,
    "kl_loss_coef": 0.0,
    "use_unbiased_kl": False,
    "advantage_estimator": "grpo",
    _PER_TOKEN: False,
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


def _convert(options: Options) -> dict[str, Any]:
    flags = {key: read_flag(options[key], key) for key, value in _ARGUMENTS.items() if value is False}
    bypass, tis, path = flags["use_rollout_logprobs"], flags["use_tis"], options["custom_tis_function_path"]
    name = str(path).rpartition(".")[2].rpartition(":")[2]
    of_mis = name.startswith("compute_mis_weights")
    # If only get_mismatch_metrics is set, a weight function is called too, and only the function in mis.py leaves the
    # loss unchanged.
    tis |= flags["get_mismatch_metrics"] and path is not None and not of_mis
    plain: dict[str, Any] = {"proximal": "bypass" if bypass else "recompute", "masks": {}}
    of_file = sorted(key for key, value in _MIS.items() if options[key] != value)
    if of_file and (tis or options["use_rs"]) and not (tis and of_mis):
        fix = "Set use_tis=true and custom_tis_function_path to its compute_mis_weights_with_cp."
        raise refuse("only mis.py reads it, with use_tis.", of_file[0], options[of_file[0]], fix)
    if bypass and tis:
        reason = "pi_old is mu there, and a weight would count its ratio twice, or be 1."
        raise refuse(reason, "use_tis", True, "Set use_rollout_logprobs=false.")
    if tis and (path is None or name.startswith("icepop")):
        lower = read_ratio_bound(options["tis_clip_low"], "tis_clip_low", zero_opens=True)
        upper = read_ratio_bound(options["tis_clip"], "tis_clip")
        plain["weight"] = build_weight("token", lower, upper, reject=path is not None)
    elif tis and of_mis:
        plain |= _convert_mis(options)
    elif tis:
        reason = (
            "it is not known what your own function does; the known functions are compute_mis_weights_with_cp and "
            "icepop_function."
        )
        raise refuse(reason, "custom_tis_function_path", path)
    if options["advantage_estimator"] == "gspo":
        check_weight_of_rows(plain.get("weight"), "slime", "advantage_estimator", "gspo")
    if flags["use_opsm"]:
        delta = read_width(options["opsm_delta"], "opsm_delta")
        ratio = "full" if bypass else "ppo"
        opsm = {"ratio": ratio, "level": "sequence", "aggregate": "geometric", "delta": delta, "when": "negative"}
        plain["masks"] = plain["masks"] | {"opsm": opsm | {"sign": "token"}}
    if flags["use_unbiased_kl"] and flags["use_kl_loss"] and read_number(options["kl_loss_coef"], "kl_loss_coef"):
        plain["kl_weight"] = {"ratio": "full" if bypass else "ppo", "upper": None}
    return plain


def _convert_slime(options: Options) -> dict[str, Any]:
    top_p = read_number(options["rollout_top_p"], "rollout_top_p")
    return _convert(options) | ({} if top_p in (None, 1.0) else {"support": "engine"})


def _convert_miles(options: Options) -> dict[str, Any]:
    plain, key = _convert(options), "skip_actor_forward_only"
    if read_flag(options[key], key) and plain["proximal"] == "recompute":
        plain["proximal"] = "reuse"
    return plain


def _convert_mis(options: Options) -> dict[str, Any]:
    mode = read_choice(options["tis_mode"], ("truncate", "clip", "mask"), "tis_mode", optional=False)
    kind = str(read_choice(options["tis_level"], tuple(_LEVELS), "tis_level", optional=False))
    upper = read_ratio_bound(options["tis_upper_bound"], "tis_upper_bound")
    if upper is None:
        raise refuse("it has no default.", "tis_upper_bound", None, "Set it to 2.0 for example.")
    given = read_ratio_bound(options["tis_lower_bound"], "tis_lower_bound")
    lower = 1 / upper if given is None else given
    normalize = read_flag(options["tis_batch_normalize"], "tis_batch_normalize")
    if normalize and kind == "geometric":
        raise refuse("mis.py computes no mean of geometric weights.", "tis_batch_normalize", True)
    if normalize and mode == "mask":
        reason = "mis.py includes rejected tokens' weights in the mean by which it divides; here they count as 0."
        raise refuse(reason, "tis_batch_normalize", True, "Set it to false.")
    level, aggregate = _LEVELS[kind]
    weight = build_weight(level, None if mode == "truncate" else lower, upper, reject=mode == "mask")
    plain: dict[str, Any] = {"weight": weight | {"aggregate": aggregate, "normalize": normalize}, "masks": {}}
    rejects = read_flag(options["use_rs"], "use_rs")
    for key, acts in (("tis_level", mode == "mask"), ("rs_level", rejects)):
        if acts and options[key] == "token" and not read_flag(options[_PER_TOKEN], _PER_TOKEN):
            reason = "a row's loss is divided by its kept tokens there, and a row without kept tokens still counts;"
            raise refuse(f"{reason} the nearest is correction.denominator=kept.", key, "token")
    if rejects:
        level, aggregate = _LEVELS[str(read_choice(options["rs_level"], tuple(_LEVELS), "rs_level", optional=False))]
        low = read_ratio_bound(options["rs_lower_bound"], "rs_lower_bound")
        high = read_ratio_bound(options["rs_upper_bound"], "rs_upper_bound")
        band = build_mask(level, aggregate, lower if low is None else low, upper if high is None else high)
        plain["masks"]["rejection"] = band
        veto = read_ratio_bound(options["rs_veto_threshold"], "rs_veto_threshold")
        if veto is not None:
            plain["masks"]["veto"] = build_mask("sequence", "any", veto, None)
    return plain


_STALE: Final = (
    (False, None),
    "tokens that older weights sampled are removed from the loss mask there; the nearest is "
    "correction.masks.stale={aggregate: staleness, level: token, upper: 0}.",
)

SLIME: Final = Peer(
    name="slime",
    releases="0.2.4 to 0.3.1",
    sections=(),
    read=_ARGUMENTS | _MIS | {"rollout_top_p": 1.0},
    convert=_convert_slime,
    unsaid={
        "mask_offpolicy_in_partial_rollout": _STALE,
        "custom_config_path": ((None,), "its file sets arguments that are not read here: give them with the others."),
        "custom_loss_function_path": ((None,), "it is not known what your own loss does."),
    },
    plain=frozenset(),
    elsewhere=words(
        "custom_megatron_before_log_prob_hook_path kl_loss_type log_probs_chunk_size log_probs_max_tokens_per_gpu"
        " loss_mask_type loss_type use_rollout_routing_replay use_routing_replay"
        # Keys of Megatron.
        " attention_mask_in_dataloader attention_softmax_in_fp32 create_attention_mask_in_dataloader eod_mask_loss"
        " mask_factor mask_prob mask_type masked_softmax_fusion no_create_attention_mask_in_dataloader"
        " no_masked_softmax_fusion reset_attention_mask"
    ),
    switches=frozenset({"use_tis", "use_opsm", "use_rs", "use_kl_loss"}),
    context=words("advantage_estimator calculate_per_token_loss use_kl_loss kl_loss_coef get_mismatch_metrics"),
)
"""slime's rules.

* ``use_tis`` clamps pi_old / mu to [tis_clip_low, tis_clip]; with ``use_rollout_logprobs`` pi_old is mu.
* With ``custom_tis_function_path`` set to ``mis.py``, the keys of ``mis.yaml`` are read: level and mode of the weight,
  a rejection (``use_rs``), and a veto of rows with a token below ``rs_veto_threshold``. With ``icepop_function``,
  tokens outside the bounds are dropped.
* If ``mis.py`` rejects tokens, the loss of a row is divided by its number of kept tokens, so rejections are read only
  with ``calculate_per_token_loss``. Token weights cannot be combined with ``advantage_estimator=gspo``.
* ``use_opsm`` masks tokens with negative advantage in rows with mean log(pi_old / pi) > opsm_delta.
* ``use_unbiased_kl`` weights the KL loss by pi / pi_old.
* With ``rollout_top_p`` below 1, log-probs are normalised over the sampled support, whose size is unlimited. Here they
  are normalised over the support of ``correction.support=engine``, which masks a token whose support has more members
  than were requested from vLLM.
"""
MILES: Final = replace(
    SLIME,
    name="miles",
    releases="0.0.2 to 0.1.0",
    read=_ARGUMENTS | _MIS | {"skip_actor_forward_only": False},
    convert=_convert_miles,
    elsewhere=SLIME.elsewhere
    | words(
        "ci_disable_logprobs_checker opd_log_prob_top_k recompute_logprobs_via_prefill use_indexer_replay"
        " use_rollout_indexer_replay"
    ),
)
"""miles' rules, which equal slime's; ``skip_actor_forward_only`` takes pi_old from the gradient step."""
