"""The command of copy_into_fork.sh: arguments, order of the steps, messages, and the smoke test of a copy in the fork.

The smoke test runs from the checkout's root, with the checkout's verl, in the user's environment.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from . import copying
from .copying import Fork, Plan, Refused

SOURCE = Path(__file__).resolve().parents[2]
TO_TRAIN = """
To train:
    cd {root}
    export PYTHONPATH={path}
    python -m recipe.offpolicy.main_offpolicy 'correction=[tis_token,gsm]' ...   # then as verl.trainer.main_ppo
    bash {place}recipe/offpolicy/run_dense_fsdp.sh    # or a whole launch script
On a running Ray cluster every node needs the same PYTHONPATH."""
DONE, SMOKE_FAILED, REFUSED, INTERRUPTED = 0, 1, 2, 3
LIMIT = 900  # seconds per step; a step takes at most 60 on an idle machine
LAUNCH = (
    "correction=[tis_token,gsm]",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
)
"""A correction, and the settings that verl requires in every launch."""
ORIGINS = """
import sys, verl, recipe.offpolicy, verl_patches
from pathlib import Path
from verl_patches.releases import release_of
release, root, place = sys.argv[1:]
wanted = {verl: "verl", recipe.offpolicy: f"{place}recipe/offpolicy", verl_patches: f"{place}verl_patches"}
for module, folder in wanted.items():
    name, found = module.__name__, Path(module.__file__).resolve()
    if found != Path(root, folder, "__init__.py"):
        fix = f"VENV=path of an environment that has no {name} of its own before PYTHONPATH."
        sys.exit(f"{name} was imported from {found}, not from {Path(root, folder)}. Fix: {fix}")
if release_of(verl.__version__) != release:
    fix = "make verl/__init__.py read verl/version/version, as verl does."
    sys.exit(f"verl says it is {verl.__version__}, its version file {release}. Fix: {fix}")
