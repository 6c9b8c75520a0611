"""Runs the cases with real verl, Ray and vLLM, and keeps their recordings as test data.

    python scripts/evidence/injected_faults/make.py WORK [NAME ...]     # VENV=path: an environment with verl 0.9.1

Each of ``cases.CASES`` is one run of scripts/quickstart.sh, about 100 seconds on two cores; WORK keeps models, logs and
whole recordings, and what is there is not run again. What is kept in tests/data/faults/PART/NAME-SEED is at most
``ROWS`` rows a step, whole prompts.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "quickstart"), str(HERE.parent)]

from injected_faults.cases import CASES, Case  # noqa: E402

from recipe.offpolicy.recording import Recording  # noqa: E402
from recipe.offpolicy.recording.files import write  # noqa: E402

DATA = ROOT / "tests" / "data" / "faults"
ROWS = 128
TOKENS = 1000
"""Valid tokens a step that suffice: of longer rows fewer prompts are kept."""
LIMIT = 600.0


def main(work: Path, names: list[str]) -> int:
    work.mkdir(parents=True, exist_ok=True)
    for case in CASES:
        if not names or case.name in names:
            recording = work / f"{case.part}-{case.name}-{case.seed}"
            if not recording.exists():
                prepare(work / "models", case.needs)
                run(case, work, recording)
            keep(recording, DATA / case.part / f"{case.name}-{case.seed}", case)
    return 0


def prepare(models: Path, name: str) -> None:
    """Make a model of ``models`` unless it is there."""
    if not name or (models / name).exists():
        return
    from injected_faults.models import merging_model, pad_vocabulary
    from prepare import prepare_model
    from task import TaskSettings
    from warm_start import WarmStartSettings

    if name == "merging":
        merging_model(models / name, TaskSettings(), WarmStartSettings())
    else:
        source = prepare_model(ROOT / "outputs" / "quickstart" / "cache", TaskSettings())
        pad_vocabulary(source, models / name, int(name.partition("-")[2]))


def run(case: Case, work: Path, recording: Path) -> None:
    """Train with the fault.

    Raises:
        RuntimeError: not every step was recorded; the log is beside the recording.
    """
    overrides = [override.format(models=work / "models", here=HERE) for override in case.overrides]
    command = [
        "bash",
        str(ROOT / "scripts" / "quickstart.sh"),
        "correction=none",
        f"offpolicy.record.dir={recording}",
        # A fault is to be recorded, not caught.
        "offpolicy.allow_unrelated_log_probs=true",
        f"trainer.total_training_steps={case.steps}",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        f"data.seed={case.seed}",
        *overrides,
    ]
    environment = {
        **os.environ,
        "VERL_USE_EXTERNAL_MODULES": "verl_patches.cpu,inject",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")])),
        **case.environment,
    }
    log = recording.with_suffix(".log")
    print(f"{recording.name}: {' '.join(command[2:])}", flush=True)
    with log.open("wb") as sink:
        # Its verdict is of the held-out score, which these short runs do not take.
        subprocess.run(command, env=environment, stdout=sink, stderr=subprocess.STDOUT, timeout=LIMIT, check=False)
    made = Recording(recording).steps if recording.is_dir() else []
    if len(made) < case.steps:
        raise RuntimeError(f"{recording.name}: {len(made)} of {case.steps} steps were recorded, see {log}")


def keep(recording: Path, target: Path, case: Case) -> None:
    """Write the part that tests read, with a card that says what was injected and nothing of this machine."""
    source = Recording(recording)
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for number in source.steps:
        step = source.step(number)
        rows = step.rows
        chosen: list[int] = []
        tokens = 0
        for uid in dict.fromkeys(rows.uid):
            group = np.flatnonzero(rows.uid == uid)
            if tokens >= TOKENS or len(chosen) + len(group) > ROWS:
                break
            chosen += group.tolist()
            tokens += int(rows.length[group].sum())
        write(target / source.files[number][0].name, rows.take(chosen), step.spec, step.reasons)
    card = {
        "release": source.card.get("release"),
        "path": source.card.get("path"),
        "injected": {
            "causes": sorted(case.causes),
            "seed": case.seed,
            "overrides": list(case.overrides),
            "environment": dict(case.environment),
        },
    }
    (target / "run.json").write_text(json.dumps(card, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1]).resolve(), sys.argv[2:]))
