"""A copy inside a checkout of the installed release works with the checkout's verl, in every layout of `recipe`.

The checkout is made from the installed package, so the test needs no network and runs in the environment of any
release.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT

pytest.importorskip("verl")
MANIFEST = ".offpolicy-manifest.json"
RELEASE = importlib.metadata.version("verl").partition("+")[0]
STEPS = ("imports", "--cfg job", "contracts", "doctor", "one CPU update")

pytestmark = pytest.mark.slow


def run(*command: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command in an environment without variables for this checkout or a platform."""
    leaks = ("GIT_", "VERL_", "PYTHON")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(leaks)}
    return subprocess.run(command, cwd=cwd, env=kept | variables, capture_output=True, text=True, check=False)


def git(root: Path, *arguments: str) -> str:
    settings = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "protocol.file.allow=always")
    done = run("git", "-C", str(root), *settings, *arguments, cwd=root)
    assert done.returncode == 0, done.stderr
    return done.stdout


def content(root: Path) -> dict[str, str]:
    """Digest of every file below `root`, except git's own files; links and folders are included by name."""
    found = {}
    for path in root.rglob("*"):
        name = path.relative_to(root).as_posix()
        if not name.startswith(".git/"):
            plain = path.is_file() and not path.is_symlink()
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest() if plain else ""
    return found


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create verl's package together with the files that make it a checkout."""
    import verl

    root = tmp_path_factory.mktemp("tree")
    # With the bytecode that a checkout in use has: each step of the smoke test would compile it again.
    shutil.copytree(Path(verl.__file__).parent, root / "verl")
    if RELEASE == "0.8.0":  # as verl's tag calls itself
        (root / "verl" / "version" / "version").write_text("0.8.0.dev\n")
    (root / "pyproject.toml").write_text(f'[project]\nname = "verl"\nversion = "{RELEASE}"\n')
    (root / ".gitignore").write_text("__pycache__/\n*.py[cod]\n**/outputs\n*.lock\nlogs\n")
    return root


@pytest.fixture
def fork(request: pytest.FixtureRequest, tree: Path, tmp_path: Path) -> Iterator[Path]:
    """A git checkout with local changes, and with `recipe` as the parameter says."""
    root = tmp_path / "fork"
    shutil.copytree(tree, root)
    git(root, "init", "-q")
    if request.param == "own recipe":
        (root / "recipe" / "dapo").mkdir(parents=True)
        (root / "recipe" / "dapo" / "main_dapo.py").write_text("NAME = 'dapo'\n")
    if request.param.startswith("submodule"):
        recipes = tmp_path / "recipes"
        (recipes / "dapo").mkdir(parents=True)
        (recipes / "dapo" / "main_dapo.py").write_text("NAME = 'dapo'\n")
        git(recipes, "init", "-q")
        git(recipes, "add", "-A")
        git(recipes, "commit", "-qm", "recipes")
        git(root, "submodule", "--quiet", "add", str(recipes), "recipe")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "verl")
    if request.param == "submodule, not initialised":
        git(root, "submodule", "--quiet", "deinit", "-f", "recipe")
    with (root / "pyproject.toml").open("a") as changed:
        changed.write("# a local change\n")
    (root / "local_notes.md").write_text("notes\n")
    yield root
    shutil.rmtree(root)


