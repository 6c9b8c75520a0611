"""Parts of the GPU report, each run by ``kit.py`` in a separate process: python -m scripts.gpu.parts NAME OUT.

A part returns lines for the page, and figures; it fails by raising an exception. With ``--dry-run``, sizes are smaller,
the device is the CPU, and figures that need a GPU are reported as not measured.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
NOT_MEASURED = "not measured on a CPU"
SYNCHRONISES = "called a synchronizing CUDA operation"
"""PyTorch's warning in its debug mode."""
LARGE = 40e9
"""GPU memory, in bytes, that is sufficient to train the model of half a billion parameters on 8 sequences of 1280
tokens."""
Found = tuple[list[str], dict[str, Any]]


class SkippedPart(Exception):
    """The part cannot measure anything here; the message says why."""


def demand(condition: bool, reason: str) -> None:
    """Fail a part unless a condition holds.

    Raises:
        RuntimeError: the part fails; the message is the reason.
    """
    if not condition:
        raise RuntimeError(reason)


def find_attention() -> tuple[str, str]:
    """Find the attention implementation that the CUDA platform would use, and the reason."""
    from verl_patches.hydra_sections import explain_missing_flash_attention as explain_missing

    missing = explain_missing()
    return ("sdpa", missing) if missing else ("flash_attention_2", "flash-attn")


