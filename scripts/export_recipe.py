"""Writes the part of this project that verl's collection of recipes could include: one folder of at most 2 000 lines.

    python scripts/export_recipe.py DIR     # writes DIR/offpolicy_correction

DIR is a checkout of verl-recipe, or any folder. The options are the files in configs/correction, and ratios.py contains
functions from recipe/offpolicy/correction/ratios.py. The rest is the compact implementation in scripts/export. An
existing export is updated in place; a folder with other files is not changed.
"""

from __future__ import annotations

import argparse
import ast
import re
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NAME = "offpolicy_correction"
TEMPLATE = ROOT / "scripts" / "export" / NAME
OPTIONS = ("none", "tis_token", "tis_sequence", "mis_token", "mis_sequence", "gsm", "opsm", "outlier")
RATIOS = ROOT / "recipe" / "offpolicy" / "correction" / "ratios.py"
MOST_LINES = 2000


def find_imported(source: str, module: str) -> set[str]:
    """Find the names that ``source`` imports from the sibling module."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom) and node.module == module]
    return {alias.name for node in nodes for alias in node.names}


def select_functions(source: str, names: set[str]) -> str:
    """Leave out a module's top-level functions, except those in ``names`` and those that a kept function uses."""
    functions = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    kept, todo = set(), names & functions.keys()
    while todo:
        kept.add(name := todo.pop())
        read = {node.id for node in ast.walk(functions[name]) if isinstance(node, ast.Name)}
        todo |= read & functions.keys() - kept
    lines = source.splitlines(keepends=True)
    for name in functions.keys() - kept:
        node = functions[name]
        lines[node.lineno - 1 : node.end_lineno] = [""] * ((node.end_lineno or node.lineno) - node.lineno + 1)
    return re.sub(r"\n{4,}", "\n\n\n", "".join(lines).rstrip() + "\n")


def build_files() -> dict[str, str]:
    """Build the recipe's files: path in the recipe's folder -> content."""
    version = runpy.run_path(str(ROOT / "recipe" / "offpolicy" / "version.py"))["VERSION"]
    files = {
        path.relative_to(TEMPLATE).as_posix(): path.read_text()
        for path in sorted(TEMPLATE.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
    imported = {name for text in files.values() if "from .ratios" in text for name in find_imported(text, "ratios")}
    files["ratios.py"] = select_functions(RATIOS.read_text(), imported)
    for option in OPTIONS:
        files[f"config/correction/{option}.yaml"] = (ROOT / "configs" / "correction" / f"{option}.yaml").read_text()
    tag = [line for line in (RATIOS.parents[1] / "REQUIRED_VERL.txt").read_text().splitlines() if "NOTES=" not in line]
    notes = f"NOTES=V1 trainer, FSDP. Exported from verl-offpolicy {version}."
    files["REQUIRED_VERL.txt"] = "\n".join([f"# {NAME}: the release that it was tested with", *tag[1:], notes, ""])
    return files


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", metavar="DIR", type=Path, help="where to write the folder")
    folder = parser.parse_args().directory / NAME
    files = build_files()
    found = [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    if foreign := [path for path in found if path.relative_to(folder).as_posix() not in files]:
        print(f"export_recipe: {foreign[0]} is not part of the export. Name another folder, or remove it.")
        return 2
    lines = sum(text.count("\n") for text in files.values())
    if lines > MOST_LINES:
        print(f"export_recipe: {lines} lines; a recipe has at most {MOST_LINES}.")
        return 1
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "run_offpolicy_correction.sh").chmod(0o755)
    print(f"{folder}: {len(files)} files, {lines} lines. Next: python -m {NAME}.smoke_test, in {folder.parent}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
