"""The tables of docs/comparison.md, generated from the facts in tests/data/peers.toml and from our own catalogue.

Usage: ``python -m tests.support.comparison_page`` rewrites them.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import tomllib
from typing import Any, get_args

from recipe.offpolicy.correction.correction_parts import CorrectionParts, Proximal
from recipe.offpolicy.correction.masks import AGGREGATES
from recipe.offpolicy.correction.units import Level, MaskWhen
from recipe.offpolicy.correction.weights import Kind, WeightAggregate
from tests.support.keys_page import TABLES
from tests.support.paths import ROOT
from tests.support.presets import PRESETS

PAGE = ROOT / "docs/comparison.md"
FACTS: dict[str, Any] = tomllib.loads((ROOT / "tests/data/peers.toml").read_text(encoding="utf-8"))
BLOCK = "<!-- {} of tests/data/peers.toml -->"


def list_catalogue() -> set[str]:
    """List the parts of a correction, with the names that ``ours`` of a feature uses."""
    kinds = {
        "kind": get_args(Kind),
        "level": get_args(Level),
        "weight aggregate": get_args(WeightAggregate),
        "aggregate": AGGREGATES,
        "proximal": get_args(Proximal),
        "when": get_args(MaskWhen),
        "key": [field.name for field in dataclasses.fields(CorrectionParts)],
    }
    return {f"{kind} {name}" for kind, names in kinds.items() for name in names}


def has(part: str) -> bool:
    """Return True if this project has an item: a part of the catalogue, an option, a section of keys, or a file."""
    kind, _, name = part.rpartition(" ")
    if kind == "file":
        return (ROOT / name).exists()
    known = {"option": PRESETS, "section": TABLES}.get(kind)
    return name in known if known is not None else bool(fnmatch.filter(list_catalogue(), part))


def mark_own(feature: dict[str, Any]) -> str:
    """Return the cell of our own column in a feature's row."""
    return "y" if feature["ours"] and all(map(has, feature["ours"])) else "-"


def list_unclaimed() -> set[str]:
    """List the parts of the catalogue that neither a row nor an entry of ``here.other`` names."""
    claims = [part for feature in FACTS["feature"] for part in feature["ours"]] + FACTS["here"]["other"]
    return {part for part in list_catalogue() if not any(fnmatch.fnmatch(part, claim) for claim in claims)}


def list_denied() -> list[str]:
    """List the columns that claim to be ahead by something which this project has, with the word that says so."""
    words = [word for word, part in FACTS["here"]["denied"].items() if has(part)]
    leads = {name: framework["ahead"] for name, framework in FACTS["framework"].items()}
    return [f"{name}: {word}" for name, lead in leads.items() for word in words if word in lead]


def build_features() -> str:
    """Build the table of features."""
    columns = FACTS["framework"]
    lines = [f"| | here | {' | '.join(columns)} |", "|---" * (len(columns) + 2) + "|"]
    for feature in FACTS["feature"]:
        found = [feature["in"].get(column, "") for column in columns]
        cells = ["p" if cell.startswith("p ") else "y" if cell else "-" for cell in found]
        lines.append(f"| {feature['name']} | {mark_own(feature)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def build_sources() -> str:
    """Build the table of releases, of each cell's file, and of the features in which a framework is ahead."""
    lines = ["| column | framework | read | files of the cells | ahead of this project |", "|---|---|---|---|---|"]
    for column, framework in FACTS["framework"].items():
        cells = [feature["in"][column].removeprefix("p ") for feature in FACTS["feature"] if column in feature["in"]]
        missing = sorted(set(cells) - set(framework["files"]))
        assert not missing, f"framework.{column}.files lacks {missing}"
        files = [f"`{path}`" if "/" in path else path for name, path in framework["files"].items()]
        release = f"{framework['release']}, {framework['read']}"
        lines.append(f"| {column} | {framework['name']} | {release} | {', '.join(files)} | {framework['ahead']} |")
    return "\n".join(lines)


def build_page() -> str:
    """Return the page with its generated tables replaced."""
    text = PAGE.read_text(encoding="utf-8")
    for name, table in (("features", build_features()), ("sources", build_sources())):
        mark = BLOCK.format(name)
        before, _, after = text.split(mark)
        text = f"{before}{mark}\n{table}\n{mark}{after}"
    return text


if __name__ == "__main__":
    PAGE.write_text(build_page(), encoding="utf-8")
