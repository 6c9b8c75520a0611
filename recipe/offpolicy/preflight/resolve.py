"""Resolution of a composed configuration before the checks: ``auto`` choices made, names replaced by corrections."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict

from verl_patches.execution_path import find_program_mode

from ..correction import CorrectionSpec, SpecError
from ..extensions.registry import load_extensions
from ..recording.record_settings import resolve_dir
from . import fallbacks, old_log_prob
from .auto_choice import Requirement, check_requirements, format_selection, select
from .auto_setup import read_setup, refuse_setup
from .hydra_groups import (
    AUTO,
    EMPTY,
    check_stack,
    load_option,
    read_chosen_options,
    read_task_overrides,
    recompose,
    refuse_moved,
)
from .shadows import SHIPPED_DELTA, parse_shadows
from .verl_keys.keys import BYPASS, VERL

Say = Callable[[str], None]
"""Takes a line of what was chosen and why."""


def resolve(config: DictConfig, say: Say) -> list[str]:
    """Resolve ``auto`` choices and names of corrections in place, inside the Hydra application that composed it.

    Inside the Hydra application that composed the configuration.

    Returns:
        The options of the group ``correction``.

    Raises:
        SpecError: names the key, its value and the fix.
        CheckError: an extension is not to be had, or its settings are malformed.
    """
    options = read_chosen_options()
    check_stack(options)
    requires: tuple[Requirement, ...] = ()
    if options == [AUTO]:
        options, requires = _choose(config, say)
    else:
        refuse_setup(config)
    if not EMPTY.issuperset(options):
        _replace_bypass(config, say)
    for extension in load_extensions(config):
        for line in extension.configure(config):
            say(line)
    # In this order: proximal=auto depends on shadows and fallbacks, and the requirements on all choices.
    _resolve_shadows(config, say)
    fallbacks.resolve(config)
    _resolve_proximal(config, say)
    check_requirements(config, requires)
    resolve_dir(config)
    return options


def refuse_emptied(spec: CorrectionSpec, options: Sequence[str]) -> None:
    """Refuse a chosen correction of which overrides have left nothing.

    Raises:
        SpecError: names the options.
    """
    if spec.is_none and not EMPTY.issuperset(options):
        fix = "Set correction=none to train uncorrected."
        raise SpecError("nothing is left of it to correct with.", fix, key="correction", value=list(options))


def _replace_bypass(config: DictConfig, say: Say) -> None:
    """Replace ``bypass_mode`` of an asynchronous program's own configuration: a correction says what pi_old is."""
    program, key = find_program_mode(config), f"{VERL}.{BYPASS}"
    own = program is not None and OmegaConf.select(config, key) is True
    given = any(each.lstrip("+").startswith(f"{key}=") for each in read_task_overrides())
    if given or not own:
        return
    with open_dict(config):
        config.algorithm.rollout_correction.bypass_mode = False
    say(f"{key}=true of {program}_policy's own configuration is replaced: correction.proximal says what pi_old is.")


def _resolve_shadows(config: DictConfig, say: Say) -> None:
    """Replace names of options in ``offpolicy.shadow`` by their values; needs the Hydra application."""
    names = OmegaConf.select(config, "offpolicy.shadow", default=[])
    if not isinstance(names, str | ListConfig | list):
        fix = "Set offpolicy.shadow=[gsm], or []."
        key = "offpolicy.shadow"
        raise SpecError("expected names of corrections.", fix, key=key, value=names, mend={key: []})
    delta = OmegaConf.select(config, "offpolicy.shadow_delta", default=SHIPPED_DELTA)
    named = [names] if isinstance(names, str) else list(names)
    refuse_moved("offpolicy.shadow", named)
    shadows, notes = parse_shadows(named, load_option, delta)
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
    """Replace ``correction.proximal=auto`` by the choice; shadows and fallbacks must be resolved before."""
    if OmegaConf.select(config, old_log_prob.KEY) != old_log_prob.AUTO:
        return
    choice = old_log_prob.choose_proximal(config)
    with open_dict(config):
        config.correction.proximal = choice.proximal
    if choice.said:
        say(choice.said)


def _choose(config: DictConfig, say: Say) -> tuple[list[str], tuple[Requirement, ...]]:
    """Choose the options for the run's set-up, put them into ``config.correction``, and report them."""
    selection = select(read_setup(config))
    check_stack(selection.options)
    with open_dict(config):
        config.correction = recompose(selection.options, selection.values)
    for line in format_selection(selection):
        say(line)
    return list(selection.options), selection.requires
