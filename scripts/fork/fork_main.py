"""The command of copy_into_fork.sh: arguments, order of events and what is said about them."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import fork_apply
import fork_manifest
from fork_checkout import Checkout, Place, Refused, choose_place, ignored, open_checkout
from fork_plan import CopyPlan, plan_copy, plan_undo
from fork_shipped import origin, shipped_files
from fork_smoke import smoke_test

SOURCE = Path(__file__).resolve().parents[2]
DONE, SMOKE_FAILED, REFUSED, INTERRUPTED = 0, 1, 2, 3
_MODULE = "recipe.offpolicy.main_offpolicy"
_ROOMS = ("recipe/offpolicy/config/", "recipe/offpolicy/", "verl_patches/")


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
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
        return DONE if options.dry_run else _stopped("nobody reads the output any more")
    except (OSError, KeyboardInterrupt) as error:
        return _stopped("interrupted" if isinstance(error, KeyboardInterrupt) else str(error))


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


def _stopped(why: str) -> int:
    print(
        f"copy_into_fork: stopped: {why}\n"
        f"Fix: run the same command again to finish, or --undo to remove what is there.",
        file=sys.stderr,
    )
    return INTERRUPTED


def _refuse(message: str) -> int:
    print(f"copy_into_fork: {message}", file=sys.stderr)
    return REFUSED


def _copy(options: argparse.Namespace) -> int:
    checkout = open_checkout(options.path)
    earlier = fork_manifest.read(checkout.root)
    place = choose_place(checkout.root)
    made_of = origin(SOURCE)
    plan = plan_copy(checkout, place, shipped_files(SOURCE), made_of, earlier, force=options.force)
    fork_apply.check_writable(checkout.root, [*(file.path for file in plan.write), *plan.remove])
    _say(f"{checkout.root}: verl {checkout.release}")
    _say(f"from:  verl-offpolicy {made_of.version}, commit {made_of.commit or 'unknown'}")
    _say(f"place: {f'{place.folder}/' if place.folder else 'the root'}, because {place.reason}")
    if earlier and earlier.state == "copying":
        _say("an earlier copy was interrupted; finishing it")
    if options.dry_run:
        _say_plan(plan, done=False)
        for file in plan.write:
            print(f"    + {file.path}")
        for path in plan.remove:
            print(f"    - {path}")
        return DONE
    changed = fork_apply.copy(checkout.root, plan, earlier)
    _say_plan(plan, done=True)
    if not changed:
        _say("nothing had to be written")
    if unseen := ignored(checkout.root, [*plan.final.files, fork_manifest.NAME]):
        _say(f"git ignores {len(unseen)} of these files here; to commit them: git add -f {' '.join(unseen)}")
    status = DONE if options.no_smoke else _smoke(checkout, place)
    if status == DONE:
        _say_how(checkout, place)
    print(f"To remove it again:\n    {_again(options)} --undo")
    return status


def _say_plan(plan: CopyPlan, *, done: bool) -> None:
    wrote, removed = ("wrote", "removed") if done else ("would write", "would remove")
    if plan.write:
        _say(f"{wrote} {len(plan.write)} files: {_by_room([file.path for file in plan.write])}")
    for path, kept in plan.overwritten.items():
        _say(f"{path} was edited: {'its content is kept' if done else 'its content would be kept'} in {kept}")
    if plan.remove:
        _say(f"{removed} {len(plan.remove)} files that are no longer shipped: {_by_room(plan.remove)}")
    if plan.unchanged:
        _say(f"{len(plan.unchanged)} files are as they should be")
    for path in plan.disowned:
        _say(f"{path} is no longer part of the copy, and not as it was copied: it stays, and is yours")


def _by_room(paths: Sequence[str]) -> str:
    if len(paths) <= 5:
        return ", ".join(paths)
    rooms = Counter(next((room for room in _ROOMS if f"/{room}" in f"/{path}"), path) for path in paths)
    return ", ".join(f"{count} in {room}" for room, count in sorted(rooms.items()))


def _smoke(checkout: Checkout, place: Place) -> int:
    _say(f"smoke test with {sys.executable}, half a minute to a few")
    for outcome in smoke_test(checkout, place, sys.executable, begin=_say_step):
        verdict = "ok" if outcome.failure is None else "FAILED"
        print(f"{verdict:<6} {outcome.seconds:5.1f} s  {_brief(outcome.said)}", flush=True)
        if outcome.failure is not None:
            _say(f"the smoke test failed at {outcome.name}: {outcome.failure.reason}")
            _say(f"the copy stays, until --undo. Fix: {outcome.failure.fix}")
            return SMOKE_FAILED
    return DONE


def _say_step(name: str) -> None:
    print(f"    {name:<15} ", end="", flush=True)


def _brief(said: str) -> str:
    return said if said.startswith("offpolicy:") else ""


def _say_how(checkout: Checkout, place: Place) -> None:
    folder = f"{place.folder}/" if place.folder else ""
    path = shlex.quote(place.python_path(checkout.root))
    print(f"\nTo train:\n    cd {shlex.quote(str(checkout.root))}\n    export PYTHONPATH={path}")
    print(f"    python -m {_MODULE} 'correction=[tis_token,gsm]' ...   # then as verl.trainer.main_ppo")
    print(f"    bash {folder}recipe/offpolicy/run_dense_fsdp.sh    # or a whole launch script")
    print("On a running Ray cluster every node needs the same PYTHONPATH.")


def _again(options: argparse.Namespace) -> str:
    script = shlex.quote(str(SOURCE / "scripts" / "copy_into_fork.sh"))
    return f"bash {script} {shlex.quote(str(options.path.resolve()))}"


def _undo(options: argparse.Namespace) -> int:
    root = options.path.resolve()
    if not root.is_dir():
        raise Refused(f"{options.path}: no such folder. Fix: name the root of a verl checkout.")
    manifest = fork_manifest.read(root)
    if manifest is None:
        if not options.dry_run:
            fork_apply.clean_up(root, None)
        _say(f"{root}: nothing to undo, there is no {fork_manifest.NAME}")
        return DONE
    plan = plan_undo(root, manifest)
    fork_apply.check_writable(root, plan.remove)
    if not options.dry_run:
        fork_apply.undo(root, plan, manifest)
    verb = "would remove" if options.dry_run else "removed"
    _say(f"{root}: {verb} {len(plan.remove)} files: {_by_room(plan.remove)}")
    for path in plan.edited:
        print(f"    kept {path}: not as it was copied, so that it is yours from now on")
    for path in plan.found:
        print(f"    kept {path}: it was there before the copy")
    return DONE


def _say(message: str) -> None:
    print(f"copy_into_fork: {message}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
