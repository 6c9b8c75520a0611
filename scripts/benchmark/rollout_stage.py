"""Time and memory of ``verl_rollout_correction`` beside verl's own helper, on the same inputs.

    python scripts/benchmark/rollout_stage.py [--json FILE] [--curve FILE.png] [--quick]

Right-padded float32 log-probs and an int64 mask, 30 % of its tokens valid. Time: CPU seconds of one thread, both
helpers in turn, medians of the pairs. Memory: what the resident set of a fresh process grows by at most, in one call.
``--curve`` goes from 2^18 to 2^27 tokens with ours alone; the largest takes about 5 GiB.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # also in the processes that measure memory

REJECTIONS = (
    *("token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3"),
    *("seq_mean_k1", "seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3"),
)
BOUNDS = {"k1": "0.5_2.0", "k2": "0.1", "k3": "0.1"}
CASES: dict[str, dict[str, Any]] = {
    "token TIS": {"rollout_is": "token", "rollout_is_threshold": 2.0},
    "sequence TIS, geometric": {
        "rollout_is": "sequence",
        "rollout_is_threshold": 5.0,
        "rollout_rs": "seq_mean_k1",
        "rollout_rs_threshold": "0.99_1.01",
    },
    "normalised TIS, all 11": {
        "rollout_is": "token",
        "rollout_is_threshold": 2.0,
        "rollout_is_batch_normalize": True,
        "rollout_rs": ",".join(REJECTIONS),
        "rollout_rs_threshold": ",".join(BOUNDS[option[-2:]] for option in REJECTIONS),
    },
}
SHAPES = ((256, 2048), (1024, 4096), (1024, 8192))
CURVE = tuple((2**k // 4096, 4096) for k in range(18, 28))
Helper = Callable[..., Any]


def helper(name: str) -> Helper:
    if name == "verl":
        from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

        return compute_rollout_correction_and_rejection_mask
    from recipe.offpolicy.translate import verl_rollout_correction

    return verl_rollout_correction


def inputs(rows: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """pi_old, mu and mask; lengths are uniform up to 0.6 of the width, so that 30 % of the tokens are valid."""
    generator = torch.Generator().manual_seed(0)
    lengths = (torch.rand(rows, generator=generator) * 0.6 * width).long().clamp(min=1)
    mask = (torch.arange(width) < lengths[:, None]).long()
    mu = torch.empty(rows, width).exponential_(generator=generator).neg_() * mask
    old = mu + 0.02 * torch.randn(rows, width, generator=generator) * mask
    return old, mu, mask


def seconds(call: Helper, tensors: Sequence[Tensor], options: dict[str, Any], threads: int = 1) -> tuple[float, float]:
    """CPU time of this process and wall time of one call."""
    torch.set_num_threads(threads)
    wall, cpu = time.perf_counter(), time.process_time()
    call(*tensors, **options)
    return time.process_time() - cpu, time.perf_counter() - wall


def _grown(name: str, shape: tuple[int, int], options: dict[str, Any], answer: Any) -> None:
    torch.set_num_threads(1)
    call, tensors = helper(name), inputs(*shape)
    call(*inputs(2, 8), **options)  # imports and compiles
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    before = _status("VmRSS")
    call(*tensors, **options)
    answer.put(_status("VmHWM") - before)


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def peak_bytes(name: str, shape: tuple[int, int], options: dict[str, Any]) -> int:
    """Greatest growth of the resident set of a fresh process during one call, its answer included."""
    context = multiprocessing.get_context("spawn")
    answer = context.Queue()
    process = context.Process(target=_grown, args=(name, shape, options, answer))
    process.start()
    grown = int(answer.get(timeout=600))
    process.join()
    return grown


def compare(shape: tuple[int, int], name: str, repeats: int) -> dict[str, Any]:
    """One row of the table."""
    options, tensors = CASES[name], inputs(*shape)
    ours, verls = helper("ours"), helper("verl")
    for call in (ours, verls):
        call(*inputs(2, 8), **options)
    pairs = [(seconds(verls, tensors, options)[0], seconds(ours, tensors, options)[0]) for _ in range(repeats)]
    walls = [[seconds(ours, tensors, options, threads)[1] for threads in (1, 2)] for _ in range(repeats)]
    memory = {who: peak_bytes(who, shape, options) for who in ("verl", "ours")}
    medians = [statistics.median(column) for column in zip(*pairs, strict=True)]
    one, two = (statistics.median(column) for column in zip(*walls, strict=True))
    return {
        "shape": list(shape),
        "case": name,
        "verl_seconds": medians[0],
        "seconds": medians[1],
        "time_ratio": statistics.median(mine / theirs for theirs, mine in pairs),
        "verl_bytes": memory["verl"],
        "bytes": memory["ours"],
        "memory_ratio": memory["ours"] / max(memory["verl"], 1),
        "wall_one_thread": one,
        "wall_two_threads": two,
    }


def curve(shapes: Sequence[tuple[int, int]], repeats: int) -> list[dict[str, Any]]:
    """Ours over the number of tokens, with token TIS."""
    points = []
    for shape in shapes:
        tensors, options = inputs(*shape), CASES["token TIS"]
        helper("ours")(*inputs(2, 8), **options)
        taken = [seconds(helper("ours"), tensors, options)[0] for _ in range(repeats)]
        del tensors
        points.append(
            {
                "tokens": shape[0] * shape[1],
                "seconds": statistics.median(taken),
                "bytes": peak_bytes("ours", shape, options),
            }
        )
    return points


def draw(points: Sequence[dict[str, Any]], path: Path) -> None:
    """Time and memory over tokens, each beside a line of slope 1 through its last point."""
    from recipe.offpolicy.pages import figures

    tokens = [point["tokens"] for point in points]
    with figures.style():
        drawing, panels = figures.panels(1, 2)
        for axes, key, scale, label in zip(
            panels, ("seconds", "bytes"), (1e3, 2**-20), ("CPU time (ms)", "memory (MiB)"), strict=True
        ):
            values = [point[key] * scale for point in points]
            axes.loglog(tokens, [values[-1] * count / tokens[-1] for count in tokens], color=figures.MUTED, ls=":")
            axes.loglog(tokens, values, **figures.look(0))
            axes.set(xlabel="tokens, padding included", ylabel=label)
        figures.save(drawing, path)


def main(arguments: Sequence[str]) -> None:
    from rich.console import Console

    from recipe.offpolicy.pages.table import Column, Table, to_rich

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--curve", type=Path)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="one small shape, to see that it runs")
    given = parser.parse_args(arguments)
    shapes, repeats = (((32, 256),), 2) if given.quick else (SHAPES, given.repeats)
    rows = [compare(shape, name, repeats) for shape in shapes for name in CASES]
    columns = ("B x T", "correction", "verl", "ours", "time ratio", "verl", "ours", "memory ratio", "two threads")
    units = ("", "", "ms", "ms", "", "MiB", "MiB", "", "x one thread")
    table = Table(
        [Column(name, unit) for name, unit in zip(columns, units, strict=True)],
        [
            (
                "{} x {}".format(*row["shape"]),
                row["case"],
                row["verl_seconds"] * 1e3,
                row["seconds"] * 1e3,
                row["time_ratio"],
                row["verl_bytes"] / 2**20,
                row["bytes"] / 2**20,
                row["memory_ratio"],
                row["wall_two_threads"] / row["wall_one_thread"],
            )
            for row in rows
        ],
    )
    Console().print(to_rich(table))
    result: dict[str, Any] = {"torch": torch.__version__, "cases": rows}
    if given.curve:
        result["curve"] = curve(CURVE[:2] if given.quick else CURVE, repeats)
        draw(result["curve"], given.curve)
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
