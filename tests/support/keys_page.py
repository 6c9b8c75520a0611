"""docs/keys.md, generated from the tables of keys and the config comments.

Usage: ``python -m tests.support.keys_page`` rewrites the page.
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
"""Section -> the file that ships the section, and its table."""
_ALARMS = "offpolicy.alarms."
_ALARM = f"{_ALARMS}ess"
"""The alarm whose YAML comments explain the keys that all alarms have."""
HEAD = """# Keys

Every key of `offpolicy` and of the extensions, with default, values and effect. The keys of `correction` are
in [correction_keys.md](correction_keys.md). `python -m tests.support.keys_page` generates this page from the tables
that the start-up checks read and from the comments in `configs/`.
"""


def read_comments(file: Path) -> dict[str, str]:
    """Read the comment above each key of a YAML file, by the key's full name; keys without a blank line between them
    share one.
    """
    found: dict[str, str] = {}
    path: list[str] = []
    said: list[str] = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.strip().startswith("#"):
            said.append(line.strip()[1:].strip())
        elif match := re.match(r"( *)(\w+):", line):
            path[len(match[1]) // 2 :] = [match[2]]
            found[".".join(path)] = " ".join(said)
        if not line.strip() or re.match(r" *\w+:$", line):
            said = []
    return found


def read_default(section: str, name: str) -> str:
    """Read the shipped value of a key."""
    file, _ = TABLES[section]
    found: Any = OmegaConf.select(
        OmegaConf.load(ROOT / "configs" / file), f"{section}.{name}" if file == BASE else name
    )
    return f"`{quote_value(OmegaConf.to_container(found) if OmegaConf.is_config(found) else found)}`"


def describe(section: str, name: str) -> tuple[str, str]:
    """Describe the values that a key accepts, and its effect."""
    file, keys = TABLES[section]
    key, words = keys[name], keys[name].words
    if key.read_with is not None:
        other, value = key.read_with
        words += f"; only read if `{other}` is set" if value is ... else f"; only read with `{other}={value}`"
    return words, read_comments(ROOT / "configs" / file)[f"{section}.{name}" if file == BASE else name]


def build_table(title: str, *rows: tuple[str, ...]) -> list[str]:
    """Build a section with a table, from its rows; the first row is the heading."""
    cells = [[cell.replace("|", "\\|").replace("\n", "\\n") for cell in row] for row in rows]
    head, *rest = (f"| {' | '.join(row)} |" for row in cells)
    return [f"## {title}", "", head, "|---" * len(rows[0]) + "|", *rest, ""]


def build_alarms() -> Iterator[str]:
    """Build the table of the keys that all alarms have, and the table of their defaults."""
    alarms = {
        section.removeprefix(_ALARMS): keys for section, (_, keys) in TABLES.items() if section.startswith(_ALARMS)
    }
    owners = {name: alarm for alarm, keys in reversed(alarms.items()) for name in keys}
    shared = list(TABLES[_ALARM][1])
    names = shared + [name for name in owners if name not in shared]
    labels = {name: f"{name} ({owners[name]} only)" if name not in shared else name for name in names}
    rows = [(f"`{labels[name]}`", *describe(f"{_ALARMS}{owners[name]}", name)) for name in names]
    yield from build_table(f"{_ALARMS}ALARM", ("key", "values", "effect"), *rows)
    values = [
        (f"`{alarm}`", *(read_default(f"{_ALARMS}{alarm}", name) if name in keys else "" for name in names))
        for alarm, keys in alarms.items()
    ]
    yield from build_table("Defaults of the alarms", ("ALARM", *(f"`{name}`" for name in names)), *values)


def build_page() -> str:
    """Build the whole page."""
    lines = [HEAD]
    for section, (_, keys) in TABLES.items():
        if section == _ALARM:
            lines += build_alarms()
        if not section.startswith(_ALARMS):
            rows = [(f"`{name}`", read_default(section, name), *describe(section, name)) for name in keys]
            lines += build_table(section, ("key", "default", "values", "effect"), *rows)
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(build_page(), encoding="utf-8")
