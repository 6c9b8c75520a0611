"""Explains why Hydra rejects a command line, in a sentence that includes the override to write instead."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, QuotedString
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from yaml import YAMLError

from verl_patches.hydra_sections import GROUPS, PROVIDER
from verl_patches.moved_options import explain_moved

from ..correction import Problem, SpecError
from ..correction.problem import format_value
from .own_keys import CONFIG_DIR

GROUP = "correction"
ENGINES = ("actor", "critic", "model_engine", "ref")
"""verl's groups that choose the training engine; with another engine, the run would be a different one."""
GetOptions = Callable[[str], Sequence[str]]
"""Lists the options of a Hydra group; empty if there is no such group."""

NO_DEFAULT = "No match in the defaults list"
"""Hydra's message if a group has no option that could be replaced."""
_LONG = 80
_FEW = 12
_KEY = re.compile(r"[+~]{0,2}[A-Za-z_][\w./@:-]*")
_BESIDE = re.compile(r"\n\s*Config search path:.*|\n\s*See https?://\S+.*|, possible interpolation keys:.*", re.S)
"""Parts of Hydra's messages that list all available options."""
_WORDS: dict[str, str] = {
    r"An item is already at '([^']+)'": "the key already exists. Write {key}={value}.",
    r"Error merging override \+{0,2}([^=]+)=": "expected a value of another type. Set single keys as {key}.KEY=VALUE.",
    r"delete from config\. '([^']+)' does not exist": "there is no such key to delete.",
    r"delete from config\. The value of '([^']+)'": "the key has another value. Write ~{key}.",
    r"Could not delete '([^'=]+)": "no option of this group is chosen, so none can be deleted.",
    r"config group '([^']+)' does not exist": "this environment has no such group. Install this package?",
    r"force-add of config groups is not supported: '\+\+([^=]+)=": "a group takes one +. Write +{key}={value}.",
}
"""Hydra's message about a key -> the message that we show instead."""
_WORD = re.compile(r"[A-Za-z_][\w/]*")
_PUNCTUATION = re.compile(r"[\W_]+")


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
        if argument.startswith("-") or (parsed := parse(argument)) is None:
            continue
        group = parsed.key_or_group
        if group not in groups or parsed.package is not None or parsed.is_delete():
            continue
        sign = argument[: len(argument) - len(argument.lstrip("+"))]
        choices = getattr(parsed.value(), "list", None) if parsed.is_sweep_override() else None
        if parsed.is_sweep_override() and choices is None:
            continue  # a range or a glob, which explain_refusal reports
        value: Any = parsed.value() if choices is None else list(map(_unquote, choices))
        names = list(_flatten(value))
        flat = isinstance(value, list) and choices is None and not any(isinstance(each, list) for each in value)
        written = argument.partition("=")[2]
        if value in (None, [], "") or (isinstance(value, str) and names == [value]):
            continue  # null and [] have their own messages
        if not names or not all(isinstance(name, str) and name for name in names):
            more = f" Set single keys as {group}.KEY=VALUE." if isinstance(value, dict) else ""
            said = f"expected the name of an option{', or a list of names' * (group == GROUP)}."
            yield Problem(f"{sign}{group}", written, said, f"Set {sign}{group}=NAME.{more}", parts=())
        elif not flat and (group == GROUP or len(names) == 1):
            said = "options are given as one list of names."
            value = f"[{','.join(map(str, names))}]" if len(names) > 1 else names[0]
            yield Problem(f"{sign}{group}", written, said, f"Quote it so: '{sign}{group}={value}'.", parts=())
        elif not flat and group != GROUP:
            said = f"options of {group} do not stack, and Hydra would use only the last."
            one = " or ".join(f"{sign}{group}={name}" for name in names)
            yield Problem(f"{sign}{group}", written, said, f"Choose one of them: {one}.", parts=())


def _unquote(value: object) -> object:
    return value.text if isinstance(value, QuotedString) else value


def _flatten(value: object) -> Iterator[object]:
    """List the names in a value; elements that are not strings stay unchanged."""
    if isinstance(value, list):
        for each in value:
            yield from _flatten(each)
    elif isinstance(value, str):
        yield from (name.strip() for name in value.strip("[] ").split(","))
    else:
        yield value


