"""k that groups have no value for, keys next to which pass@k is ERROR or NO-OP, and the shipped options."""

from __future__ import annotations

import pytest

from recipe.offpolicy.extensions.add_on import load_extensions
from recipe.offpolicy.extensions.pass_at_k.pass_at_k import PassAtK
from recipe.offpolicy.extensions.pass_at_k.settings import PassAtKSettings
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


# What the section leaves out is as the option ships it, and k goes by its schedule


def test_defaults_and_schedules() -> None:
    settings = PassAtKSettings.from_mapping("pass_at_k", {"objective": "loo"})
    assert (settings.k, settings.all_k, settings.get_k(99)) == (4, (4,), 4)
    later = PassAtKSettings.from_mapping("pass_at_k", {"objective": "loo", "schedule": [[10, 2], [20, 1]]})
    assert [later.get_k(step) for step in (1, 9, 10, 19, 20, 99)] == [4, 4, 2, 2, 1, 1]
    assert later.all_k == (4, 2, 1)
    whole = PassAtKSettings.from_mapping("pass_at_k", {"objective": "loo", "schedule": [[0, 8], [20, 1]]})
    assert whole.all_k == (8, 1)
