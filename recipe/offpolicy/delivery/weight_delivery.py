"""Proves at each synchronisation that the rollout engine has the trainer's weights.

``verl_patches.rollout_seams`` lists the patched functions.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

import ray
from omegaconf import DictConfig, OmegaConf

from verl_patches import rollout_seams

from ..extensions.add_on import AddOn
from ..extensions.batch_view import BatchView
from ..proof.verify import LivenessError
from .checksums import (
    AS_SENT,
    FIX_ROUNDED,
    LEAST_SEEN,
    SECTION,
    Checksum,
    Comparison,
    DeliverySettings,
    Held,
    HeldComparer,
    add_checksums,
    compare_adapter,
    find_left_out,
    watch_sent,
)
from .engine_side import METHOD
from .probe import Probe

logger = logging.getLogger("verl.offpolicy")

NAMED = 6
"""Maximum number of tensor names in an error message."""
FEWEST = 64
"""A run stops after this number of updates without a synchronisation, if its usual interval is not yet known."""
SEEN_OVER = 3
"""Number of recent updates over which the share that survives the engine's rounding is computed; the run warns if it is
below ``LEAST_SEEN``."""
KEPT = 4
"""Number of past synchronisations whose checksums are kept, to recognise outdated weights."""


class WeightDelivery(AddOn):
    """Add-on for ``offpolicy.delivery``, which compares the rollout engine's weights with the trainer's.

    Args:
        run: the run whose workers send the weights, with ``recording``, ``workers`` and ``global_steps``.
        settings: how often weights are compared.
    """

    proof_name = "delivery"

    def __init__(self, run: Any, settings: DeliverySettings) -> None:
        self._run, self._settings = run, settings
        self._syncs = self._updates = self._longest = self._intervals = 0
        self._engines: dict[int, Engine] = {}
        self._past: deque[Mapping[str, Checksum]] = deque(maxlen=KEPT)
        self._probe: Probe | None = None
        self._metrics: dict[str, float] = {}
        self._told: dict[str, None] = {}
        self._asked: Asked | None = None
        self._updates_seen: deque[tuple[float, float]] = deque(maxlen=SEEN_OVER)
        self._warned_of_rounding = False

    def begin(self, config: DictConfig) -> None:
        rollout_seams.WEIGHT_SYNC.check()
        self._rollout = config.actor_rollout_ref.rollout
        rollout_seams.listen(self.on_sync)
        if self._settings.probe is not None:
            self._probe = Probe(self._rollout.get("max_model_len"), _advise("probe"))

    def engine_part(self) -> Callable[[Any], object]:
        return partial(watch_sent, dtype=_dtype(self._rollout.get("dtype")))

    def unproved(self) -> str | None:
        if self._metrics.get("proved") == 1.0 or "probe_slope" in self._metrics:
            return None
        return " ".join(self._told) or f"the rollout engine's weights have not been compared yet ({SECTION})."

    def metrics(self) -> dict[str, float]:
        return {f"offpolicy/delivery/{name}": value for name, value in self._metrics.items()}

    def on_sync(self, manager: Any) -> None:
        """Request checksums of the weights on ``manager``'s servers and of the weights that the trainer's workers sent.

        The answers are compared later, before the next update or validation, so that both sides can compute checksums
        while the servers already sample.

        Raises:
            LivenessError: the checksums of the previous synchronisation, which are compared only now, differ.
        """
        start = time.perf_counter()
        self._compare_sums()
        self._syncs += 1
        self._intervals += self._updates > 0  # a critic may be trained alone at first
        self._updates, self._longest = 0, max(self._longest, self._updates)
        if self._settings.sums is not None and (self._syncs - 1) % self._settings.sums == 0:
            self._ask_sums(manager)
        if self._probe is not None and (self._syncs - 1) % (self._settings.probe or 1) == 0:
            self._probe.ask(manager.replicas)
        self._metrics["seconds"] = time.perf_counter() - start

    def validate(self, trainer: Any, run: Callable[[], dict[str, float]]) -> dict[str, float]:
        self._compare_sums()
        return run()

    def on_rollout(self, batch: BatchView) -> None:
        start = time.perf_counter()
        self._compare_sums()
        compared = time.perf_counter()
        self._metrics["seconds"] = self._metrics.get("seconds", 0.0) + compared - start
        if self._probe is not None:
            try:
                self._metrics |= self._probe.hear(batch, self._syncs, self._metrics.get("update_seen", math.nan))
            except LivenessError as error:
                self._record("different", sentence=str(error))
                raise
            self._metrics["probe_seconds"] = time.perf_counter() - compared

    def _ask_sums(self, manager: Any) -> None:
        if self._rollout.name != "vllm":
            return self._say(f"weights of the rollout engine {self._rollout.name} are not compared.")
        engines = [self._engines.setdefault(id(replica), Engine()) for replica in manager.replicas]
        asked = [replica.servers[0].collective_rpc.remote(METHOD) for replica in manager.replicas]
        # Use the dtypes that the engines reported last. If the answers show other dtypes, request the checksums again.
        ready = all(engine.dtypes and not engine.skipped for engine in engines)
        dtypes = _find_dtypes(engines, self._rollout) if ready else None
        weighed = None if dtypes is None else self._run.workers.weigh_offpolicy(*dtypes)
        self._asked = Asked(self._syncs, manager, engines, asked, dtypes, weighed)

    def _compare_sums(self) -> None:
        """Compare the checksums that were requested at the latest synchronisation."""
        if (given := self._asked) is None:
            return
        self._asked = None
        try:
            answers = ray.get(given.engines_sums)
        except ray.exceptions.RayTaskError as error:
            if f"no attribute '{METHOD}'" not in str(error):
                raise
            self._metrics["proved"] = math.nan
            return self._say("the rollout engine uses its own worker class: weights are not compared.")
        for engine, answer in zip(given.engines, answers, strict=True):
            engine.read(answer)
        judged = [engine for engine in given.engines if not engine.skipped]
        for reason in sorted({engine.skipped for engine in given.engines} - {""}):
            self._say(f"{reason}: weights are not compared.")
        if not judged:
            self._metrics["proved"] = math.nan
            return
        if silent := [engine for engine in judged if not engine.received_names]:
            if given.manager.backend == "delta_sharded":
                return self._say("delta_sharded sends only changes: weights are not compared.")
            self._stop(
                f"synchronisation {given.at}: {len(silent)} of {len(judged)} rollout engines received no weights, so "
                f"they sample with their initial weights. {_advise('sums')}"
            )
        dtypes = _find_dtypes(judged, self._rollout)
        weighed = given.own_sums if dtypes == given.dtypes else self._run.workers.weigh_offpolicy(*dtypes)
        own, trained, update = _add_ranks(ray.get(weighed))
        found = [engine.compare(own) for engine in judged]
        self._judge(given.at, found, judged, own, trained)
        self._past.append(own)
        self._report(found, update, first=given.at == 1)

    def before_update(self) -> None:
        self._compare_sums()  # a custom training loop may not have called any earlier hook

    def on_update(self, metrics: dict[str, Any], batch: Any) -> None:
        self._updates += 1
        if self._updates > (FEWEST if self._intervals < 3 else 4 * self._longest):
            self._stop(
                f"{self._updates} updates were made since verl last sent weights to the rollout engine; the longest "
                f"previous interval was {self._longest} updates. {_advise('sums')}"
            )

    def _judge(
        self,
        at: int,
        found: Sequence[Comparison],
        engines: Sequence[Engine],
        own: Mapping[str, Checksum],
        trained: Sequence[str] | None,
    ) -> None:
        for comparison, engine in zip(found, engines, strict=True):
            if trained is not None and (left := find_left_out(trained, engine.received_names)):
                self._stop(
                    f"synchronisation {at}: {len(left)} of {len(trained)} trained tensors are not among the "
                    f"{len(engine.received_names)} that verl sends to the rollout engine: {_names(left)}. "
                    f"The engine samples with old values of these tensors. {_advise('sums')}"
                )
            if comparison.different:
                count = len(comparison.different) + len(comparison.equal)
                self._stop(
                    f"synchronisation {at}: the rollout engine does not hold the trainer's weights: "
                    f"{len(comparison.different)} of {count} tensors differ: {_names(comparison.different)}. "
                    f"{self._explain(comparison, engine)} {_advise('sums')}"
                )

    def _explain(self, comparison: Comparison, engine: Engine) -> str:
        """Describe which earlier synchronisation sent the engine's current values."""
        for back, past in enumerate(reversed(self._past), start=1):
            if not set(comparison.different) & set(engine.compare(past, judge=False).different):
                return f"It holds the weights from {back} synchronisation{'s' if back > 1 else ''} earlier."
        received = "" if engine.received else " It has received nothing since the last synchronisation."
        known = "match none of the last synchronisations" if self._past else "were never the trainer's"
        return f"The engine's values {known}.{received}"

    def _report(self, found: Sequence[Comparison], update: Sequence[float], first: bool) -> None:
        equal, unknown = (sum(len(getattr(each, name)) for each in found) for name in ("equal", "unknown"))
        self._metrics |= {"proved": 1.0 if equal else math.nan, "equal": float(equal), "unknown": float(unknown)}
        along, square, own, rounded, _ = update or [0.0] * 5
        if update:
            self._metrics["update_seen"] = along / square if square else math.nan
            self._metrics["changed"] = rounded / own if own else math.nan
            self._warn_of_rounding(along, square)
        self._record("equal", tensors=equal, along=along, square=square)
        if first:
            logger.info(
                "the rollout engine holds the trainer's weights: %d tensors are equal, %d unknown.", equal, unknown
            )
        if unknown:
            names = sorted({name for each in found for name in each.unknown})
            reason = "are not compared, because the engine stores them in its own layout"
            self._say(f"{len(names)} tensors {reason}: {_names(names)}.")

    def _warn_of_rounding(self, along: float, square: float) -> None:
        """Warn once if updates are lost in rounding to the engine's dtype although all weights are delivered."""
        self._updates_seen.append((along, square))
        seen, made = (sum(values) for values in zip(*self._updates_seen, strict=True))
        if len(self._updates_seen) == SEEN_OVER and seen < LEAST_SEEN * made and not self._warned_of_rounding:
            self._warned_of_rounding = True
            logger.warning(
                "only a fraction of %.2g of the last %d updates survived rounding to the rollout engine's dtype, %s, "
                "so the engine is in effect sampling with older weights. Fix: %s.",
                seen / made, SEEN_OVER, self._rollout.get("dtype"), FIX_ROUNDED,
            )  # fmt: skip

    def _stop(self, sentence: str) -> NoReturn:
        self._record("different", sentence=sentence)
        raise LivenessError(sentence)

    def _record(self, verdict: str, **values: Any) -> None:
        if self._run.recording is not None:
            self._run.recording.write_delivery({"step": self._run.global_steps, "verdict": verdict, **values})

    def _say(self, line: str) -> None:
        if line not in self._told:
            self._told[line] = None
            logger.warning("%s", line)


