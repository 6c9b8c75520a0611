"""The CUDA platform uses flash-attn with packed rows if it can be imported, and reports its choice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.support.applications import application
from verl_patches.hydra_sections import (
    ATTENTION,
    REMOVE_PADDING,
    RESOLVER,
    explain_missing_flash_attention,
    settle_flash_attention,
)

FAILURE = "flash_attn_2_cuda.so: undefined symbol: _ZN3c105ErrorC2E\nin another line"
BROKEN = f"raise ImportError({FAILURE!r})"


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "flash_attn", raising=False)
    explain_missing_flash_attention.cache_clear()
    yield
    explain_missing_flash_attention.cache_clear()


def install(folder: Path, code: str) -> None:
    (folder / "flash_attn").mkdir()
    (folder / "flash_attn" / "__init__.py").write_text(code)


@pytest.mark.parametrize(
    ("code", "overrides", "values", "said"),
    [
        (None, (), ("sdpa", False), "attn_implementation=sdpa, use_remove_padding=false: flash-attn is not installed"),
        (
            BROKEN,
            (),
            ("sdpa", False),
            "attn_implementation=sdpa, use_remove_padding=false: "
            "flash-attn cannot be imported (flash_attn_2_cuda.so: undefined symbol: _ZN3c105ErrorC2E)",
        ),
        # What the user sets is kept, and only the rest is reported.
        ("", (f"{REMOVE_PADDING}=false",), ("flash_attention_2", False), "attn_implementation=flash_attention_2: "),
        (None, (f"{REMOVE_PADDING}=true", f"{ATTENTION}=eager"), ("eager", True), None),
    ],
)
def test_the_platform_follows_what_is_installed(
    code: str | None, overrides: tuple[str, ...], values: tuple[str, bool], said: str | None, tmp_path: Path
) -> None:
    if code is not None:
        install(tmp_path, code)
    with application("platform=cuda", *overrides, primary="quickstart") as config:
        lines = settle_flash_attention(config)
        # Workers have no such interpolation.
        OmegaConf.clear_resolver(RESOLVER)
        found = OmegaConf.select(config, ATTENTION), OmegaConf.select(config, REMOVE_PADDING)
    assert found == values
    assert len(lines) == (said is not None)
    assert all(line.startswith(said or "") for line in lines)
