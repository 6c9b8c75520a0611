"""For a key that verl no longer has, the doctor names the last release that has it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from omegaconf import DictConfig
from packaging.version import Version

from recipe.offpolicy.doctor.launch import compose
from recipe.offpolicy.doctor.program import Launch
from recipe.offpolicy.doctor.unknown_keys import find_last_release, find_successor
from verl_patches.contract import installed_release


@pytest.mark.parametrize(
    ("key", "value", "last", "said"),
    [
        ("critic.model.fsdp_config.wrap_policy.x", "1", "0.7.1", "Write critic.fsdp.wrap_policy.x=1."),
        ("data.continuous_token.enable", "True", "0.9.0", "Launch with verl 0.9.0."),
        ("reward_model.model.input_tokenizer", "null", "0.7.0", "Delete this override: null has no effect."),
        ("algorithm.rollout_correction.rollout_token_veto_threshold", "1e-4", "0.7.0", "Instead: one of our masks"),
    ],
)
def test_a_former_key(key: str, value: str, last: str, said: str) -> None:
    assert find_last_release(key) == last
    assert find_successor(key, value, last).startswith(said)


def test_no_key_of_the_installed_release_counts_as_former() -> None:
    """This covers the keys of all of verl's programs, by the names of every section."""
    installed = Version(str(installed_release("verl")))
    for arguments in ((), ("--config-name=ppo_megatron_trainer",)):
        keys = list(_list_keys(compose(Launch("verl.trainer.main_ppo", arguments)), ""))
        assert len(keys) > 500
        former = {key: last for key in keys if (last := find_last_release(key)) and Version(last) < installed}
        assert not former


def _list_keys(section: DictConfig, path: str) -> Iterator[str]:
    for name in section:
        node = section._get_node(name)
        yield f"{path}{name}"
        if isinstance(node, DictConfig) and not node._is_none() and not node._is_interpolation():
            yield from _list_keys(node, f"{path}{name}.")
