"""Tables of other frameworks' keys, compared with the names in their classes; and keys that no table contains."""

from __future__ import annotations

import contextlib
import datetime
import itertools
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from recipe.offpolicy.correction import CorrectionSpec, SpecError
from recipe.offpolicy.correction.dialects import PEERS

KEYS: dict[str, dict[str, str]] = yaml.safe_load((Path(__file__).parents[2] / "data/peer_keys.yaml").read_text())


def list_paths(peer: str) -> set[str]:
    """List the full paths of the sections' keys, for all releases of one framework."""
    found = set()
    for release, sections in KEYS.items():
        for section, names in sections.items() if release.split()[0] == peer else ():
            prefix = "" if section in ("options", "elsewhere") else f"{section}."
            found |= {prefix + name for name in names.split()} if section != "elsewhere" else set()
    return found


@pytest.mark.parametrize("peer", sorted(PEERS))
def test_every_key_of_the_classes_is_in_the_table(peer: str) -> None:
    table = PEERS[peer]
    grpo = {path for path in list_paths(peer) if path.startswith("grpo.")}  # more than the loss
    filters = {path for path in list_paths(peer) if path.startswith("train_infer_correction.filters.")}
    paths = {*table.read, *table.unsaid, *table.plain}
    owners = {path for path in list_paths(peer) if any(each.startswith(f"{path}.") for each in paths)}
    assert {path for path in list_paths(peer) - grpo - filters - owners if not table.knows(path)} == set()
    for release, sections in KEYS.items():
        names = set(sections.get("elsewhere", "").split()) if release.split()[0] == peer else set()
        known = {name for path in paths for name in path.split(".")} | table.elsewhere
        assert {name for name in names if name.rpartition(".")[2] not in known} == set(), release


@pytest.mark.parametrize("peer", sorted(PEERS))
def test_a_misspelt_key_is_an_error_that_names_it(peer: str) -> None:
    """A letter is left out, doubled or swapped, in a whole document and among arguments."""
    for path in set(PEERS[peer].read) - {"beta"}:  # of the KL term, too short to tell
        above, dot, name = path.rpartition(".")
        place = len(name) // 2
        swapped = name[: place - 1] + name[place] + name[place - 1] + name[place + 1 :]
        for wrong in {name[:place] + name[place + 1 :], name[:place] + name[place - 1 :], swapped} - {name}:
            for document in ({above + dot + wrong: 2.0}, {f"--{(above + dot + wrong).replace('_', '-')}": 2.0}):
                with pytest.raises(SpecError, match=wrong):
                    PEERS[peer].read_source(document)


@pytest.mark.parametrize("peer", sorted(PEERS))
@pytest.mark.parametrize(
    "key", ["new_importance_cap", "use_icepop", "token_mask_width", "min_logprob", "score_centering", "loss_type_v2"]
)
def test_a_name_like_a_corrections_is_an_error_anywhere(peer: str, key: str) -> None:
    for document in ({key: 2.0}, {"somewhere": {"else": {key: 2.0}}}, {f"--{key.replace('_', '-')}": 2.0}):
        with pytest.raises(SpecError, match=key):
            PEERS[peer].read_source(document)
    assert PEERS[peer].read_source({"somewhere": {key: 2.0}}, frozenset({f"somewhere.{key}"})).plain is not None


def test_values_of_every_release_are_read() -> None:
    """A cap by TRL's older name, open-instruct's off, AReaL's two older caps, and three generations of OpenRLHF."""
    read = CorrectionSpec.from_peer
    trl = read("trl", {"vllm_importance_sampling_cap": 5.0}).weight
    assert trl is not None
    assert (trl.level, trl.kind, trl.upper) == ("sequence", "reject", 5.0)
    assert read("open_instruct", {"truncated_importance_sampling_ratio_cap": 0.0}) == CorrectionSpec()
    capped = read("open_instruct", {"truncated_importance_sampling_ratio_cap": 3.0})
    assert capped == read("open_instruct", {"rho_clamp_upper_bound": 3.0})
    decoupled = {"use_decoupled_loss": True}
    rejection = read("areal", decoupled | {"rejection_sampling": {"upper": 4.0}})
    assert rejection == read("areal", decoupled | {"behave_imp_weight_cap": 4.0})
    assert rejection == read("areal", decoupled | {"behav_imp_weight_cap": 4.0})
    clamped = read("areal", decoupled | {"behave_imp_weight_cap": 4.0, "behave_imp_weight_mode": "sequence_truncate"})
    assert clamped == read(
        "areal", decoupled | {"rejection_sampling": {"level": "sequence", "action": "clamp", "upper": 4.0}}
    )
    icepop = read("openrlhf", {"is_correction_level": "token"})
    assert icepop == read("openrlhf", {"is_correction_enable": True, "is_correction_type": "icepop"})
    assert icepop == read("openrlhf", {"enable_vllm_is_correction": True, "vllm_is_correction_type": "icepop"})
    assert icepop.weight is not None
    assert (icepop.weight.kind, icepop.weight.lower, icepop.weight.upper) == ("reject", 0.5, 5.0)
    cap = read("nemo_rl", {"use_importance_sampling_correction": True, "truncated_importance_sampling_ratio": 2.0})
    assert cap.weight is not None
    assert (cap.weight.kind, cap.weight.upper) == ("truncate", 2.0)


