"""The command that translates a correction from one framework's configuration to another's."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import yaml

from recipe.offpolicy.analysis.whatif.candidates import compose_correction, initialize_composer
from recipe.offpolicy.correction import CorrectionSpec, SpecError
from recipe.offpolicy.translate.__main__ import main, read_document, translate

AREAL = "actor:\n  use_decoupled_loss: true\n  lr: 1.0e-6\n  rejection_sampling: {upper: 2.0, lower: 0.5}\n"
PRIME = "[trainer.loss]\ntype = 'kpop'\nkpop_threshold = 0.2\n"


NEMO = {
    "loss_fn": {"use_importance_sampling_correction": True, "truncated_importance_sampling_type": "tis"}
    | {"truncated_importance_sampling_ratio": 2.0},
    "grpo": {"seq_logprob_error_threshold": None},
}
OPENRLHF = {"algo.advantage.is_correction_enable": True, "algo.advantage.is_correction_type": "icepop"}
TRL = {"vllm_importance_sampling_mode": "token_truncate", "learning_rate": 1e-6}
VERL = {"algorithm": {"rollout_correction": {"rollout_is": "sequence", "rollout_is_threshold": 5.0}}}


def composed(text: str) -> CorrectionSpec:
    given = shlex.split(text.replace("+correction@correction=", "correction="))
    ours = [override for override in given if override.lstrip("+").startswith("correction")]
    with initialize_composer():
        return CorrectionSpec.from_mapping(compose_correction(ours))


def test_from_a_file_to_overrides_that_compose_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, text, source in (("areal.yaml", AREAL, "areal"), ("prime.toml", PRIME, "prime_rl")):
        path = tmp_path / name
        path.write_text(text)
        assert main([str(path), "--from", source]) == 0
        said = capsys.readouterr().out
        document = read_document(path)
        demanded = {
            "areal": lambda given=document: CorrectionSpec.from_peer("areal", given["actor"]),
            "prime_rl": lambda given=document: CorrectionSpec.from_peer("prime_rl", given["trainer"]["loss"]),
        }[source]()
        assert composed(said) == demanded
        assert ("loss_mode=gpg" in said) == (source == "prime_rl")


@pytest.mark.parametrize(
    ("source", "document", "target", "expected"),
    [
        ("areal", yaml.safe_load(AREAL), "verl", {"rollout_is": "token", "rollout_is_threshold": "0.5_2.0"}),
        ("slime", {"--use-tis": True}, "skyrl", {"tis_ratio_type": "token"}),
        ("miles", {"use_tis": True, "tis_clip": 3.0}, "verl", {"rollout_is": "token", "rollout_is_threshold": 3.0}),
        ("open_instruct", {}, "verl", {"rollout_is": "token"}),
        ("roll", {"enable_old_logprobs_recompute": True}, "verl", {}),
        ("nemo_rl", NEMO, "verl", {"rollout_is": "token"}),
        ("openrlhf", OPENRLHF, "verl", {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"}),
        ("skyrl", {"tis_ratio_type": "token"}, "verl", {"rollout_is": "token"}),
        ("trl", TRL, "verl", {"rollout_is": "token", "rollout_is_threshold": 3.0}),
        ("verl", VERL, "skyrl", {"tis_ratio_type": "sequence"}),
    ],
)
def test_from_each_framework(
    source: str, document: dict[str, object], target: str, expected: dict[str, object]
) -> None:
    assert yaml.safe_load(translate(document, source, target)[0]) == expected


@pytest.mark.parametrize(
    ("given", "printed"),
    [
        (
            {"rollout_is": "token", "rollout_is_threshold": 3.0},
            "+correction@correction=tis_token correction.weight.upper=3.0 V.rollout_is=null V.rollout_is_threshold=2.0",
        ),
        ({"bypass_mode": True}, "+correction@correction=none correction.proximal=bypass V.bypass_mode=false"),
        ({}, "+correction@correction=none"),
    ],
)
def test_verls_own_correction_becomes_what_main_ppo_takes(given: dict[str, object], printed: str) -> None:
    """verl's keys are reset, because the launch stops if both correct."""
    expected = printed.replace("V.", "algorithm.rollout_correction.").split()
    for document in (given, {"algorithm": {"rollout_correction": given, "gamma": 1.0}}):
        assert translate(document, "verl", "hydra")[0].split() == expected


@pytest.mark.parametrize(
    ("source", "document"),
    [
        ("skyrl", {"enable_sample_support_replay": True}),
        ("openrlhf", {"is_correction_level": "token", "is_correction_gating": "tv", "is_correction_threshold": 0.1}),
        ("nemo_rl", {"loss_fn": {"use_on_policy_kl_approximation": True}}),
    ],
)
def test_overrides_of_a_translation_compose_to_it(source: str, document: dict[str, object]) -> None:
    assert composed(translate(document, source, "hydra")[0]) == CorrectionSpec.from_peer(source, document)


def test_what_cannot_be_said_is_an_error_and_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "loss.yaml"
    path.write_text("loss: {type: kpop}\n")
    assert main([str(path), "--from", "prime_rl", "--to", "trl"]) == 2
    assert "translate: correction." in capsys.readouterr().err
    with pytest.raises(SpecError, match="cannot express this"):
        translate({"loss": {"type": "kpop"}}, "prime_rl", "trl")


@pytest.mark.parametrize(("name", "text"), [("a.yaml", "- 1\n"), ("a.toml", "a = \n")])
def test_a_file_that_is_no_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str
) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert main([str(path), "--from", "trl"]) == 2
    assert main([str(tmp_path / "none.yaml"), "--from", "trl"]) == 2
    assert str(path) in capsys.readouterr().err
