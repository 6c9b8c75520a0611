"""Reading of a program's ``@hydra.main`` arguments without importing it."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class HydraMain:
    """The arguments of a program's ``@hydra.main``, None if not given, and its file."""

    file: Path
    config_path: str | None
    config_name: str | None


def read_hydra_main(path: Path) -> HydraMain | None:
    """Read the arguments of a program's ``@hydra.main``; None if it has none, or they are not literals."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "hydra.main":
            given = {keyword.arg: keyword.value for keyword in node.keywords}
            values = [given.get(name, ast.Constant(None)) for name in ("config_path", "config_name")]
            if all(isinstance(value, ast.Constant) for value in values):
                config_path, config_name = (ast.literal_eval(value) for value in values)
                return HydraMain(path, config_path, config_name)
    return None