def test_losses_around_mu() -> None:
    """SkyRL's losses on pi / mu: rollout_is keeps r in [1 - 0.2, 1 + 0.3], DPPO keeps differences of at most 0.2."""
    read = CorrectionSpec.from_skyrl
    reject = read({"policy_loss_type": "rollout_is", "eps_clip_high": 0.3}).weight
    assert reject is not None
    assert (reject.ratio, reject.kind, reject.lower, reject.upper) == ("full", "reject", 0.8, 1.3)
    dppo = read({"policy_loss_type": "dppo"})
    assert dict(dppo.masks) == dict(CorrectionSpec.from_peer("prime_rl", {}).masks)
    assert dppo.penalty is None
    cispo = read({"policy_loss_type": "cispo", "cispo": {"cispo_anchor": "rollout"}}).weight
    assert cispo is not None
    assert (cispo.ratio, cispo.kind, cispo.lower, cispo.upper) == ("full", "truncate", None, 5.0)
    assert read({"policy_loss_type": "cispo"}) == CorrectionSpec()
    by_kl = {"dppo_type": "binary_kl", "delta_low": 0.05, "delta_high": 0.05}
    (mask,) = dict(read({"policy_loss_type": "dppo", "dppo": by_kl}).masks).values()
    assert (mask.ratio, mask.aggregate, mask.upper, mask.when) == ("full", "binary_kl_forward", 0.05, "outward")
    with pytest.raises(SpecError, match=r"delta_low=0\.2: .* delta_high=0\.05"):
        read({"policy_loss_type": "dppo", "dppo": by_kl | {"delta_low": 0.2}})
    with pytest.raises(SpecError, match="already a correction"):
        read({"policy_loss_type": "rollout_is", "off_policy_correction": {"tis_ratio_type": "token"}})


def test_weights_of_the_kl_term() -> None:
    trl = CorrectionSpec.from_trl({"beta": 0.04, "use_bias_correction_kl": True, "use_vllm": False})
    assert trl.kl_weight is not None
    assert (trl.kl_weight.ratio, trl.kl_weight.upper, trl.weight) == ("ppo", None, None)
    with pytest.raises(SpecError, match="use_bias_correction_kl=null: beta adds"):
        CorrectionSpec.from_trl({"beta": 0.04})
    nemo = CorrectionSpec.from_peer("nemo_rl", {"use_on_policy_kl_approximation": True})
    assert nemo.kl_weight is not None
    assert nemo.kl_weight.ratio == "full"
    slime = CorrectionSpec.from_peer("slime", {"use_unbiased_kl": True, "use_kl_loss": True, "kl_loss_coef": 0.01})
    assert slime.kl_weight is not None
    assert slime.kl_weight.ratio == "ppo"


@pytest.mark.parametrize("peer", sorted(PEERS))
def test_a_value_of_another_type_is_an_error_and_never_a_crash(peer: str) -> None:
    switch = {"areal": {"actor.use_decoupled_loss": True}, "slime": {"use_tis": True}, "miles": {"use_tis": True}}
    values = [None, True, 0, -1, float("inf"), float("nan"), 10**400, "x", "0.5_2", [], [1], {}, {"a": 1}, [{"a": 1}]]
    for key, value in itertools.product((*PEERS[peer].read, *PEERS[peer].unsaid), values):
        with contextlib.suppress(SpecError):
            CorrectionSpec.from_peer(peer, {**switch.get(peer, {}), key: value})


DECOUPLED = {"use_decoupled_loss": True}
CORRECTS = {"use_importance_sampling_correction": True}
CAP = "truncated_importance_sampling_ratio"


@pytest.mark.parametrize("value", [False, "2.0", -1.0])
@pytest.mark.parametrize(
    ("peer", "document", "key"),
    [
        ("areal", {"use_decoupled_loss": True}, "actor.rejection_sampling.upper"),
        ("areal", {"use_decoupled_loss": True}, "actor.behave_imp_weight_cap"),
        ("nemo_rl", {"loss_fn": CORRECTS}, f"loss_fn.{CAP}"),
        ("nemo_rl", {"loss_fn": CORRECTS | {CAP: 2.0}}, f"loss_fn.{CAP}_min"),
        ("open_instruct", {}, "rho_clamp_upper_bound"),
        ("open_instruct", {}, f"{CAP}_cap"),
        ("prime_rl", {}, "trainer.loss.dppo_mask_low"),
        ("prime_rl", {}, "trainer.loss.kl_tau"),
        ("skyrl", {"trainer.algorithm.use_tis": True}, "trainer.algorithm.tis_imp_ratio_cap"),
        ("slime", {"use_tis": True}, "tis_clip"),
        ("slime", {"use_opsm": True}, "opsm_delta"),
    ],
)
def test_a_bound_of_another_type_does_not_open_it(peer: str, document: dict[str, Any], key: str, value: Any) -> None:
    start = "actor." if peer == "areal" else ""
    with pytest.raises(SpecError, match=rf"^{key}="):
        CorrectionSpec.from_peer(peer, {start + name: each for name, each in document.items()} | {key: value})


