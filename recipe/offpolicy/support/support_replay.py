"""Support replay in a run: the vLLM servers that return supports, the clients that record them, and the proof.

The servers return, and the clients record, the ids that could have been sampled for each token. Patched in verl 0.9.1:
``RolloutReplicaRegistry.register(name, loader)``, the attribute ``server_class`` of ``vLLMReplica``,
``_preprocess_engine_kwargs(self, engine_kwargs)`` of ``vLLMHttpServer``, and two names that its ``generate`` uses:
``SamplingParams``, in which it requests only the sampled token's log-prob (``logprobs=0``), and
``extract_prompt_logprobs(output, num_prompt_logprobs, result_dict)``, which receives vLLM's whole answer; see also
``verl_patches.rollout_seams``.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import ray
from omegaconf import DictConfig
from vllm.logprobs import FlatLogprobs, Logprob

from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import RolloutReplicaRegistry
from verl.workers.rollout.vllm_rollout import vllm_async_server
from verl_patches import rollout_seams
from verl_patches.contract import check_all

from ..batch.plan import take_reports
from ..extensions.add_on import AddOn
from ..proof.verify import LivenessError
from ..staleness.client import Request, RowNotes, note_rows
from .fsdp_engine import FLAG, REPORT, SupportReport, install_support
from .support_settings import SUPPORT, SupportSettings
from .token_supports import NOTE, SupportError, SupportNote, TokenSupports, read_supports

ANSWER = "offpolicy_support_answer"
"""Key, in a server's extra fields, of the ``TokenSupports`` for the tokens that the server sampled."""
_rows: RowNotes[SupportNote] = RowNotes(SupportNote)


def _add_supports(request: Request) -> None:
    """Add ``NOTE``.

    If the server returns tokens without a support, these tokens have no entry in the note, and the worker stops the
    run. An error raised here would not stop the run, because verl would count the row as failed and continue.
    """
    note = request.find_note(_rows)
    for attempt in request.attempts:
        supports = attempt.fields.get(ANSWER)
        if isinstance(supports, TokenSupports) and len(supports.sizes) == len(attempt.sampled):
            note.add(attempt.prompt, attempt.sampled, supports)
    request.output.extra_fields.pop(ANSWER, None)
    request.output.extra_fields[NOTE] = note


def note_supports(client: LLMServerClient, key: str = SUPPORT) -> LLMServerClient:
    """Replace a client with a client that records supports; ``key`` is the configuration key that requires supports."""
    return note_rows(client, _add_supports, "supports", f"{key}=null", SupportError)


Extract = Callable[[Any, int | None, dict[str, Any]], None]


