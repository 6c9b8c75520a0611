"""CONTRIBUTING's recipes, each followed on a copy of the repository: with all of its steps the named tests pass."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.extended, pytest.mark.verl("==0.9.1")]

COPIED = (
    "pyproject.toml",
    "setup.py",
    "README.md",
    "CONTRIBUTING.md",
    "configs",
    "docs",
    "recipe",
    "requirements",
    "scripts",
    "tests",
    "verl_patches",
)
NEEDED = ("data.train_files=x", "data.val_files=x", "actor_rollout_ref.model.path=/nowhere")


class Copy:
    """A copy of the repository that is changed as a contributor would."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir()
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                ignored = shutil.ignore_patterns("__pycache__", "faults", "outputs")
                shutil.copytree(source, root / name, symlinks=True, ignore=ignored)
            else:
                shutil.copy(source, root / name)
        for command in (["init", "-q"], ["add", "-A"]):  # tests list files by git
            subprocess.run(["git", *command], cwd=root, check=True)

    def write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def insert(self, path: str, before: str, text: str) -> None:
        """Insert text before the only line that begins so."""
        lines = (self.root / path).read_text().splitlines(keepends=True)
        (place,) = [number for number, line in enumerate(lines) if line.startswith(before)]
        self.write(path, "".join([*lines[:place], text, *lines[place:]]))

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        env = os.environ | {"PYTHONPATH": str(self.root), "PYTEST_ADDOPTS": ""}
        command = [sys.executable, *arguments]
        return subprocess.run(command, cwd=self.root, env=env, capture_output=True, text=True, check=False)

    def test(self, *arguments: str) -> None:
        done = self.run("-m", "pytest", "-q", "-x", *arguments)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]

    def fails(self, *arguments: str) -> str:
        done = self.run("-m", "pytest", "-q", "-x", *arguments)
        assert done.returncode == 1, done.stdout[-3000:] + done.stderr[-2000:]
        return done.stdout


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    return Copy(tmp_path / "copy")


def test_a_mask(copy: Copy) -> None:
    tests = ("tests/unit/correction/test_catalogue.py", "tests/unit/preflight/test_presets.py")
    copy.write(
        "configs/correction/tight.yaml",
        "# Geometric mask of rows, tighter than gsm.\nmasks:\n"
        "  tight: {ratio: rollout, level: sequence, aggregate: geometric, lower: 0.995, upper: 1.005, when: any}\n",
    )
    assert "tight" in copy.fails(tests[0])
    copy.insert("docs/corrections.md", "| `gsm_turn` ", "| `tight` | as `gsm` | [0.995, 1.005] | ours |\n")
    copy.test(tests[0])
    assert "tight" in copy.fails(tests[1], "-k", "held_by_a_test")
    copy.insert(tests[1], '    "gsm_turn": ', '    "tight": masks(tight=band(0.995, 1.005)),\n')
    copy.test(*tests)
    copy.test("tests/integration/test_options_live.py", "-k", "tight")


def test_an_aggregate(copy: Copy) -> None:
    proof, reference = "tests/unit/proof/test_trials.py", "tests/unit/correction/test_reference.py"
    live = ("tests/integration/test_vocabulary_live.py", "-k", "test_masks and l1_mean")
    copy.insert(
        "recipe/offpolicy/correction/masks.py",
        '    Aggregate("staleness"',
        '    Aggregate("l1_mean", "mean", (None, 0.05), lambda ratio, p, q: ratio.abs(), least=0.0, at=abs),\n',
    )
    assert "l1_mean" in copy.fails(proof)
    copy.insert(
        "recipe/offpolicy/proof/inverses.py",
        '        case "k1":',
        '        case "l1":\n            return free * value\n',
    )
    copy.test(proof)
    assert "l1_mean" in copy.fails(reference)
    statement = '        case ["l1", "mean"]:\n            return [math.fsum(map(abs, logs)) / len(logs)]\n'
    copy.insert("tests/support/reference.py", '        case ["geometric"]:', statement)
    copy.test(reference, "-k", "l1_mean or test_every_mask or aggregate")
    assert "l1_mean" in copy.fails("tests/unit/correction/test_catalogue.py")
    copy.insert("docs/correction_keys.md", "| `second_moment` |", "| `l1_mean` | the mean of &#124;log r&#124; |\n")
    copy.test("tests/unit/correction/test_catalogue.py", "tests/unit/monitor/test_histogram.py")
    copy.test(*live)


