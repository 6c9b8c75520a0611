"""Corrections to replay: the recorded correction, corrections composed from Hydra overrides, and grids over them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
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

from verl_patches.moved_options import MOVED, explain_moved

from ...correction import CorrectionSpec, SpecError
from ...correction.correction_parts import OF_THE_TRAINER
from ...correction.problem import find_closest, set_to
from ...preflight.composed import AUTO as AUTO_PROXIMAL
from ...preflight.hydra_groups import (
    AUTO,
    GROUP,
    check_stack,
    force_own_keys,
    list_options,
    load_option,
    read_chosen_options,
)
from ...preflight.own_keys import list_groups

_CONFIGS = str(Path(__file__).resolve().parents[2] / "config")
_PRIMARY = "offpolicy_replay"
_EXAMPLE = f"Examples: {GROUP}=gsm, '{GROUP}=[tis_token,gsm]' or {GROUP}.masks.gsm.upper=1.02."


@contextmanager
def initialize_composer() -> Iterator[None]:
    """Initialise Hydra for ``compose_correction`` within the context; restore its former state afterwards."""
    # Hydra is a process-wide singleton, and a caller, such as a launch, may already have initialised it.
    before, config = GlobalHydra.instance().hydra, HydraConfig.instance().cfg
    GlobalHydra.instance().clear()
    # These are the lines of offpolicy_trainer.yaml except verl's own configuration, which a correction does not read.
    defaults = ["offpolicy_base", "_self_", {GROUP: "none"}]
    ConfigStore.instance().store(name=_PRIMARY, node={"defaults": defaults}, provider=__name__)
    try:
        with initialize_config_dir(_CONFIGS, version_base=None):
            yield
    finally:
        HydraConfig.instance().cfg = config
        GlobalHydra.instance().hydra = before


def compose_correction(overrides: Sequence[str]) -> dict[str, Any]:
    """Compose the plain values under ``correction``; a missing mandatory value stays "???".

    Raises:
        SpecError: an override is malformed or belongs to another group, an option is unknown, two options set the same
            key, or the option is ``correction=auto``.
    """
    for override in overrides:
        if _parse(override).key_or_group.split(".")[0] != GROUP:
            raise SpecError(f"{override}: this override does not belong to the correction. {_EXAMPLE}")
    try:
        # The Hydra node lists the chosen options.
        config = compose(_PRIMARY, overrides=force_own_keys(overrides), return_hydra_config=True)
        HydraConfig.instance().set_config(config)
        options = read_chosen_options()
        check_stack(options)
        if options == [AUTO]:
            raise SpecError(f"{GROUP}={AUTO} depends on a run's configuration. Name the options that the run printed.")
        mapping = cast(dict[str, Any], OmegaConf.to_container(config[GROUP], resolve=True))
    except MissingConfigException as error:
        if said := explain_moved(error.missing_cfg_file, overrides):
            raise SpecError(said) from error
        name = str(error.missing_cfg_file).removeprefix(f"{GROUP}/")
        near = suggest_keys(name, list_groups()[GROUP])
        raise SpecError(f"{GROUP}={name}: there is no such option. {near}") from error
    except (HydraException, OmegaConfBaseException) as error:
        raise SpecError(f"{' '.join(overrides)}: {' '.join(str(error).split())}") from error
    if mapping.get("proximal") == AUTO_PROXIMAL:
        # This is the recorded pi_old, whether a forward pass or the gradient step itself computed it.
        mapping["proximal"] = "recompute"
    return mapping


def suggest_keys(name: str, known: Iterable[str]) -> str:
    """Name the known key that is most similar, in a sentence; if none is similar, name all known keys."""
    near = find_closest(name, known) or find_closest(f"{GROUP}.{name}", known)
    return f"Nearest: {near!r}." if near else f"Known names: {', '.join(map(repr, sorted(known)))}."


def parse_grid(grid: str) -> tuple[str, list[str]]:
    """Parse key and values of ``key=a,b,c`` or of another Hydra sweep, such as ``key=range(1,4)``.

    Raises:
        SpecError: the text is not an override, or deletes a key.
    """
    override = _parse(grid)
    if override.is_delete():
        raise SpecError(f"{grid}: this deletes a key, so there is nothing to compare. Pass key=value,value.")
    swept = override.is_sweep_override()
    return override.key_or_group, list(override.sweep_string_iterator()) if swept else [override.get_value_string()]


def _parse(override: str) -> Any:
    try:
        return OverridesParser.create().parse_override(override)
    except HydraException as error:
        raise SpecError(f"{override!r}: this is not a Hydra override, key=value. {_EXAMPLE}") from error


_BOUNDS = frozenset({"lower", "upper", "delta", "budget"})
_OPEN = "???"


def build_overrides(spec: CorrectionSpec) -> list[str]:
    """Build the overrides of a correction: names of shipped options that match its parts, then single keys.

    If pi_old comes from the trainer's weights, the launch decides which of two ways computes it.
    """
    wanted = _plain(spec)
    compose_correction([f"{GROUP}=none"])  # the application in which options are looked up
    options = list_options()
    weight = [name for name in options if wanted["weight"] and _is_of(name, {"weight": wanted["weight"]})]
    # Among options that differ only in their bounds, the option with exactly these bounds is preferred; after that, the
    # shortest name.
    weight.sort(key=lambda name: (_count_other_bounds(load_option(name)["weight"], wanted["weight"]), len(name), name))
    known = wanted["masks"].items()
    by_mask = {name: MOVED.get(name, name) for name, _ in known}
    masks = [
        name for name, mask in known if by_mask[name] in options and _is_of(by_mask[name], {"masks": {name: mask}})
    ]
    stack = [*weight[:1], *(by_mask[name] for name in masks)] or ["none"]
    overrides = [f"{GROUP}={stack[0]}" if len(stack) == 1 else f"{GROUP}=[{','.join(stack)}]"]
    if wanted["weight"] and not weight:
        overrides.append(set_to(f"{GROUP}.weight", wanted["weight"]))
    overrides += [f"+{set_to(f'{GROUP}.masks.{name}', mask)}" for name, mask in known if name not in masks]
    overrides += [f"+{set_to(f'{GROUP}.weights.{name}', one)}" for name, one in wanted.get("weights", {}).items()]
    if wanted.get("kl_weight"):  # as a whole, because an open bound (null) is not a default of a missing part
        overrides.append(set_to(f"{GROUP}.kl_weight", wanted["kl_weight"], add=True))
    composed = compose_correction(overrides)
    there = dict(_leaves(composed))
    # Values are compared after parsing, because defaults that the spec fills in need no override.
    had = dict(_leaves(_plain(CorrectionSpec.from_mapping(_filled(composed, wanted)))))
    return overrides + [
        set_to(f"{GROUP}.{key}", value, add=key not in there)
        for key, value in _leaves(wanted)
        if had.get(key) != value or there.get(key) == _OPEN
    ]


def _plain(spec: CorrectionSpec) -> dict[str, Any]:
    plain = spec.to_mapping()
    return plain | {"proximal": "recompute"} if plain["proximal"] in OF_THE_TRAINER else plain


def _is_of(option: str, part: Mapping[str, Any]) -> bool:
    """Check whether an option sets this part and nothing else, apart from its bounds."""
    values, wanted = dict(_leaves(load_option(option))), dict(_leaves(part))
    owners, wanted_owners = ({key.rpartition(".")[0] for key in each} for each in (values, wanted))
    return owners == wanted_owners and all(
        key.rpartition(".")[2] in _BOUNDS or wanted.get(key) == value for key, value in values.items()
    )


def _count_other_bounds(one: Mapping[str, Any], other: Mapping[str, Any]) -> int:
    return sum(one.get(name) != other.get(name) for name in _BOUNDS)


def _filled(plain: Any, wanted: Any) -> Any:
    """Fill the missing values of ``plain`` from ``wanted``."""
    if isinstance(plain, Mapping) and isinstance(wanted, Mapping):
        return {key: _filled(value, wanted.get(key)) for key, value in plain.items()}
    return wanted if plain == _OPEN else plain


def _leaves(values: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of every entry that is not a mapping; an empty mapping yields nothing."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


RECORDED = "recorded"
"""Name of the correction that was active during the run, which may change from step to step."""
UNCORRECTED = "uncorrected"
"""Name of a correction with the recorded pi_old but without weights or masks."""
MOST = 400
"""Largest number of corrections in one replay."""
_OPTIONAL = ("sign", "normalize", "aggregate", "ratio", "by_staleness")
"""Keys of masks and weights that options may omit."""


@dataclass(frozen=True)
class Candidate:
    """A correction to replay.

    Attributes:
        label: its overrides, unique within a replay.
        base: the label without the values of the grid.
        point: the values of the grid keys, by key; empty without a grid.
        spec: None if it depends on the recorded correction, or if the point is invalid.
        error: why the point is invalid; None if it is valid.
    """

    label: str
    base: str
    point: Mapping[str, str] = field(default_factory=dict)
    spec: CorrectionSpec | None = None
    error: str | None = None

    def resolve_spec(self, recorded: Mapping[str, Any]) -> CorrectionSpec:
        """Return the correction for a step at which ``recorded`` was active.

        Raises:
            SpecError: the correction is malformed.
        """
        if self.spec is not None:
            return self.spec
        if self.base == UNCORRECTED:
            return CorrectionSpec.from_mapping({key: recorded.get(key) for key in ("proximal", "alpha")})
        return CorrectionSpec.from_mapping(_change(recorded, self.point))


def build_candidates(
    specs: Sequence[Sequence[str]], grids: Sequence[str], recorded: Mapping[str, Any]
) -> tuple[Candidate, ...]:
    """Build all corrections of a replay by combining every spec with the grid keys that apply to it.

    The recorded correction is also replayed, unchanged, for comparison, unless it is the only spec.

    Args:
        specs: overrides of each correction, or ``["recorded"]``.
        grids: ``key=value,value`` each; all grids are crossed.
        recorded: plain values of the correction that was active at the first step.

    Raises:
        SpecError: a spec without a grid is malformed, a grid key does not apply to any spec, or there are more than
            ``MOST`` corrections.
    """
    axes: dict[str, list[str]] = {}
    for key, values in map(parse_grid, grids):
        axes.setdefault(key, []).extend(values)
    if mixed := [each for each in specs if RECORDED in each and len(each) > 1]:
        raise SpecError(
            f"--spec {' '.join(mixed[0])}: {RECORDED} takes no overrides. Use --grid key=value to vary the recorded "
            "correction."
        )
    with initialize_composer():
        bases = [
            (RECORDED, recorded) if list(each) == [RECORDED] else (" ".join(each), compose_correction(each))
            for each in specs
        ]
    alone = all(label == RECORDED for label, _ in bases)
    # The grid keys of each base.
    keys = [_list_keys(mapping) if alone or label != RECORDED else set() for label, mapping in bases]
    known = set().union(*keys)
    if unknown := [key for key in axes if key not in known]:
        raise SpecError(f"--grid {unknown[0]}: no --spec has this key. {suggest_keys(unknown[0], known)}")
    found: dict[str, Candidate] = {}
    for (label, mapping), its_keys in zip(bases, keys, strict=True):
        own = [key for key in axes if key in its_keys]
        for point in itertools.product(*(axes[key] for key in own)):
            candidate = _build_candidate(label, mapping, dict(zip(own, point, strict=True)))
            # Two specs may yield the same correction, which is then replayed once.
            found.setdefault(candidate.label, candidate)
            if len(found) > MOST:
                raise SpecError(f"--grid: the values yield more than {MOST} corrections. Pass fewer values.")
    return tuple(found.values())


def _build_candidate(base: str, mapping: Mapping[str, Any], point: Mapping[str, str]) -> Candidate:
    label = " ".join([base, *(f"{key}={value}" for key, value in point.items())])
    try:
        spec = CorrectionSpec.from_mapping(_change(mapping, point))
    except SpecError as error:
        if not point:
            raise
        # Some points of a grid may have bounds that exclude each other; all other points are still replayed.
        return Candidate(label, base, point, error=str(error))
    return Candidate(label, base, point, None if base == RECORDED else spec)


def _change(mapping: Mapping[str, Any], point: Mapping[str, str]) -> dict[str, Any]:
    """Set the values of a grid; they are parsed as Hydra does: 1.01 is a number, null is None."""
    changed: dict[str, Any] = deepcopy(dict(mapping))
    for key, value in point.items():
        *path, leaf = key.split(".")[1:]
        node = changed
        for name in path:
            node = node[name]
        node[leaf] = _parse(f"key={value}").value()
    return changed


def _list_keys(mapping: Mapping[str, Any]) -> set[str]:
    """List the keys that a grid can vary: those that have a value, and those that an option may omit."""
    keys = {f"{GROUP}.{path}" for path, _ in _leaves(mapping)}
    parts = {key.rpartition(".")[0] for key in keys} - {GROUP}
    return keys | {f"{part}.{name}" for part in parts for name in _OPTIONAL}