def _advise(key: str) -> str:
    return (
        f"Rewards and gradients would come from two different policies. To continue without this check: "
        f"{SECTION}.{key}=null."
    )


class Engine:
    """State of one rollout server: the latest answers of its workers, and the results of earlier comparisons."""

    def __init__(self) -> None:
        self.dtypes: dict[str, str] = {}
        self.skipped = ""
        self._comparer = HeldComparer()

    def read(self, answer: Sequence[Mapping[str, Any]] | None) -> None:
        """Read the answers of a server's workers; an answer is None if the server's class is not verl's."""
        if not answer:
            self.skipped = "the rollout server does not return checksums of its workers"
            return
        self.skipped = next((rank["skipped"] for rank in answer if rank["skipped"]), "")
        self.received = sum(rank["received"] for rank in answer)
        self._ranks = [
            [Held(tuple(names), Checksum(*sums), dtype) for names, *sums, dtype in rank["groups"]] for rank in answer
        ]
        self.dtypes = {name: held.dtype for rank in self._ranks for held in rank for name in held.sources}
        self.adapter = {name: Checksum(*sums) for name, sums in answer[0]["adapter"].items()}
        self._first = {name: Checksum(*sums) for rank in answer for name, sums in rank["first"].items()}
        self._has_adapter = all(rank["adapters"] for rank in answer)
        self.received_names = sorted({name for rank in answer for name in rank["names"]} | self.adapter.keys())

    def compare(self, own: Mapping[str, Checksum], judge: bool = True) -> Comparison:
        """Compare the answers with the trainer's checksums; with ``judge=False``, the result is not stored."""
        found = (self._comparer if judge else HeldComparer()).compare(self._ranks, own, self._first if judge else None)
        return compare_adapter(found, self.adapter, own, loaded=self._has_adapter)


