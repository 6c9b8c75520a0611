"""The user's own agent loops: what is found in their source, and that nothing else is claimed."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from recipe.offpolicy.correction import CorrectionSpec, Problem
from recipe.offpolicy.preflight.checks.rollout import check_agent_loops
from recipe.offpolicy.preflight.composed import Composed
from recipe.offpolicy.preflight.python_source import find_log_probs
from tests.support.corrections import GSM, spec

HEAD = "from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput\n"
TOOLS = "from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop\n"
WITHOUT = "AgentLoopOutput(prompt_ids=[], response_ids=[])"
MASKED = spec(gsm=GSM)

# The module of a loop, and what is seen of the class Loop in it.
SOURCES = {
    "given": (
        f"{HEAD}class Loop(AgentLoopBase):\n  def run(self): return AgentLoopOutput(response_logprobs=[])",
        "returned",
    ),
    "left out": (f"{HEAD}class Loop(AgentLoopBase):\n  def run(self): return {WITHOUT}", "left out"),
    "set afterwards": (
        f"{HEAD}class Loop(AgentLoopBase):\n  def run(self):\n    o = {WITHOUT}\n    o.response_logprobs = []",
        "returned",
    ),
    "by keywords that are not seen": (
        f"{HEAD}class Loop(AgentLoopBase):\n  def run(self, **k): return AgentLoopOutput(**k)",
        "unknown",
    ),
    "verl's own": (f"{TOOLS}class Loop(ToolAgentLoop):\n  def tool(self): ...", "returned"),
    "verl's own, and another": (
        f"{HEAD}{TOOLS}class Loop(ToolAgentLoop):\n  def run(self):\n    return {WITHOUT} or super().run()",
        "unknown",
    ),
    "not Python": ("class", "unknown"),
}


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's package whose modules would end the test if they were imported."""
    package = tmp_path / "of_mine"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "made.py").write_text(f"{HEAD}raise SystemExit\ndef made(): return {WITHOUT}\n")
    (package / "base.py").write_text(f"{HEAD}class Base(AgentLoopBase):\n  def run(self): return {WITHOUT}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VERL_USE_EXTERNAL_MODULES", raising=False)
    return package / "loop.py"


@pytest.mark.parametrize("name", SOURCES)
def test_what_the_source_of_a_loop_shows(name: str, module: Path) -> None:
    source, seen = SOURCES[name]
    module.write_text(f"raise SystemExit\n{source}\n" if name != "not Python" else source)
    assert find_log_probs("of_mine.loop.Loop").log_probs == seen


def config(**agent: object) -> DictConfig:
    return OmegaConf.create(
        {"actor_rollout_ref": {"rollout": {"agent": agent}}, "data": {"custom_cls": {"path": None}}}
    )


def problems(agent: DictConfig, correction: CorrectionSpec = MASKED) -> list[Problem]:
    return list(check_agent_loops(Composed(agent, correction)))


def listed(folder: Path, *names: str) -> str:
    """A file of loops next to the package."""
    file = folder / "agent.yaml"
    file.write_text("".join(f"- {{name: {name}, _target_: of_mine.{name}.Loop}}\n" for name in names))
    return file.name


@pytest.mark.parametrize("default", ["single_turn_agent", "tool_agent"])
def test_verls_own_loops_are_known(default: str, module: Path) -> None:
    assert problems(config(default_agent_loop=default, agent_loop_config_path=None)) == []
    assert problems(OmegaConf.create({"actor_rollout_ref": {"rollout": {}}})) == []


@pytest.mark.parametrize("content", [None, "a: 1", "- {name: x}", "- ["])
def test_a_file_that_verl_cannot_read_is_wrong(content: str | None, module: Path) -> None:
    path = module.parent.parent / "agent.yaml"
    if content is not None:
        path.write_text(content)
    for given in ("agent.yaml", str(path)):
        (problem,) = problems(config(agent_loop_config_path=given, default_agent_loop="mine"))
        assert (problem.verdict, problem.value) == ("ERROR", given)
        assert "cannot read this file as a list of agent loops" in problem.reason


def test_a_loop_that_nobody_registers_is_wrong_and_mended(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = config(default_agent_loop="mine", agent_loop_config_path=None)
    (problem,) = problems(asked)
    assert problem.verdict == "ERROR"
    assert problem.overrides == ("actor_rollout_ref.rollout.agent.default_agent_loop=single_turn_agent",)
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "of_mine")
    (problem,) = problems(asked)
    assert (problem.verdict, "of_mine may register it, which was not checked" in problem.reason) == ("NOTE", True)


def test_a_loop_without_log_probs_is_inert(module: Path) -> None:
    module.write_text(f"{SOURCES['left out'][0]}\n")
    (module.parent / "other.py").write_text(f"{SOURCES['given'][0]}\n")
    alone = listed(module.parent.parent, "loop")
    for default in ("single_turn_agent", "loop"):
        (problem,) = problems(config(default_agent_loop=default, agent_loop_config_path=alone))
        assert problem.verdict == "NO-OP"
        assert problem.reason == (
            f"the loop loop (of_mine.loop.Loop) creates its output without response_logprobs ({module}, line 3), "
            "so the trainer receives no mu."
        )
    both = listed(module.parent.parent, "loop", "other")
    verdicts = {"single_turn_agent": "NOTE", "other": "NOTE", "loop": "NO-OP"}
    for default, verdict in verdicts.items():
        (problem,) = problems(config(default_agent_loop=default, agent_loop_config_path=both))
        assert problem.verdict == verdict
