"""A plugin: the garbage collector only visits objects that tests create, not those that imports create.

torch, verl and pytest's items are millions of objects that live until the end. Visiting them again and again took a
third of the collection time.
"""

from __future__ import annotations

import atexit
import gc

import pytest

gc.disable()
# Libraries that look for leaks at the end would find what is frozen.
atexit.register(gc.unfreeze)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    gc.freeze()
    # Configurations are trees of nodes that know their parents: seldom enough not to visit them as they are built.
    gc.set_threshold(100_000, 20, 20)
    gc.enable()