def script(fork: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = ("bash", str(ROOT / "scripts" / "copy_into_fork.sh"), str(fork), *options)
    return run(*command, cwd=ROOT.parent, VENV=sys.prefix, OMP_NUM_THREADS="1")


def copied_files(fork: Path, before: dict[str, str], status: str) -> set[str]:
    """List the files that a copy added; everything else must be unchanged, and git sees the copy as one commit."""
    after = content(fork)
    assert {path: after[path] for path in before} == before, "the smoke test leaves nothing, and changes nothing"
    added = {path for path in after.keys() - before.keys() if (fork / path).is_file()}
    assert git(fork, "status", "--porcelain", "-uall") == status
    place = place_in(fork)
    ours = (f"{place}recipe/offpolicy/", f"{place}verl_patches/")
    assert {path for path in added if not path.startswith(ours)} == {MANIFEST}
    return added


def place_in(fork: Path) -> str:
    return "offpolicy_correction/" if (fork / ".gitmodules").exists() else ""


@pytest.mark.extended
@pytest.mark.parametrize(
    "fork", ["own recipe", "submodule, populated", "no recipe", "submodule, not initialised"], indirect=True
)
def test_a_copy_runs_where_it_lies_and_goes_without_a_trace(fork: Path, request: pytest.FixtureRequest) -> None:
    """The copy passes its smoke test although there is another recipe."""
    smoke = request.node.callspec.params["fork"] in ("own recipe", "submodule, populated")
    before, status = content(fork), git(fork, "status", "--porcelain", "-uall")
    copied = script(fork, *([] if smoke else ["--no-smoke"]))
    assert copied.returncode == 0, copied.stdout + copied.stderr
    if smoke:
        assert tuple(re.findall(r"^    (\S.*?) +ok +[\d.]+ s", copied.stdout, re.M)) == STEPS
        assert f"LIVE through verl {RELEASE} in {fork / 'verl'}: 14 tokens" in copied.stdout
    copied_files(fork, before, status)
    code = "import verl, recipe.offpolicy as r, verl_patches as p; print(verl.__file__, r.__file__, p.__file__)"
    command = f"cd {fork} && {exported(copied.stdout)} && {sys.executable} -B -c {code!r}"
    found = run("bash", "-c", command, cwd=fork.parent)
    here = fork / place_in(fork)
    wanted = (fork / "verl", here / "recipe/offpolicy", here / "verl_patches")
    assert found.stdout.split() == [str(package / "__init__.py") for package in wanted], found.stderr
    _run_as_printed(fork, copied.stdout)
    undone = script(fork, "--undo")
    assert undone.returncode == 0, undone.stderr
    assert content(fork) == before
    assert git(fork, "status", "--porcelain", "-uall") == status


def exported(printed: str) -> str:
    export = re.search(r"^    (export PYTHONPATH=.*)$", printed, re.M)
    assert export is not None
    return export[1]


def _run_as_printed(fork: Path, printed: str) -> None:
    """Run the printed commands in a shell without other variables, and also run the checkout's other recipes."""
    # With bytecode, as a user would run it: the undo has to cope.
    launch = (fork / place_in(fork) / "recipe/offpolicy/run_dense_fsdp.sh").relative_to(fork)
    assert f"bash {launch} " in printed
    started = run(
        "bash",
        "-c",
        f"cd {fork} && {exported(printed)} && bash {launch} 'correction=[tis_token,gsm]' --cfg job",
        cwd=fork.parent,
        PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    )
    assert started.returncode == 0, started.stderr
    assert re.search(r"^    adv_estimator: grpo$|^  adv_estimator: grpo$", started.stdout, re.M)
    assert re.search(r"^  masks:\n    gsm:$", started.stdout, re.M)
    if (fork / "recipe/dapo").is_dir():
        alongside = "import recipe.dapo.main_dapo as dapo, recipe.offpolicy; print(dapo.NAME)"
        there = f"cd {fork} && {exported(printed)} && {sys.executable}"
        done = run("bash", "-c", f'{there} -c "{alongside}"', cwd=fork.parent)
        assert done.stdout.strip() == "dapo", done.stderr
    for cache in (fork / "recipe/dapo").rglob("__pycache__"):
        shutil.rmtree(cache)


@pytest.mark.extended
@pytest.mark.parametrize("fork", ["no recipe"], indirect=True)
def test_a_fork_whose_seam_has_moved_fails_the_smoke_test(fork: Path) -> None:
    """The contracts apply to the checkout's verl, not to the installed verl."""
    losses = fork / "verl" / "workers" / "utils" / "losses.py"
    text = losses.read_text()
    assert text.count("def ppo_loss(config: ActorConfig, model_output, data: TensorDict, dp_group=None):") == 1
    losses.write_text(text.replace("data: TensorDict, dp_group=None):", "data: TensorDict, dp_group=None, more=1):"))
    done = script(fork)
    assert done.returncode == 1
    assert "the smoke test failed at contracts" in done.stdout
    assert "more=1" in done.stdout
    assert "To train" not in done.stdout
    assert (fork / MANIFEST).exists()
    assert script(fork, "--undo").returncode == 0
