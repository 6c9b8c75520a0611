"""Inputs that the formulas of extensions refuse, each by one changed argument of a call that passes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from recipe.offpolicy.extensions.length_penalty.penalties import penalties
from recipe.offpolicy.extensions.opd.signal import advantages as distil
from recipe.offpolicy.extensions.opd.signal import compute_scale, eligible, k2_loss
from recipe.offpolicy.extensions.pass_at_k.estimates import fit, summarize, unbiased
from recipe.offpolicy.extensions.pass_at_k.training import advantages as train
from recipe.offpolicy.extensions.pass_at_k.training import allocate

ON = torch.tensor([[False, True, True], [False, False, False]])
LOG_PROBS = torch.full((2, 3), -1.0)
TEACHER = torch.where(ON, -2.0, math.nan)
GAPS: dict[str, Any] = {"student": LOG_PROBS, "teacher": TEACHER, "max_gap": 2.0}
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any], list[tuple[dict[str, Any], str]]]] = {
    "advantages of a teacher": (
        distil,
        GAPS | {"base": LOG_PROBS, "eligible_tokens": ON, "coef": 1.0, "scale": "none"},
        [
            ({"coef": math.nan}, "coef=nan: not a finite number"),
            ({"max_gap": 0.0}, "max_gap=0.0: not a finite number of nats above 0"),
            ({"scale": 0.0}, "scale=0.0"),
            ({"horizon": 0}, "horizon=0: expected 1 or more"),
            ({"teacher": TEACHER[:1]}, "shapes .*expected one shape"),
            ({"base": LOG_PROBS[:, :2]}, r"\(2, 2\) advantages for a mask of \(2, 3\)"),
        ],
    ),
    "loss of a teacher": (
        k2_loss,
        GAPS | {"mask": ON},
        [
            ({"mask": ON[0]}, "expected one shape"),
            ({"mask": ~ON}, "token 0 of row 0"),
            ({"max_gap": -1.0}, "max_gap=-1.0"),
        ],
    ),
    "scale of gaps": (
        compute_scale,
        {"gaps": LOG_PROBS, "tokens": ON, "scale": "std"},
        [({"scale": "mean"}, "scale=mean")],
    ),
    "eligible rows": (
        eligible,
        {"rewards": torch.zeros(1), "groups": ["a"], "passed_above": 0.0, "max_pass_rate": 0.5},
        [
            ({"groups": ["a", "a"]}, "for 2 groups"),
            ({"max_pass_rate": 1.5}, "max_pass_rate=1.5"),
            ({"passed_above": math.inf}, "passed_above=inf"),
            ({"rows": "some"}, "rows=some"),
        ],
    ),
    "length penalty": (
        penalties,
        {"kind": "uniform", "lengths": [1], "right": [1], "coefficient": 0.1, "anchor": None},
        [
            ({"kind": "cosine"}, "kind=cosine"),
            ({"right": [1, 0]}, "one of each"),
            ({"lengths": [math.nan]}, "0 tokens or more"),
            ({"right": [0.5]}, r"1 \(correct\) or 0 \(wrong\)"),
            ({"coefficient": -0.1}, "coefficient=-0.1"),
            ({"kind": "anchor", "anchor": 0}, "anchor=0"),
        ],
    ),
    "training of pass@k": (
        train,
        {"right": [1, 0], "k": 1, "objective": "loo"},
        [
            ({"right": [0.5, 1]}, r"1 \(correct\) or 0 \(wrong\)"),
            ({"right": [[1, 0]]}, "one per row"),
            ({"k": 1.0}, "k=1.0"),
            ({"objective": "best"}, "objective=best"),
        ],
    ),
    "group sizes": (
        allocate,
        {"rates": [0.5, 0.5], "total": 8, "least": 2, "most": 6},
        [({"most": 3}, "8 rollouts for 2 prompts"), ({"least": 5}, "8 rollouts"), ({"least": 0}, "8 rollouts")],
    ),
    "pass@k": (
        unbiased,
        {"n": 4, "c": 2, "k": 2},
        [
            ({"c": 5}, "with 5"),
            ({"k": 5}, "pass@5"),
            ({"c": -1}, "with -1"),
            ({"k": 0}, "pass@0"),
            ({"n": 4.0}, "=4.0"),
        ],
    ),
    "fit over prompts": (
        fit,
        {"n": [4.0, 4.0], "c": [4.0, 0.0]},
        [({"c": [5.0, 0.0]}, "expected"), ({"c": [1.5, 2.0]}, "expected"), ({"c": [1.0]}, "expected")],
    ),
    "means over prompts": (
        summarize,
        {"n": [8], "c": [1], "ks": [1]},
        [({"n": [], "c": []}, "expected one of each"), ({"c": [1, 2]}, "expected one of each")],
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_inputs_that_are_refused(name: str) -> None:
    call, given, refused = CALLS[name]
    if name != "fit over prompts":  # two prompts have no fit
        call(**given)
    for changes, said in refused:
        with pytest.raises(ValueError, match=said):
            call(**given | changes)