def list_nested(get_options: Callable[[str, ObjectType], Sequence[str]], group: str) -> list[str]:
    """List the options of a group, then the options of the groups under it by their path, such as "verl/disabled".

    Args:
        get_options: lists the options, or the groups, directly in a group.
    """
    below = get_options(group, ObjectType.GROUP)
    nested = (f"{inner}/{each}" for inner in below for each in list_nested(get_options, f"{group}/{inner}"))
    return [*get_options(group, ObjectType.CONFIG), *nested]


def explain_refusal(error: BaseException, overrides: Sequence[str], get_options: GetOptions) -> str:
    """Explain in words why Hydra does not compose a command line.

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
                return _explain_unparsed(override, overrides[place + 1 :])
    for override in overrides:
        parsed = parse(override)
        if parsed is not None and parsed.is_delete() and "deletion value" in str(error):
            return f"{_shorten(override)}: a group is deleted by its name alone. Write ~{parsed.key_or_group}."
        if parsed is None or parsed.is_delete():
            continue
        if parsed.is_sweep_override():
            return _explain_sweep(override)
        key, value = parsed.key_or_group, parsed.value()
        if "/" in key and f"Could not override '{key}'" in str(error):
            return (
                f"{_shorten(override)}: there is no group {key}. A key is written with dots: {key.replace('/', '.')}."
            )
        if NO_DEFAULT in str(error) and f"'{key}'" in str(error):
            if key == PROVIDER:  # also a section; its group has a single option, which no one replaces
                return f"{_shorten(override)}: expected a value of another type. Set single keys as {key}.KEY=VALUE."
            near = find_nearest(str(value), get_options(key))
            return f"{_shorten(override)}: no default to replace. Write +{key}={near[0] if near else value}."
        names = value if isinstance(value, list) else [value]
        no_names = not all(isinstance(name, str | QuotedString) for name in names) and not isinstance(value, dict)
        null = value is None and "Got NoneType" in str(error)
        if (null or (value is not None and no_names)) and (options := get_options(key)):
            return f"{_shorten(override)}: expected the name of an option. Choose one of {', '.join(options)}."
    for words, said in _WORDS.items():
        found = re.search(words, str(error))
        for each in overrides if found is not None else ():
            key, _, value = each.lstrip("+~").partition("=")
            if found is not None and key.partition("@")[0] == found[1].partition("@")[0]:
                return f"{_shorten(each)}: {said.format(key=key, value=_shorten(value))}"
    return _format_error(error)


def find_nearest(name: str, options: Sequence[str]) -> list[str]:
    """Find the options that a mistyped name may stand for, closest first; only one option if the match is clear."""
    bare = {_PUNCTUATION.sub("", option.lower()): option for option in options}
    wanted = _PUNCTUATION.sub("", name.lower())
    if wanted in bare:
        return [bare[wanted]]
    if near := difflib.get_close_matches(wanted, bare, 1, 0.75):
        return [bare[near[0]]]
    begun = [option for short, option in bare.items() if wanted and short.startswith(wanted)]
    return (begun or [bare[each] for each in difflib.get_close_matches(wanted, bare, 3, 0.6)])[:3]


def _explain_missing(group: str, name: str, options: Sequence[str], overrides: Sequence[str]) -> str:
    """Explain that a group has no option of this name."""
    words = _WORD.findall(name)
    if group == GROUP and len(words) > 1 and set(words) <= set(options):
        return f"{group}={_shorten(name)}: several options are a list. Quote it so: '{group}=[{','.join(words)}]'."
    engine = group in ENGINES
    near = difflib.get_close_matches(name, options, 1, 0.85) if engine else find_nearest(name, options)
    given = next((each for each in overrides if name in each and each.lstrip("+").startswith(group)), f"{group}={name}")
    beyond = f"{name} is not an option of {group}."
    if near:
        return f"{_shorten(given)}: {beyond} Did you mean {' or '.join(near)}?"
    if engine:
        return f"{_shorten(given)}: {beyond} verl has {', '.join(options)}. Install the package that provides {name}."
    if len(options) <= _FEW:
        return f"{_shorten(given)}: {beyond} Choose one of {', '.join(options)}."
    where = "docs/corrections.md explains them all" if group == GROUP else f"there are {len(options)} options"
    return f"{_shorten(given)}: {beyond} {where}; the first are {', '.join(options[:_FEW])}."


def _explain_unparsed(override: str, later: Sequence[str]) -> str:
    """Explain an argument that Hydra's grammar rejects: split by the shell, not quoted, or no override at all."""
    whole = override
    for word in later:
        # A key contains no spaces, and the equals sign needs none around it.
        whole += word if word.startswith("=") or whole.endswith("=") else f" {word}"
        if "=" in whole and parse(whole) is not None:
            return f"{_shorten(override)}: the shell has split it. Quote it so: '{_shorten(whole)}'."
    key, equals, value = override.partition("=")
    if not equals or not _KEY.fullmatch(key):
        return f"{_shorten(override)}: not an override. Write KEY=VALUE."
    if key.strip("+") == GROUP and len(words := _WORD.findall(value)) > 1 and _is_closed(value):
        return f"{_shorten(override)}: several options are a list. Quote it so: '{key}=[{','.join(words)}]'."
    if not _is_closed(value):
        return f"{_shorten(override)}: a bracket or a quote is not closed. Close it, and quote the whole override."
    if len(value) > _LONG and value.strip().lstrip("+-").replace("_", "").isdigit():
        return f"{_shorten(override)}: {len(value)} digits are too long for a number. Set a shorter one."
    quoted = value.replace("\\", "\\\\").replace('"', '\\"')
    fix = f""" Quote it so: '{key}="{_shorten(quoted)}"'.""" if parse(f'{key}="{quoted}"') is not None else ""
    return f"{_shorten(override)}: Hydra cannot read this value.{fix}"