@pytest.mark.parametrize(
    ("peer", "document", "message"),
    [
        # A value, or a list, instead of a section.
        ("areal", {"actor": DECOUPLED | {"rejection_sampling": [{"upper": 2.0}]}}, "expected a section"),
        ("areal", {"actor": DECOUPLED | {"rejection_sampling": 5}}, "expected a section"),
        ("prime_rl", {"trainer": {"loss": "ipo"}}, "trainer.loss=ipo"),
        # A known key below another section, or in another spelling.
        ("prime_rl", {"orchestrator": {"loss": {"type": "ipo"}}}, "Did you mean trainer.loss.type"),
        ("prime_rl", {"trainer": {"Loss": {"type": "ipo"}}}, "Did you mean trainer.loss.type"),
        ("slime", {"useTis": True}, "Did you mean use_tis"),
        ("areal", {"actor": {"behaveImpWeightCap": 3.0}}, "Did you mean actor.behave_imp_weight_cap"),
        ("open_instruct", {"arguments": ["--rho_mask_upper_bound=2"]}, "arguments.rho_mask_upper_bound"),
        # Files that are not read.
        ("nemo_rl", {"defaults": "../grpo_math_1B.yaml", "loss_fn": CORRECTS}, "defaults=../grpo_math_1B.yaml"),
        ("slime", {"use_tis": True, "custom_config_path": "mis.yaml"}, "custom_config_path=mis.yaml"),
        # slime's weights are 0 under a cap of 0.
        ("slime", {"use_tis": True, "tis_clip": 0}, "tis_clip=0: ratios are positive"),
        ("roll", {"train_infer_correction": {"filters": [{"ratio_high": 1.5}]}}, r"filters\[0\].enabled"),
        ("verl", {"actor_rollout_ref": {"actor": {"policy_loss": {"loss_mode": "bypass_mode"}}}}, "loss_mode"),
    ],
)
def test_what_would_be_lost_in_silence_is_an_error(peer: str, document: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        CorrectionSpec.from_peer(peer, document)


def test_values_that_are_objects_are_values() -> None:
    """Dates and paths have many attributes but are values; a configuration's own objects are sections."""
    plain = {"start": datetime.date(2026, 1, 1), "output_dir": Path("/tmp/run"), "use_tis": True}
    assert CorrectionSpec.from_peer("slime", plain) == CorrectionSpec.from_peer("slime", {"use_tis": True})
    trainer = SimpleNamespace(loss=SimpleNamespace(type="ipo", ipo_threshold=0.2), output_dir=Path("/tmp/run"))
    document = {"trainer": {"loss": {"type": "ipo", "ipo_threshold": 0.2}}}
    read = CorrectionSpec.from_peer
    assert read("prime_rl", SimpleNamespace(trainer=trainer)) == read("prime_rl", document)
    mode = Enum("Mode", {"mask": "token_mask"}, type=str)
    masked = CorrectionSpec.from_trl({"vllm_importance_sampling_mode": "token_mask"})
    assert CorrectionSpec.from_trl({"vllm_importance_sampling_mode": mode("token_mask")}) == masked
    correction = {"rollout_is": "${level}"}
    composed = OmegaConf.create({"model": "???", "level": "token", "algorithm": {"rollout_correction": correction}})
    assert CorrectionSpec.from_verl(composed) == CorrectionSpec.from_verl({"rollout_is": "token"})
    correction["rollout_is"] = "???"
    with pytest.raises(SpecError, match=r"rollout_is=\?\?\?"):
        CorrectionSpec.from_verl(OmegaConf.create({"algorithm": {"rollout_correction": correction}}))


def test_what_a_framework_takes_as_off_or_open() -> None:
    """No difference of probabilities exceeds 1, so a width of 1 masks nothing; an empty section has the defaults."""
    read = CorrectionSpec.from_peer
    assert dict(read("prime_rl", {"dppo_mask_low": 1.0}).masks).keys() == {"dppo_positive"}
    assert not read("prime_rl", {"type": "ipo", "ipo_threshold": 1.0}).masks
    assert read("roll", {"train_infer_correction": {}}) == read("roll", {})
    off = {"train_infer_correction": {"filters": [{"enabled": False, "ratio_high": 1.5}]}}
    assert read("roll", off) == read("roll", {})
    below = {f"{CAP.removesuffix('_ratio')}_type": "icepop", CAP: 2.0, f"{CAP}_min": 0.0}
    icepop = read("nemo_rl", CORRECTS | below).weight
    assert icepop is not None
    assert (icepop.kind, icepop.lower, icepop.upper) == ("reject", None, 2.0)
    assert read("nemo_rl", {"defaults": ["_self_"]}) == CorrectionSpec()
