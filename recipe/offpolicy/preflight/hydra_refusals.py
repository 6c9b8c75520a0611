"""Rejects command lines that Hydra would misread, explains those that Hydra rejects, and suggests replacements."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override
from hydra.errors import HydraException, MissingConfigException, OverrideParseException

from verl_patches.hydra_sections import GROUPS, PROVIDER
from verl_patches.moved_options import explain_moved

from ..correction import Problem, SpecError
from ..correction.problem import find_closest, format_value
from .own_keys import CONFIG_DIR

GROUP = "correction"
ENGINES = ("actor", "critic", "model_engine", "ref")
"""verl's groups that select the training engine; no replacement is suggested, because the run would then differ."""
GetOptions = Callable[[str], Sequence[str]]
"""Lists the options of a Hydra group; empty if there is no such group."""

NO_DEFAULT = "No match in the defaults list"
"""Hydra's message if a group has no option that could be replaced."""
_LONG = 80
_FEW = 12
_KEY = re.compile(r"[+~]{0,2}[A-Za-z_][\w./@:-]*")
_ALL_OPTIONS = re.compile(r"\n\s*Config search path:.*|\n\s*See https?://\S+.*|, possible interpolation keys:.*", re.S)
"""Parts of Hydra's messages that list all available options."""
_WORDS: dict[str, str] = {
    r"An item is already at '([^']+)'": "the key already exists. Write {key}={value}.",
    r"Error merging override \+{0,2}([^=]+)=": "wrong type. To set individual keys, use {key}.KEY=VALUE.",
    r"config group '([^']+)' does not exist": "this environment has no such group. Install this package?",
    r"force-add of config groups is not supported: '\+\+([^=]+)=": "a group takes one +. Write +{key}={value}.",
}
"""Hydra's message about a key -> the message that we show instead."""
_WORD = re.compile(r"[A-Za-z_][\w/]*")
_OURS = {"ppo_trainer": "offpolicy_trainer", "ppo_megatron_trainer": "offpolicy_megatron_trainer"}
"""verl's primary configurations -> ours."""
_SEARCH_PATH = re.compile(r"(?P<start>\+{0,2}hydra\.searchpath\s*=\s*\[)(?P<places>.*)\]\s*", re.S)
_BRINGS = re.compile(rf"\+({'|'.join(GROUPS)})@\1=")
"""An option that adds our sections to any primary configuration."""
_OPTION = "'+correction@correction=[...]'"
_NEEDED = "pkg://verl.trainer.config"


def check_primary(flags: argparse.Namespace) -> None:
    """Reject a primary configuration that is not found, or that is verl's own.

    Args:
        flags: the arguments of our program, as Hydra parses them.

    Raises:
        SpecError: the configuration is rejected; the message names our configuration to use instead.
    """
    given, path = flags.config_name, flags.config_path
    if given is None or any(map(_BRINGS.match, flags.overrides)) or (path and "://" in path):
        return  # A configuration without our sections is reported when Hydra composes it.
    name = given.removesuffix(".yaml")
    folders = [Path(flags.config_dir)] if flags.config_dir else []
    folders.append(CONFIG_DIR.parent / path if path else CONFIG_DIR)
    file = next((path for folder in folders if (path := folder / f"{name}.yaml").is_file()), None)
    if name in _OURS and (file is None or file.resolve().parts[-4:-1] == ("verl", "trainer", "config")):
        reason = "verl's own primary configuration, which has no section for a correction."
        fix = f"Give --config-name={_OURS[name]}, and no --config-path."
    elif file is None:
        if any(map(_SEARCH_PATH.fullmatch, flags.overrides)):
            return  # the added search path may lead to the file
        reason = f"there is no such file in {' or '.join(map(str, folders))}."
        fix = f"Name its folder with --config-dir, or launch the program that it belongs to, with {_OPTION}."
    else:
        return
    raise SpecError(reason, fix, key="--config-name", value=given)


