"""k that groups have no value for, keys next to which pass@k is ERROR or NO-OP, and the shipped options."""

from __future__ import annotations

import pytest

from recipe.offpolicy.extensions.pass_at_k.pass_at_k import PassAtK
from recipe.offpolicy.extensions.pass_at_k.settings import PassAtKSettings
from recipe.offpolicy.extensions.registry import load_extensions
from tests.support.applications import NEEDED, application

N, VALIDATION = "actor_rollout_ref__rollout__n", "actor_rollout_ref__rollout__val_kwargs__"


@pytest.mark.parametrize("option", ["loo", "loo_minus_one", "analytic", "groups", "validation"])
def test_each_option_is_shipped(option: str) -> None:
    with application(f"pass_at_k={option}", *NEEDED) as config:
        (extension,) = load_extensions(config)
    assert isinstance(extension, PassAtK)
    objective = "none" if option == "validation" else option
    assert extension.pass_at_k == PassAtKSettings.from_mapping("pass_at_k", {"objective": objective})
    assert (extension.worker() is None) == (option == "validation")
    assert option in extension.meaning
