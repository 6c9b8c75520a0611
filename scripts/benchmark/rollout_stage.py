"""Compares time and memory of ``verl_rollout_correction`` with verl's own helper on the same inputs.

    python scripts/benchmark/rollout_stage.py                                            # a table for the terminal
    python scripts/benchmark/rollout_stage.py --markdown --first --curve docs/cost.png   # docs/evidence/cost.md
    python scripts/benchmark/rollout_stage.py --quick --json FILE                        # one small shape

Inputs are right-padded float32 log-probs and an int64 mask in which 30 % of the tokens are valid. Times are CPU seconds
of one thread; the two helpers run in turn, and the medians are shown. Memory is the peak increase in a fresh process's
resident set size during one call. ``--curve`` covers 2^18 to 2^27 tokens, but verl's helper only up to 2^23; the
largest size takes about 5 GiB and a minute. ``--first`` adds the time of a process's first call, before and after the
loops are compiled. ``--repeats`` is 7 by default.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # also in the processes that measure memory

from scripts import harness

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
VERL_UP_TO = 2**23
COLUMNS = (
    *("B x T", "correction", "verl, ms", "ours, ms", "time ratio"),
    *("verl, MiB", "ours, MiB", "memory ratio", "two threads, x one"),
)
PRELOAD = ("torch", "verl.trainer.ppo.rollout_corr_helper")
Helper = Callable[..., Any]


def find_helper(name: str) -> Helper:
    if name == "verl":
        from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

        return compute_rollout_correction_and_rejection_mask
    from recipe.offpolicy.translate.rollout_correction import verl_rollout_correction

    return verl_rollout_correction


def draw_inputs(rows: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draw pi_old, mu and mask; lengths are uniform up to 0.6 of the width, so 30 % of the tokens are valid."""
    generator = torch.Generator().manual_seed(0)
    lengths = (torch.rand(rows, generator=generator) * 0.6 * width).long().clamp(min=1)
    mask = (torch.arange(width) < lengths[:, None]).long()
    mu = torch.empty(rows, width).exponential_(generator=generator).neg_() * mask
    old = mu + 0.02 * torch.randn(rows, width, generator=generator) * mask
    return old, mu, mask


def measure_seconds(
    call: Helper, tensors: Sequence[Tensor], options: dict[str, Any], threads: int = 1
) -> harness.Seconds:
    """Measure this process's CPU time and the wall time of one call."""
    torch.set_num_threads(threads)
    return harness.time_call(partial(call, *tensors, **options))


def prepare(name: str, options: dict[str, Any]) -> Helper:
    """Import a helper and call it once on a small input, so that its compilation is not measured."""
    call = find_helper(name)
    call(*draw_inputs(2, 8), **options)
    return call


def _grown(name: str, shape: tuple[int, int], options: dict[str, Any]) -> int:
    torch.set_num_threads(1)
    tensors, call = draw_inputs(*shape), prepare(name, options)
    return harness.measure_growth(partial(call, *tensors, **options))


def measure_memory(name: str, shape: tuple[int, int], options: dict[str, Any]) -> int:
    """Measure by how many bytes the memory of a fresh process grows during one call."""
    return harness.run_in_fresh_process(_grown, name, shape, options, preload=PRELOAD)


def _first(options: dict[str, Any]) -> float:
    call, tensors = find_helper("ours"), draw_inputs(32, 256)
    from verl.protocol import DataProto  # a run imports it long before

    DataProto.from_dict({"mask": tensors[2]})
    return measure_seconds(call, tensors, options).cpu


def measure_first_call(options: dict[str, Any]) -> dict[str, float]:
    """Measure the CPU seconds of a process's first call, before and after another process has compiled the loops."""
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, NUMBA_CACHE_DIR=folder):
        return {when: harness.run_in_fresh_process(_first, options) for when in ("compiling", "compiled")}


def compare(shape: tuple[int, int], name: str, repeats: int) -> dict[str, Any]:
    """Measure one row of the table."""
    options, tensors = CASES[name], draw_inputs(*shape)
    calls = {who: prepare(who, options) for who in ("verl", "ours")}
    sides = {who: partial(measure_seconds, call, tensors, options) for who, call in calls.items()}
    cpu = {who: [each.cpu for each in taken] for who, taken in harness.take_turns(sides, repeats).items()}
    threads = {str(n): partial(measure_seconds, calls["ours"], tensors, options, n) for n in (1, 2)}
    walls = harness.take_turns(threads, 3 * repeats, uncounted=0)
    one, two = (statistics.median(each.wall for each in taken) for taken in walls.values())
    memory = {who: measure_memory(who, shape, options) for who in calls}
    return {
        "shape": list(shape),
        "case": name,
        "verl_seconds": statistics.median(cpu["verl"]),
        "seconds": statistics.median(cpu["ours"]),
        "time_ratio": harness.find_median_ratio(cpu["ours"], cpu["verl"]),
        "verl_bytes": memory["verl"],
        "bytes": memory["ours"],
        "memory_ratio": memory["ours"] / max(memory["verl"], 1),
        "wall_one_thread": one,
        "wall_two_threads": two,
    }