def keep_search_path(arguments: Sequence[str]) -> list[str]:
    """Add verl's configuration, on which ours is based, to a search path given by the user."""
    kept = []
    for argument in arguments:
        found = _SEARCH_PATH.fullmatch(argument)
        if found and _NEEDED not in found["places"]:
            argument = f"{found['start']}{','.join(filter(None, (found['places'].strip(), _NEEDED)))}]"
        kept.append(argument)
    return kept


def parse(override: str) -> Override | None:
    """Parse one override as Hydra does; None if Hydra's grammar rejects it."""
    try:
        return OverridesParser.create().parse_override(override)
    except (HydraException, ValueError, ArithmeticError, RecursionError):
        return None


def find_malformed_choices(arguments: Sequence[str], groups: Collection[str]) -> Iterator[Problem]:
    """Find overrides of our groups whose value is neither the name of an option nor a list of names.

    Args:
        arguments: arguments on the command line, including flags.
        groups: our groups; only ``correction`` accepts several options.
    """
    for argument in arguments:
        parsed = None if argument.startswith("-") else parse(argument)
        if parsed is None or parsed.key_or_group not in groups or parsed.package is not None or parsed.is_delete():
            continue
        group, value, written = parsed.key_or_group, parsed.value(), argument.partition("=")[2]
        key = f"{'+' * (len(argument) - len(argument.lstrip('+')))}{group}"
        sweep, names = isinstance(value, ChoiceSweep), _WORD.findall(written)
        if value is None or (parsed.is_sweep_override() and not sweep):
            continue  # these have their own messages
        if all(isinstance(name, str) for name in (value if isinstance(value, list) else [value])):
            continue
        said = f"expected the name of an option{', or a list of names' * (group == GROUP)}."
        fix = f"Set {key}=NAME."
        if isinstance(value, dict):
            fix = f"To set individual keys, use {group}.KEY=VALUE."
        elif group == GROUP and len(names) > 1:
            fix = f"Quote it: '{key}=[{','.join(names)}]'."
        elif sweep:
            fix = f"Choose one of them: {' or '.join(f'{key}={name}' for name in names)}."
        yield Problem(key, written, said, fix, parts=())


def list_nested(get_options: Callable[[str, ObjectType], Sequence[str]], group: str) -> list[str]:
    """List the options of a group, then the options of the groups under it by their path, such as "verl/disabled".

    Args:
        get_options: lists the options, or the groups, directly in a group.
    """
    below = get_options(group, ObjectType.GROUP)
    nested = (f"{inner}/{each}" for inner in below for each in list_nested(get_options, f"{group}/{inner}"))
    return [*get_options(group, ObjectType.CONFIG), *nested]


def explain_refusal(error: BaseException, overrides: Sequence[str], get_options: GetOptions) -> str:
    """Explain why Hydra cannot compose a command line.

    Args:
        error: the exception that composing raised.
        overrides: overrides on the command line.
        get_options: lists the options of each group of the application.
    """
    if isinstance(error, MissingConfigException) and "/" in (error.missing_cfg_file or ""):
        path = str(error.missing_cfg_file)
        if said := explain_moved(path, overrides):
            return said
        group, _, name = path.partition("/") if path.startswith(f"{GROUP}/") else path.rpartition("/")
        return _explain_missing(group, name, list(get_options(group) or error.options or ()), overrides)
    if isinstance(error, OverrideParseException) or not isinstance(error, HydraException):
        for place, override in enumerate(overrides):
            if parse(override) is None:
                return f"{_shorten(override)}: {_explain_unparsed(override, overrides[place + 1 :])}"
    for override in overrides:
        if (parsed := parse(override)) and (said := _explain_composed(parsed, str(error), get_options)):
            return f"{_shorten(override)}: {said}"
    for words, said in _WORDS.items():
        if found := re.search(words, str(error), re.S):
            for each in overrides:
                key, _, value = each.lstrip("+~").partition("=")
                if key.partition("@")[0] == found[1].partition("@")[0]:
                    return f"{_shorten(each)}: {said.format(key=key, value=_shorten(value))}"
    return _format_error(error)


