"""Supervisor of the quickstart: prepares, trains, reports, and cleans up.

scripts/quickstart.sh runs it with the environment's Python; its arguments are Hydra overrides. See options.py for the
environment variables that it reads, and report.py for its exit codes.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import yaml

from recipe.offpolicy.analysis.table import to_rich
from verl_patches.contract import demand_release

from . import options, report, sums
from .prepare import find_made, folder
from .processes import Child, SharedMemoryWatch, StageFailed, Tail, Teacher, become_subreaper, clean_up
from .smollm2 import NAME

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
OUTPUTS = ROOT / "outputs" / "quickstart"
CACHE = OUTPUTS / "cache"
CONFIG = ROOT / "configs" / "quickstart.yaml"
CHECKED = "offpolicy: all checks passed; "
"""The first line that the trainer prints, before it starts anything; the correction follows as JSON."""
SPLITS = (("train", "train"), ("val", "heldout"))
"""verl's key -> name of the file."""
WATCH_EVERY = 2.0
"""Seconds between checks of /dev/shm."""


class Interrupted(BaseException):
    """Raised when a signal asks the run to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Quickstart:
    """One run. `run` may raise any exception; `close` must always be called."""

    def __init__(self, given: options.Options, overrides: Sequence[str], progress: report.Progress) -> None:
        self.options = given
        self.task = options.TASKS[given.task]
        # Platform and model are among the options. Hydra accepts the choice of a group only once, and has no group for
        # the model.
        self.overrides = [override for override in overrides if not override.startswith(("platform=", "model="))]
        self.taught = options.needs_teacher(self.overrides)
        self.own = "mixture" if given.mixture else self.task.model
        self.parts = [self.task.data, *([] if given.model else [self.own]), *(["teacher"] if self.taught else [])]
        self.progress = progress
        self.history = report.History()
        self.current: Child | None = None
        self.checking = False
        self._read_metrics: Callable[[], None] = lambda: None
        self._shared_memory = SharedMemoryWatch()
        self._folder = OUTPUTS / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        self._folder.mkdir(parents=True)
        # Ray's sockets are deep below this folder, and the path of a socket must be shorter than 108 characters.
        self._scratch = tempfile.mkdtemp(prefix="qs", dir="/tmp")
        large = given.model is not None or given.task == "arithmetic"
        self._env = options.build_child_environment(os.environ, given.platform, ROOT, large=large) | {
            "TMPDIR": self._scratch,
            "RAY_TMPDIR": self._scratch,
            "VERL_FILE_LOGGER_PATH": str(self._folder / "metrics.jsonl"),
        }

    def run(self) -> tuple[int, str]:
        """Prepare, train and report; return the exit code and a sentence.

        Raises:
            StageFailed, Interrupted.
        """
        release = demand_release()
        where = os.path.relpath(self._folder)
        self.progress.line(f"quickstart of verl {release} on {self.options.platform}, everything goes to {where}")
        command = self._build_command(release)
        folders = find_made(CACHE, self.parts) or self._check_and_prepare(command)
        if self.taught:
            self._start_teacher(folders["teacher"])
        self.progress.stage("checking the configuration")
        model = self.options.model or folders[self.parts[1]]
        data = folders[self.task.data]
        files = [options.quote(f"data.{key}_files", data / f"{name}.parquet") for key, name in SPLITS]
        command += [*files, options.quote(options.MODEL_PATH, model), *self.overrides]
        lines = self._follow(self._start(command, "train.log"))
        # Only the trainer knows the correction, because it resolves correction=auto.
        correction, _ = json.JSONDecoder().raw_decode(self._await_checks(lines))
        self.progress.line(f"  all checks passed: {report.describe(correction)}")
        return self._train(lines, correction)

    def close(self) -> tuple[list[int], list[str]]:
        """End every process of the run, remove its shared memory and temporary files, and print nothing.

        Returns:
            The pids of processes that could not be ended, normally none, and the segments that had to be removed.
        """
        left = clean_up(self._shared_memory)
        shutil.rmtree(self._scratch, ignore_errors=True)
        return left

    def _check_and_prepare(self, command: list[str]) -> dict[str, Path]:
        """Make data and models. Meanwhile, run the checks, which fail within seconds if an override is wrong."""
        self.progress.stage("checking the configuration")
        make = [sys.executable, "-m", "scripts.quickstart.prepare", "--cache", str(CACHE), *self.parts]
        preparation = self._start(make, "prepare.log")
        if not self.taught:  # with a teacher, the checks need a teacher that serves
            self._await_checks(self._follow(self._start([*command, "--check", *self.overrides], "check.log")))
        self.progress.stage("preparing model and data")
        for line in self._follow(preparation):
            self.progress.line(f"  {line}")
        return {part: folder(CACHE, part) for part in self.parts}

    def _start_teacher(self, model: Path) -> None:
        """Start a server for the teacher, and wait until it is ready."""
        self.progress.stage("starting the teacher")
        env = self._env | ({"PLATFORM": "cpu"} if self.options.platform.startswith("cpu") else {})
        teacher = Teacher(model, env | {"VENV": sys.prefix}, self._folder / "teacher.log", ROOT)
        teacher.wait(self._tick)
        self.progress.line(f"  serving at {teacher.url}")
        self.overrides.append(f"opd.teacher.url={teacher.url}")

    def _train(self, lines: Iterator[str], correction: dict[str, Any]) -> tuple[int, str]:
        trainer = yaml.safe_load((self._folder / "hydra" / ".hydra" / "config.yaml").read_text())["trainer"]
        steps = int(trainer["total_training_steps"] or 0)
        scored = trainer["val_before_train"] and trainer["test_freq"] > 0
        default = options.find_last("trainer.total_training_steps", self.task.overrides)
        enough = int(default or yaml.safe_load(CONFIG.read_text())["trainer"]["total_training_steps"])
        judged = not self.options.model and self.options.task != "free_length" and steps >= enough
        parts = ("weight", "masks", "proximal", "kl_clip")
        corrected = [correction[part] for part in parts] != [None, {}, "recompute", None]
        view = report.TrainingView(self.progress, self.history, steps, corrected, scored)
        metrics = Tail(self._folder / "metrics.jsonl")

        def read_metrics() -> None:
            for step, data in self.history.add(metrics.new_lines()):
                view.step(step, data)

        self._read_metrics = read_metrics
        for line in lines:
            view.log_line(line)
        verdict = report.judge(self.history, corrected=corrected, judged=judged, scored=scored)
        if self.history.steps:
            self._report(correction, corrected)
        return verdict

    def _report(self, correction: dict[str, Any], corrected: bool) -> None:
        self.progress.stage("reporting")
        recorded = sorted((self._folder / "recorded").glob("step_00000001*.parquet"))
        if self.options.task == "process_reward" and recorded and not self.options.model:
            found = sums.judge_utilities(sums.read_recorded(recorded, folder(CACHE, "sums_model")))
            first = self.history.series(report.FIRST_VALUE)[0]
            self.progress.line(f"values of the first step: {sums.describe_utilities(found, first)}")
        self.progress.console.print(to_rich(report.build_summary_table(self.history, corrected=corrected)))
        picture = self._folder / "quickstart.png"
        named = {"mixture": "a mixture of 1.2 M parameters", options.SMOLLM2: NAME}
        own = named.get(self.own, "a Qwen2 of 0.4 M parameters")
        model = self.options.model.name if self.options.model else own
        if self.options.task == "free_length":
            self._report_lengths()
        report.draw(self.history, picture, f"GRPO of {model} on {self.task.title}, {report.describe(correction)}")
        self.progress.line(f"picture: {os.path.relpath(picture)}")

    def _report_lengths(self) -> None:
        """Report the length of answers at the start and at the end, and draw the length by correctness."""
        from recipe.offpolicy.analysis.lengths import plot_curves, read_curves
        from recipe.offpolicy.analysis.plotting import draw_panels, save

        steps = read_curves(self._folder / "metrics.jsonl", correct_at_least=1.0)
        first, last = (each.lengths["all"] for each in (steps[0], steps[-1]))
        picture = self._folder / "lengths.png"
        save(draw_panels(plot_curves({"length of answers": steps}), columns=2), picture)
        self.progress.line(f"length of answers: {first:.1f} tokens at the first step, {last:.1f} at the last")
        self.progress.line(f"picture: {os.path.relpath(picture)}")

    def _build_command(self, release: str) -> list[str]:
        """Build the training command without data, model and the user's overrides."""
        recorded = options.quote("offpolicy.record.dir", self._folder / "recorded")
        return [
            *(sys.executable, "-m", "recipe.offpolicy.main_offpolicy", "--config-name", CONFIG.stem),
            options.quote("hydra.run.dir", self._folder / "hydra"),
            options.quote("reward.custom_reward_function.path", HERE / "reward.py"),
            *options.build_release_overrides(self.options.platform, release, self.overrides),
            *self.options.model_overrides,
            *options.build_task_overrides(self.options, self.overrides),
            *([recorded] if self.options.task == "process_reward" else []),
        ]

    def _await_checks(self, lines: Iterator[str]) -> str:
        """Wait for the start-up checks; return the line in which the trainer describes its correction."""
        self.checking = True
        said = next((line for line in lines if line.startswith(CHECKED)), None)
        if said is None:
            raise StageFailed("the trainer reported no checked configuration")
        self.checking = False
        return said.removeprefix(CHECKED)

    def _start(self, command: list[str], log: str) -> Child:
        return Child(command, self._env, self._folder / log, ROOT)

    def _follow(self, child: Child) -> Iterator[str]:
        self.current = child
        return child.lines(self._tick)

    def _tick(self) -> None:
        self._shared_memory.observe(every=WATCH_EVERY)
        self._read_metrics()
        self.progress.tick()


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise Interrupted(number)


