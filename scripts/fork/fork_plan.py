"""What a copy or an undo would do, decided before anything is written. Reads the checkout, changes nothing."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from fork_checkout import Checkout, Place, Refused
from fork_manifest import Entry, Manifest
from fork_shipped import Origin, Shipped, digest


@dataclass(frozen=True)
class CopyPlan:
    """A copy that may go ahead.

    Attributes:
        manifest: of the copy, for the time until it is complete.
        write: files to write, under the paths of the checkout.
        unchanged: paths that hold what they should.
        remove: paths of an earlier copy that are no longer shipped.
        disowned: the same, with edits: they stay, and are the user's from now on.
        overwritten: edited copies that `--force` replaces -> the path under which each is kept.
    """

    manifest: Manifest
    write: tuple[Shipped, ...]
    unchanged: tuple[str, ...]
    remove: tuple[str, ...]
    disowned: tuple[str, ...]
    overwritten: Mapping[str, str]

    @property
    def final(self) -> Manifest:
        return self.manifest.finished({*self.unchanged, *(file.path for file in self.write)})


@dataclass(frozen=True)
class UndoPlan:
    """What goes and what stays.

    Attributes:
        remove: files that hold what was copied.
        edited: files that do not, or that cannot be told: they stay, and are the user's.
        found: files that were there before the copy.
        directories: made by the copy; removed where nothing is left in them.
    """

    remove: tuple[str, ...]
    edited: tuple[str, ...]
    found: tuple[str, ...]
    directories: tuple[str, ...]


def plan_copy(
    checkout: Checkout,
    place: Place,
    shipped: Iterable[Shipped],
    origin: Origin,
    earlier: Manifest | None,
    *,
    force: bool = False,
) -> CopyPlan:
    """What copying `shipped` to `place` takes.

    Raises:
        Refused: a file of the user's is in the way, a copied file was edited (without `force`), or an earlier copy
            lives in another place; with the list.
    """
    root = checkout.root
    files = [Shipped(place.within(file.path), file.content, file.executable) for file in shipped]
    known = earlier.files if earlier else {}
    if earlier and earlier.place != place.folder:
        raise Refused(
            f"an earlier copy lives in {earlier.place or 'the root'} and now belongs in {place.folder or 'the root'}: "
            f"{place.reason}. Fix: --undo first, then copy again."
        )
    if blocked := [why for file in files if (why := obstacle(root, file.path))]:
        raise Refused(_listed("these are in the way", sorted(set(blocked)), "move them away, then copy again"))
    write, unchanged, foreign, edited = [], [], [], []
    entries: dict[str, Entry] = {}
    for file in files:
        there = content_digest(root / file.path)
        entry = known.get(file.path)
        found = entry.found if entry else there is not None
        before = there if entry and there not in (None, file.sha256) else None
        entries[file.path] = Entry(file.sha256, before=before, found=found and there == file.sha256)
        if there == file.sha256:
            unchanged.append(file.path)
            continue
        write.append(file)
        if there is None:
            continue
        if entry is None or entry.found:
            foreign.append(file.path)
        elif not entry.is_ours(there):
            edited.append(file.path)
    if foreign:
        raise Refused(
            _listed("these exist with other content, and are not of a copy", foreign, "rename or remove them")
        )
    if edited and not force:
        fix = "--force, which replaces them and keeps each beside itself as FILE.orig"
        raise Refused(_listed("these were edited since they were copied", edited, fix))
    stale = {path: entry for path, entry in known.items() if path not in entries}
    gone = [path for path, entry in stale.items() if removable(root, path, entry)]
    left = [path for path in stale if path not in gone and content_digest(root / path) is not None]
    made = (*(earlier.directories if earlier else ()), *_missing_directories(root, entries))
    manifest = Manifest(
        state="copying",
        version=origin.version,
        commit=origin.commit,
        verl=checkout.release,
        place=place.folder,
        directories=tuple(sorted(set(made))),
        # Files on their way out are known until they are gone, so that an interruption forgets none.
        files=entries | {path: stale[path] for path in gone},
    )
    kept = {path: _free_name(root, path) for path in edited}
    return CopyPlan(manifest, tuple(write), tuple(unchanged), tuple(gone), tuple(left), kept)


def plan_undo(root: Path, manifest: Manifest) -> UndoPlan:
    """What undoing the copy in `manifest` takes."""
    remove: list[str] = []
    edited: list[str] = []
    found: list[str] = []
    for path, entry in manifest.files.items():
        if content_digest(root / path) is None:
            continue
        if entry.found and removable(root, path, Entry(entry.sha256)):
            found.append(path)
        else:
            (remove if removable(root, path, entry) else edited).append(path)
    return UndoPlan(tuple(remove), tuple(edited), tuple(found), manifest.directories)


def removable(root: Path, path: str, entry: Entry) -> bool:
    """Whether `path` is still the file that was copied."""
    there = content_digest(root / path)
    return there is not None and not obstacle(root, path) and not entry.found and entry.is_ours(there)


def content_digest(path: Path) -> str | None:
    """SHA-256 of what is at `path`, "" where that is no readable file, None where nothing is."""
    try:
        return digest(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return "" if path.is_symlink() else None
    except OSError:
        return ""


def obstacle(root: Path, path: str) -> str | None:
    """What stands where a plain file in plain folders should be."""
    for step in _steps(path):
        there = root / step
        if there.is_symlink():
            return f"{step} (a link)"
        if there.exists() and not (there.is_file() if step == path else there.is_dir()):
            return f"{step} ({'no plain file' if step == path else 'no folder'})"
    return None


def _free_name(root: Path, path: str) -> str:
    """path.orig, or path.orig2 and so on where that is taken."""
    names = (f"{path}.orig{number if number > 1 else ''}" for number in itertools.count(1))
    return next(name for name in names if not os.path.lexists(root / name))


def _steps(path: str) -> Iterator[str]:
    """a/b/c -> a, a/b, a/b/c"""
    parts = path.split("/")
    for length in range(1, len(parts) + 1):
        yield "/".join(parts[:length])


def _missing_directories(root: Path, paths: Iterable[str]) -> set[str]:
    parents = {parent.as_posix() for path in paths for parent in PurePosixPath(path).parents} - {"."}
    return {parent for parent in parents if not (root / parent).exists()}


def _listed(what: str, paths: list[str], fix: str) -> str:
    return f"nothing was written: {what}:\n" + "\n".join(f"    {path}" for path in paths) + f"\nFix: {fix}."
