"""Expected verdicts of the doctor: one case for each rule, on launches of verl's own program and of ours."""

from __future__ import annotations

from recipe.offpolicy.preflight.programs import OURS
from tests.support.doctor_cases_ours import OF_OURS
from tests.support.doctor_keys import (
    COLOCATE,
    K1,
    K1_BAND,
    KL,
    KL_OF_NO_WEIGHT,
    LOSS_MODE,
    MEGATRON,
    REJECTING_IN_BYPASS,
    REPLAY,
    ROLLOUT,
    TIS_OF_VERL,
    VERL,
    VERLS,
    WORKERS,
    Case,
)

OF_VERL: dict[str, Case] = {
    "rollout log-probs off": Case(
        "NO-OP",
        "rollout_correction.rollout_is",
        TIS_OF_VERL | {f"{ROLLOUT}.calculate_log_probs": False},
        "verl silently skips its correction",
        TIS_OF_VERL,
    ),
    "asynchronous and uncorrected": Case(
        "NOTE", "", COLOCATE, "nothing corrects for it", COLOCATE | TIS_OF_VERL, mends=False
    ),
    "no threshold": Case(
        "NO-OP",
        "rollout_correction.rollout_is",
        TIS_OF_VERL | {f"{VERL}.rollout_is_threshold": None},
        "leaves out the weight",
        TIS_OF_VERL,
    ),
    "no threshold of a rejection": Case(
        "ERROR",
        "rollout_correction.rollout_rs",
        K1,
        "Set a threshold",
        K1 | {f"{VERL}.rollout_rs_threshold": "0.5_2.0"},
    ),
    "no threshold of a rejection by k3": Case(
        "ERROR",
        "rollout_correction.rollout_rs",
        {f"{VERL}.rollout_rs": "seq_mean_k3,token_k1"},
        "Set a threshold",
        {f"{VERL}.rollout_rs": "seq_mean_k3,token_k1", f"{VERL}.rollout_rs_threshold": "0.01,0.5_2.0"},
    ),
    "a rejection that verl does not know": Case(
        "ERROR",
        "rollout_correction.rollout_rs",
        {f"{VERL}.rollout_rs": "token_k4", f"{VERL}.rollout_rs_threshold": "2.0"},
        "is unknown",
        K1 | {f"{VERL}.rollout_rs_threshold": "0.5_2.0"},
    ),
    "a rejection that is no name": Case(
        "ERROR",
        "rollout_correction.rollout_rs",
        {f"{VERL}.rollout_rs": 4, f"{VERL}.rollout_rs_threshold": "2.0"},
        "Set options separated by commas",
        K1 | {f"{VERL}.rollout_rs_threshold": "0.5_2.0"},
    ),
    "crossed thresholds": Case(
        "ERROR",
        "rollout_correction.rollout_rs",
        K1 | {f"{VERL}.rollout_rs_threshold": "2.0_0.5"},
        "nothing lies between",
        K1 | {f"{VERL}.rollout_rs_threshold": "0.5_2.0"},
    ),
    "bypass without the actor's keys": Case(
        "NO-OP",
        "rollout_correction.rollout_is",
        TIS_OF_VERL | {f"{VERL}.bypass_mode": True},
        "the loss stays vanilla around mu",
        {f"{VERL}.bypass_mode": True},
    ),
    "the actor's keys without bypass": Case(
        "NO-OP", WORKERS, {f"{WORKERS}.rollout_is": "token"}, "loss_mode is vanilla", {}
    ),
    "an obsolete name": Case(
        "NO-OP",
        "rollout_correction.rollout_token_veto_threshold",
        TIS_OF_VERL | {f"{VERL}.rollout_token_veto_threshold": 1e-4},
        "no longer reads a key of this name",
        TIS_OF_VERL,
    ),
    "a name before 0.6": Case(
        "NO-OP",
        "algorithm.rollout_is_threshold",
        {"algorithm.rollout_is_threshold": 2.0},
        "no longer reads a key of this name",
        {},
    ),
    # k1 = -log(pi_old / mu): "0.5_5" bounds mu / pi_old, so that pi_old / mu is kept in [1/5, 1/0.5].
    "inverted k1 bounds": Case(
        "ERROR",
        "rollout_correction.rollout_rs",
        K1 | {f"{VERL}.rollout_rs_threshold": "0.5_5.0"},
        "keeps pi_old / mu in [0.2, 2]",
        K1 | {f"{VERL}.rollout_rs_threshold": "0.5_2.0"},
    ),
    "inverted bounds of one of several": Case(
        "ERROR",
        "rollout_correction.rollout_rs",
        {f"{VERL}.rollout_rs": "seq_max_k2,seq_mean_k1", f"{VERL}.rollout_rs_threshold": "2.5,0.99_1.02"},
        "seq_mean_k1 keeps pi_old / mu in [0.9804, 1.01]",
        {f"{VERL}.rollout_rs": "seq_max_k2,seq_mean_k1", f"{VERL}.rollout_rs_threshold": "2.5,0.999_1.001"},
    ),
    "k1 bounds of the other way": Case(
        "NOTE",
        "",
        K1 | {f"{VERL}.rollout_rs_threshold": "0.2_2.0"},
        "keeps pi_old / mu in [0.5, 5]",
        K1 | {f"{VERL}.rollout_rs_threshold": "0.6_1.6"},
        mends=False,
    ),
    # What YAML makes of 0.5_2 without quotes.
    "a number of two bounds": Case(
        "ERROR",
        "rollout_correction.rollout_rs",
        K1 | {f"{VERL}.rollout_rs_threshold": 0.52},
        "read an unquoted 0.5_2 as the number 0.52",
        K1 | {f"{VERL}.rollout_rs_threshold": 2.0},
    ),
    "a cap of two bounds": Case(
        "ERROR",
        "rollout_correction.rollout_is",
        TIS_OF_VERL | {f"{VERL}.rollout_is_threshold": 0.52},
        "shrinks every on-policy token",
        TIS_OF_VERL | {f"{VERL}.rollout_is_threshold": "0.5_2.0"},
    ),
    "a wide cap of two bounds": Case(
        "NOTE",
        "",
        TIS_OF_VERL | {f"{VERL}.rollout_is_threshold": 25},
        "2_5 as 25",
        TIS_OF_VERL | {f"{VERL}.rollout_is_threshold": 5.0},
    ),
    "KL next to weights": Case("NOTE", "", TIS_OF_VERL | KL, "the KL loss is not weighed", K1_BAND | KL, mends=False),
    "KL of no weight": Case(
        "NOTE", "", TIS_OF_VERL | KL, "the KL loss is not weighed", TIS_OF_VERL | KL_OF_NO_WEIGHT, mends=False
    ),
    "KL next to rejections of bypass mode": Case(
        "NOTE",
        "",
        REJECTING_IN_BYPASS | KL,
        "rejected tokens keep the gradient of the KL loss",
        REJECTING_IN_BYPASS,
        mends=False,
    ),
    "top-p": Case(
        "ERROR",
        "rollout_correction.rollout_is",
        TIS_OF_VERL | {f"{ROLLOUT}.top_p": 0.9},
        "mass that was cut",
        {f"{ROLLOUT}.top_p": 0.9},
    ),
    "raw log-probs": Case(
        "ERROR",
        "rollout_correction.rollout_is",
        TIS_OF_VERL | {f"{ROLLOUT}.logprobs_mode": "raw_logprobs"},
        "leave temperature out",
        {f"{ROLLOUT}.logprobs_mode": "raw_logprobs"},
    ),
    "a loss that takes no weights": Case(
        "ERROR",
        "rollout_correction.rollout_is",
        TIS_OF_VERL | {LOSS_MODE: "geo_mean"},
        "gradient under weights",
        TIS_OF_VERL | {LOSS_MODE: "gspo"},
    ),
    "R2 with bypass": Case(
        "ERROR",
        "router_replay",
        MEGATRON | {REPLAY: "R2", f"{VERL}.bypass_mode": True},
        "bypass_mode=true skips it",
        MEGATRON | {REPLAY: "R2"},
    ),
}
CASES = {f"ours, {name}": (OURS, case) for name, case in OF_OURS.items()}
CASES |= {f"verl's, {name}": (VERLS, case) for name, case in OF_VERL.items()}
