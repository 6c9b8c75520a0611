"""Expected verdicts of the doctor: one case for each rule, on launches of verl's own program and of ours."""

from __future__ import annotations

from recipe.offpolicy.preflight.programs import OURS
from tests.support.doctor_cases_ours import OF_OURS
from tests.support.doctor_keys import (
    K1,
    K1_BAND,
    KL,
    ROLLOUT,
    TIS_OF_VERL,
    VERL,
    VERLS,
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
    "KL next to weights": Case("NOTE", "", TIS_OF_VERL | KL, "the KL loss is not weighed", K1_BAND | KL, mends=False),
    "raw log-probs": Case(
        "ERROR",
        "rollout_correction.rollout_is",
        TIS_OF_VERL | {f"{ROLLOUT}.logprobs_mode": "raw_logprobs"},
        "leave temperature out",
        {f"{ROLLOUT}.logprobs_mode": "raw_logprobs"},
    ),
}
CASES = {f"ours, {name}": (OURS, case) for name, case in OF_OURS.items()}
CASES |= {f"verl's, {name}": (VERLS, case) for name, case in OF_VERL.items()}
