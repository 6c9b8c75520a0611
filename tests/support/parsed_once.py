"""A plugin: YAML that Hydra and OmegaConf read is parsed once a process, and not anew for each composition.

Parsing verl's thirty files in Python is half of what a composition takes. OmegaConf copies what it is given, so that
all compositions can share it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import yaml


@pytest.fixture(autouse=True, scope="session")
def _parsed_once() -> Iterator[None]:
    parse = yaml.load
    known: dict[str, Any] = {}

    def load(stream: Any, Loader: Any) -> Any:
        if Loader.__name__ != "OmegaConfLoader":
            return parse(stream, Loader)
        text = stream if isinstance(stream, str) else stream.read()
        if text not in known:
            known[text] = parse(text, Loader)
        return known[text]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(yaml, "load", load)
        yield
