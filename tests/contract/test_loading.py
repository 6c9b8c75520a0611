"""How patches are loaded into a process: by a variable, by verl's entry points, or by capability; and how a failure is
found.

Patches change their process permanently, so each test that loads them runs in its own process.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.fresh_python import ok, python

CPU = {"VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda"}
"""Only the platform variable: these tests examine what loads the group of patches."""

pytest.importorskip("verl")


def last(code: str, *, path: str = "", bare: bool = False, **environment: str) -> str:
    """Return the last line that the code printed."""
    return ok(code, path=path, bare=bare, **environment).splitlines()[-1]


@pytest.fixture(scope="module")
def entry_point(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Create a folder with the metadata that an installed package would have, and add it to the path."""
    folder = tmp_path_factory.mktemp("installed")
    metadata = folder / "verl_offpolicy_of_the_test-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: verl-offpolicy-of-the-test\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[verl.plugins]\noffpolicy = verl_patches.plugin\n")
    return str(folder)


# verl reads entry points from 0.9 on.
needs_plugins = pytest.mark.verl(">=0.9")
STATES = "import verl, verl_patches; print(set(verl_patches.status()['cpu'].values()))"


@needs_plugins
def test_the_entry_point_is_inert_unless_asked_for(entry_point: str) -> None:
    # With VERL_PLATFORM=cpu and nothing of ours verl has no such platform; "cuda" is what it has by default.
    code = "import sys, importlib.metadata; before = importlib.metadata.version; import verl, verl_patches"
    code += "; assert importlib.metadata.version is before; assert 'verl_patches.plugin' in sys.modules"
    code += "; assert not any(name.startswith('verl_patches.cpu.') for name in sys.modules); print('inert')"
    assert last(code, path=entry_point) == "inert"


@needs_plugins
@pytest.mark.parametrize("asked", ["auto", " cpu ,auto"])
def test_the_entry_point_loads_what_is_asked_for(asked: str, entry_point: str) -> None:
    states = last(STATES, path=entry_point, OFFPOLICY_PATCHES=asked, **CPU)
    assert "in force" in states
    assert "off" not in states


@needs_plugins
def test_a_plugin_that_failed_is_found_although_verl_carries_on(entry_point: str) -> None:
    """In an incomplete environment, the group raises an error, verl logs it at DEBUG, and status() raises it again."""
    done = python("import verl; print('carried on'); import verl_patches; verl_patches.status()", path=entry_point,
                  OFFPOLICY_PATCHES="cpu")  # fmt: skip
    assert done.stdout.splitlines()[-1] == "carried on"
    assert done.returncode != 0
    assert "PatchError: OFFPOLICY_PATCHES=cpu: verl_patches.cpu makes verl run on the CPU and needs" in done.stderr


def test_what_nobody_loaded_is_found() -> None:
    """The patch is requested by name in an environment whose entry points verl does not see."""
    code = "import verl, sys; import verl_patches; verl_patches.status()"
    # The platform's own import would load the group; without it, verl's default.
    done = python(code, OFFPOLICY_PATCHES="cpu", VERL_USE_EXTERNAL_PLUGINS="none")
    assert done.returncode != 0
    assert "the environment requests the patches 'cpu', but none of them is installed" in done.stderr
    assert "Fix: export VERL_USE_EXTERNAL_MODULES=verl_patches.cpu before verl is imported" in done.stderr


@pytest.mark.parametrize("environment", [{}, CPU], ids=["", "cpu"])
def test_a_look_at_the_start_imports_nothing(environment: dict[str, str]) -> None:
    code = "import sys, verl_patches; assert not any(verl_patches.status().values())"
    code += "; assert not {'torch', 'verl', 'verl_patches.cpu'} & set(sys.modules); print('nothing')"
    assert last(code, bare=True, **environment) == "nothing"


# verl's legacy actors, of which one is for Megatron, are of 0.7.
needs_legacy = pytest.mark.verl("<0.8")
NO_MEGATRON = "import sys; sys.modules['megatron'] = None; "


