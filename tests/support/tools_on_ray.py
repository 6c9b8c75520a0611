"""Each analysis tool alone, by eight processes and on a Ray cluster, in one driver; prints whether all are alike.

python tools_on_ray.py RECORDING FOLDER

The page is written where it runs; a marker of the worker that died lies in FOLDER.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
from functools import partial
from importlib import import_module
from pathlib import Path

import ray

SPEC = ("--spec", "correction=[tis_token,gsm]")
TOOLS = {
    "attribute": ("--json",),
    "whatif": (*SPEC, "--json"),
    "calibrate": (*SPEC, "--target-kept", "0.98", "--target-ess", "0.9", "--json"),
    "report": ("--out", "report.html"),
}


def die_once(folder: Path, number: int) -> int:
    """Die as for lack of memory, in the first attempt at one item."""
    marker = folder / str(number)
    if number == 3 and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def run_tool(tool: str, *arguments: str) -> str:
    """Run a tool in this process, and return its output or the page that it wrote."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        import_module(f"recipe.offpolicy.{tool}").main(arguments)
    return Path("report.html").read_text() if tool == "report" else printed.getvalue()


def join(recording: str, folder: str, address: str) -> None:
    """Print for each tool whether all results are equal, and are more than an empty page."""
    # Here, so that the process that holds the cluster does without torch.
    from recipe.offpolicy.analysis.jobs import Jobs

    for tool, arguments in TOOLS.items():
        who = ("--jobs", "1"), ("--jobs", "8"), ("--ray", address)
        alone, eight, shared = (run_tool(tool, recording, *arguments, *more) for more in who)
        print(tool, "alike", alone == eight == shared, len(alone) > 1000, flush=True)
    found = list(Jobs(ray=address).map(partial(die_once, Path(folder)), range(8)))
    print("in order", found == list(range(8)), flush=True)


def main(recording: str, folder: str) -> None:
    """Start the cluster, and a driver that joins it."""
    ray.init(num_cpus=2, include_dashboard=False)
    try:
        address = ray.get_runtime_context().gcs_address
        subprocess.run([sys.executable, __file__, "--join", recording, folder, address], check=True)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    join(*sys.argv[2:]) if sys.argv[1] == "--join" else main(*sys.argv[1:])
