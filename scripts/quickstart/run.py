"""The quickstart's supervisor: prepares, trains under limits, reports, and leaves nothing behind.

scripts/quickstart.sh runs it with the environment's Python; its arguments are Hydra overrides. See options.py for
the environment variables it reads and judge.py for its exit codes.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import yaml
from cache import folder, known
from cleanup import MARKER, SharedMemoryWatch, become_subreaper, end_processes, processes_of_run
from judge import Exit, Verdict, judge
from metrics import History, MetricsFile
from options import ANY_MODEL_OVERRIDES, Options, child_environment, override
from progress import Progress
from releases import overrides as release_overrides
from releases import platform_option
from report import describe, draw, summary_table
from stages import Child, Limits, OutOfTime, StageFailed, Stalled
from training import TrainingView

from verl_patches.contract import installed_release

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
OUTPUTS = ROOT / "outputs" / "quickstart"
CACHE = OUTPUTS / "cache"
CONFIG = ROOT / "configs" / "quickstart.yaml"
CHECKED = "offpolicy: all checks passed; "
"""What the trainer says before it starts anything; the correction follows, as JSON."""
WATCH_EVERY = 2.0
"""Seconds between two looks at /dev/shm."""


class Interrupted(BaseException):
    """A signal asked the run to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Quickstart:
    """One run. `run` may raise anything; `close` is always to be called."""

    def __init__(self, options: Options, overrides: Sequence[str], progress: Progress) -> None:
        self.options = options
        # The platform is among the options, and Hydra takes a group's choice once.
        self.overrides = [override for override in overrides if not override.startswith("platform=")]
        self.progress = progress
        release = installed_release("verl")
        assert release is not None, "quickstart.sh looks for verl before"
        self.release = release
        self.history = History()
        self.correction: dict[str, Any] = {}
        self.run_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        self.folder = OUTPUTS / self.run_id
        self.folder.mkdir(parents=True)
        self.current: Child | None = None
        self.checking = False
        self._limits = Limits(time.monotonic() + options.time_limit, options.stall_limit)
        self._shared_memory = SharedMemoryWatch()
        self._watched = 0.0
        # Sockets of Ray lie deep below it, and the path of a socket must be shorter than 108 characters.
        self._scratch = Path(tempfile.mkdtemp(prefix="qs", dir="/tmp"))
        self._env = child_environment(os.environ, options.platform, ROOT) | {
            MARKER: self.run_id,
            "TMPDIR": str(self._scratch),
            "RAY_TMPDIR": str(self._scratch),
            "VERL_FILE_LOGGER_PATH": str(self.folder / "metrics.jsonl"),
        }

    @property
    def corrected(self) -> bool:
        """Whether something is corrected, which has to be proved."""
        of = self.correction
        return bool(of) and (of["weight"], of["masks"], of["proximal"], of["kl_clip"]) != (None, {}, "recompute", None)

    def run(self) -> Verdict:
        """Every stage in turn; raises StageFailed, OutOfTime, Stalled or Interrupted."""
        self.progress.line(
            f"quickstart of verl {self.release} on {self.options.platform}, everything goes to "
            f"{self._short(self.folder)}"
        )
        parts = ["data"] if self.options.model else ["data", "model"]
        folders = known(CACHE, parts) or self._check_and_prepare(parts)
        self.progress.stage("checking the configuration")
        training = self._start(self._trainer(folders), "train.log")
        # What is corrected is known to the trainer alone, which has chosen for correction=auto.
        self.correction, _ = json.JSONDecoder().raw_decode(self._wait_until_checked(training))
        self.progress.line(f"  all checks passed: {describe(self.correction)}")
        config = yaml.safe_load((self.folder / "hydra" / ".hydra" / "config.yaml").read_text())
        trainer = config["trainer"]
        steps = int(trainer["total_training_steps"] or 0)
        scored = trainer["val_before_train"] and trainer["test_freq"] > 0
        default_steps = yaml.safe_load(CONFIG.read_text())["trainer"]["total_training_steps"]

        metrics = MetricsFile(self.folder / "metrics.jsonl")
        view = TrainingView(self.progress, metrics, self.history, steps, self.corrected, scored)
        self._wait(training, on_line=view.on_line, on_tick=view.on_tick)
        judged = not self.options.model and steps >= default_steps
        return judge(self.history, corrected=self.corrected, judged=judged, scored=scored)

    def report(self) -> None:
        """The table, and the picture beside the metrics; nothing when not a single step was made."""
        if not self.history.steps:
            return
        self.progress.console.print(summary_table(self.history, corrected=self.corrected))
        picture = self.folder / "quickstart.png"
        model = self.options.model.name if self.options.model else "a Qwen2 of 0.4 M parameters"
        subtitle = f"GRPO of {model} on reasoning-gym's spell_backward, {describe(self.correction)}"
        draw(self.history, picture, subtitle)
        self.progress.line(f"picture: {self._short(picture)}")

    def close(self) -> tuple[list[int], list[str]]:
        """Ends every process of the run and removes its shared memory and temporary files.

        Prints nothing, because the caller's terminal may be gone.

        Returns:
            The pids that could not be ended, normally none, and the segments that had to be removed.
        """
        self._shared_memory.observe(lambda: processes_of_run(self.run_id))
        survivors = end_processes(self.run_id)
        removed = self._shared_memory.remove_leaked()
        shutil.rmtree(self._scratch, ignore_errors=True)
        return survivors, removed

    def _check_and_prepare(self, parts: Sequence[str]) -> dict[str, Path]:
        """The folders of data and model, which are made.

        That takes a while: checks run beside it, and fail within seconds when an override is wrong.
        """
        self.progress.stage("checking the configuration")
        command = [sys.executable, str(HERE / "prepare.py"), "--cache", str(CACHE)]
        preparation = self._start(command + ["--data-only"] * ("model" not in parts), "prepare.log")
        self._wait_until_checked(self._start(self._trainer({}, "--check"), "check.log"))
        self.progress.stage("preparing model and data")
        self._wait(preparation, on_line=lambda line: self.progress.line(f"  {line}"))
        return {part: folder(CACHE, part) for part in parts}

    def _trainer(self, folders: Mapping[str, Path], *flags: str) -> list[str]:
        """The command that trains, with the user's overrides last; `folders` is empty before they are made."""
        command = [sys.executable, "-m", "recipe.offpolicy.main_offpolicy", "--config-name", CONFIG.stem, *flags]
        fixed = [
            f"platform={platform_option(self.options.platform, self.release)}",
            override("hydra.run.dir", self.folder / "hydra"),
            override("reward.custom_reward_function.path", HERE / "reward.py"),
            *release_overrides(self.release),
        ]
        if self.options.model:
            fixed += ANY_MODEL_OVERRIDES
        if folders:
            fixed += [
                override("data.train_files", folders["data"] / "train.parquet"),
                override("data.val_files", folders["data"] / "heldout.parquet"),
                override("actor_rollout_ref.model.path", self.options.model or folders["model"]),
            ]
        return [*command, *fixed, *self.overrides]

    def _wait_until_checked(self, child: Child) -> str:
        """What the child says of its correction when the checks have passed; the child goes on."""
        said: list[str] = []
        self.checking = True
        self._wait(child, on_line=said.append, until=CHECKED)
        if not (said and said[-1].startswith(CHECKED)):
            raise StageFailed("no checked configuration")
        self.checking = False
        return said[-1].removeprefix(CHECKED)

    def _start(self, command: list[str], log: str) -> Child:
        return Child(command, self._env, self.folder / log, ROOT)

    def _wait(self, child: Child, on_line: Any = lambda line: None, on_tick: Any = None, until: str = "") -> None:
        self.current = child

        def tick() -> bool:
            if time.monotonic() - self._watched > WATCH_EVERY:
                self._shared_memory.observe(lambda: processes_of_run(self.run_id))
                self._watched = time.monotonic()
            if on_tick:
                return bool(on_tick())
            self.progress.tick()
            return False

        child.wait(self._limits, on_line=on_line, on_tick=tick, until=until)

    def _short(self, path: Path) -> str:
        return os.path.relpath(path)


