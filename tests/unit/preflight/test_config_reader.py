"""What a composed configuration asks for, part by part."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError

from recipe.offpolicy.correction import SpecError
from recipe.offpolicy.preflight.composed import Composed, copy_config
from recipe.offpolicy.preflight.examination import list_parts
from recipe.offpolicy.preflight.hydra_groups import list_options, read_task_overrides
from recipe.offpolicy.preflight.python_source import find_source
from tests.support.applications import OPTIONS, application, without_verl
from tests.support.corrections import GSM, TIS, spec


def test_parts_are_named_with_what_they_mean(tmp_path: Path) -> None:
    with application("correction=[tis_token,gsm]", folder=without_verl(tmp_path)) as config:
        assert Composed(config).spec == spec(TIS, gsm=GSM)
        parts = list_parts(Composed(config))
        assert read_task_overrides() == ["correction=[tis_token,gsm]"]
        assert sorted(list_options()) == OPTIONS
    assert [(part.name, part.reads_mu, part.ours) for part in parts] == [
        ("weight", True, True),
        ("masks.gsm", True, True),
    ]
    assert parts[0].meaning == "token, truncate <= 2 on pi_old / mu"


def test_shadows_are_corrections_by_name() -> None:
    plain = spec(None, gsm=GSM)
    config = OmegaConf.create({"offpolicy": {"shadow": {"gsm": plain.to_mapping()}}})
    assert Composed(config).shadows == {"gsm": plain}
    assert Composed(OmegaConf.create({})).shadows == {}
    with pytest.raises(SpecError, match=r"offpolicy\.shadow"):
        _ = Composed(OmegaConf.create({"offpolicy": {"shadow": ["gsm"]}})).shadows


def test_a_copy_keeps_interpolations_and_what_is_locked_and_shares_nothing() -> None:
    config = OmegaConf.create({"data": {"n": 3}, "actor": {"n": "${data.n}", "list": [1]}})
    OmegaConf.set_struct(config, True)
    copied = copy_config(config)
    assert OmegaConf.to_container(copied, resolve=False) == OmegaConf.to_container(config, resolve=False)
    copied.data.n = 4
    copied.actor.list.append(2)
    assert (copied.actor.n, config.actor.n, config.actor.list) == (4, 3, [1])
    with pytest.raises(ConfigAttributeError):
        copied.data.other = 1


# A module's file, as ``python -m`` finds it, without importing it


def test_modules_packages_and_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("single.py", "package/__init__.py", "package/inner.py", "program/__init__.py", "program/__main__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert find_source("single") == tmp_path / "single.py"
    assert find_source("package") == tmp_path / "package" / "__init__.py"
    assert find_source("package.inner") == tmp_path / "package" / "inner.py"
    assert find_source("program") == tmp_path / "program" / "__main__.py"
    assert find_source("package.none") is None
    assert find_source("there_is_no_such_package.x") is None
