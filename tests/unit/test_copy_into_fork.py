"""Copying into a checkout and back: nothing of the user's is touched, whatever happens in between."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts" / "fork"))

import fork_apply
import fork_checkout
import fork_main
from fork_main import DONE, INTERRUPTED, REFUSED

ROOT = Path(__file__).resolve().parents[2]
MANIFEST = ".offpolicy-manifest.json"
PROJECT = {
    "setup.py": 'setup(\n    name="verl-offpolicy",\n    version="1.2.3",\n)\n',
    "recipe/offpolicy/__init__.py": "",
    "recipe/offpolicy/main.py": "one\n",
    "recipe/offpolicy/run.sh": "#!/bin/sh\n",
    "recipe/offpolicy/deep/er.py": "two\n",
    "verl_patches/__init__.py": "three\n",
    "configs/base.yaml": "a: 1\n",
    "configs/correction/gsm.yaml": "b: 2\n",
}
COPIED = {
    "recipe/offpolicy/__init__.py": "",
    "recipe/offpolicy/main.py": "one\n",
    "recipe/offpolicy/run.sh": "#!/bin/sh\n",
    "recipe/offpolicy/deep/er.py": "two\n",
    "recipe/offpolicy/config/base.yaml": "a: 1\n",
    "recipe/offpolicy/config/correction/gsm.yaml": "b: 2\n",
    "verl_patches/__init__.py": "three\n",
}


def put(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small project of the real one's shape, with litter, as what is copied."""
    root = put(tmp_path / "project", PROJECT)
    (root / "recipe" / "offpolicy" / "config").symlink_to("../../configs")
    (root / "recipe" / "offpolicy" / "run.sh").chmod(0o755)
    litter = {
        "recipe/offpolicy/__pycache__/main.cpython-311.pyc": "x",
        "recipe/offpolicy/outputs/log.txt": "x",
        "verl_patches/.hidden.py": "x",
        "verl_patches/core.dump": "x",
    }
    put(root, litter)
    monkeypatch.setattr(fork_main, "SOURCE", root)
    return root


@pytest.fixture
def fork(tmp_path: Path) -> Path:
    """What the script takes for a verl checkout, with a file of the user's."""
    files = {"verl/__init__.py": "", "verl/version/version": "0.9.1\n", "mine.py": "mine\n"}
    return put(tmp_path / "fork", files)


def call(*arguments: object) -> int:
    return fork_main.main([str(argument) for argument in arguments])


def copy(fork: Path, *options: str) -> int:
    return call(fork, "--no-smoke", *options)


def snapshot(root: Path) -> dict[str, tuple[int, str]]:
    """Every path below `root` with its mode and its content or target."""
    found = {}
    for path in root.rglob("*"):
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode):
            content = os.readlink(path)
        else:
            content = hashlib.sha256(path.read_bytes()).hexdigest() if stat.S_ISREG(mode) else ""
        found[path.relative_to(root).as_posix()] = (mode, content)
    return found


def new_files(root: Path, before: dict[str, tuple[int, str]]) -> dict[str, str]:
    """Path -> content of the files that `before` has not; what it has must be as it was."""
    now = snapshot(root)
    assert {path: now.get(path) for path in before} == before
    added = [root / path for path in now.keys() - before.keys()]
    assert not [path for path in added if path.is_symlink()]
    return {path.relative_to(root).as_posix(): path.read_text() for path in added if path.is_file()}


