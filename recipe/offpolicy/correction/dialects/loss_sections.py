"""Converters for frameworks that configure corrections together with the loss: NeMo-RL, prime-rl and SkyRL."""

from __future__ import annotations

from typing import Any, Final

from .peer import SCORE_CENTERING, Options, Peer, build_dppo_masks, build_mask, build_weight, words

_CORRECTS: Final = "loss_fn.use_importance_sampling_correction"
_BY_ROW: Final = "loss_fn.sequence_level_importance_ratios"
_TYPE: Final = "loss_fn.truncated_importance_sampling_type"
_RATIO: Final = "loss_fn.truncated_importance_sampling_ratio"
_PENALTY: Final = "loss_fn.reference_policy_kl_penalty"
_THRESHOLD: Final = "grpo.seq_logprob_error_threshold"
_FLAGS: Final = (
    "use_importance_sampling_correction",
    "sequence_level_importance_ratios",
    "force_on_policy_ratio",
    "use_on_policy_kl_approximation",
    "use_kl_in_reward",
)


def _convert_nemo_rl(options: Options) -> dict[str, Any]:
    corrects, by_row, on_policy, kl_weight, kl_in_reward = (options.flag(f"loss_fn.{key}") for key in _FLAGS)
    kind = options.choice_or_null(_TYPE, "tis", "icepop", "seq-mask-tis")
    plain: dict[str, Any] = {"proximal": "reuse" if on_policy else "recompute"}
    for key in () if corrects else (_TYPE, _RATIO, f"{_RATIO}_min"):
        if options[key] is not None:
            raise options.refuse(key, "NeMo-RL reads this key only if a correction is on.", f"Set {_CORRECTS}=true.")
    if corrects:
        lower, upper = options.bound(f"{_RATIO}_min", zero_opens=True), options.bound(_RATIO)
        if kind is None and lower is not None:
            raise options.refuse(f"{_RATIO}_min", "a lower bound needs a type.", f"Set {_TYPE}.")
        if kind is None and upper is not None:
            # Up to 0.5.0, which had no types, this was the only rule.
            kind = "tis"
        if kind is not None and upper is None:
            raise options.refuse(_RATIO, "a type needs a ratio.", "Set it to 2.0 for example.")
        if kind in ("icepop", "seq-mask-tis") and options[f"{_RATIO}_min"] is None:
            raise options.refuse(f"{_RATIO}_min", "this type needs two bounds.", "Set it to 0.5 for example.")
        if kind == "seq-mask-tis":
            if by_row:
                raise options.refuse(_BY_ROW, "seq-mask-tis weights tokens.", "Set it to false.")
            plain["weight"] = build_weight("token", None, None)
            plain["masks"] = {"geometric": build_mask("sequence", "geometric", lower, upper)}
        else:
            plain["weight"] = build_weight("sequence" if by_row else "token", lower, upper, reject=kind == "icepop")
    penalty = options.number(_PENALTY)
    if kl_weight and penalty and not kl_in_reward:
        plain["kl_weight"] = {"ratio": "full", "upper": None}
    if options.number(_THRESHOLD) is not None:
        if kind in ("icepop", "seq-mask-tis"):
            reason = (
                f"NeMo-RL's denominator excludes the rows that this key drops and includes those that {kind} drops; "
                "no denominator here does both."
            )
            raise options.refuse(_THRESHOLD, reason, f"Set {_THRESHOLD}=null, or {_TYPE}=tis.")
        outlier = build_mask("sequence", "exp_abs_mean", None, options.bound(_THRESHOLD))
        plain |= {"masks": {"outlier": outlier}, "denominator": "kept", "proximal": "recompute"}
    return plain