class Asked(NamedTuple):
    """Pending requests of synchronisation ``at``: references to the checksums of the engines and of the trainer."""

    at: int
    manager: Any
    engines: Sequence[Engine]
    engines_sums: Sequence[Any]
    dtypes: tuple[str, dict[str, str]] | None
    own_sums: Sequence[Any] | None


def _find_dtypes(engines: Sequence[Engine], rollout: Any) -> tuple[str, dict[str, str]]:
    """Find the dtype of most of the engines' tensors, and the dtypes of all other tensors by plain name."""
    dtypes = {name: dtype for engine in engines for name, dtype in engine.dtypes.items()}
    common = Counter(dtypes.values()).most_common(1)
    default = common[0][0] if common else _dtype(rollout.get("dtype"))
    others = {name: dtype for name, dtype in dtypes.items() if dtype != default}
    return default, others | {name: AS_SENT for engine in engines for name in engine.adapter}


def _add_ranks(ranks: Sequence[Any]) -> tuple[dict[str, Checksum], list[str] | None, list[float]]:
    """Merge the reports of the trainer's ranks: checksums, names of trained tensors, and the update."""
    weights = [(name, each) for rank in ranks for name, each in rank["weights"].items()]
    parts: dict[str, list[Checksum]] = {}
    for name, (*sums, _) in weights:
        parts.setdefault(name, []).append(Checksum(*sums))
    own = {name: add_checksums(each) for name, each in parts.items()}
    trained = list(dict.fromkeys(name for name, (*_, trains) in weights if trains))
    updates = [rank["update"] for rank in ranks if rank["update"]]
    update = [sum(column) for column in zip(*updates, strict=True)]
    return own, None if any(rank["sent"] for rank in ranks) else trained, update


def _dtype(given: Any) -> str:
    name = OmegaConf.to_container(given) if OmegaConf.is_config(given) else given
    return {"half": "float16", "bf16": "bfloat16", "float": "float32", "auto": "bfloat16"}.get(str(name), str(name))


def _names(names: Sequence[str]) -> str:
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
