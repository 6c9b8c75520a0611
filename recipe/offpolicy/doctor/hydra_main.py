"""What a program says of its configuration, read without importing it."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class HydraMain:
    """What a program's ``@hydra.main`` says about its configuration, None where it says nothing; and its file."""

    file: Path
    config_path: str | None
    config_name: str | None


def read_hydra_main(path: Path) -> HydraMain | None:
    """The arguments of the ``@hydra.main`` of a program; None where it has none with literal arguments."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "hydra.main":
            given = {keyword.arg: keyword.value for keyword in node.keywords}
            values = [given.get(name, ast.Constant(None)) for name in ("config_path", "config_name")]
            if all(isinstance(value, ast.Constant) for value in values):
                config_path, config_name = (ast.literal_eval(value) for value in values)
                return HydraMain(path, config_path, config_name)
    return None
