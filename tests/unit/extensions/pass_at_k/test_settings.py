"""What the section leaves out is as the option ships it, and k goes by its schedule."""

from __future__ import annotations

from recipe.offpolicy.extensions.pass_at_k.settings import PassAtKSettings


def test_defaults_and_schedules() -> None:
    settings = PassAtKSettings.from_mapping("pass_at_k", {"objective": "loo"})
    assert (settings.k, settings.all_k, settings.get_k(99)) == (4, (4,), 4)
    later = PassAtKSettings.from_mapping("pass_at_k", {"objective": "loo", "schedule": [[10, 2], [20, 1]]})
    assert [later.get_k(step) for step in (1, 9, 10, 19, 20, 99)] == [4, 4, 2, 2, 1, 1]
    assert later.all_k == (4, 2, 1)
    whole = PassAtKSettings.from_mapping("pass_at_k", {"objective": "loo", "schedule": [[0, 8], [20, 1]]})
    assert whole.all_k == (8, 1)
