"""Messages about words of a launch that only running the script would determine, and their fixes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from .bash import Unknown

KEY = re.compile(r"[+]{0,2}([\w./@-]+)=", re.S)


def describe_overrides(unknowns: Sequence[Unknown], script: Path) -> str:
    """Describe which overrides of a launch are unknown, why, and the fix."""
    keys = [found[1] for each in unknowns if (found := KEY.match(each.prefix))]
    few = "an override is" if len(unknowns) == 1 else f"{len(unknowns)} overrides are"
    named = f" ({', '.join(dict.fromkeys(keys))})" if keys else ""
    return f"{few} unknown{named}: {describe_unknowns(unknowns, script)}"


def describe_unknowns(unknowns: Sequence[Unknown], script: Path) -> str:
    """Describe why values are unknown, each cause once, with the fixes."""
    lines: dict[str, int] = {}
    for each in unknowns:
        lines.setdefault(each.why, each.line)
    causes = [f"{why} (line {line})" for why, line in lines.items()]
    # ${X:?} does not allow an empty value.
    unset = {each.unset: not each.required for each in unknowns if each.unset}
    fixes = dict.fromkeys(
        filter(
            None,
            (
                *propose_exports(unset),
                _propose_in_front(unknowns),
                *_propose_values(unknowns, script),
            ),
        )
    )
    proposed = f" Fix: {', and '.join(fixes)}." if fixes else ""
    return f"{'; '.join(causes)}.{proposed}"


def propose_exports(names: Mapping[str, bool]) -> list[str]:
    """Suggest exports of variables, noting if bash accepts an empty value, and script arguments for names like "1"."""
    as_empty = " (bash treats it as empty)"
    fixes = [f"export {name}=VALUE{as_empty * empty}" for name, empty in names.items() if not name.isdigit()]
    if any(name.isdigit() for name in names):
        fixes.append("give the script's arguments after --script FILE")
    return fixes


def _propose_in_front(unknowns: Sequence[Unknown]) -> str:
    names = dict.fromkeys(each.variable for each in unknowns if each.variable and not each.unset)
    return f"put {' '.join(f'{name}=VALUE' for name in names)} before the command" if names else ""


def _propose_values(unknowns: Sequence[Unknown], script: Path) -> list[str]:
    """Suggest values for keys that neither a variable nor an argument determines."""
    left = [each for each in unknowns if not each.variable and not each.unset]
    keys = dict.fromkeys(found[1] for each in left if (found := KEY.match(each.prefix)))
    values = " ".join(f"{key}=VALUE" for key in keys)
    return [f"to check the launch with values of your own, add {values} after --script {script}"] if keys else []