def ask_for_supports(build: Callable[..., Any], settings: SupportSettings) -> Callable[..., Any]:
    """Wrap vLLM's ``SamplingParams``, so that a request for the sampled tokens' log-probs includes K more ids."""

    def build_asking(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("logprobs") == 0:
            # The flat form has two lists per request instead of one object per id.
            kwargs |= {"logprobs": settings.size, "flat_logprobs": True}
            if settings.min_p is not None:
                kwargs.setdefault("min_p", settings.min_p)
        return build(*args, **kwargs)

    return build_asking


def extract_supports(extract: Extract, settings: SupportSettings) -> Extract:
    """Wrap verl's ``extract_prompt_logprobs`` to add the supports of the sampled tokens to its result."""

    def extract_both(output: Any, num_prompt_logprobs: int | None, result_dict: dict[str, Any]) -> None:
        extract(output, num_prompt_logprobs, result_dict)
        sampled = output.outputs[0]
        if isinstance(found := sampled.logprobs, FlatLogprobs):
            count = len(sampled.token_ids)
            result_dict[ANSWER] = read_supports(found.token_ids, found.logprobs, count, likeliest=settings.likeliest)
            # verl reads only the sampled token's log-prob; reading flat log-probs would create one object per id.
            step = max(len(found.token_ids) // max(count, 1), 1)
            own = zip(found.token_ids[::step], found.logprobs[::step], strict=True)
            sampled.logprobs = [{token: Logprob(log_prob)} for token, log_prob in own]

    return extract_both


class SupportServer(vllm_async_server.vLLMHttpServer):
    """verl's vLLM server that returns supports.

    Args:
        support: settings of the request.
    """

    def __init__(self, *args: Any, support: SupportSettings, **kwargs: Any) -> None:
        check_all(rollout_seams.build_support_server())
        self.support = support
        # This server is the only server in its process, and it looks up both names at each request.
        vllm_async_server.SamplingParams = ask_for_supports(vllm_async_server.SamplingParams, support)
        vllm_async_server.extract_prompt_logprobs = extract_supports(vllm_async_server.extract_prompt_logprobs, support)
        super().__init__(*args, **kwargs)

    def _preprocess_engine_kwargs(self, engine_kwargs: dict[str, Any]) -> None:
        super()._preprocess_engine_kwargs(engine_kwargs)
        # vLLM accepts either spelling of the key; -1 means no limit.
        given = [engine_kwargs.pop(name, None) for name in ("max_logprobs", "max-logprobs")]
        asked = [int(each) for each in given if each is not None]
        engine_kwargs["max_logprobs"] = -1 if -1 in asked else max([self.support.size, *asked])


class SupportActor:
    """Ray's actor class of ``SupportServer``, with the interface that verl's replica uses.

    Args:
        actor: actor class of the server, made by ``ray.remote``.
        support: additional argument of the server.
    """

    def __init__(self, actor: Any, support: SupportSettings) -> None:
        self._actor, self._support = actor, support

    def options(self, **options: Any) -> SupportActor:
        """Set Ray's options for the next actor."""
        return SupportActor(self._actor.options(**options), self._support)

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Start a server."""
        return self._actor.remote(*args, support=self._support, **kwargs)


class SupportReplica(vllm_async_server.vLLMReplica):
    """verl's replica of servers that return supports."""

    support: ClassVar[SupportSettings]
    """Settings of the run to which this process belongs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.server_class = SupportActor(ray.remote(SupportServer), self.support)


def serve_supports(settings: SupportSettings) -> None:
    """Make vLLM replicas started by this process return supports."""
    SupportReplica.support = settings
    RolloutReplicaRegistry.register("vllm", lambda: SupportReplica)


WORSE = 1.1
"""Largest accepted ratio of k3 over the support to k3 over the vocabulary."""
_ROUNDING = 1e-6
"""k3 per token between two engines that differ only by rounding."""


def judge(reports: Sequence[SupportReport], settings: SupportSettings, *, first: bool) -> tuple[dict[str, float], str]:
    """Check the reports of one update, one per mini-batch and rank.

    Args:
        first: True for the first update of the run, in which replaying the support must not increase k3(mu, pi).

    Returns:
        The metrics, named under ``offpolicy/support/``, and a sentence.

    Raises:
        LivenessError: nothing was replayed, or replay widens the mismatch.
    """
    if not reports:
        raise LivenessError(
            "correction.support=engine: the update returned no report, so no support was replayed. The run uses a "
            "worker or engine that does not replay supports."
        )
    tokens, known = (sum(getattr(each, name) for each in reports) for name in ("tokens", "known"))
    if tokens and not known:
        raise LivenessError(
            f"correction.support=engine: none of {tokens} tokens has a support of at most {settings.size} ids. "
            f"Fix: raise correction.support_size, or set correction.support=null."
        )
    k3, without = (math.fsum(getattr(each, name) for each in reports) for name in ("k3", "k3_without"))
    compared = sum(each.k3_tokens for each in reports)
    unknown = tokens - known
    size = sum(each.bytes for each in reports)
    metrics = {
        "unknown_token_share": unknown / tokens if tokens else math.nan,
        "size": sum(each.members for each in reports) / known if known else math.nan,
        "size_largest": float(max(each.largest for each in reports)),
        "mass_least": min(each.least_mass for each in reports),
        "unknown_mass": math.fsum(each.unknown_mass for each in reports) / unknown if unknown else math.nan,
        "bytes": float(size),
        "bytes_a_token": size / tokens if tokens else math.nan,
        "kl_k3": k3 / compared if compared else math.nan,
        "kl_k3_without": without / compared if compared else math.nan,
    }
    if first and k3 > WORSE * without + _ROUNDING * compared:
        raise LivenessError(
            f"correction.support=engine: KL(mu, pi) by k3 is {metrics['kl_k3']:.2e} over the support and "
            f"{metrics['kl_k3_without']:.2e} over the vocabulary, so mu was not sampled from this support. "
            f"Fix: run the same model in rollout and trainer, or set correction.support=null."
        )
    rows = sum(each.compared for each in reports)
    return (
        metrics,
        f"support of {known / tokens if tokens else 0.0:.1%} of tokens LIVE, {metrics['size']:.1f} ids per token: each "
        f"token is in its support, mu sums to 1 over the support, checksums of {rows} rows as sampled, KL(mu, pi) by "
        f"k3 {metrics['kl_k3']:.1e} over the support and {metrics['kl_k3_without']:.1e} over the vocabulary.",
    )


logger = logging.getLogger("verl.offpolicy")


class LikeliestTokens(AddOn):
    """Feature for both trainers that requests the likeliest tokens of each position, and transports them.

    Args:
        settings: settings of the request.
    """

    key: ClassVar[str] = SUPPORT
    flag: ClassVar[str] = FLAG
    prefix: ClassVar[str] = "offpolicy/support"

    def __init__(self, settings: SupportSettings) -> None:
        self._settings = settings
        self._metrics: dict[str, float] = {}
        self._proved = False

    def begin(self, config: DictConfig) -> None:
        check_all(rollout_seams.SUPPORT)
        serve_supports(self._settings)

    def rollout_client(self, client: Any) -> Any:
        return note_supports(client, self.key)

    def batch_flags(self) -> dict[str, Any]:
        # Rows added by an extension were not sampled, so they have no likeliest tokens.
        return {self.flag: True}

    def metrics(self) -> dict[str, float]:
        return {f"{self.prefix}/{name}": value for name, value in self._metrics.items()}


class SupportReplay(LikeliestTokens):
    """Feature for both trainers that makes the actor's engine replay supports."""

    def engine_part(self) -> Callable[[Any], object]:
        return partial(install_support, unknown=self._settings.unknown)

    def on_update(self, metrics: dict[str, Any], batch: Any) -> None:
        self._metrics, proof = judge(take_reports(metrics, REPORT), self._settings, first=not self._proved)
        if not self._proved:
            logger.info(proof)
        self._proved = True
