"""Compares time and memory of ``verl_rollout_correction`` with verl's own helper on the same inputs.

    python scripts/benchmark/rollout_stage.py [--first] [--curve docs/cost.png] [--repeats 7]

Inputs are right-padded float32 log-probs and an int64 mask in which 30 % of the tokens are valid. Times are CPU seconds
of one thread; the two helpers run in turn, and the medians are shown. Memory is the peak increase in a fresh process's
resident set size during one call. ``--curve`` covers 2^18 to 2^27 tokens, but verl's helper only up to 2^23; the
largest size takes about 5 GiB and a minute. ``--first`` adds the time of a process's first call, before and after the
loops are compiled.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
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


def prepare(name: str, options: dict[str, Any]) -> Helper:
    """Import a helper and call it once on a small input, so that its compilation is not measured."""
    call = partial(find_helper(name), **options)
    call(*draw_inputs(2, 8))
    return call


def time_call(call: Helper, tensors: Sequence[Tensor], threads: int = 1) -> harness.Seconds:
    torch.set_num_threads(threads)
    return harness.time_call(partial(call, *tensors))


def grow(name: str, shape: tuple[int, int], options: dict[str, Any]) -> int:
    torch.set_num_threads(1)
    return harness.measure_growth(partial(prepare(name, options), *draw_inputs(*shape)))


def measure_memory(name: str, shape: tuple[int, int], options: dict[str, Any]) -> int:
    """Measure the growth, in bytes, of a fresh process's memory during one call."""
    return harness.run_in_fresh_process(grow, name, shape, options, preload=PRELOAD)


def time_first_call(options: dict[str, Any]) -> float:
    call, tensors = partial(find_helper("ours"), **options), draw_inputs(32, 256)
    from verl.protocol import DataProto  # a run imports it long before

    DataProto.from_dict({"mask": tensors[2]})
    return time_call(call, tensors).cpu


def compare(shape: tuple[int, int], name: str, repeats: int) -> list[str]:
    """Measure one row of the table, and format it."""
    options, tensors = CASES[name], draw_inputs(*shape)
    calls = {who: prepare(who, options) for who in ("verl", "ours")}
    taken = harness.take_turns({who: partial(time_call, call, tensors) for who, call in calls.items()}, repeats)
    verls, ours = ([each.cpu for each in taken[who]] for who in calls)
    threads = {str(n): partial(time_call, calls["ours"], tensors, n) for n in (1, 2)}
    walls = harness.take_turns(threads, 3 * repeats, uncounted=0)
    one, two = (statistics.median(each.wall for each in found) for found in walls.values())
    memory = [measure_memory(who, shape, options) / 2**20 for who in calls]
    verl, our = (statistics.median(each) * 1e3 for each in (verls, ours))
    times = f"{verl:.{0 if verl >= 100 else 1}f}", f"{our:.{2 if our < 10 else 1}f}"
    ratio = f"{harness.find_median_ratio(ours, verls):.3f}"
    sizes = f"{memory[0]:.1f}", f"{memory[1]:.1f}", f"{memory[1] / max(memory[0], 1e-6):.3f}"
    return ["{} x {}".format(*shape), name, *times, ratio, *sizes, f"{two / one:.2f}"]


def measure_curve(repeats: int) -> list[dict[str, Any]]:
    """Measure both helpers over the number of tokens, with token TIS."""
    options = CASES["token TIS"]
    points = []
    for shape in CURVE:
        tokens = shape[0] * shape[1]
        for who in ("ours", "verl") if tokens <= VERL_UP_TO else ("ours",):
            call, tensors = prepare(who, options), draw_inputs(*shape)
            taken = statistics.median(time_call(call, tensors).cpu for _ in range(repeats))
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


def main(arguments: Sequence[str] | None = None) -> None:
    parser = harness.build_parser(__doc__)
    parser.add_argument("--curve", type=Path, metavar="FILE.png")
    parser.add_argument("--first", action="store_true", help="the first call of a process")
    harness.add_counts(parser, repeats=7)
    given = parser.parse_args(arguments)
    print("\n".join(harness.format_markdown(COLUMNS, [])))
    for shape, name in product(SHAPES, CASES):
        print(harness.format_row(compare(shape, name, given.repeats)), flush=True)
    if given.curve:
        points = measure_curve(min(given.repeats, 5))
        draw(points, given.curve)
        rows = []
        for point in points:
            taken, tokens = point["seconds"], point["tokens"]
            cells = (f"{taken * 1e3:.2f}", f"{point['bytes'] / 2**20:.1f}", f"{taken / tokens * 1e9:.2f}")
            rows.append([f"2^{tokens.bit_length() - 1}", point["helper"], *cells])
        print("\n".join(["", *harness.format_markdown(("tokens", "helper", "CPU, ms", "MiB", "ns a token"), rows)]))
    if given.first:  # before and after another process has compiled the loops
        with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, NUMBA_CACHE_DIR=folder):
            for when in ("compiling", "compiled"):
                taken = harness.run_in_fresh_process(time_first_call, CASES["normalised TIS, all 11"])
                print(f"first call of a process, {when}: {taken:.2f} s of CPU time")


if __name__ == "__main__":
    main()