@needs_legacy
def test_without_megatron_only_its_actor_is_refused() -> None:
    """Without Megatron, FSDP still starts and the status can be read; a request for the Megatron actor names
    the fix.
    """
    code = NO_MEGATRON + "import verl, verl.workers.actor.dp_actor, verl_patches; from verl_patches import legacy\n"
    code += "legacy.check('fsdp'); assert verl_patches.status()['legacy'] == "
    code += "{'fsdp_actor': 'in force', 'megatron_actor': 'waiting'}, verl_patches.status()\n"
    code += "try: legacy.check('megatron')\nexcept verl_patches.contract.NotInstalledError as error: print(error)"
    told = last(code, VERL_USE_EXTERNAL_MODULES="verl_patches.legacy")
    assert told.startswith("the legacy Megatron actor needs megatron")
    assert told.endswith(". Fix: install megatron-core and mbridge.")


def test_without_a_name_capability_decides() -> None:
    """The platform variable enables the CPU patches, and the files of the installed verl enable legacy actors; nothing
    is imported to decide.
    """
    legacy = "'legacy'" if has_legacy_actor() else ""
    code = "import sys, verl_patches; print(verl_patches.needed()); assert not {'torch', 'verl'} & set(sys.modules)"
    assert last(code, bare=True) == f"[{legacy}]"
    assert last(code, bare=True, **CPU) == f"['cpu'{', ' if legacy else ''}{legacy}]"
    installed = "import verl_patches; made = verl_patches.install(); assert verl_patches.install() == made"
    states = last(f"{installed}; print(sorted(made), {{s for g in made.values() for s in g.values()}})", **CPU)
    assert states.startswith(f"['cpu'{', ' if legacy else ''}{legacy}]")
    assert "off" not in states


def has_legacy_actor() -> bool:
    import verl

    return (Path(verl.__file__).parent / "workers" / "actor" / "dp_actor.py").is_file()


# The table ----------------------------------------------------------------------------------------------------

TABLE = "import runpy, sys; sys.argv = ['verl_patches']; {before}runpy.run_module('verl_patches', run_name='__main__')"


def table_of(printed: str) -> list[list[str]]:
    """Return the table's cells, row by row."""
    return [
        [cell.strip() for cell in line.strip("┃ ").split("│")[1:-1]] for line in printed.splitlines() if "│" in line
    ]


@pytest.mark.slow
@pytest.mark.extended
def test_the_table_shows_every_contract_and_that_it_holds() -> None:
    done = python(TABLE.format(before=""), **CPU, VERL_USE_EXTERNAL_MODULES="verl_patches.cpu")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = table_of(done.stdout)
    by_patch = {(row[0], row[1]): row[2:] for row in rows}
    seam = by_patch["worker_seams", "verl.workers.utils.losses:ppo_loss"]
    assert seam[1:] == ["calls", "ok"]
    wrapped = by_patch["cpu.process_group", "torch.distributed:init_process_group"]
    assert wrapped[1:] == ["in force", "ok"]
    assert {row[4] for row in rows if row[0].startswith("cpu.")} <= {"ok", "not for this release", "not installed"}
    if not has_legacy_actor():
        assert [row[3] for row in rows if row[0].startswith("legacy.")] == ["off"] * 2


@pytest.mark.slow
def test_a_broken_contract_ends_with_1() -> None:
    before = "import torch.distributed.fsdp as f; f.CPUOffloadPolicy.__init__ = lambda self, pin: None; "
    before += "import verl.workers.utils.losses as l; l.ppo_loss = lambda config, data: None; "
    done = python(TABLE.format(before=before))
    assert done.returncode == 1
    assert "worker_seams: patch 'ppo_loss': the target verl.workers.utils.losses:ppo_loss has changed" in done.stderr
    assert "pin_memory" not in done.stderr, "what this process does not need does not matter"
