"""Composition of a correction from Hydra overrides, with the group and the checks of a launch, without verl."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_patches.moved_options import explain_moved

from ...correction import SpecError
from ...preflight.composed import AUTO as AUTO_PROXIMAL
from ...preflight.hydra_groups import AUTO, GROUP, check_stack, force_own_keys, read_chosen_options
from ...preflight.own_keys import list_groups

_CONFIGS = Path(__file__).resolve().parents[2] / "config"
_PRIMARY = "offpolicy_replay"
_NEAR = 0.7
"""Likeness, as difflib measures it, from which a name is taken for a misspelt one."""
_EXAMPLE = f"Give {GROUP}=gsm, '{GROUP}=[tis_token,gsm]' or {GROUP}.masks.gsm.upper=1.02 for example."


@contextmanager
def initialize_composer() -> Iterator[None]:
    """Initialise Hydra for ``compose_correction`` within the context; restore its former state afterwards."""
    # Hydra is a process-wide singleton: a caller, such as a launch, may have it initialised.
    before, config = GlobalHydra.instance().hydra, HydraConfig.instance().cfg
    GlobalHydra.instance().clear()
    # The lines of offpolicy_trainer.yaml less verl's own configuration, which a correction does not read.
    defaults = ["offpolicy_base", "_self_", {GROUP: "none"}]
    ConfigStore.instance().store(
        name=_PRIMARY, node={"defaults": defaults}, provider="recipe.offpolicy.analysis.whatif"
    )
    try:
        with initialize_config_dir(str(_CONFIGS), version_base=None):
            yield
    finally:
        HydraConfig.instance().cfg = config
        GlobalHydra.instance().hydra = before


def compose_correction(overrides: Sequence[str]) -> dict[str, Any]:
    """Compose the plain values under ``correction``; a mandatory value that is left out stays "???".

    Raises:
        SpecError: a malformed override, one of another group, an unknown option, two options that set
            one key, or ``correction=auto``.
    """
    for override in overrides:
        key = parse_key(override)
        if key.split(".")[0] != GROUP:
            raise SpecError(
                f"{override}: not an override of the correction, which is all that a replay reads. {_EXAMPLE}"
            )
    try:
        # The Hydra node lists the chosen options.
        config = compose(_PRIMARY, overrides=force_own_keys(overrides), return_hydra_config=True)
        HydraConfig.instance().set_config(config)
        options = read_chosen_options()
        check_stack(options)
        if options == [AUTO]:
            raise SpecError(
                f"{GROUP}={AUTO} chooses by the configuration of a run. Name the options that it chose, which the "
                f"run printed at its start."
            )
        mapping = OmegaConf.to_container(config[GROUP], resolve=True)
    except MissingConfigException as error:
        if said := explain_moved(error.missing_cfg_file, overrides):
            raise SpecError(said) from error
        name = str(error.missing_cfg_file).removeprefix(f"{GROUP}/")
        raise SpecError(f"{GROUP}={name}: no such option. {suggest_keys(name, list_groups()[GROUP])}") from error
    except (HydraException, OmegaConfBaseException) as error:
        text = " ".join(str(error).split())
        raise SpecError(f"{' '.join(overrides)}: {text}") from error
    if not isinstance(mapping, dict):
        raise SpecError(f"{GROUP}={mapping}: not a correction. {_EXAMPLE}")
    if mapping.get("proximal") == AUTO_PROXIMAL:
        # What a recording holds as pi_old, whether a forward pass or the gradient step itself computed it.
        mapping["proximal"] = "recompute"
    return cast(dict[str, Any], mapping)


def suggest_keys(name: str, known: Sequence[str]) -> str:
    """Format the nearest known names in a sentence, or all of them where none is near."""
    # What all keys begin with makes none of them likely.
    by_rest = {key.removeprefix(f"{GROUP}."): key for key in known}
    near = difflib.get_close_matches(name.removeprefix(f"{GROUP}."), by_rest, n=3, cutoff=_NEAR)
    names = [by_rest[rest] for rest in near] or sorted(known)
    return f"{'Nearest' if near else 'There are'}: {', '.join(map(repr, names))}."


def parse_key(override: str) -> str:
    """Parse the dotted key that an override sets.

    Raises:
        SpecError: it is no override.
    """
    return str(_parsed(override).key_or_group)


def parse_grid(grid: str) -> tuple[str, list[str]]:
    """Parse key and values of ``key=a,b,c``, or of another Hydra sweep such as ``key=range(1,4)``.

    Raises:
        SpecError: it is no override.
    """
    override = _parsed(grid)
    if override.is_delete():
        raise SpecError(f"{grid}: deletes a key, so that there is nothing to compare. Give key=value,value.")
    if override.is_sweep_override():
        return str(override.key_or_group), list(override.sweep_string_iterator())
    return str(override.key_or_group), [override.get_value_string()]


def parse_value(value: str) -> Any:
    """Parse a value as Hydra does: 1.01 is a number, null is None."""
    value_of: Any = _parsed(f"key={value}").value()
    return value_of


def _parsed(override: str) -> Any:
    try:
        return OverridesParser.create().parse_override(override)
    except HydraException as error:
        raise SpecError(f"{override!r}: not a Hydra override, key=value. {_EXAMPLE}") from error
