"""Why Hydra takes no configuration from a command line: the parts of the answers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from recipe.offpolicy.preflight.hydra_refusals import explain_refusal, find_malformed_choices, parse
from recipe.offpolicy.preflight.own_keys import CONFIG_DIR


@pytest.mark.parametrize(
    ("argument", "fixes"),
    [
        ("correction=gsm", []),
        ("correction=[gsm,tis_token]", []),
        ("+opd=null", []),
        ("trainer.nnodes=[[1]]", []),
        ("correction=[[gsm]]", ["Quote it so: 'correction=gsm'."]),
        ("+correction=gsm,tis_token", ["Quote it so: '+correction=[gsm,tis_token]'."]),
        ("opd=loss,advantage", ["Choose one of them: opd=loss or opd=advantage."]),
        ("opd=1.5", ["Set opd=NAME."]),
        ("~correction", []),
    ],
)
def test_choices_that_are_no_names(argument: str, fixes: list[str]) -> None:
    assert [problem.advice for problem in find_malformed_choices([argument], ["correction", "opd"])] == fixes


def test_what_hydra_cannot_parse() -> None:
    assert parse("trainer.nnodes=1") is not None
    assert parse("trainer.nnodes=[") is None
    assert parse(f"trainer.nnodes={'9' * 5000}") is None


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["a=1", "b=[1,", "2]"], "b=[1,: the shell has split it. Quote it so: 'b=[1, 2]'."),
        (["a=1", "b"], "b: not an override. Write KEY=VALUE."),
        (["a.b.=3"], "a.b.=3: Hydra cannot read this value."),
        (["a=x:{"], "a=x:{: a bracket or a quote is not closed."),
    ],
)
def test_an_override_is_named(overrides: Sequence[str], said: str) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        OverridesParser.create().parse_overrides(list(overrides))
    assert explain_refusal(caught.value, overrides, lambda group: ()).startswith(said)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("+trainer.nnodes=2", "+trainer.nnodes=2: the key already exists. Write trainer.nnodes=2."),
        (
            "offpolicy=[1]",
            "offpolicy=[1]: wrong type. To set individual keys, use offpolicy.KEY=VALUE.",
        ),
        ("~trainer.none_such", "~trainer.none_such: there is no such key to delete."),
        ("~trainer.nnodes=7", "~trainer.nnodes=7: the key has another value. Write ~trainer.nnodes."),
        ("~mode", "~mode: no option of this group is chosen, so none can be deleted."),
        ("++opd=loss", "++opd=loss: a group takes one +. Write +opd=loss."),
        ("+a/b@c=d", "+a/b@c=d: this environment has no such group. Install this package?"),
    ],
)
def test_what_hydra_does_not_compose(override: str, said: str) -> None:
    with pytest.raises(HydraException) as caught, initialize_config_dir(str(CONFIG_DIR), version_base=None):
        compose("offpolicy_trainer", [override])
    assert explain_refusal(caught.value, [override], lambda group: ()) == said
