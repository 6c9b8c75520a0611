"""Comparison of what a rollout engine holds with what the trainer has, by checksums of groups of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from .checksums import Checksum, add_checksums


@dataclass(frozen=True)
class Held:
    """What one rank of an engine holds of tensors that it was sent.

    Attributes:
        sources: names of the tensors that were loaded into the same parameters, sorted.
        checksum: of these parameters on this rank.
        dtype: of the parameters, as torch names it.
    """

    sources: tuple[str, ...]
    checksum: Checksum
    dtype: str


@dataclass(frozen=True)
class Comparison:
    """What was compared at one synchronisation; names are the trainer's.

    Attributes:
        equal: tensors that the engine holds as the trainer has them.
        different: tensors that it holds otherwise.
        unknown: tensors that cannot be judged, because the engine lays them out in a way of its own.
    """

    equal: tuple[str, ...] = ()
    different: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


class HeldComparer:
    """Comparer of one engine's ranks with the trainer, over a run's synchronisations."""

    def __init__(self) -> None:
        self._comparable: set[tuple[str, ...]] = set()
        self._own_layout: set[tuple[str, ...]] = set()
        self._before: dict[tuple[str, ...], tuple[Checksum, set[tuple[int, int]]]] = {}

    def compare(
        self,
        ranks: Sequence[Sequence[Held]],
        own: Mapping[str, Checksum],
        received: Mapping[str, Checksum] | None = None,
    ) -> Comparison:
        """Compare the trainer's checksums ``own``, by name, with what all ranks of an engine hold.

        Ranks hold shards, which add up, or copies, which are equal each. A group that the engine holds in a layout of
        its own is judged from the time that it was equal; until then only whether it changes when the trainer's does.
        Its layout is the engine's own if neither count of elements fits, as with padding and with heads that several
        ranks hold, or if the engine ``received`` what the trainer has and makes something else of it.
        """
        by_sources: dict[tuple[str, ...], list[Held]] = {}
        for held in (held for rank in ranks for held in rank):
            by_sources.setdefault(held.sources, []).append(held)
        found: dict[str, list[str]] = {"equal": [], "different": [], "unknown": []}
        for sources, parts in by_sources.items():
            names = sources if all(source in own for source in sources) else _name_fused(sources)
            if not names or not all(name in own for name in names):
                found["unknown"] += sources
                continue
            expected = add_checksums(own[name] for name in names)
            arrived = [(received or {}).get(source) for source in sources]
            whole = add_checksums(each for each in arrived if each is not None) if None not in arrived else None
            found[self._judge(sources, parts, expected, whole)] += sources
        return Comparison(**{name: tuple(sorted(each)) for name, each in found.items()})

    def _judge(
        self, sources: tuple[str, ...], parts: Sequence[Held], expected: Checksum, received: Checksum | None
    ) -> str:
        """Judge one group: ``equal``, ``different`` or ``unknown``."""
        copies = all(part.checksum.size == expected.size for part in parts)
        sharded = add_checksums(part.checksum for part in parts)
        sums = {part.checksum[1:] for part in parts} if copies else {sharded[1:]}
        before = self._before.get(sources)
        self._before[sources] = (expected, sums)
        if sums == {expected[1:]}:
            self._comparable.add(sources)
            return "equal"
        if not (copies or sharded.size == expected.size) or received == expected:
            self._own_layout.add(sources)
        if sources in self._comparable or sources not in self._own_layout:
            return "different"
        return "different" if before is not None and before[0] != expected and before[1] == sums else "unknown"


def compare_adapter(
    found: Comparison, adapter: Mapping[str, Checksum], own: Mapping[str, Checksum], *, loaded: bool
) -> Comparison:
    """Add to ``found`` the tensors of a LoRA adapter as the engine got them, which it has ``loaded`` or not."""
    known = [name for name in sorted(adapter) if name in own]
    equal = tuple(name for name in known if loaded and adapter[name] == own[name])
    return replace(
        found,
        equal=found.equal + equal,
        different=found.different + tuple(name for name in known if name not in equal),
        unknown=found.unknown + tuple(name for name in sorted(adapter) if name not in own),
    )


def _name_fused(sources: Sequence[str]) -> tuple[str, ...]:
    """Name the parameters of a layer's experts that Hugging Face fuses, given the tensors that verl sends of them."""
    layers = {source.partition(".experts.")[0] for source in sources if ".experts." in source}
    kinds = {source.rpartition(".")[0].rpartition(".")[2] for source in sources}
    if len(layers) != 1 or not kinds <= {"gate_proj", "up_proj", "down_proj"}:
        return ()
    fused = {"down_proj" if kind == "down_proj" else "gate_up_proj" for kind in kinds}
    return tuple(f"{layer}.experts.{name}" for layer in layers for name in sorted(fused))


def find_left_out(trained: Sequence[str], received: Sequence[str]) -> list[str]:
    """Find parameters that are trained and of which no tensor was sent, whatever prefix verl sends them under."""
    ends = {_end(name) for name in received}
    experts = {name.partition(".experts.")[0] for name in received if ".experts." in name}
    return [name for name in trained if _end(name) not in ends and name.partition(".experts.")[0] not in experts]


def _end(name: str) -> str:
    """Return the part of a name from its layer on; without layers the last two parts."""
    _, layers, end = name.partition("layers.")
    return end if layers else ".".join(name.split(".")[-2:])
