"""Every command line gets an understandable answer: it is parsed as Hydra parses it, and other errors name the
override.
"""

from __future__ import annotations

import io
import random

import pytest

from recipe.offpolicy.doctor.diagnosis import diagnose
from recipe.offpolicy.doctor.launch import parse_flags, prepare_arguments
from recipe.offpolicy.doctor.program import Launch, LaunchError
from recipe.offpolicy.doctor.show import show, to_json
from recipe.offpolicy.preflight.own_keys import list_groups, list_paths
from recipe.offpolicy.preflight.python_source import OURS, VERLS
from tests.support.applications import NEEDED
from tests.support.doctor_answer import Ask
from tests.support.examples import each_nth_by_default

pytestmark = pytest.mark.verl(">=0.9")

LONG = "9" * 5000
MAIN = ("--module", VERLS[0])

# The arguments, and a part of the answer.
REFUSED: list[tuple[tuple[str, ...], str]] = [
    (("correction=tis_tokn",), "Did you mean tis_token?"),
    (("correction=tis_token,gsm",), "Quote it: 'correction=[tis_token,gsm]'."),
    (("correction=[tis_token,", "gsm]"), "Quote it: 'correction=[tis_token, gsm]'."),
    (("opd=advantage,loss",), "Choose one of them: opd=advantage or opd=loss."),
    (("correction={a: 1}",), "To set individual keys, use correction.KEY=VALUE."),
    (("correction=gsm", "correction.masks.gms.upper=1.02"), "Choose an option that has this mask, such as gsm"),
    (("pass_at_k.k=8",), "pass_at_k is off, so the key would be unused. Add pass_at_k=analytic"),
    (("correction=gsm", "offpolicy.alarms.ess=warn"), "Set offpolicy.alarms.ess.action=warn."),
    ((*MAIN, "+offpolicy.shadow=[gsm]", "+opd={a: 1}"), "Choose an option of this package"),
    ((*MAIN, "+corection=gsm"), "Write +correction@correction=gsm"),
    ((*MAIN, "+correction@correction=gsm", "correction.masks.own={level: token}"), "Write '+correction.masks.own={"),
]


@pytest.mark.parametrize(("arguments", "part"), REFUSED, ids=lambda each: str(each)[:60])
def test_a_mistake_is_answered_by_what_to_write(arguments: tuple[str, ...], part: str, ask: Ask) -> None:
    answer = ask(*arguments, *NEEDED)
    assert answer.status == 2
    assert part in answer.printed
    assert len(answer.printed) < 3000, "not every option there is"


def test_flags_stand_in_front_of_all_overrides_or_behind_them() -> None:
    for line in (["a=1", "--config-name=b"], ["--config-name", "b", "a=1"]):
        flags = parse_flags(line)
        assert (flags.config_name, flags.overrides, flags.shows) == ("b", ["a=1"], False)
    assert parse_flags(["a=1", "--cfg", "job"]).shows
    for line in (["a=1", "--cfg=job", "b=2"], ["--multirun"], ["--resolve"], ["--run", "--cfg=job"], ["--none-such"]):
        with pytest.raises(LaunchError):
            parse_flags(line)
    assert prepare_arguments(["a=1", "correction.x=1"]) == ["a=1", "++correction.x=1"]


VALUES = [
    *("[[gsm]]", "[gsm]", "gsm", "6", "{a: 1}", "{}", "[]", "", "null", "nan", "inf", "-inf", "???", "a,b", "${a.b}"),
    *("${oc.env:NOT_SET}", "${data.seed}", LONG, "1e400", "1e308", "-1", "0", "0.5", "true", "'x'", "a b", "\u00fc"),
    *("[1,2]", "[null]", "[{a: 1}]", "{a: {b: [1]}}", "a:b", "1_000", "auto", "choice(1,2)", "range(1,3)", "a=b", "["),
    *("\u65e5\u672c", "${now:%Y}", "${correction}", "'", "@", "1" * 30, "glob(*)"),
]
VERLS_KEYS = [
    *("trainer", "trainer.nnodes", "trainer.v1", "trainer.v1.trainer_mode", "trainer.use_v1", "trainer.device"),
    *("trainer.logger", "trainer.resume_mode", "trainer.default_local_dir", "data", "data.train_batch_size"),
    *("actor_rollout_ref", "actor_rollout_ref.actor", "actor_rollout_ref.actor.policy_loss.loss_mode"),
    *("actor_rollout_ref.actor.strategy", "actor_rollout_ref.actor.fsdp_config", "actor_rollout_ref.rollout"),
    *("actor_rollout_ref.rollout.n", "actor_rollout_ref.rollout.top_p", "actor_rollout_ref.rollout.engine_kwargs"),
    *("algorithm", "algorithm.adv_estimator", "algorithm.rollout_correction", "ray_kwargs.ray_init.runtime_env"),
    *("algorithm.rollout_correction.rollout_is", "algorithm.rollout_correction.rollout_rs_threshold"),
    *("hydra.run.dir", "hydra.mode", "hydra.searchpath", "hydra.output_subdir", "model_engine", "critic"),
]
OWN_KEYS = [".".join(path) for path in list_paths()]
MASK_KEYS = [f"correction.masks.gsm.{name}" for name in ("upper", "lower", "when", "level", "by_staleness", "delta")]
BASES: list[tuple[str, ...]] = [
    (),
    ("correction=[tis_token,gsm]",),
    ("correction=auto",),
    ("correction=paper/m2po", "trainer.v1.trainer_mode=separate_async"),
    ("opd=loss", "opd.teacher.url=http://host:1"),
    ("process_reward=prefix_value",),
]


def draw(seed: int) -> Launch:
    """A launch with one or two unusual overrides."""
    draws = random.Random(seed)
    odd = []
    for _ in range(draws.choice((1, 1, 1, 2))):
        key = draws.choice(draws.choice((OWN_KEYS, OWN_KEYS, VERLS_KEYS, MASK_KEYS, list(list_groups()))))
        sign = draws.choice(("", "", "", "+", "++", "~"))
        package = "@foo" if draws.random() < 0.05 else ""
        odd.append(f"{sign}{key}{package}" + ("" if sign == "~" else f"={draws.choice(VALUES)}"))
    module = draws.choice((OURS, OURS, OURS, OURS, VERLS[0]))
    return Launch(module, (*(draws.choice(BASES) if module == OURS else ()), *NEEDED, *odd))


def judge_in_words(launch: Launch) -> str:
    """Judge a launch; the answer must not report a failure of the doctor itself."""
    diagnosis = diagnose(launch)
    file = io.StringIO()
    show(diagnosis, file)
    said = f"{file.getvalue()}{to_json(diagnosis)}"
    for part in (
        "Traceback",
        "Internal error in the doctor",
        "cannot read the configuration",
        "Hydra cannot compose it",
    ):
        assert part not in said, (launch.arguments, said[-600:])
    return diagnosis.verdict


@pytest.mark.usefixtures("ask")
@pytest.mark.parametrize("seed", each_nth_by_default(30, range(150)))
def test_a_random_command_line_is_answered_in_words(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from recipe.offpolicy import main_offpolicy

    launch = draw(seed)
    verdict = judge_in_words(launch)
    if launch.ours:  # whose start-up check says the same
        monkeypatch.setattr("sys.argv", ["main_offpolicy", "--check", *launch.arguments])
        status: object = 0
        try:
            main_offpolicy.main()
        except SystemExit as stop:
            status = stop.code
        assert (status != 0) == (verdict == "ERROR"), (launch.arguments, status)