def test_a_start_up_check(copy: Copy) -> None:
    module, listed = (f"recipe/offpolicy/preflight/checks/{name}.py" for name in ("run_keys", "__init__"))
    code = '''

def check_prompts(run: Composed) -> Iterator[Problem]:
    """Check that a batch has more than one prompt."""
    if run.get(BATCH) == 1:
        yield run.problem(BATCH, "one prompt is no batch.", sets={BATCH: 2})
'''
    copy.write(module, (copy.root / module).read_text() + code)
    launch = ("-m", "recipe.offpolicy.main_offpolicy", "--check", "correction=tis_token", *NEEDED)
    sizes = ("data.train_batch_size=1", "actor_rollout_ref.actor.ppo_mini_batch_size=1")
    rest = ("actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1")
    copy.insert(listed, "    run_keys.check_micro_batches,", "    run_keys.check_prompts,\n")
    stopped = copy.run(*launch, *rest, *sizes)
    assert stopped.returncode == 1
    assert "data.train_batch_size=1: one prompt is no batch. Set data.train_batch_size=2." in stopped.stderr
    assert "one prompt is no batch" not in copy.run(*launch, *rest, *sizes, "data.train_batch_size=2").stderr
    asked = copy.run("-m", "recipe.offpolicy.doctor", *launch[3:], *rest, *sizes)
    assert asked.returncode == 2
    assert "one prompt is no batch" in asked.stdout


def test_a_release(copy: Copy) -> None:
    table = (copy.root / "verl_patches" / "releases.py").read_text()
    assert "_V0_9_0, _V0_9_1)" in table
    copy.write("verl_patches/releases.py", table.replace("_V0_9_1)\n", '_V0_9_1, Release("0.10.0"))\n'))
    tests = ("tests/unit/test_packaging.py", "tests/unit/verl_patches/test_releases.py")
    assert "0.10.0" in copy.fails(tests[0], "-k", "release")
    pinned = (copy.root / "requirements" / "verl-0.9.1.txt").read_text()
    copy.write("requirements/verl-0.10.0.txt", pinned.replace("verl==0.9.1", "verl==0.10.0"))
    assert "0.10.0" in copy.fails(tests[0], "-k", "cuda")
    pinned = (copy.root / "requirements" / "cuda.txt").read_text()
    copy.write("requirements/cuda.txt", pinned.replace("verl==0.9.1", "verl==0.10.0"))
    assert "0.10.0" in copy.fails(tests[0], "-k", "documents")
    copy.insert("docs/paths.md", "| 0.9.0, 0.9.1 | V1", "| 0.10.0 | V1: `sync` | engine: FSDP |\n")
    copy.insert("README.md", "# ", "For verl 0.10.0.\n\n")
    copy.test(*tests, "tests/unit/scripts/quickstart/test_releases.py", "-k", "release")


def test_an_extension(copy: Copy) -> None:
    folder = "recipe/offpolicy/extensions/wobble"
    copy.write(f"{folder}/__init__.py", '"""A small extension."""\n')
    copy.write(f"{folder}/nudge.py", (ROOT / "tests" / "support" / "nudge.py").read_text())
    copy.insert(
        "recipe/offpolicy/extensions/add_on.py",
        '    "opd": "',
        '    "wobble": "recipe.offpolicy.extensions.wobble.nudge:Nudge",\n',
    )
    check = "tests/unit/extensions/test_registry.py"
    assert "wobble" in copy.fails(check)
    copy.write("configs/wobble/on.yaml", "# Rewards each token of a response.\nbonus: 0.5\n")
    assert "wobble" in copy.fails(check)
    copy.insert("configs/offpolicy_base.yaml", "  - _self_", "  - wobble: null\n")
    assert "wobble" in copy.fails(check)
    copy.insert("docs/extensions.md", "The shipped extensions are", "Another is `wobble`.\n")
    copy.test(check, "tests/unit/test_layering.py")
    launch = ("-m", "recipe.offpolicy.main_offpolicy", "--check", "wobble=on", "actor_rollout_ref.rollout.name=vllm")
    done = copy.run(*launch, *NEEDED, "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8")
    assert "; wobble (bonus=0.5" in done.stdout, done.stderr
