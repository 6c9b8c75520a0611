"""What a launch does to its composed configuration before anything is checked: choices made, names resolved."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict

from ..correction import CorrectionSpec, SpecError
from ..extensions.registry import load_extensions
from ..recording.settings import resolve_dir
from . import fallbacks, old_log_prob
from .auto_choice import Requirement, check_requirements, lines, select
from .auto_setup import read_setup, refuse_setup
from .hydra_groups import AUTO, EMPTY, check_stack, chosen_options, option_values, recomposed
from .shadows import SHIPPED_DELTA, parse_shadows

Say = Callable[[str], None]
"""Takes a line of what was chosen and why."""


def resolve(config: DictConfig, say: Say) -> list[str]:
    """Choose for ``correction=auto``, and put what they mean in the place of names of corrections; in place.

    Inside the Hydra application that composed the configuration.

    Returns:
        The options of the group ``correction``.

    Raises:
        SpecError: names the key, its value and the fix.
        CheckError: an extension is not to be had, or its settings are malformed.
    """
    options = chosen_options()
    check_stack(options)
    requires: tuple[Requirement, ...] = ()
    if options == [AUTO]:
        options, requires = _choose(config, say)
    else:
        refuse_setup(config)
    for extension in load_extensions(config):
        for line in extension.configure(config):
            say(line)
    _resolve_shadows(config, say)
    fallbacks.resolve(config)
    _resolve_proximal(config, say)
    check_requirements(config, requires)
    resolve_dir(config)
    return options


def refuse_emptied(spec: CorrectionSpec, options: Sequence[str]) -> None:
    """A correction that was chosen, and of which overrides have left nothing.

    Raises:
        SpecError: names the options.
    """
    if spec.is_none and not EMPTY.issuperset(options):
        fix = "Set correction=none to train uncorrected."
        raise SpecError("nothing is left of it to correct with.", fix, key="correction", value=list(options))


def _resolve_shadows(config: DictConfig, say: Say) -> None:
    """Names of options in ``offpolicy.shadow`` replaced by what they mean, which only Hydra's application knows."""
    names = OmegaConf.select(config, "offpolicy.shadow", default=[])
    if not isinstance(names, str | ListConfig | list):
        fix = "Set offpolicy.shadow=[gsm], or []."
        key = "offpolicy.shadow"
        raise SpecError("expected names of corrections.", fix, key=key, value=names, mend={key: []})
    delta = OmegaConf.select(config, "offpolicy.shadow_delta", default=SHIPPED_DELTA)
    shadows, notes = parse_shadows([names] if isinstance(names, str) else list(names), option_values, delta)
    if delta != SHIPPED_DELTA and not notes:
        key, reason = (
            "offpolicy.shadow_delta",
            "no option of offpolicy.shadow leaves a delta open, so that nothing reads it.",
        )
        raise SpecError(reason, key=key, value=delta, mend={key: SHIPPED_DELTA})
    if not shadows:
        return
    with open_dict(config):
        config.offpolicy.shadow = {name: shadow.to_mapping() for name, shadow in shadows.items()}
    for note in notes:
        say(note)


def _resolve_proximal(config: DictConfig, say: Say) -> None:
    """A source of pi_old in the place of ``correction.proximal=auto``, for which shadows and fallbacks are known."""
    if OmegaConf.select(config, old_log_prob.KEY) != old_log_prob.AUTO:
        return
    choice = old_log_prob.choose(config)
    with open_dict(config):
        config.correction.proximal = choice.proximal
    if choice.said:
        say(choice.said)


def _choose(config: DictConfig, say: Say) -> tuple[list[str], tuple[Requirement, ...]]:
    """The options for the run's set-up, put into ``config.correction``; says what and why."""
    selection = select(read_setup(config))
    check_stack(selection.options)
    with open_dict(config):
        config.correction = recomposed(selection.options)
    for line in lines(selection):
        say(line)
    return list(selection.options), selection.requires