def _raise_interrupted(number: int, frame: FrameType | None) -> NoReturn:
    raise Interrupted(number)


def _failure(error: BaseException, quickstart: Quickstart) -> tuple[int, str]:
    """Exit code and sentence for a run that did not end by itself."""
    options = quickstart.options
    match error:
        case Interrupted():
            return 128 + error.number, f"interrupted by {error}"
        case OutOfTime():
            return Exit.TIME_LIMIT, (
                f"the time limit of {options.time_limit:.0f} s struck; QUICKSTART_TIME_LIMIT=seconds raises it"
            )
        case Stalled():
            return Exit.STALLED, (
                f"nothing was heard for {options.stall_limit:.0f} s; QUICKSTART_STALL_LIMIT=seconds waits longer"
            )
        case StageFailed() if quickstart.checking:
            return Exit.REFUSED, "the configuration was refused, see above"
        case StageFailed():
            return Exit.FAILED, f"failed with {error}, see above"
        case _:
            raise error


def main(overrides: Sequence[str]) -> int:
    try:
        if sys.platform != "linux":
            raise ValueError(f"this quickstart runs on Linux, not on {sys.platform}")
        options = Options.read(os.environ, overrides)
    except ValueError as error:
        print(f"quickstart: {error}", file=sys.stderr)
        return Exit.REFUSED
    become_subreaper()
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    with Progress() as progress:
        quickstart = Quickstart(options, overrides, progress)
        try:
            for number in signals:
                signal.signal(number, _raise_interrupted)
            verdict = quickstart.run()
            code, sentence = int(verdict.code), verdict.sentence
            progress.stage("reporting")
            quickstart.report()
        except (StageFailed, OutOfTime, Stalled, Interrupted) as error:
            code, sentence = _failure(error, quickstart)
            if quickstart.current and not isinstance(error, Interrupted):
                progress.line(f"the end of {quickstart.current.log}:")
                # What was going on when a limit struck is said in a few lines, a traceback in more, and Hydra lists
                # every correction that there is.
                lines = 8
                if isinstance(error, StageFailed):
                    lines = 120 if quickstart.checking else 40
                progress.console.print(quickstart.current.tail(lines), markup=False, soft_wrap=True)
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
