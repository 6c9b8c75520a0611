"""The parts of scripts/gpu.sh that compare verl's engine with the tests' references: parity, and two ranks with one."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.worker.loss import OffPolicyLoss
from scripts.gpu.parts import Found, SkippedPart, demand, find_attention, main
from tests.support import first_update as fu
from tests.support import training_worker as tw
from tests.support.parity_case import BFLOAT16, CORRECTIONS, FOR_BFLOAT16, ROWS, Case, tiny_model
from tests.support.parity_paths import Witness, batch_v1, update_by_engine
from tests.support.parity_update import expected, measure_errors
from tests.support.specs import BATCH_WIDE, STACK


def compare_with_reference(dry_run: bool) -> Found:
    """Compare updates by verl's engine with the float64 reference, and prove a first update in each layout."""
    attention, _ = find_attention()
    layouts = [
        ("float32", "sdpa", False, tuple(CORRECTIONS), dict.fromkeys(BFLOAT16, 1e-5)),
        ("bfloat16", "sdpa" if dry_run else attention, True, FOR_BFLOAT16, BFLOAT16),
    ]
    lines: list[str] = []
    figures: dict[str, Any] = {}
    tw.join_process_group()
    with tempfile.TemporaryDirectory() as scratch:
        folder = tiny_model(Path(scratch))
        case = Case.of(folder)
        for precision, kind, packed, names, limits in layouts:
            worker = tw.start_worker(folder, attention=kind, precision=precision, use_remove_padding=packed)
            found: dict[str, Any] = {"device": next(worker.engine.module.parameters()).device.type}
            demand(found["device"] == ("cpu" if dry_run else "cuda"), f"the model is on {found['device']}")
            for name in names:
                witness = Witness(case.of_correction(name))
                witness.register()
                update = update_by_engine(worker, witness, batch_v1, name, "token-mean", 4)
                demanded = expected(witness.case, CORRECTIONS[name], "token-mean", range(ROWS))
                found[name] = measure_errors(update, demanded)
            worst = {what: max(found[name][what] for name in names) for what in limits}
            layout = f"{precision}, {kind}, {'packed' if packed else 'padded'}"
            figures[layout] = found
            text = ", ".join(f"{what} {worst[what]:.1e}" for what in worst)
            lines.append(f"{layout}: largest relative errors of {len(names)} corrections: {text}")
            above = [f"{what} {worst[what]:.2g} > {limit:g}" for what, limit in limits.items() if worst[what] > limit]
            demand(not above, f"{layout}: {', '.join(above)}")
            live = fu.first_update(worker, CORRECTIONS["tis"])
            found["proof"] = {key: float(value) for key, value in live.items()}
            demand(live["proved"] == 1.0, f"{layout}: the first update is not proved")
            lines.append(f"{layout}: first update proved, relative error of the gradient {live['gradient_error']:.1e}")
    return lines, figures


def compare_ranks(dry_run: bool) -> Found:
    """Compare an update of two ranks with an update of one rank."""

    if not dry_run and torch.cuda.device_count() < 2:
        raise SkippedPart("one GPU is visible, and NCCL needs one for each rank")
    backend = "gloo" if dry_run else "NCCL"
    lines: list[str] = []
    figures: dict[str, Any] = {"backend": backend}
    with tempfile.TemporaryDirectory() as scratch:
        model = tw.tiny_model(Path(scratch) / "model")
        ranks = tw.run_two_ranks("corrected", model, Path(scratch))
        tw.join_process_group()
        worker = tw.start_worker(model)
        for name, mapping in {"stack": STACK, "batch_wide": BATCH_WIDE}.items():
            spec = CorrectionSpec.from_mapping(mapping)
            rows = tw.add_log_probs(worker, tw.make_rollout(), mismatch=0.2)
            loss = OffPolicyLoss(spec, tw.actor_config())
            metrics, gradients = tw.gradients(worker, loss, fu.planned(spec, rows))
            scale = max(float(each.abs().max()) for each in gradients.values())
            apart = max(float((ranks[name]["gradient"][key] - each).abs().max()) for key, each in gradients.items())
            one = float(metrics["loss"][0])
            found = {"gradient": apart / scale, "loss": abs(ranks[name]["loss"] - one) / abs(one)}
            figures[name] = found
            lines.append(f"{backend}, {name}: relative errors: " + ", ".join(f"{k} {v:.1e}" for k, v in found.items()))
            demand(max(found.values()) < 1e-4, f"{lines[-1]}, above 1e-4")
    return lines, figures


PARTS = {"parity": compare_with_reference, "ranks": compare_ranks}

if __name__ == "__main__":
    main(PARTS, *sys.argv[1:])
