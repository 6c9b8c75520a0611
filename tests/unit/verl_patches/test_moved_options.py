"""A former name of an option is told from keys, folders and names of today."""

from __future__ import annotations

from verl_patches.moved_options import describe_moved, explain_moved, rename


def test_names_of_today() -> None:
    assert rename("[verl_disabled, 'm2po',gsm,trl/m2po,x.m2po]") == "[verl/disabled, 'paper/m2po',gsm,trl/m2po,x.m2po]"
    assert describe_moved(["m2po", "opsm_trl"]) == "m2po is now paper/m2po, opsm_trl is now trl/opsm."


def test_only_former_names_of_the_group_are_explained() -> None:
    assert explain_moved("actor/m2po", ["actor=m2po"]) is None
    assert explain_moved("m2po", []) is None
    assert explain_moved(None, []) is None
    assert explain_moved("correction/m2p", ["correction=m2p"]) is None
    # All former names of an override at once, and another key's value is not the group's.
    given = ["x.y=m2po", "+correction@correction=[kpop,m2po,gsm]"]
    assert explain_moved("correction/m2po", given) == (
        "+correction@correction=[kpop,m2po,gsm]: kpop is now paper/kpop, m2po is now paper/m2po. "
        "Set '+correction@correction=[paper/kpop,paper/m2po,gsm]'."
    )
