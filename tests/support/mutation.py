"""Mutation score of the unit tests: which single changes of the code does no test notice?

    python -m tests.support.mutation --out FILE [--mutants 200] [--seed 0] [--rooms correction proof ...]

Mutants are drawn from the executed lines of the rooms; each runs the tests that execute its line, in a copy of the
repository, until the first one fails. FILE has a line a mutant, and a further call goes on where it ended.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import random
import shutil
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.support.paths import ROOT

ROOMS = ("correction", "proof", "batch", "worker", "extensions", "staleness")
LIMIT = 120
"""Seconds after which a test counts as hanging, and its mutant as noticed."""
PRELOADED = ("torch", "tensordict", "omegaconf", "hypothesis", "transformers")
"""Modules that every test would import; they are imported once, before the forks."""
SWAPS: dict[type, type] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.FloorDiv: ast.Mult,
    ast.Pow: ast.Mult,
}


class Tracer:
    """A pytest plugin that records the lines of ``folder`` that each test executes, by file and line."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.lines = str(folder), defaultdict(set)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        def look(frame: FrameType, event: str, _: Any) -> Any:
            if not (file := frame.f_code.co_filename).startswith(self.folder):
                return None
            self.lines[file, frame.f_lineno].add(item.nodeid)
            return look

        sys.settrace(look)
        yield
        sys.settrace(None)


def find_mutations(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """List the mutations of a file, each as its line and a description; see ``mutate``."""
    annotations = {
        id(part)
        for node in ast.walk(tree)
        for name in ("annotation", "returns")
        if isinstance(getattr(node, name, None), ast.AST)
        for part in ast.walk(getattr(node, name))
    }
    for node in ast.walk(tree):
        if id(node) in annotations:
            continue
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Compare):
            old: Any = node.ops[0]
        elif isinstance(node, (ast.BinOp, ast.BoolOp, ast.AugAssign)):
            old = node.op
        elif isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float)):
            new = not node.value if isinstance(node.value, bool) else node.value + 1
            value, node.value = node.value, new
            yield line, f"{value} -> {new}"
            node.value = value
            continue
        else:
            continue
        if type(old) in SWAPS:
            swapped = SWAPS[type(old)]()
            put(node, swapped)
            yield line, f"{type(old).__name__} -> {type(swapped).__name__}"
            put(node, old)


def put(node: Any, operator: Any) -> None:
    if isinstance(node, ast.Compare):
        node.ops[0] = operator
    else:
        node.op = operator


def trace(rooms: list[str], cache: Path) -> dict[str, list[str]]:
    """Map "file:line" to the tests that execute this line; the map is kept in ``cache``."""
    if not cache.exists() and not (child := os.fork()):
        tracer = Tracer(ROOT / "recipe" / "offpolicy")
        pytest.main(["-q", "-p", "no:xdist", *(f"tests/unit/{room}" for room in rooms)], plugins=[tracer])
        found = {
            f"{Path(file).relative_to(ROOT)}:{line}": sorted(tests) for (file, line), tests in tracer.lines.items()
        }
        cache.write_text(json.dumps(found))
        os._exit(0)
    if not cache.exists():
        os.waitpid(child, 0)
    read: dict[str, list[str]] = json.loads(cache.read_text())
    return read


def draw(rooms: list[str], executed: dict[str, list[str]], seed: int, count: int) -> list[tuple[str, int, int, str]]:
    """Draw mutants: file, line, number among the file's mutations, description."""
    every = [
        (str(file.relative_to(ROOT)), line, number, text)
        for room in rooms
        for file in sorted((ROOT / "recipe" / "offpolicy" / room).rglob("*.py"))
        for number, (line, text) in enumerate(find_mutations(ast.parse(file.read_text())))
        if f"{file.relative_to(ROOT)}:{line}" in executed
    ]
    return random.Random(seed).sample(every, min(count, len(every)))


def run(copy: Path, file: str, number: int, tests: list[str]) -> str:
    """Run the tests of one mutant in a new process, and return "noticed" or "survived"."""
    source = (ROOT / file).read_text()
    tree = ast.parse(source)
    for at, _ in enumerate(find_mutations(tree)):
        if at == number:
            (copy / file).write_text(ast.unparse(tree))
            break
    if not (child := os.fork()):
        os.chdir(copy)
        sys.path[:] = [str(copy), *(entry for entry in sys.path if Path(entry or ".").resolve() != ROOT)]
        for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "recipe", "verl_patches")]:
            del sys.modules[name]
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, 1), os.dup2(sink, 2)
        options = ["-x", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", f"--timeout={LIMIT}", "--rootdir=."]
        os._exit(0 if pytest.main([*options, *tests]) == 0 else 1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    (copy / file).write_text(source)
    return "noticed" if status else "survived"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--mutants", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rooms", nargs="+", default=list(ROOMS))
    given = parser.parse_args()
    for name in PRELOADED:
        importlib.import_module(name)
    executed = trace(given.rooms, given.out.with_suffix(".lines.json"))
    done = [json.loads(line) for line in given.out.read_text().splitlines()] if given.out.exists() else []
    ended = {(one["file"], one["number"]) for one in done}
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv*", "outputs", "__pycache__"))
        for file, line, number, text in draw(given.rooms, executed, given.seed, given.mutants):
            if (file, number) in ended:
                continue
            verdict = run(copy, file, number, executed[f"{file}:{line}"])
            done.append({"file": file, "line": line, "number": number, "change": text, "verdict": verdict})
            with given.out.open("a") as out:
                out.write(json.dumps(done[-1]) + "\n")
    for one in done:
        if one["verdict"] == "survived":
            print(f"{one['file']}:{one['line']}: {one['change']}")
    counts = Counter(one["verdict"] for one in done)
    print(f"{counts['noticed']} of {len(done)} noticed")


if __name__ == "__main__":
    main()
