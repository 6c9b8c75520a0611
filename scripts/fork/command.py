"""Command of copy_into_fork.sh: arguments, order of the steps, and messages."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from .checkout import Fork, Refused, open_fork, require_repository
from .copying import MANIFEST, Plan, apply, plan_copy, plan_undo, read_manifest, read_origin
from .smoke import smoke_test

SOURCE = Path(__file__).resolve().parents[2]
TO_TRAIN = """
To train:
    cd {root}
    export PYTHONPATH={path}
    python -m recipe.offpolicy.main_offpolicy 'correction=[tis_token,gsm]' ...   # then as verl.trainer.main_ppo
    bash {place}recipe/offpolicy/run_dense_fsdp.sh    # or a whole launch script
On a running Ray cluster every node needs the same PYTHONPATH."""
DONE, SMOKE_FAILED, REFUSED, INTERRUPTED = 0, 1, 2, 3


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    options = _parser().parse_args(arguments)
    if options.undo and (options.force or options.no_smoke):
        return _refuse("--undo goes with --dry-run alone: it never removes what was edited, and starts nothing.")
    try:
        status = _undo(options) if options.undo else _copy(options)
        sys.stdout.flush()
        return status
    except Refused as error:
        return _refuse(str(error))
    except BrokenPipeError:
        # Whoever reads has seen enough. Python would write what is left at its end, and fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE if options.dry_run else _stop("no one reads the output any more")
    except (OSError, KeyboardInterrupt) as error:
        return _stop("interrupted" if isinstance(error, KeyboardInterrupt) else str(error))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="copy_into_fork.sh", description="Copies the off-policy recipe into a verl checkout, and tries it there."
    )
    parser.add_argument("path", type=Path, metavar="PATH", help="root of the verl checkout")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, and do nothing")
    parser.add_argument("--undo", action="store_true", help="remove what was copied")
    parser.add_argument("--force", action="store_true", help="overwrite edits that were made to copied files")
    parser.add_argument("--no-smoke", action="store_true", help="copy only")
    return parser


def _stop(why: str) -> int:
    fix = "run the same command again to finish, or --undo to remove what is there."
    print(f"copy_into_fork: stopped: {why}\nFix: {fix}", file=sys.stderr)
    return INTERRUPTED


def _refuse(message: str) -> int:
    print(f"copy_into_fork: {message}", file=sys.stderr)
    return REFUSED


def _copy(options: argparse.Namespace) -> int:
    fork = open_fork(options.path)
    plan = plan_copy(fork, SOURCE, force=options.force)
    version, commit = read_origin(SOURCE)
    _say(f"{fork.root}: verl {fork.release}")
    _say(f"from:  verl-offpolicy {version}, commit {commit or 'unknown'}")
    _say(f"place: {fork.place or 'the root'}, because {fork.reason}")
    if not options.dry_run:
        apply(fork.root, plan)
    _say_plan(plan, done=not options.dry_run)
    if options.dry_run:
        print("".join([f"    + {path}\n" for path in plan.write] + [f"    - {path}\n" for path in plan.remove]), end="")
        return DONE
    status = DONE if options.no_smoke else _smoke(fork)
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
            _say(f"{path} was edited: its content {kept} kept in the commit before")
        else:
            _say(f"{path} is no longer part of the copy, and not as it was copied: it stays, and is yours")
    if not (plan.write or plan.remove or plan.manifest):
        _say("nothing had to be written")


def _count(paths: Collection[str]) -> str:
    return f"{len(paths)} files{': ' + ', '.join(paths) if len(paths) <= 5 else ''}"


def _smoke(fork: Fork) -> int:
    _say(f"smoke test with {sys.executable}, half a minute to a few")
    failure = smoke_test(fork, sys.executable)
    if failure is None:
        return DONE
    _say(f"the smoke test failed at {failure.reason}")
    _say(f"the copy stays, until --undo. Fix: {failure.fix}")
    return SMOKE_FAILED


def _undo(options: argparse.Namespace) -> int:
    root = options.path.resolve()
    if not root.is_dir():
        raise Refused(f"{options.path}: no such folder. Fix: name the root of a verl checkout.")
    require_repository(root)
    manifest = read_manifest(root)
    if manifest is None:
        _say(f"{root}: nothing to undo, there is no {MANIFEST}")
        return DONE
    plan = plan_undo(root, manifest)
    if not options.dry_run:
        apply(root, plan)
    _say(f"{root}: {'would remove' if options.dry_run else 'removed'} {_count(plan.remove[:-1])}")
    for path in plan.edited:
        print(f"    kept {path}: not as it was copied, so that it is yours from now on")
    return DONE


def _say(message: str) -> None:
    print(f"copy_into_fork: {message}", flush=True)
