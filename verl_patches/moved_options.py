"""Former names of options in the group ``correction``, and the message that explains them."""

from __future__ import annotations

import re
from collections.abc import Sequence

_GROUP = "correction"
_PRESETS = {
    "nemo": "outlier",
    "roll": "diff diff_turn",
    "skyrl": "recommended",
    "trl": "default",
    "verl": "bypass_pg_geo_rs bypass_pg_geo_rs_seq_tis bypass_pg_geo_rs_token_tis bypass_pg_is bypass_pg_token_icepop "
    "bypass_ppo_clip bypass_ppo_clip_geo_rs bypass_ppo_clip_k3_rs decoupled_geo_rs decoupled_geo_rs_seq_tis "
    "decoupled_geo_rs_token_tis decoupled_k3_rs decoupled_k3_rs_seq_tis decoupled_k3_rs_token_tis decoupled_seq_is "
    "decoupled_seq_is_rs decoupled_token_icepop decoupled_token_is disabled",
}
_PAPERS = ("deepseek_v32_opsm", "dppo_tv", "kpop", "liu2025_mis", "m2po", "topr", "vaco", "yao2025_tis")
MOVED = {
    **{f"{folder}_{name}": f"{folder}/{name}" for folder, names in _PRESETS.items() for name in names.split()},
    **{name: f"paper/{name}" for name in _PAPERS},
    "icepop_wide": "openrlhf/icepop",
    "opsm_slime": "slime/opsm",
    "opsm_trl": "trl/opsm",
}
"""Former name -> current name."""
_NAME = re.compile(r"(?<![\w/.])\w+(?![\w/.])")


def rename(value: str) -> str:
    """Replace former names with current names in the value of an override.

    Example:
        >>> rename("[yao2025_tis,gsm]")
        '[paper/yao2025_tis,gsm]'
    """
    return _NAME.sub(lambda found: MOVED.get(found[0], found[0]), value)


def _list_moved(value: str) -> list[str]:
    """List the former names in the value of an override."""
    return [name for name in dict.fromkeys(_NAME.findall(value)) if name in MOVED]


def explain_moved(config: str | None, overrides: Sequence[str]) -> str | None:
    """Explain that Hydra cannot find a configuration because it was renamed; None if it was not renamed.

    Args:
        config: the configuration that Hydra looked for, such as "correction/yao2025_tis".
        overrides: the overrides on the command line.
    """
    name = (config or "").removeprefix(f"{_GROUP}/")
    if name == config or name not in MOVED:
        return None
    for override in overrides:
        key, _, value = override.partition("=")
        if key.lstrip("+").partition("@")[0].strip() == _GROUP and name in _list_moved(value):
            return f"{override}: {describe_moved(_list_moved(value))} Set {_quote(f'{key}={rename(value)}')}."
    # The name occurs in the defaults list of a file.
    return f"{_GROUP}={name}: {describe_moved([name])} Set {_GROUP}={MOVED[name]}."


def describe_moved(names: Sequence[str]) -> str:
    """List the current names in a sentence."""
    return f"{', '.join(f'{name} is now {MOVED[name]}' for name in names)}."


def _quote(override: str) -> str:
    """Quote an override for the shell if it is a list."""
    return f"'{override}'" if "[" in override else override
