from __future__ import annotations

from omegaconf import OmegaConf

from recipe.offpolicy.delivery.checksums import DeliverySettings, find_problems


def test_the_defaults() -> None:
    config = OmegaConf.create({"offpolicy": {"delivery": {"sums": 4, "probe": None}}})
    assert list(find_problems(config)) == []
    assert DeliverySettings.from_config(config) == DeliverySettings(sums=4, probe=None)
    assert DeliverySettings.from_config(OmegaConf.create({"offpolicy": {}})) == DeliverySettings(sums=1, probe=5)
