"""Modules looked at without importing them: verl's import alone takes seconds."""

from __future__ import annotations

import ast
import importlib.util
from dataclasses import dataclass
from pathlib import Path


def source_of(module: str) -> Path | None:
    """The file of a module by its dotted name, as ``python -m`` would find it; None if there is none."""
    top, *below = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ValueError, ImportError):
        return None
    if spec is None:
        return None
    if not below and spec.submodule_search_locations is None:
        return Path(spec.origin) if spec.origin else None
    for folder in spec.submodule_search_locations or ():
        path = Path(folder, *below)
        for candidate in (path.with_suffix(".py") if below else path / "__main__.py", path / "__main__.py"):
            if candidate.is_file():
                return candidate
        if (path / "__init__.py").is_file():
            return path / "__init__.py"
    return None


@dataclass(frozen=True)
class HydraMain:
    """What a program's ``@hydra.main`` says about its configuration, None where it says nothing; and its file."""

    file: Path
    config_path: str | None
    config_name: str | None


def hydra_main(path: Path) -> HydraMain | None:
    """The arguments of the ``@hydra.main`` of a program; None where it has none with literal arguments."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "hydra.main":
            given = {keyword.arg: keyword.value for keyword in node.keywords}
            values = [given.get(name, ast.Constant(None)) for name in ("config_path", "config_name")]
            if all(isinstance(value, ast.Constant) for value in values):
                config_path, config_name = (ast.literal_eval(value) for value in values)
                return HydraMain(path, config_path, config_name)
    return None
