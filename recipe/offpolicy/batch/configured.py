"""A configuration as start-up checks read it: values at dotted keys, and problems of keys with their present values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ..correction.problem import EVERYTHING, Problem, Verdict, set_to


class Configured:
    """A composed configuration.

    Args:
        config: configuration of the launch.
        parts: corrections that its problems concern, see ``Problem``.
    """

    def __init__(self, config: DictConfig, *parts: str) -> None:
        self.config, self._parts = config, parts or EVERYTHING

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value at a dotted key; None if it is null, ``default`` if it is missing."""
        return OmegaConf.select(self.config, key, default=default)

    def problem(
        self,
        key: str,
        reason: str,
        fix: str = "",
        sets: Mapping[str, Any] | Iterable[str] = (),
        parts: tuple[str, ...] | None = None,
        verdict: Verdict = "ERROR",
        alongside: Mapping[str, Any] | Iterable[str] = (),
        **more: Any,
    ) -> Problem:
        """Build the problem of a key with its present value.

        Args:
            sets: the overrides that fix the problem, or keys and their values.
            parts: corrections that the problem concerns; None: the ``parts`` of this configuration.
            alongside: other keys whose values make this key's value a problem; a mapping overrides their present
                values.
            more: a ``value`` that is not in the configuration, or other fields of ``Problem``.
        """
        overrides = [set_to(*each) for each in sets.items()] if isinstance(sets, Mapping) else sets
        value = more.pop("value") if "value" in more else self.get(key)
        others = dict(alongside) if isinstance(alongside, Mapping) else {each: self.get(each) for each in alongside}
        named = self._parts if parts is None else parts
        return Problem(key, value, reason, fix, verdict, named, tuple(overrides), **{"alongside": others} | more)