def measure_curve(shapes: Sequence[tuple[int, int]], repeats: int) -> list[dict[str, Any]]:
    """Measure both helpers over the number of tokens, with token TIS."""
    options = CASES["token TIS"]
    points = []
    for shape in shapes:
        tokens = shape[0] * shape[1]
        for who in ("ours", "verl") if tokens <= VERL_UP_TO else ("ours",):
            call, tensors = prepare(who, options), draw_inputs(*shape)
            taken = statistics.median(measure_seconds(call, tensors, options).cpu for _ in range(repeats))
            del tensors
            memory = measure_memory(who, shape, options)
            points.append({"helper": who, "tokens": tokens, "seconds": taken, "bytes": memory})
    return points


def draw(points: Sequence[dict[str, Any]], path: Path) -> None:
    """Plot time and memory over the number of tokens, with a line of slope 1 through the last point of our helper."""
    from recipe.offpolicy.analysis import plotting

    with plotting.apply_style():
        drawing, (time, memory) = plotting.create_axes(1, 2)
        for axes, key, scale in ((time, "seconds", 1e3), (memory, "bytes", 2**-20)):
            for index, (who, name) in enumerate((("ours", "this package"), ("verl", "verl's helper"))):
                found = [(point["tokens"], point[key] * scale) for point in points if point["helper"] == who]
                counts, values = zip(*found, strict=True)
                look: Any = {"color": plotting.PALETTE[index], "marker": plotting.MARKERS[index]}
                axes.loglog(counts, values, label=name, **look)
                if who == "ours":
                    linear = [count * values[-1] / counts[-1] for count in counts]
                    axes.loglog(counts, linear, color=plotting.MUTED, ls=":", label="linear")
            axes.set_xscale("log", base=2)
            axes.set(xlabel="tokens, padding included")
            axes.legend()
        time.set_ylabel("CPU time (ms)")
        memory.set_ylabel("memory (MiB)")
        plotting.save(drawing, path)


def list_cells(row: dict[str, Any]) -> tuple[Any, ...]:
    """List the cells of one row under ``COLUMNS``."""
    return (
        *("{} x {}".format(*row["shape"]), row["case"]),
        *(row["verl_seconds"] * 1e3, row["seconds"] * 1e3, row["time_ratio"]),
        *(row["verl_bytes"] / 2**20, row["bytes"] / 2**20, row["memory_ratio"]),
        row["wall_two_threads"] / row["wall_one_thread"],
    )


def format_tables(result: Mapping[str, Any]) -> str:
    """Format the tables of docs/evidence/cost.md."""
    rows = []
    for row in result["cases"]:
        shape, case, *numbers = list_cells(row)
        digits = (0 if numbers[0] >= 100 else 1, 2 if numbers[1] < 10 else 1, 3, 1, 1, 3, 2)
        rows.append([shape, case, *(f"{number:.{d}f}" for number, d in zip(numbers, digits, strict=True))])
    lines = harness.format_markdown(COLUMNS, rows)
    if "curve" in result:
        rows = []
        for point in result["curve"]:
            taken, tokens = point["seconds"], point["tokens"]
            cells = (f"{taken * 1e3:.2f}", f"{point['bytes'] / 2**20:.1f}", f"{taken / tokens * 1e9:.2f}")
            rows.append([f"2^{tokens.bit_length() - 1}", point["helper"], *cells])
        lines += ["", *harness.format_markdown(("tokens", "helper", "CPU, ms", "MiB", "ns a token"), rows)]
    if "first" in result:
        rows = [[name, f"{taken:.2f}"] for name, taken in result["first"].items()]
        lines += ["", *harness.format_markdown(("first call of a process", "CPU, s"), rows)]
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> None:
    from rich.console import Console

    from recipe.offpolicy.analysis.table import Column, Table, to_rich

    parser = harness.build_parser(__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", action="store_true", help="rows for docs/evidence/cost.md")
    parser.add_argument("--curve", type=Path, metavar="FILE.png")
    parser.add_argument("--first", action="store_true", help="the first call of a process")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="one small shape, to see that it runs")
    given = parser.parse_args(arguments)
    shapes, repeats = (((32, 256),), 2) if given.quick else (SHAPES, given.repeats)
    names = list(CASES)[-1:] if given.quick else list(CASES)
    result: dict[str, Any] = {
        "torch": torch.__version__,
        "cases": [compare(shape, name, repeats) for shape in shapes for name in names],
    }
    if given.curve:
        result["curve"] = measure_curve(CURVE[:1] if given.quick else CURVE, min(repeats, 5))
        draw(result["curve"], given.curve)
    if given.first:
        result["first"] = measure_first_call(CASES[names[-1]])
    if given.markdown:
        print(format_tables(result))
    else:
        rows = [list_cells(row) for row in result["cases"]]
        Console().print(to_rich(Table([Column(name) for name in COLUMNS], rows)))
        for name, taken in result.get("first", {}).items():
            print(f"first call of a process, {name}: {taken:.2f} s of CPU time")
    harness.write_json(given.json, result)


if __name__ == "__main__":
    main(sys.argv[1:])
