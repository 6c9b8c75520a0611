"""Does score centering help if the sampler has lower precision? Trains in one process, as in collapse/in_process.py.

    python scripts/evidence/centering/experiment.py --list
    python scripts/evidence/centering/experiment.py [NAME ...] [--hours H]    # NAME: an arm, or a run: centred-3
    python scripts/evidence/centering/experiment.py --table                   # the committed results

This script runs verl's training worker and the recipe's loss, starting from the committed weights of the evidence on
collapse. The sampler uses the weights of the current step, rounded to a few bits of mantissa. The plan is in PLAN.md.
Finished runs are not repeated.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

if __name__ == "__main__" and {"-h", "--help"} & set(sys.argv):  # before imports that take seconds
    sys.exit(print(__doc__))

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "evidence")]

import pandas
from collapse import in_process, results  # sets the environment of verl on a CPU
from collapse.arms import FIRST_SEED, RATES
from collapse.in_process import SampledRows, Trainer
from seeds import Planned, bootstrap, build_parser, holm, make_runs, sign_flip
from torch import Tensor

from recipe.offpolicy.centering.score_centering import FLAG, install_centering
from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.support.token_supports import NOTE
from scripts.benchmark.simulated_parts import build_note
from scripts.harness import Records
from verl.workers.config import FSDPActorConfig

DATA = Path(__file__).with_name("results.parquet")
STEPS, SEEDS, MANTISSA, SIZE = 60, 20, 1, 20
PAIRS = {"H1": ("centred", "none"), "H2": ("tis_centred", "tis")}
TIS: dict[str, Any] = {"weight": {"level": "token", "kind": "truncate", "lower": None, "upper": 2.0}}
ARMS: dict[str, dict[str, Any]] = {
    "none": {},
    "centred": {"centering": SIZE},
    "tis": TIS,
    "tis_centred": TIS | {"centering": SIZE},
}


def list_runs() -> Iterator[Planned]:
    """List all runs, seed by seed; the seed determines the order of the questions and the sampling."""
    for seed in range(FIRST_SEED, FIRST_SEED + SEEDS):
        yield from (Planned(setting=arm, seed=seed, seconds=45) for arm in ARMS)


def build_trainer(model: Path, config: FSDPActorConfig) -> Trainer:
    """Build a trainer whose engine can centre scores."""
    trainer = Trainer(model, config)
    install_centering(SimpleNamespace(actor=trainer._worker))
    return trainer


def train(run: Planned, model: Path, steps: int = STEPS) -> Records:
    """Train once; see ``in_process.train``."""
    spec = CorrectionSpec.from_mapping(ARMS[run.setting])

    def annotate(rows: SampledRows, log_probs: Sequence[Tensor]) -> None:
        prompts = [each.tolist() for each in rows.prompts]
        drawn = zip(prompts, rows.responses, log_probs, strict=True)
        rows.notes = [{NOTE: build_note(*each, SIZE)[1].to_plain()} for each in drawn]
        rows.flags = {FLAG: spec.centering is not None}

    return in_process.train(
        model, spec, seed=run.seed, rate=RATES[0], mantissa=MANTISSA, steps=steps, build_trainer=build_trainer,
        annotate=annotate,
    )  # fmt: skip


def format_table(table: pandas.DataFrame) -> str:
    """Format the exact matches after the last step by arm, and the differences paired by seed."""
    outcomes = table.sort_values("step").groupby(["seed", "arm"])["exact"].last().unstack("arm").dropna()
    k3 = table[table["step"] > 0].groupby("arm")["k3"].mean()
    heading = "exact matches after the last step: mean, least, greatest; k3 of all steps"
    lines = [f"{len(outcomes)} of {SEEDS} seeds; {heading}"]
    for arm, found in outcomes.items():
        lines.append(f"{arm:12} {found.mean():.3f}  {found.min():.3f}  {found.max():.3f}  {k3[arm]:.3f}")
    apart = {name: outcomes[one] - outcomes[other] for name, (one, other) in PAIRS.items()}
    adjusted = holm({name: sign_flip(each) for name, each in apart.items()})
    for name, (one, other) in PAIRS.items():
        low, high = bootstrap(apart[name])
        difference = f"{apart[name].mean():+.3f} ({low:+.3f} to {high:+.3f})"
        lines.append(f"{name}: {one} - {other} {difference}, p = {adjusted[name]:.3f} (Holm)")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = build_parser(__doc__)
    parser.add_argument("--table", action="store_true", help="print the committed results and judge the hypotheses")
    parser.add_argument("--out", type=Path, default=DATA)
    options = parser.parse_args(arguments)
    if options.table:
        print(format_table(results.read(options.out)))
        return 0

    def make(run: Planned) -> str:
        return in_process.make(run, lambda model: train(run, model), options.out)

    make_runs(list_runs(), results.describe_finished(options.out), make, options, "of one core")
    return 0


if __name__ == "__main__":
    sys.exit(main())