"""
STEPS = (
    ("imports", ("-c", ORIGINS), "VENV=path of an environment that runs this checkout"),
    (
        "--cfg job",
        ("-m", "recipe.offpolicy.main_offpolicy", "--cfg", "job"),
        "compare verl/trainer/config with that of the release, which our primary configuration inherits",
    ),
    ("contracts", ("-m", "verl_patches"), "run `python -m verl_patches` there, which lists every patched function"),
    ("doctor", ("-m", "recipe.offpolicy.doctor", *LAUNCH), "run the doctor there by itself"),
    (
        "one CPU update",
        ("-m", "recipe.offpolicy.smoke"),
        "compare verl/workers/utils/losses.py with that of the release: the correction calls its ppo_loss",
    ),
)
"""Name, arguments of Python, and the fix to show if the program itself does not name one."""


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    options = _parser().parse_args(arguments)
    if options.undo and (options.force or options.no_smoke):
        return _refuse("--undo can be combined only with --dry-run: it never removes edited files, and starts nothing.")
    try:
        return _undo(options) if options.undo else _copy(options)
    except Refused as error:
        return _refuse(str(error))
    except (OSError, KeyboardInterrupt) as error:
        why = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error)
        fix = "run the same command again to finish, or --undo to remove what is there."
        print(f"copy_into_fork: stopped: {why}\nFix: {fix}", file=sys.stderr)
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="copy_into_fork.sh", description="Copies the off-policy recipe into a verl checkout, and tests it there."
    )
    parser.add_argument("path", type=Path, metavar="PATH", help="root of the verl checkout")
    parser.add_argument("--dry-run", action="store_true", help="print what would be done, and do nothing")
    parser.add_argument("--undo", action="store_true", help="remove what was copied")
    parser.add_argument("--force", action="store_true", help="overwrite edits that were made to copied files")
    parser.add_argument("--no-smoke", action="store_true", help="copy only")
    return parser


def _refuse(message: str) -> int:
    print(f"copy_into_fork: {message}", file=sys.stderr)
    return REFUSED


def _copy(options: argparse.Namespace) -> int:
    fork = copying.open_fork(options.path)
    plan = copying.plan_copy(fork, SOURCE, force=options.force)
    version, commit = copying.read_origin(SOURCE)
    _say(f"{fork.root}: verl {fork.release}")
    _say(f"from:  verl-offpolicy {version}, commit {commit or 'unknown'}")
    _say(f"place: {fork.place or 'the root'}, because {fork.reason}")
    if not options.dry_run:
        copying.apply(fork.root, plan)
    _say_plan(plan, done=not options.dry_run)
    if options.dry_run:
        print("".join([f"    + {path}\n" for path in plan.write] + [f"    - {path}\n" for path in plan.remove]), end="")
        return DONE
    status = DONE if options.no_smoke else smoke_test(fork)
    if status == DONE:
        root, path = shlex.quote(str(fork.root)), shlex.quote(fork.python_path)
        print(TO_TRAIN.format(root=root, path=path, place=fork.place))
    script = shlex.quote(str(SOURCE / "scripts" / "copy_into_fork.sh"))
    print(f"To remove it again:\n    bash {script} {shlex.quote(str(fork.root))} --undo")
    return status


def _say_plan(plan: Plan, *, done: bool) -> None:
    wrote, removed, kept = ("committed", "removed", "is") if done else ("would commit", "would remove", "would be")
    if plan.write:
        _say(f"{wrote} {_count(plan.write)}")
    if plan.remove:
        _say(f"{removed} {_count(plan.remove)}, no longer shipped")
    for path in plan.edited:
        if path in plan.write:
            _say(f"{path} was edited: its content {kept} kept in the previous commit")
        else:
            _say(f"{path} is no longer part of the copy, and was edited: it is kept, and belongs to you")
    if not (plan.write or plan.remove or plan.manifest):
        _say("no file had to be written")


def _count(paths: Collection[str]) -> str:
    return f"{len(paths)} files{': ' + ', '.join(paths) if len(paths) <= 5 else ''}"


def _undo(options: argparse.Namespace) -> int:
    root = options.path.resolve()
    if not root.is_dir():
        raise Refused(f"{options.path}: no such folder. Fix: name the root of a verl checkout.")
    copying.require_repository(root)
    manifest = copying.read_manifest(root)
    if manifest is None:
        _say(f"{root}: nothing to undo, because there is no {copying.MANIFEST}")
        return DONE
    plan = copying.plan_undo(root, manifest)
    if not options.dry_run:
        copying.apply(root, plan)
    _say(f"{root}: {'would remove' if options.dry_run else 'removed'} {_count(plan.remove[:-1])}")
    for path in plan.edited:
        print(f"    kept {path}: it was edited, so it is yours from now on")
    return DONE


def _say(message: str) -> None:
    print(f"copy_into_fork: {message}", flush=True)


# --- smoke test


def smoke_test(fork: Fork) -> int:
    """Run the steps one after another, up to the first that fails; each step's name is printed before it starts."""
    _say(f"smoke test with {sys.executable}, which takes half a minute or more")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [fork.python_path, os.environ.get("PYTHONPATH")])),
        "PYTHONDONTWRITEBYTECODE": "1",  # no bytecode in the checkout
        "HYDRA_FULL_ERROR": "0",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    for name, arguments, fix in STEPS:
        print(f"    {name:<15} ", end="", flush=True)
        started, said = time.monotonic(), ""
        more = (fork.release, str(fork.root), fork.place) if name == "imports" else ()
        try:
            done = subprocess.run(
                [sys.executable, *arguments, *more], cwd=fork.root, env=environment, stdin=subprocess.DEVNULL,
                capture_output=True, text=True, errors="replace", timeout=LIMIT, check=False,
            )  # fmt: skip
            failure = explain(done) if done.returncode else ""
            said = (done.stdout.strip().splitlines() or [""])[-1]
        except subprocess.TimeoutExpired:
            failure, fix = f"it took more than {LIMIT} s", "copy again when the machine is less busy"
        shown = said if said.startswith("offpolicy:") else ""
        print(f"{'FAILED' if failure else 'ok':<6} {time.monotonic() - started:5.1f} s  {shown}", flush=True)
        if failure:
            _say(f"the smoke test failed at {name}: {failure}")
            _say(f"the copy stays until --undo. Fix: {'see above' if 'Fix: ' in failure else fix}")
            return SMOKE_FAILED
    return DONE


def explain(done: subprocess.CompletedProcess[str]) -> str:
    """Explain the failure of a program: the lines with a fix, otherwise a traceback's last line or the last lines."""
    lines = (done.stderr + done.stdout).strip().splitlines()
    if own := [line for line in lines if "Fix: " in line]:
        return "\n".join(dict.fromkeys(own))
    traceback = "Traceback (most recent call last):" in done.stderr
    said = done.stderr.strip().splitlines()[-1:] if traceback else lines[-20:]
    return "\n".join(said) or f"exit {done.returncode}"