def _is_closed(text: str) -> bool:
    return all(text.count(left) == text.count(right) for left, right in ("[]", "{}", "()")) and not any(
        text.count(quote) % 2 for quote in "'\""
    )


def _explain_sweep(override: str) -> str:
    key, _, value = override.partition("=")
    return (
        f"{_shorten(override)}: several values, but a launch takes one. Write '{key}=[{value}]' for a list, "
        f"""or '{key}="{value}"' for a text."""
    )


def _shorten(text: str) -> str:
    return text if len(text) <= _LONG else f"{text[:_LONG]}..."


def _format_error(error: BaseException | None) -> str:
    """Format Hydra's own message and its causes as one paragraph."""
    said: list[str] = []
    while error is not None:
        text = _BESIDE.sub("", str(error)).strip()
        if not isinstance(error, HydraException) and not said:
            text = f"Hydra cannot compose it: {text or format_value(type(error).__name__)}"
        if text and text not in said:
            said.append(text)
        error = error.__cause__
    return "\n".join(said)


_OURS = {"dense": "offpolicy_trainer", "megatron": "offpolicy_megatron_trainer"}
_VERLS = ("ppo_trainer", "ppo_megatron_trainer")
_VERLS_FOLDER = ("verl", "trainer", "config")
_SECTIONS = "offpolicy_base"
_GROUP = "correction"
_SEARCH_PATH = re.compile(r"(?P<start>\+{0,2}hydra\.searchpath\s*=\s*\[)(?P<places>.*)\]\s*", re.S)
_BRINGS = re.compile(rf"\+({'|'.join(GROUPS)})@\1=")
"""An option that adds our sections to whatever primary configuration is used."""
_OPTION = "'+correction@correction=[...]'"
_NEEDED = "pkg://verl.trainer.config"


class _InvalidFlags(Exception):
    """Flags that Hydra's parser rejects; Hydra itself reports them."""