def _explain(error: StageFailed | Interrupted, quickstart: Quickstart) -> tuple[int, str]:
    """Explain why a run did not end on its own, and show the end of the log; return the exit code and a sentence."""
    if isinstance(error, Interrupted):
        return 128 + error.number, f"interrupted by {error}"
    if quickstart.current:
        # Hydra's message lists all existing corrections, so it needs more lines than a traceback.
        lines = 120 if quickstart.checking else 40
        quickstart.progress.line(f"the end of {quickstart.current.log}:")
        quickstart.progress.console.print(quickstart.current.end_of_log(lines), markup=False, soft_wrap=True)
    if quickstart.checking:
        return report.REFUSED, "the configuration was refused, see above"
    return report.FAILED, f"{error}, see above"


def main(overrides: Sequence[str]) -> int:
    try:
        if sys.platform != "linux":
            raise ValueError(f"this quickstart runs on Linux, not on {sys.platform}")
        given = options.Options.read(os.environ, overrides)
    except ValueError as error:
        print(f"quickstart: {error}", file=sys.stderr)
        return report.REFUSED
    become_subreaper()
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    with report.Progress() as progress:
        quickstart = Quickstart(given, overrides, progress)
        try:
            for number in signals:
                signal.signal(number, _interrupt)
            code, sentence = quickstart.run()
        except (StageFailed, Interrupted) as error:
            code, sentence = _explain(error, quickstart)
        finally:
            for number in signals:
                signal.signal(number, signal.SIG_IGN)
            survivors, removed = quickstart.close()
        progress.line(f"cleaned up: no process is left{f', except {survivors}' if survivors else ''}")
        if removed:
            progress.line(f"  {len(removed)} segments that the engines had left in /dev/shm were removed")
        progress.line(f"{'OK' if code == 0 else 'FAILED'}: {sentence}", style="bold green" if code == 0 else "bold red")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