def test_a_copy_holds_plain_files_and_the_undo_leaves_no_trace(
    project: Path, fork: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = snapshot(fork)
    assert copy(fork) == DONE
    printed = capsys.readouterr().out
    added = new_files(fork, before)
    manifest = json.loads(added.pop(MANIFEST))
    assert added == COPIED
    assert (fork / "recipe/offpolicy/run.sh").stat().st_mode & 0o777 == 0o755
    sums = {path: entry["sha256"] for path, entry in manifest["files"].items()}
    assert sums == {path: hashlib.sha256(text.encode()).hexdigest() for path, text in COPIED.items()}
    assert (manifest["state"], manifest["version"], manifest["commit"]) == ("complete", "1.2.3", None)
    assert (manifest["verl"], manifest["place"]) == ("0.9.1", "")
    assert "wrote 7 files: 4 in recipe/offpolicy/, 2 in recipe/offpolicy/config/, 1 in verl_patches/" in printed
    assert f"export PYTHONPATH={fork}\n" in printed
    assert call(fork, "--undo") == DONE
    assert "removed 7 files" in capsys.readouterr().out
    assert snapshot(fork) == before
    assert call(fork, "--undo") == DONE
    assert "nothing to undo" in capsys.readouterr().out


def test_a_second_copy_writes_nothing(project: Path, fork: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy(fork)
    times = {path: path.stat().st_mtime_ns for path in fork.rglob("*")}
    capsys.readouterr()
    assert copy(fork) == DONE
    assert "nothing had to be written" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in fork.rglob("*")} == times


def test_an_update_writes_what_changed_and_removes_what_is_gone(project: Path, fork: Path) -> None:
    before = snapshot(fork)
    copy(fork)
    put(project, {"recipe/offpolicy/main.py": "ONE\n", "recipe/offpolicy/new/file.py": "new\n"})
    (project / "recipe/offpolicy/deep/er.py").unlink()
    assert copy(fork) == DONE
    added = new_files(fork, before)
    manifest = json.loads(added.pop(MANIFEST))
    kept = {path: text for path, text in COPIED.items() if path != "recipe/offpolicy/deep/er.py"}
    assert added == kept | {"recipe/offpolicy/main.py": "ONE\n", "recipe/offpolicy/new/file.py": "new\n"}
    assert manifest["files"].keys() == added.keys()
    assert not (fork / "recipe/offpolicy/deep").exists()
    assert call(fork, "--undo") == DONE
    assert snapshot(fork) == before


@pytest.mark.parametrize("option", ["", "--force"])
def test_files_of_the_users_are_never_overwritten(
    project: Path, fork: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    put(fork, {"verl_patches/__init__.py": "theirs\n", "recipe/offpolicy/main.py": "theirs too\n"})
    before = snapshot(fork)
    assert copy(fork, *option.split()) == REFUSED
    said = capsys.readouterr().err
    assert "    recipe/offpolicy/main.py\n    verl_patches/__init__.py\n" in said
    assert "nothing was written" in said
    assert snapshot(fork) == before


def test_a_file_that_was_there_already_stays_when_the_copy_goes(
    project: Path, fork: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(fork, {"verl_patches/__init__.py": COPIED["verl_patches/__init__.py"], "recipe/dapo/a.py": "a\n"})
    before = snapshot(fork)
    assert copy(fork) == DONE
    assert copy(fork) == DONE
    put(project, {"verl_patches/__init__.py": "newer\n"})
    assert copy(fork) == REFUSED, "an update would overwrite the user's file"
    capsys.readouterr()
    assert call(fork, "--undo") == DONE
    assert "kept verl_patches/__init__.py: it was there before" in capsys.readouterr().out
    assert snapshot(fork) == before


def test_an_edit_stops_an_update_unless_it_is_forced(
    project: Path, fork: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy(fork)
    put(fork, {"recipe/offpolicy/main.py": "edited\n"})
    put(project, {"verl_patches/__init__.py": "newer\n"})
    before = snapshot(fork)
    assert copy(fork) == REFUSED
    assert "edited since they were copied:\n    recipe/offpolicy/main.py\nFix:" in capsys.readouterr().err
    assert snapshot(fork) == before
    assert copy(fork, "--force") == DONE
    assert "the edits of recipe/offpolicy/main.py are overwritten" in capsys.readouterr().out
    assert (fork / "recipe/offpolicy/main.py").read_text() == "one\n"
    assert (fork / "verl_patches/__init__.py").read_text() == "newer\n"


def test_an_undo_leaves_edits_and_what_else_lies_there(
    project: Path, fork: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = snapshot(fork)
    copy(fork)
    put(fork, {"recipe/offpolicy/main.py": "edited\n", "recipe/offpolicy/deep/notes.md": "notes\n"})
    capsys.readouterr()
    assert call(fork, "--undo") == DONE
    assert "kept recipe/offpolicy/main.py" in capsys.readouterr().out
    assert new_files(fork, before) == {
        "recipe/offpolicy/main.py": "edited\n",
        "recipe/offpolicy/deep/notes.md": "notes\n",
    }


def test_an_edited_file_that_is_no_longer_shipped_becomes_the_users(project: Path, fork: Path) -> None:
    copy(fork)
    put(fork, {"recipe/offpolicy/deep/er.py": "edited\n"})
    (project / "recipe/offpolicy/deep/er.py").unlink()
    assert copy(fork) == DONE
    assert "recipe/offpolicy/deep/er.py" not in json.loads((fork / MANIFEST).read_text())["files"]
    assert (fork / "recipe/offpolicy/deep/er.py").read_text() == "edited\n"


def test_bytecode_goes_with_its_source_and_no_other_does(project: Path, fork: Path) -> None:
    before = snapshot(fork)
    copy(fork)
    caches = {
        "verl_patches/__pycache__/__init__.cpython-311.pyc": "x",
        "recipe/offpolicy/__pycache__/main.cpython-311.pyc": "x",
        "recipe/offpolicy/__pycache__/main.cpython-312.opt-1.pyc": "x",
        "recipe/offpolicy/__pycache__/theirs.cpython-311.pyc": "x",
    }
    put(fork, caches)
    call(fork, "--undo")
    assert new_files(fork, before) == {"recipe/offpolicy/__pycache__/theirs.cpython-311.pyc": "x"}


def test_a_dry_run_lists_and_writes_nothing(project: Path, fork: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = snapshot(fork)
    assert call(fork, "--dry-run") == DONE
    said = capsys.readouterr().out
    assert [line[6:] for line in said.splitlines() if line.startswith("    + ")] == sorted(COPIED)
    assert snapshot(fork) == before
    copy(fork)
    copied = snapshot(fork)
    assert call(fork, "--undo", "--dry-run") == DONE
    assert "would remove 7 files" in capsys.readouterr().out
    assert snapshot(fork) == copied


class Interruption:
    """Ends the command at the n-th call of a function, before that call has done anything."""

    def __init__(self, module: object, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.function: Callable[..., object] = getattr(module, name)
        self.calls = 0
        self.at = -1
        monkeypatch.setattr(module, name, self)

    def __call__(self, *args: object, **kwargs: object) -> object:
        self.calls += 1
        if self.calls == self.at:
            raise KeyboardInterrupt
        return self.function(*args, **kwargs)

    def arm(self, at: int) -> None:
        self.calls, self.at = 0, at


# What an interruption can come before: the last step of writing a file, the removal of one, the removal of folders.
POINTS = [(os, "replace"), (fork_apply, "_remove"), (fork_apply, "_prune")]
# How often each is reached: the manifest twice and seven files; the update's two manifests and its one changed file.
REACHED = {
    ("copy", "replace"): 9,
    ("copy", "_remove"): 0,
    ("copy", "_prune"): 1,
    ("update", "replace"): 3,
    ("update", "_remove"): 1,
    ("update", "_prune"): 1,
    ("undo", "replace"): 0,
    ("undo", "_remove"): 7,
    ("undo", "_prune"): 1,
}


def prepare(what: str, project: Path, fork: Path) -> None:
    """The state that the operation `what` starts from, in a checkout without a copy."""
    if what == "update":
        put(project, {"recipe/offpolicy/main.py": "older\n", "recipe/offpolicy/older.py": "older\n"})
    if what != "copy":
        assert copy(fork) == DONE
    if what == "update":
        (project / "recipe/offpolicy/older.py").unlink()
        put(project, PROJECT)


@pytest.mark.parametrize(("module", "name"), POINTS, ids=[name for _, name in POINTS])
@pytest.mark.parametrize("then", ["copy", "undo"])
@pytest.mark.parametrize("what", ["copy", "update", "undo"])
def test_an_interruption_at_any_point_can_be_finished_or_undone(
    project: Path, fork: Path, monkeypatch: pytest.MonkeyPatch, module: object, name: str, then: str, what: str
) -> None:
    before = snapshot(fork)
    interruption = Interruption(module, name, monkeypatch)
    for at in itertools.count(1):
        prepare(what, project, fork)
        interruption.arm(at)
        status = call(fork, "--undo") if what == "undo" else copy(fork)
        interruption.arm(0)
        if then == "copy" and status == INTERRUPTED:
            assert copy(fork) == DONE
            added = new_files(fork, before)
            manifest = json.loads(added.pop(MANIFEST))
            assert (manifest["state"], set(manifest["files"])) == ("complete", set(COPIED))
            assert added == COPIED
        assert call(fork, "--undo") == DONE
        assert snapshot(fork) == before
        if status == DONE:
            break
        assert status == INTERRUPTED
    assert at - 1 == REACHED[what, name]


def test_an_edit_after_an_interruption_is_still_an_edit(
    project: Path, fork: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interruption = Interruption(os, "replace", monkeypatch)
    interruption.arm(5)
    assert copy(fork) == INTERRUPTED
    interruption.arm(0)
    written = next(path for path in sorted(COPIED) if (fork / path).exists())
    put(fork, {written: "edited\n"})
    assert copy(fork) == REFUSED
    assert (fork / written).read_text() == "edited\n"


def test_a_closed_folder_is_told_before_anything_is_written(
    project: Path, fork: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (fork / "recipe").mkdir(mode=0o555)
    root = os.geteuid() == 0
    if root:  # to which nothing is closed
        for folder in (*(each for each in fork.parents if Path(tempfile.gettempdir()) in each.parents), project):
            folder.chmod(folder.stat().st_mode | 0o055)
        fork.chmod(0o777)
        (fork / "recipe").chmod(0o555)
    before = snapshot(fork)
    if root:
        os.seteuid(65534)
    try:
        status = copy(fork)
    finally:
        if root:
            os.seteuid(0)
    assert status == REFUSED
    assert f"no permission to write in {fork / 'recipe'}. Fix:" in capsys.readouterr().err
    assert snapshot(fork) == before


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "it holds no verl/version/version. Fix: name the root of a verl checkout."),
        ({"__init__.py": "", "version/version": "0.9.1"}, "Fix: name the folder above it"),
        (
            {"verl/__init__.py": "", "verl/version/version": "0.6.1\n"},
            "is verl 0.6.1; the recipe was tested with 0.7.1",
        ),
        ({"verl/__init__.py": "", "verl/version/version": "0.9.1.dev0"}, "is verl 0.9.1.dev0"),
    ],
)
def test_other_paths_are_refused(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], files: dict[str, str], message: str
) -> None:
    other = put(tmp_path / "other", files)
    other.mkdir(exist_ok=True)
    before = snapshot(other)
    assert copy(other) == REFUSED
    assert message in capsys.readouterr().err
    assert snapshot(other) == before


def test_an_untested_release_is_opted_into(project: Path, fork: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(fork, {"verl/version/version": "0.8.2\n"})
    assert copy(fork) == REFUSED
    monkeypatch.setenv("OFFPOLICY_ALLOW_UNTESTED_VERL", "1")
    assert copy(fork) == DONE
    monkeypatch.delenv("OFFPOLICY_ALLOW_UNTESTED_VERL")
    put(fork, {"verl/version/version": "0.10.0\n"})
    assert call(fork, "--undo") == DONE, "an undo does not ask for the release"


def test_links_are_not_written_through(
    project: Path, fork: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = put(tmp_path / "elsewhere", {"keep.py": "x"})
    (fork / "verl_patches").symlink_to(elsewhere)
    put(fork, {"recipe/offpolicy": "a file\n"})
    before = snapshot(tmp_path)
    assert copy(fork) == REFUSED
    said = capsys.readouterr().err
    assert "in the way:\n    recipe/offpolicy (no folder)\n    verl_patches (a link)\nFix:" in said
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    "content",
    [
        "not json",
        "[]",
        '{"format": 2}',
        '{"about": "", "format": 1, "state": "complete", "version": "1", "commit": null, "verl": "0.9.1", "place": "", '
        '"directories": [], "files": {"../mine.py": {"sha256": "0"}}}',
    ],
)
def test_a_manifest_that_is_not_ours_is_left_alone(
    project: Path, fork: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    put(fork, {MANIFEST: content})
    before = snapshot(fork)
    for arguments in ((fork, "--no-smoke"), (fork, "--undo")):
        assert call(*arguments) == REFUSED
        assert "is not a manifest of this script" in capsys.readouterr().err
    assert snapshot(fork) == before


def test_undo_takes_no_other_option(project: Path, fork: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy(fork)
    before = snapshot(fork)
    assert call(fork, "--undo", "--force") == REFUSED
    assert snapshot(fork) == before


# ---- git


def git(root: Path, *arguments: str) -> str:
    settings = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "protocol.file.allow=always"]
    command = ["git", "-C", str(root), *settings, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=git_free()).stdout


def git_free() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}


@pytest.fixture
def submodule(fork: Path, tmp_path: Path) -> Path:
    """The fork as verl is: a git repository whose `recipe` is a populated submodule; its path."""
    recipes = put(tmp_path / "recipes", {"dapo/main_dapo.py": "x\n", "README.md": "r\n"})
    for root in (recipes, fork):
        git(root, "init", "-q")
        if root == fork:
            git(fork, "submodule", "--quiet", "add", str(recipes), "recipe")
        git(root, "add", "-A")
        git(root, "commit", "-qm", "first")
    return fork / "recipe"


def test_a_git_checkout_shows_our_files_and_nothing_else(
    project: Path, fork: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(fork, {".gitignore": "deep/\n", "other.py": "a\n"})
    git(fork, "init", "-q")
    git(fork, "add", "-A")
    git(fork, "commit", "-qm", "first")
    put(fork, {"other.py": "changed\n", "new.py": "new\n"})
    before, status = snapshot(fork), git(fork, "status", "--porcelain", "-uall")
    before = snapshot(fork)
    assert copy(fork) == DONE
    assert "git add -f recipe/offpolicy/deep/er.py" in capsys.readouterr().out
    assert set(new_files(fork, before)) == {*COPIED, MANIFEST}
    shown = {*git(fork, "status", "--porcelain", "-uall").splitlines()} - {*status.splitlines()}
    assert {line[3:] for line in shown} == {*COPIED, MANIFEST} - {"recipe/offpolicy/deep/er.py"}
    assert call(fork, "--undo") == DONE
    assert git(fork, "status", "--porcelain", "-uall") == status


@pytest.mark.parametrize("populated", [True, False])
def test_beside_a_submodule(
    project: Path, fork: Path, submodule: Path, capsys: pytest.CaptureFixture[str], populated: bool
) -> None:
    if not populated:
        git(fork, "submodule", "--quiet", "deinit", "-f", "recipe")
        assert not list(submodule.iterdir())
    before = snapshot(fork)
    assert copy(fork) == DONE
    printed = capsys.readouterr().out
    assert f"recipe/ is a git submodule, {'populated' if populated else 'not initialised'}" in printed
    assert f"export PYTHONPATH={fork}/offpolicy_correction:{fork}\n" in printed
    added = {f"offpolicy_correction/{path}" for path in COPIED} | {MANIFEST}
    assert set(new_files(fork, before)) == added
    assert set(git(fork, "status", "--porcelain", "-uall").splitlines()) == {f"?? {p}" for p in added}
    if not populated:
        git(fork, "submodule", "--quiet", "update", "--init")
        assert copy(fork) == DONE, "the place stays the same"
        assert "nothing had to be written" in capsys.readouterr().out
        git(fork, "submodule", "--quiet", "deinit", "-f", "recipe")
    assert call(fork, "--undo") == DONE
    # git itself has changed its own folder since, if the submodule came and went.
    gone = {path: state for path, state in snapshot(fork).items() if not path.startswith(".git/")}
    assert gone == {path: state for path, state in before.items() if not path.startswith(".git/")}
    assert git(fork, "status", "--porcelain", "-uall") == ""


def shadowing_init(fork: Path, submodule: Path) -> None:
    put(submodule, {"__init__.py": ""})


def shadowing_recipe(fork: Path, submodule: Path) -> None:
    put(submodule, {"offpolicy/__init__.py": ""})


def shadowing_patches(fork: Path, submodule: Path) -> None:
    put(fork, {"verl_patches.py": ""})


@pytest.mark.parametrize(
    ("shadow", "message"),
    [
        (shadowing_init, "it holds an __init__.py"),
        (shadowing_recipe, "recipe/offpolicy/ would be imported in the place of"),
        (shadowing_patches, "verl_patches/ would be imported in the place of"),
    ],
)
def test_where_python_would_not_find_the_copy_it_says_so(
    project: Path,
    fork: Path,
    submodule: Path,
    capsys: pytest.CaptureFixture[str],
    shadow: Callable[[Path, Path], None],
    message: str,
) -> None:
    shadow(fork, submodule)
    before = snapshot(fork)
    assert copy(fork) == REFUSED
    assert message in capsys.readouterr().err
    assert snapshot(fork) == before


def link_elsewhere(fork: Path) -> None:
    (fork / "recipe").symlink_to("..")


def own_repository(fork: Path) -> None:
    put(fork, {"recipe/README.md": ""})
    git(fork / "recipe", "init", "-q")


def gitlink_alone(fork: Path) -> None:
    git(fork, "init", "-q")
    git(fork, "update-index", "--add", "--cacheinfo", f"160000,{'1' * 40},recipe")


def listed_alone(fork: Path) -> None:
    put(fork, {".gitmodules": '[submodule "recipe"]\n\tpath = recipe\n\turl = ../recipes\n'})


@pytest.mark.parametrize("arrange", [link_elsewhere, own_repository, gitlink_alone, listed_alone])
def test_a_recipe_that_is_not_the_checkouts_own(project: Path, fork: Path, arrange: Callable[[Path], None]) -> None:
    arrange(fork)
    before = snapshot(fork)
    assert copy(fork) == DONE
    assert set(new_files(fork, before)) == {*(f"offpolicy_correction/{path}" for path in COPIED), MANIFEST}
    assert call(fork, "--undo") == DONE
    assert snapshot(fork) == before


@pytest.mark.parametrize("path", ["third_party/recipe", "recipes"])
def test_other_submodules_do_not_matter(project: Path, fork: Path, path: str) -> None:
    put(fork, {".gitmodules": f'[submodule "recipe"]\n\tpath = {path}\n\turl = ../recipes\n'})
    before = snapshot(fork)
    assert copy(fork) == DONE
    assert set(new_files(fork, before)) == {*COPIED, MANIFEST}


def test_when_the_place_changes_the_old_copy_has_to_go_first(
    project: Path, fork: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    listed_alone(fork)
    copy(fork)
    (fork / ".gitmodules").unlink()
    before = snapshot(fork)
    assert copy(fork) == REFUSED
    assert "an earlier copy lives in offpolicy_correction" in capsys.readouterr().err
    assert snapshot(fork) == before


# ---- the real project and the command


def test_the_project_itself_is_copied_whole(fork: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = snapshot(fork)
    assert copy(fork) == DONE
    files = set(new_files(fork, before)) - {MANIFEST}
    configs = {path.relative_to(ROOT / "configs").as_posix() for path in (ROOT / "configs").rglob("*.yaml")}
    assert {f"recipe/offpolicy/config/{path}" for path in configs} <= files
    sources = [*(ROOT / "recipe/offpolicy").rglob("*.py"), *(ROOT / "verl_patches").rglob("*.py")]
    assert {path.relative_to(ROOT).as_posix() for path in sources} <= files
    assert {"recipe/offpolicy/REQUIRED_VERL.txt", "recipe/offpolicy/run_dense_fsdp.sh"} <= files


def test_the_command_passes_on_arguments_and_status(fork: Path) -> None:
    before = snapshot(fork)
    script = ["bash", str(ROOT / "scripts" / "copy_into_fork.sh"), str(fork)]
    environment = {**git_free(), "VENV": sys.prefix}

    def run(*options: str, **changes: str) -> subprocess.CompletedProcess[str]:
        command = [*script, *options]
        return subprocess.run(
            command, env=environment | changes, cwd=fork, capture_output=True, text=True, timeout=60, check=False
        )

    copied = run("--no-smoke")
    assert (copied.returncode, copied.stderr) == (0, "")
    assert set(new_files(fork, before)) > {MANIFEST, "recipe/offpolicy/main_offpolicy.py"}
    assert run("--undo").returncode == 0
    assert snapshot(fork) == before
    missing = run(VENV="/nowhere")
    assert (missing.returncode, "VENV=/nowhere" in missing.stderr) == (2, True)
    assert run("--undo", "--force").returncode == 2


def test_the_releases_are_those_of_the_seams() -> None:
    from verl_patches.engine_loss import SEAMS

    shared = [release for release in fork_checkout.SUPPORTED if all(seam.covers(release) for seam in SEAMS)]
    assert shared == list(fork_checkout.SUPPORTED)