def check_primary(arguments: Sequence[str]) -> None:
    """Refuse a primary configuration that is not found or does not contain a section for a correction.

    Args:
        arguments: command-line arguments of our program.

    Raises:
        SpecError: the configuration is refused; the message names our configuration to use instead.
    """
    flags = _parse_flags(arguments)
    if flags is None or flags.config_name is None or any(map(_BRINGS.match, arguments)):
        return
    name = flags.config_name.removesuffix(".yaml")
    alongside = CONFIG_DIR if flags.config_path is None else CONFIG_DIR.parent / flags.config_path
    if flags.config_path is not None and "://" in flags.config_path:
        return
    folders = [*([Path(flags.config_dir)] if flags.config_dir else []), alongside]
    file = _find_file(name, folders)
    if name in _VERLS and (file is None or file.resolve().parts[-4:-1] == _VERLS_FOLDER):
        fix = f"Give --config-name={_OURS['megatron' if 'megatron' in name else 'dense']}, and no --config-path."
        reason = "verl's own primary configuration, which has no section for a correction."
        raise SpecError(reason, fix, key="--config-name", value=flags.config_name)
    if file is None:
        if any(map(_SEARCH_PATH.fullmatch, arguments)):
            return  # the added search path may lead to the file
        places = " or ".join(map(str, folders))
        fix = f"Name its folder with --config-dir, or launch the program that it belongs to, with {_OPTION}."
        raise SpecError(f"there is no such file in {places}.", fix, key="--config-name", value=flags.config_name)
    if not _has_sections(file, folders):
        reason = f"{file} has no section for a correction."
        fix = f"Give options of ours as {_OPTION}, which adds the sections to it."
        raise SpecError(reason, fix, key="--config-name", value=flags.config_name)


def keep_search_path(arguments: Sequence[str]) -> list[str]:
    """Add verl's configuration, on which ours is based, to a search path given by the user."""
    return [_add_verls(argument) for argument in arguments]


def _add_verls(argument: str) -> str:
    found = _SEARCH_PATH.fullmatch(argument)
    if found is None or _NEEDED in found["places"]:
        return argument
    places = [place for place in (found["places"].strip(), _NEEDED) if place]
    return f"{found['start']}{','.join(places)}]"


class _Flags:
    config_name: str | None
    config_path: str | None
    config_dir: str | None


def _parse_flags(arguments: Sequence[str]) -> _Flags | None:
    # Hydra's own parser is not public. Only these flags matter; --cfg is listed so that -c does not abbreviate another.
    parser = argparse.ArgumentParser(add_help=False)
    for short, flag in (("-cn", "--config-name"), ("-cp", "--config-path"), ("-cd", "--config-dir"), ("-c", "--cfg")):
        parser.add_argument(short, flag)

    def refuse(message: str) -> NoReturn:
        raise _InvalidFlags(message)

    parser.error = refuse  # type: ignore[method-assign]
    try:
        return cast(_Flags, parser.parse_known_args(list(arguments))[0])
    except _InvalidFlags:
        return None


def _find_file(name: str, folders: Sequence[Path]) -> Path | None:
    return next((path for folder in folders if (path := folder / f"{name}.yaml").is_file()), None)


def _has_sections(file: Path, folders: Sequence[Path], seen: frozenset[Path] = frozenset()) -> bool:
    """Return True if a configuration, or one of its defaults next to it, includes our sections."""
    try:
        content = OmegaConf.load(file)
    except (OSError, ValueError, YAMLError):
        return True  # Hydra reports what is wrong with it
    if not isinstance(content, DictConfig) or file in seen:
        return False
    defaults = [*_list_defaults(content)]
    if _GROUP in content or {_GROUP, _SECTIONS} & set(defaults):
        return True
    inner = filter(None, (_find_file(name, [*folders, CONFIG_DIR]) for name in defaults))
    return any(_has_sections(each, folders, seen | {file}) for each in inner)


def _list_defaults(content: DictConfig) -> Iterator[str]:
    """List the names in a defaults list: configurations, and groups with a chosen option."""
    plain = cast(dict[str, Any], OmegaConf.to_container(content, resolve=False))
    for default in plain.get("defaults") or ():
        for name in default if isinstance(default, dict) else (default,):
            yield str(name).removeprefix("override ").split("@")[0].strip("/ ")