def _explain_composed(parsed: Override, error: str, get_options: GetOptions) -> str:
    """Explain why Hydra cannot compose an override that it can parse; "" if another override is the cause."""
    key, value = parsed.key_or_group, None if parsed.is_delete() else parsed.value()
    if parsed.is_sweep_override():
        given, _, written = str(parsed.input_line).partition("=")
        return (
            f"several values are given, but a launch accepts only one. To pass a list, quote it: '{given}=[{written}]'."
        )
    if NO_DEFAULT in error and f"'{key}'" in error and not parsed.is_delete():
        if key == PROVIDER:  # This is also a section; its group has a single option, so there is nothing to replace.
            return f"wrong type. To set individual keys, use {key}.KEY=VALUE."
        package = f"@{key}" if key in GROUPS else ""  # it also adds the sections to a primary configuration
        near = find_closest(str(value), get_options(key), 0.6)
        return f"no default to replace. Write +{key}{package}={near or value}."
    return ""


def _explain_missing(group: str, name: str, options: Sequence[str], overrides: Sequence[str]) -> str:
    """Explain that a group has no option of this name."""
    words = _WORD.findall(name)
    if group == GROUP and len(words) > 1 and set(words) <= set(options):
        return f"{group}={_shorten(name)}: several options are a list. Quote it: '{group}=[{','.join(words)}]'."
    given = next((each for each in overrides if name in each and each.lstrip("+").startswith(group)), f"{group}={name}")
    if group in ENGINES:
        near = next(iter(difflib.get_close_matches(name, options, 1, 0.85)), None)
    else:
        begun = [option for option in options if name and option.startswith(name)]  # tis -> tis_token
        near = find_closest(name, options, 0.75) or " or ".join(begun[:3]) or find_closest(name, options, 0.6)
    if near:
        advice = f"Did you mean {near}?"
    elif group in ENGINES:
        advice = f"verl has {', '.join(options)}. Install the package that provides {name}."
    elif len(options) <= _FEW:
        advice = f"Choose one of {', '.join(options)}."
    else:
        where = "docs/corrections.md explains them all" if group == GROUP else f"there are {len(options)} options"
        advice = f"{where}; the first are {', '.join(options[:_FEW])}."
    return f"{_shorten(given)}: {name} is not an option of {group}. {advice}"


def _explain_unparsed(override: str, later: Sequence[str]) -> str:
    """Explain why Hydra's grammar rejects an argument: it was split, is not quoted, or is not an override at all."""
    whole = " ".join([override, *later[:1]])
    if later and parse(whole) is not None:
        return f"the shell has split it. Quote it: '{_shorten(whole)}'."
    key, equals, value = override.partition("=")
    if not equals or not _KEY.fullmatch(key):
        return "not an override. Write KEY=VALUE."
    closed = all(value.count(left) == value.count(right) for left, right in ("[]", "{}", "()"))
    closed = closed and not any(value.count(quote) % 2 for quote in "'\"")
    if key.strip("+") == GROUP and len(words := _WORD.findall(value)) > 1 and closed:
        return f"several options are a list. Quote it: '{key}=[{','.join(words)}]'."
    if not closed:
        return "a bracket or a quote is not closed. Close it, and quote the whole override."
    quoted = value.replace("\\", "\\\\").replace('"', '\\"')
    fix = f""" Quote it: '{key}="{_shorten(quoted)}"'.""" if parse(f'{key}="{quoted}"') is not None else ""
    return f"Hydra cannot read this value.{fix}"


def _shorten(text: str) -> str:
    return text if len(text) <= _LONG else f"{text[:_LONG]}..."


def _format_error(error: BaseException | None) -> str:
    """Format Hydra's own message and its causes as one paragraph."""
    said: list[str] = []
    while error is not None:
        text = _ALL_OPTIONS.sub("", str(error)).strip()
        if not isinstance(error, HydraException) and not said:
            text = f"Hydra cannot compose it: {text or format_value(type(error).__name__)}"
        if text and text not in said:
            said.append(text)
        error = error.__cause__
    return "\n".join(said)