def report_environment(dry_run: bool) -> Found:
    """Report devices, driver and libraries."""
    import torch

    figures: dict[str, Any] = {"cuda": torch.version.cuda, "attention": find_attention()[0], "devices": []}
    lines = [f"CUDA {torch.version.cuda}, attention: {', '.join(find_attention())}"]
    if not dry_run:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        seen = "" if visible is None else f" with CUDA_VISIBLE_DEVICES={visible!r}"
        reason = f"PyTorch {torch.__version__} finds no CUDA device{seen}. Fix: make one visible, or add --dry-run."
        demand(torch.cuda.is_available(), reason)
        for index in range(torch.cuda.device_count()):
            each = torch.cuda.get_device_properties(index)
            figures["devices"].append(
                {"name": each.name, "bytes": each.total_memory, "capability": f"{each.major}.{each.minor}"}
            )
            lines.append(f"{each.name}, {each.total_memory / 2**30:.0f} GiB, capability {each.major}.{each.minor}")
        figures["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        figures["driver"] = read_driver()
        lines.append(f"driver {figures['driver']}, NCCL {figures['nccl']}")
    from verl_patches.contract import demand_release

    figures["verl"] = demand_release()
    return lines, figures


def read_driver() -> str:
    """Read the driver's version; "unknown" without nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.split()
    except (OSError, subprocess.TimeoutExpired):
        said = []
    return said[0] if said else "unknown"


def train(dry_run: bool) -> Found:
    """Train the quickstart's model for a few steps with vLLM, and read the trainer's liveness proof."""
    needed = "torch verl vllm ray transformers hydra reasoning_gym pandas pyarrow matplotlib psutil rich xxhash"
    missing = [name for name in needed.split() if importlib.util.find_spec(name) is None]
    fix = "pip install " + " ".join(missing).replace("_", "-")
    demand(not missing, f"{', '.join(missing)} missing in this environment. Fix: {fix}")
    from scripts.harness import list_updates, run_quickstart

    steps = 2 if dry_run else 5
    unscored = ("trainer.val_before_train=false", "trainer.test_freq=-1", f"trainer.total_training_steps={steps}")
    overrides = [*(["platform=cpu"] if dry_run else []), *unscored]
    with tempfile.TemporaryDirectory() as scratch:
        ended = run_quickstart(overrides, Path(scratch) / "log", environment={"VENV": sys.prefix})
    updates = list_updates(ended.records)
    if ended.code != 0 or len(updates) != steps:
        print(ended.said)
    said = [line for line in ended.said.splitlines() if line.strip()] or ["no output"]
    errors = [line for line in said if re.match(r"[\w.]*(Error|Exception)\b", line)]
    demand(ended.code == 0, f"the quickstart ended with {ended.code}: {(errors or said)[-1]}")
    demand(len(updates) == steps, f"{len(updates)} of {steps} steps have metrics")
    first, last = updates[0], updates[-1]
    keys = {
        "proved": "offpolicy/live/proved",
        "gradient_error": "offpolicy/live/gradient_error",
        "delivered": "offpolicy/delivery/proved",
        "kl_k3": "offpolicy/kl/k3",
        "kept_share": "offpolicy/keep/token_share",
        "identical_share": "offpolicy/live/identical_share",
    }
    figures = {name: first.get(key) for name, key in keys.items()}
    figures |= {f"last_{name}": last.get(keys[name]) for name in ("kl_k3", "kept_share")}
    seconds = [update["timing_s/step"] for update in updates]
    figures["step_seconds"] = seconds
    demand(figures["proved"] == 1.0, f"the first update is not proved: offpolicy/live/proved={figures['proved']}")
    prefix = "offpolicy: attn_implementation="
    settled = [line.removeprefix("offpolicy: ") for line in ended.log.splitlines() if line.startswith(prefix)]
    return [
        *settled[:1],
        f"{steps} steps: proved at the first, gradient error {figures['gradient_error']:.1e}, "
        f"engine's weights equal: {figures['delivered'] == 1.0}",
        f"KL(mu, pi_old) by k3 {figures['kl_k3']:.2e} at first, {figures['last_kl_k3']:.2e} at last; "
        f"tokens kept {figures['kept_share']:.3f} and {figures['last_kept_share']:.3f}",
        f"median step {statistics.median(seconds[1:]):.2f} s, the first {seconds[0]:.2f} s",
    ], figures


def measure_loss(dry_run: bool) -> Found:
    """Measure memory and synchronisations of verl's and of the corrected loss on rows of very different lengths."""
    import torch

    from recipe.offpolicy.correction import CorrectionSpec
    from recipe.offpolicy.worker.loss import OffPolicyLoss
    from recipe.offpolicy.worker.metrics import take_packets
    from scripts.benchmark.simulated_parts import CORRECTION, build_actor_config, build_micro_batch
    from verl.workers.utils.losses import ppo_loss

    device, shrink = ("cpu", 16) if dry_run else ("cuda", 1)
    lengths = [32768 // shrink] + [256 // shrink] * 128
    output, data = build_micro_batch(sum(lengths), lengths, device)
    config = build_actor_config(len(data))
    losses: dict[str, Callable[..., Any]] = {
        "verl's": partial(ppo_loss, config),
        "corrected": OffPolicyLoss(CorrectionSpec.from_mapping(CORRECTION), config),
    }
    figures: dict[str, Any] = {"tokens": sum(lengths), "longest": max(lengths), "rows": len(lengths)}
    lines = [f"{figures['tokens']} tokens in {figures['rows']} rows, the longest {figures['longest']}"]

    def update(loss: Callable[..., Any], given: Any) -> None:
        value, metrics = loss(model_output=given, data=data)
        value.backward()
        demand(bool(torch.isfinite(value)), f"the loss is {float(value)}")
        take_packets(metrics)

    for name, loss in losses.items():
        update(loss, output())  # imports and compiles
        if dry_run:
            update(loss, output())
            figures[name] = {"bytes": None, "synchronisations": None}
            lines.append(f"{name} loss: finite; memory and synchronisations {NOT_MEASURED}")
            continue
        given = output()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        update(loss, given)
        peak = torch.cuda.max_memory_allocated() - before
        given = output()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            value, _ = loss(model_output=given, data=data)
            value.backward()
            torch.cuda.set_sync_debug_mode("default")
        said = [each for each in caught if SYNCHRONISES in str(each.message)]
        places = [f"{Path(each.filename).name}:{each.lineno}" for each in said]
        figures[name] = {"bytes": peak, "synchronisations": len(places), "places": places}
        lines.append(f"{name} loss: {peak / 2**20:.0f} MiB at most beyond its inputs, {len(places)} synchronisations")
    return lines, figures


def measure_step(dry_run: bool) -> Found:
    """Time forward and backward passes with verl's loss and with the corrected loss, in pairs."""
    import torch

    from scripts.benchmark.worker_stage import Sizes, compare, format_figures

    if dry_run:
        figures = compare("tiny", Sizes(rows=4, micro_batches=2), 5, "cpu")
    else:
        rows = 8 if torch.cuda.get_device_properties(0).total_memory > LARGE else 2
        sizes = Sizes(rows=rows, prompt=256, response=1024, micro_batches=4, mini_batches=1)
        figures = compare("qwen2-0.5b", sizes, 15, "cuda")
    return format_figures(figures).splitlines(), figures


PARTS: dict[str, Callable[[bool], Found]] = {
    "environment": report_environment,
    "training": train,
    "loss": measure_loss,
    "step": measure_step,
}


def main(parts: Mapping[str, Callable[[bool], Found]], name: str, out: str, *flags: str) -> None:
    """Run one part, and write its results."""
    # The signal is raised as an exception, so that the processes of a part are also ended. If the kit is killed, the
    # kernel sends this signal.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    try:
        lines, figures = parts[name]("--dry-run" in flags)
        found: dict[str, Any] = {"status": "ok", "said": lines, "figures": figures}
    except SkippedPart as reason:
        found = {"status": "skipped", "said": [str(reason)]}
    Path(out).write_text(json.dumps(found, ensure_ascii=False), encoding="utf-8")


if __name__ == "__main__":
    main(PARTS, *sys.argv[1:])
