"""Keys in the tables of cases, which use short names for sections."""

from __future__ import annotations

import re
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser

from tests.support.paths import ROOT

SHORT = {
    "actor": "actor_rollout_ref.actor",
    "fsdp": "actor_rollout_ref.actor.fsdp_config",
    "megatron": "actor_rollout_ref.actor.megatron",
    "model": "actor_rollout_ref.model",
    "ref": "actor_rollout_ref.ref",
    "rollout": "actor_rollout_ref.rollout",
    "vllm": "actor_rollout_ref.rollout.engine_kwargs.vllm",
    "trtllm": "actor_rollout_ref.rollout.engine_kwargs.trtllm",
    "env": "ray_kwargs.ray_init.runtime_env.env_vars",
    "masks": "correction.masks",
    "weight": "correction.weight",
    "sampler": "trainer.v1.sampler",
    "v1": "trainer.v1",
    "verl": "algorithm.rollout_correction",
}
"""Short names of sections; a key after ^ is written in full."""
UNCHANGED = "as it is"


def in_full(override: str) -> str:
    """Write a key of a table as Hydra expects it."""
    sign, bare = override[: len(override) - len(override.lstrip("+~"))], override.lstrip("+~")
    top, dot, below = bare.partition(".")
    return f"{sign}{bare[1:]}" if bare.startswith("^") else f"{sign}{SHORT.get(top, top) if dot else top}{dot}{below}"


def read_changes(written: str) -> dict[str, Any]:
    """Convert the overrides of a table to full keys and values."""
    overrides = [] if written == UNCHANGED else list(map(in_full, written.split("; ")))
    return {each.key_or_group: each.value() for each in OverridesParser.create().parse_overrides(overrides)}


def read_table(name: str) -> list[tuple[str, list[list[str]]]]:
    """Read a table in tests/data: heads with their cases, which are overrides and the expected result; indented lines
    continue.
    """
    table: list[tuple[str, list[list[str]]]] = []
    for line in re.sub(r"\n {8,}", " ", (ROOT / "tests/data" / name).read_text()).splitlines():
        if line.startswith(" "):
            table[-1][1].append(line.strip().split(" -> "))
        elif not line.startswith("#"):
            table.append((line, []))
    return table
