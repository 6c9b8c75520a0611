"""docs/keys.md, generated from the tables of keys and the config comments.

Usage: ``python -m tests.support.keys_page`` rewrites it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from recipe.offpolicy.batch.declared_keys import Key
from recipe.offpolicy.correction.problem import quote_value
from recipe.offpolicy.delivery import checksums
from recipe.offpolicy.extensions.length_penalty.settings import LengthSettings
from recipe.offpolicy.extensions.opd.settings import OpdSettings
from recipe.offpolicy.extensions.pass_at_k.settings import PassAtKSettings
from recipe.offpolicy.extensions.process_reward.settings import ProcessSettings
from recipe.offpolicy.extensions.turn_credit import TurnSettings
from recipe.offpolicy.extensions.vcpo import BaselineSettings, EssLrSettings
from recipe.offpolicy.monitor import alarm_settings, bound_settings
from recipe.offpolicy.preflight import auto_choice
from recipe.offpolicy.recording import run
from recipe.offpolicy.replay import batch_routes
from recipe.offpolicy.staleness import staleness_settings, weight_snapshots
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "keys.md"
BASE = "offpolicy_base.yaml"
TABLES: dict[str, tuple[str, Mapping[str, Key]]] = {
    section.path: (BASE, section.keys)
    for section in (
        staleness_settings.KEYS,
        batch_routes.KEYS,
        checksums.KEYS,
        weight_snapshots.KEYS,
        run.KEYS,
        *alarm_settings.KEYS.values(),
        bound_settings.KEYS,
        auto_choice.KEYS,
    )
} | {
    settings.option.split("/")[0]: (f"{settings.option}.yaml", settings.keys())
    for settings in (
        EssLrSettings,
        LengthSettings,
        OpdSettings,
        BaselineSettings,
        PassAtKSettings,
        ProcessSettings,
        TurnSettings,
    )
}
"""Section -> the file that ships it, and its table."""
_ALARM = "offpolicy.alarms.ess"
"""The alarm whose keys explain those of the others."""
HEAD = """# Keys

Every key of `offpolicy` and of the extensions, with default, values and effect. The keys of `correction` are
in [correction_keys.md](correction_keys.md). `python -m tests.support.keys_page` generates this page from the tables
that the start-up checks read and from the comments in `configs/`.
"""


def read_comments(file: Path) -> dict[str, str]:
    """Read the comment above each key of a YAML file, by the key's full name; keys without a line between share one."""
    found: dict[str, str] = {}
    path: list[str] = []
    said: list[str] = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.strip().startswith("#"):
            said.append(line.strip()[1:].strip())
        elif match := re.match(r"( *)(\w+):", line):
            path[len(match[1]) // 2 :] = [match[2]]
            found[".".join(path)] = " ".join(said)
        if not line.strip() or line.endswith(":"):
            said = []
    return found


def list_rows(section: str, file: str, keys: Mapping[str, Key]) -> Iterator[str]:
    """List the rows of a section's table."""
    shipped, comments = OmegaConf.load(ROOT / "configs" / file), read_comments(ROOT / "configs" / file)
    for name, key in keys.items():
        full = f"{section}.{name}" if file == BASE else name
        needed = "" if key.read_with is None else f"; read with `{key.read_with[0]}`"
        if needed and key.read_with and key.read_with[1] is not ...:
            needed = f"{needed[:-1]}={key.read_with[1]}`"
        default: Any = OmegaConf.select(shipped, full)
        plain = OmegaConf.to_container(default) if OmegaConf.is_config(default) else default
        cells = [
            f"`{name}`",
            f"`{quote_value(plain)}`",
            f"{key.words}{needed}",
            comments[full] or comments[f"{_ALARM}.{name}"],
        ]
        escaped = [cell.replace("|", "\\|").replace("\n", "\\n") for cell in cells]
        yield f"| {' | '.join(escaped)} |"


def build_page() -> str:
    """Build the whole page."""
    lines = [HEAD]
    for section, (file, keys) in TABLES.items():
        lines += [f"## {section}", "", "| key | default | values | effect |", "|---|---|---|---|"]
        lines += [*list_rows(section, file, keys), ""]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(build_page(), encoding="utf-8")
