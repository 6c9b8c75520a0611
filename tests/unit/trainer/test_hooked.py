"""A process of a corrected run has hooks on verl's trainers, and a logger that is heard."""

from __future__ import annotations

import subprocess
import sys

import pytest
from omegaconf import OmegaConf

from recipe.offpolicy.trainer import hooked

WITHOUT = "import pickle, sys; from omegaconf import OmegaConf; OmegaConf.resolve(pickle.load(sys.stdin.buffer))"


@pytest.mark.slow
@pytest.mark.parametrize("imports", ["", f"import {hooked.MODULE}; "])
def test_a_process_without_the_hooks_cannot_resolve_the_configuration(imports: str) -> None:
    import pickle

    config = OmegaConf.create({"trainer": {"device": "cpu"}})
    hooked.mark(config)
    done = subprocess.run([sys.executable, "-c", imports + WITHOUT], input=pickle.dumps(config), capture_output=True)
    assert (done.returncode == 0) is bool(imports)
    assert (b"offpolicy_hooked" in done.stderr) is not bool(imports)


def test_what_only_samples_is_no_trainer() -> None:
    class FullyAsyncRollouter:
        """verl's, by name: Ray's actors carry their class by value."""

    class Derived(FullyAsyncRollouter):
        """A fork's."""

    assert not hooked.trains(FullyAsyncRollouter)
    assert not hooked.trains(Derived)
    assert hooked.trains(object)


def test_installing_twice_hooks_once() -> None:
    before = list(sys.meta_path)
    hooked.install()
    assert sys.meta_path == before


SAY = (
    "from recipe.offpolicy.trainer.hooked import logger, set_up_logger\n"
    "set_up_logger(); set_up_logger()\nlogger.info('it is live')\n"
)


def said(setup: str = "", **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", setup + SAY], env=environment, capture_output=True, text=True, check=True
    )
    return done.stderr


def test_once_where_nobody_set_up_a_logger() -> None:
    assert said().count("it is live") == 1