NEMO_RL: Final = Peer(
    name="NeMo-RL",
    releases="0.5.0 to 0.7.0",
    sections=("loss_fn",),
    read={f"loss_fn.{key}": False for key in _FLAGS}
    | {_TYPE: None, _RATIO: None, f"{_RATIO}_min": None, _PENALTY: 0.01, _THRESHOLD: None},
    convert=_convert_nemo_rl,
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

_PRIME: Final = "trainer.loss"
_LOSSES: Final[dict[str, dict[str, Any]]] = {
    "default": {"dppo_mask_low": 0.2, "dppo_mask_high": 0.2, "adv_tau": 1.0, "kl_tau": 1e-3},
    "ipo": {"ipo_threshold": 0.1, "adv_tau": 1.0, "kl_tau": 1e-3},
    "kpop": {"kpop_threshold": 0.1, "adv_tau": 1.0, "kl_tau": 1e-3},
    "kimi_k15": {"tau": 0.2, "adv_tau": 1.0, "sequence_regularizer": False},
}


def _convert_prime_rl(options: Options) -> dict[str, Any]:
    key = f"{_PRIME}.type"
    if options[key] == "custom":
        raise options.refuse(key, "the effect of a custom loss is unknown.")
    kind = options.choice(key, *_LOSSES)
    for path in sorted(options.given - {key}):
        if path.rpartition(".")[2] not in _LOSSES[kind]:
            raise options.refuse(path, f"type {kind} has no such key.", f"Known: {', '.join(_LOSSES[kind])}.")
    numbers = {name: options.width(f"{_PRIME}.{name}") for name in _LOSSES[kind] if name != "sequence_regularizer"}
    if numbers["adv_tau"] != 1:
        raise options.refuse(f"{_PRIME}.adv_tau", "advantages are used unscaled.", "Set it to 1.0.")
    plain: dict[str, Any] = {"proximal": "bypass", "masks": {}}
    if kind == "kimi_k15":
        regularizer = f"{_PRIME}.sequence_regularizer"
        if options.flag(regularizer):
            raise options.refuse(regularizer, "the square of a row's sum has no equivalent here.", "Set it to false.")
        coefficient = numbers["tau"] / 2
    else:
        plain["weight"], coefficient = build_weight("token", None, None, ratio="full"), numbers["kl_tau"]
    if kind == "default":
        plain["masks"] = build_dppo_masks(numbers["dppo_mask_low"], numbers["dppo_mask_high"])
    elif kind == "ipo" and (far := numbers["ipo_threshold"]) < 1:  # no difference of probabilities is larger
        plain["masks"]["ipo"] = build_mask("token", "binary_tv", -far, far, "full")
    elif kind == "kpop":
        plain["masks"]["kpop"] = build_mask("token", "binary_kl", None, numbers["kpop_threshold"], "full")
    return plain | ({"penalty": {"ratio": "full", "coefficient": coefficient}} if coefficient else {})


PRIME_RL: Final = Peer(
    name="prime-rl",
    releases="0.6.0 to 0.8.0",
    sections=(_PRIME,),
    read={
        f"{_PRIME}.type": "default",
        **{f"{_PRIME}.{key}": value for loss in _LOSSES.values() for key, value in loss.items()},
    },
    convert=_convert_prime_rl,
    unsaid={f"{_PRIME}.score_centering": SCORE_CENTERING},
    # Keys of custom losses, which are rejected because of their type.
    plain=words("import_path kwargs", _PRIME),
    elsewhere=words("enable_router_replay logprob_offset loss_mask max_off_policy_steps"),
)
"""prime-rl's rules, for ``actor.policy_loss.loss_mode=gpg``; ``kpop`` and ``kimi_k15`` exist only in branches.

The policy term is -A pi / mu per token, unbounded, over the tokens that the mask keeps (``kimi_k15``: -A log pi over
all tokens). ``kl_tau`` (``tau`` / 2) times the squared log-ratio of all tokens is added to the policy term. Tokens with
A = 0 have no gradient here, whereas prime-rl masks them like tokens with A < 0.
"""

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
_SKYRL: Final = "trainer.algorithm"
_SECTION: Final = f"{_SKYRL}.off_policy_correction"
_LOSS: Final = f"{_SKYRL}.policy_loss_type"
_UNCORRECTED: Final = ("clip_cov", "kl_cov", "importance_sampling", "cross_entropy")
_CORRECTED: Final = ("regular", "dual_clip", "gspo", "cispo", "sapo", "rollout_is", "dppo")


def _convert_skyrl(options: Options) -> dict[str, Any]:
    plain = _convert_correction(options)
    corrects = plain["weight"] is not None or bool(plain["masks"])
    support = {"support": "engine"} if options.flag(f"{_SKYRL}.enable_sample_support_replay") else {}
    loss = options.choice(_LOSS, *_CORRECTED, *_UNCORRECTED)
    if corrects and loss in _UNCORRECTED:
        raise options.refuse(_LOSS, f"SkyRL applies no off-policy correction with this loss, but {_SECTION} is set.")
    rollout = options.choice(f"{_SKYRL}.cispo.cispo_anchor", "old", "rollout") == "rollout"
    if loss not in ("rollout_is", "dppo") and not (loss == "cispo" and rollout):
        return plain | support
    if corrects:
        reason = (
            f"the ratio of this loss is pi / mu, which is already a correction, and {_SECTION} would also correct "
            "pi_old / mu."
        )
        raise options.refuse(_LOSS, reason)
    if loss == "dppo":
        return {"proximal": "bypass", **_mask_divergence(options), **support}
    # -sg(r 1[1 - low <= r <= 1 + high]) A log pi, and CISPO's -sg(clamp(r, 1 - low, 1 + high)) A log pi, r = pi / mu.
    rejects = loss == "rollout_is"
    low, high = _read_widths(options, "eps_clip" if rejects else "cispo.cispo_eps_clip")
    weight = build_weight("token", max(1 - low, 0), 1 + high, reject=rejects, ratio="full")
    return {"proximal": "bypass", "weight": weight, **support}


def _mask_divergence(options: Options) -> dict[str, Any]:
    """Convert DPPO: -r A, r = pi / mu, for tokens whose update does not move p_pi more than delta away from p_mu."""
    kind = options.choice(f"{_SKYRL}.dppo.dppo_type", "binary_tv", "binary_kl")
    low, high = _read_widths(options, "dppo.delta")
    masks = build_dppo_masks(low, high)
    if kind == "binary_kl":
        if low != high:
            key = f"{_SKYRL}.dppo.delta_low"
            reason = f"a mask with when=outward has one bound for both signs, but delta_high={high:g}."
            raise options.refuse(key, reason, f"Set {key}={high:g}.")
        mask = build_mask("token", "binary_kl_forward", None, high, "full") | {"when": "outward", "sign": "token"}
        masks = {"dppo_kl": mask}
    return {"weight": build_weight("token", None, None, ratio="full"), "masks": masks}


def _read_widths(options: Options, stem: str) -> tuple[float, float]:
    return options.width(f"{_SKYRL}.{stem}_low"), options.width(f"{_SKYRL}.{stem}_high")


def _convert_correction(options: Options) -> dict[str, Any]:
    bounds = {key: options.bound(f"{_SECTION}.{key}") for key in SKYRL_DEFAULTS if key.endswith(("_high", "_low"))}
    level = options.choice_or_null(f"{_SECTION}.tis_ratio_type", "token", "sequence")
    # SkyRL translates its older keys in the same way.
    if options.flag(f"{_SKYRL}.use_tis"):
        cap_of_old = f"{_SKYRL}.tis_imp_ratio_cap"
        if options[cap_of_old] in (None, -1, -1.0):
            raise options.refuse(cap_of_old, "a truncated weight needs a cap.", "Set it to 2.0 for example.")
        level, bounds["token_tis_ratio_clip_high"] = "token", options.bound(cap_of_old)
    weight = None
    if level is not None:
        cap = f"{level}_tis_ratio_clip_high"
        if bounds[cap] is None:
            raise options.refuse(f"{_SECTION}.{cap}", "a truncated weight needs a cap.", "Set it to 2.0 for example.")
        weight = build_weight(level, None, bounds[cap])
    masks: dict[str, Any] = {}
    metric = options.choice_or_null(f"{_SECTION}.sequence_mask_metric", "geometric", "product")
    kinds = {
        "outlier": ("outlier_token_is_threshold", "sequence", "any"),
        "token": ("token_mask_is_threshold", "token", "product"),
    }
    if metric is not None:
        kinds[metric] = ("geo_mask" if metric == "geometric" else "product_mask", "sequence", metric)
    for name, (stem, unit, aggregate) in kinds.items():
        lower, upper = bounds[f"{stem}_low"], bounds[f"{stem}_high"]
        low, high = f"{_SECTION}.{stem}_low", f"{_SECTION}.{stem}_high"
        if lower is None and upper is None and name != metric:
            continue
        if None in (lower, upper) and name != "outlier":
            key, other = (low, high) if lower is None else (high, low)
            raise options.refuse(key, "SkyRL needs both bounds of this mask.", f"Set {key}.", other)
        if lower is not None and upper is not None and lower > upper:
            raise options.refuse(low, "nothing lies between.", "Swap them.", high)
        masks[name] = build_mask(unit, aggregate, lower, upper)
    by_sequence = metric is not None or level == "sequence"
    return {"weight": weight, "masks": masks, "skyrl_compat": "token" in masks and by_sequence}


SKYRL: Final = Peer(
    name="SkyRL",
    releases="0.1.0 to 0.4.0",
    sections=(_SECTION, _SKYRL),
    read={f"{_SECTION}.{key}": value for key, value in SKYRL_DEFAULTS.items()}
    | {
        f"{_SKYRL}.{key}": value
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
    convert=_convert_skyrl,
    unsaid={f"{_SKYRL}.score_centering": SCORE_CENTERING},
    plain=words(
        "advantage_batch_normalize advantage_estimator clip_cov clip_ratio_c dynamic_sampling entropy_loss_coef"
        " gamma grpo_norm_by_std kl_cov kl_ctrl kl_estimator_type kl_loss_coef lambd loss_reduction max_seq_len sapo"
        " temperature use_entropy_loss use_kl_in_reward use_kl_loss value_clip value_head_prefix zero_variance_filter"
        " zero_variance_filter_tol",
        _SKYRL,
    ),
    elsewhere=words(
        "enable_return_sample_support_set fused_lm_head_logprob fused_lm_head_logprob_backend logprobs"
        " logprobs_chunk_size moe_enable_routing_replay recompute_old_logprobs_per_minibatch"
    ),
    switches=frozenset({f"{_SECTION}.tis_ratio_type", f"{_SECTION}.sequence_mask_metric", f"{_SKYRL}.use_tis"}),
    context=frozenset({_LOSS})
    | words("eps_clip_low eps_clip_high cispo.cispo_eps_clip_low cispo.cispo_eps_clip_high", _SKYRL),
)
"""SkyRL's rules.

SkyRL applies a token mask before any sequence-level part; if both are configured, ``skyrl_compat`` reproduces that
order. SkyRL's outlier mask acts even earlier, but it drops whole rows, so its place in the order does not matter.
SkyRL's losses anchored at mu (``rollout_is``, ``dppo`` by total variation, and ``cispo`` with ``cispo_anchor=rollout``)
become weights on pi / mu for ``actor.policy_loss.loss_mode=gpg``; all other losses keep pi_old and are set with verl's
own keys.
"""
