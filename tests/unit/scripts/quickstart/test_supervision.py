"""Options, limits and progress of the quickstart's supervisor."""

from __future__ import annotations

import pytest

from scripts.quickstart.options import Options


@pytest.mark.parametrize(
    ("env", "overrides", "options"),
    [
        ({}, [], Options(model=None, platform="cpu")),
        ({"TASK": "free_length"}, ["platform=cpu", "a=3", "platform=cuda"], Options(None, "cuda", "free_length")),
        ({}, ["model=moe"], Options(None, "cpu", mixture=True)),
        ({"TASK": "free_length"}, ["length_penalty=anchor"], Options(None, "cpu", "free_length")),
        ({}, ["process_reward=prefix_value"], Options(None, "cpu", "process_reward")),
    ],
)
def test_options_are_of_the_environment_and_of_overrides(env, overrides, options):
    assert Options.read(env, overrides) == options


@pytest.mark.parametrize(
    ("env", "overrides", "message"),
    [
        ({"MODEL": "/nowhere"}, [], "MODEL=/nowhere"),
        ({}, ["model=dense"], "model=dense"),
        (
            {},
            ["model=moe", "process_reward=prefix_value"],
            "model=moe: the mixture of experts has its own task",
        ),
        ({"TASK": "long"}, [], "TASK=long: choose one of spelling, free_length"),
        ({"MODEL": "smollm2", "TASK": "free_length"}, [], "smollm2|arithmetic"),
    ],
)
def test_bad_options_name_the_key_and_the_value(env, overrides, message):
    with pytest.raises(ValueError, match=message):
        Options.read(env, overrides)
