"""A plugin: what Hydra and OmegaConf read is parsed once a process, and a correction composed once.

Reading verl's thirty files in Python is half of what a composition takes, and parsing the same interpolations again a
third of what the start-up checks of a configuration take. Each file is handed out as a copy of its own, and of an
interpolation OmegaConf only visits the tree.

Without a launch a correction is composed from the shipped files alone, so that equal overrides compose equal values:
the same few are asked for by each page and each table of a recording.
"""

from __future__ import annotations

import functools
import io
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import omegaconf._utils
import omegaconf.base
import pytest
from omegaconf import OmegaConf, grammar_parser

from recipe.offpolicy.analysis.whatif import candidates


@pytest.fixture(autouse=True, scope="session")
def _parsed_once() -> Iterator[None]:
    read = OmegaConf.load
    known: dict[str, bytes] = {}

    def load(file: str | Path | IO[Any]) -> Any:
        text = Path(file).read_text("utf-8") if isinstance(file, str | Path) else file.read()
        if text not in known:
            known[text] = pickle.dumps(read(io.StringIO(text)))
        return pickle.loads(known[text])

    interpolation = functools.lru_cache(maxsize=None)(grammar_parser.parse)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OmegaConf, "load", load)
        for module in (omegaconf.base, omegaconf._utils):
            patch.setattr(module, "parse", interpolation)
        yield


@pytest.fixture(autouse=True, scope="session")
def _composed_once() -> Iterator[None]:
    composed = candidates.compose
    known: dict[tuple[str, ...], Any] = {}

    def compose_once(name: str, overrides: Sequence[str], **options: Any) -> Any:
        key = (name, *overrides)
        if key not in known:
            known[key] = composed(name, overrides=list(overrides), **options)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(candidates, "compose", compose_once)
        yield
