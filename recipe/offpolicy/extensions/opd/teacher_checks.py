"""Checks of a teacher before the run: one model, with enough context, that repeats itself and tokenises alike."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import requests

from .settings import TeacherSettings
from .teacher_client import Row, TeacherClient, TeacherError, open_session, parse_object, request

PATIENCE = 10.0
"""Seconds to wait for an answer before the run."""
LARGEST = 2**24
"""Largest size of such an answer in bytes."""
REPEATS = {"float32": 1e-3, "bfloat16": 0.05}
"""Nats by which a log-prob may differ between two requests; a 16-bit teacher is reported and accepted."""
PROBES = (
    *(
        "the quick brown fox",
        "Straße",
        "日本語の文",
        "привет",
        "😀👩‍👧",
        "naïve café",
        "A" * 24,
        "1234567890",
        "3.14159",
    ),
    *("  two  spaces", "\ttab", "\n\nnewlines\n", "trailing ", "def f(x):\n    return x ** 2", "a=b;c", "{}[]()<>"),
    *("\\frac{a}{b}", "$x^2$", "<think>", "</think>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<s>", "</s>"),
    *("https://example.org/?q=1&r=2", "don't", "“quotes”", "—", "…", "\u200b", "①②③", "e\u0301", "é", "ﬁ", "𝔘"),
)
"""Strings on which tokenizers differ: scripts, digits, white space, code, markers."""


def _ask(settings: TeacherSettings, url: str, path: str, body: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
    """Get or post JSON.

    Raises:
        TeacherError: the server is not reachable, or does not answer with a JSON object.
    """
    with open_session(settings) as session:
        try:
            status, _, text = request(session, f"{url}{path}", body, LARGEST, time.monotonic() + PATIENCE)
        except requests.RequestException as error:
            raise TeacherError(f"{url}{path}: {type(error).__name__}") from None
    if status != 200:
        raise TeacherError(f"{url}{path}: HTTP {status}")
    return parse_object(text, f"{url}{path}")


def _tokenize(settings: TeacherSettings, body: Mapping[str, Any]) -> object:
    answer = _ask(settings, settings.urls[0], "/tokenize", body)
    if not isinstance(answer.get("tokens"), list):
        raise TeacherError(f"{settings.urls[0]}/tokenize: no list of tokens")
    return answer["tokens"]


def find_model(settings: TeacherSettings) -> tuple[str, frozenset[str]]:
    """Find the name of the one model that all addresses serve, and all of its names.

    Raises:
        TeacherError: an address is not reachable, or serves another model, or several.
    """
    model, names = _describe(settings)
    return str(model["id"]), names


def _describe(settings: TeacherSettings) -> tuple[Mapping[str, Any], frozenset[str]]:
    """Describe the model as the servers list it, and list the names of the same weights."""
    found: dict[str, Mapping[str, Any]] = {}
    names: set[str] = set()
    for url in settings.urls:
        listed = _ask(settings, url, "/v1/models").get("data")
        if not isinstance(listed, list) or not all(isinstance(each, dict) and "id" in each for each in listed):
            raise TeacherError(f"{url}/v1/models: no list of models")
        served = {str(each["id"]): each for each in listed}
        wanted = settings.model or (next(iter(served)) if len(served) == 1 else None)
        if wanted not in served:
            raise TeacherError(
                f"{url} serves {', '.join(served) or 'no model'}, "
                + ("of which one must be selected" if settings.model is None else f"but not {settings.model}")
            )
        found[url] = model = served[str(wanted)]
        names |= {name for name, each in served.items() if model.get("root") and each.get("root") == model["root"]}
    if len({each["id"] for each in found.values()}) > 1:
        raise TeacherError(f"the addresses serve {', '.join(str(each['id']) for each in found.values())}")
    lengths = {url: each.get("max_model_len") for url, each in found.items()}
    shortest = min(found, key=lambda url: length if isinstance(length := lengths[url], int) else math.inf)
    return found[shortest], frozenset(names | {str(found[shortest]["id"])})


def find_length(settings: TeacherSettings) -> int | None:
    """Find the longest sequence that every address accepts, in tokens; None if a server does not report it."""
    length = _describe(settings)[0].get("max_model_len")
    return length if isinstance(length, int) else None


def measure_repeats(settings: TeacherSettings, model: str, ids: Sequence[Sequence[int]]) -> float:
    """Measure by how many nats log-probs differ between requests of a row alone, twice, and together with others.

    Args:
        ids: two rows of three or more ids.
    """
    rows = [Row(number, (row[0],), tuple(row[1:])) for number, row in enumerate(ids)]
    crowd = [*rows, *(Row(number, row.prompt, row.response) for number, row in enumerate(rows * 3, len(rows)))]
    client = TeacherClient(settings, model)
    try:
        alone = [client.wait(client.start([row])) for row in rows for _ in range(2)]
        together = client.wait(client.start(crowd))
    finally:
        client.close()
    apart = [
        abs(one - other)
        for number in range(len(rows))
        for found in (alone[2 * number + 1][0], *together[number :: len(rows)])
        for one, other in zip(alone[2 * number][0], found, strict=True)
    ]
    return max(apart, default=0.0)


def find_other_vocabulary(settings: TeacherSettings, model: str, tokenizer: Any) -> Iterator[str]:
    """Find strings for which the teacher's tokenizer gives other ids than the student's ``tokenizer``."""
    for text in PROBES:
        theirs = _tokenize(settings, {"model": model, "prompt": text, "add_special_tokens": False})
        if theirs != tokenizer(text, add_special_tokens=False)["input_ids"]:
            yield text


def find_other_template(settings: TeacherSettings, model: str, tokenizer: Any, messages: Sequence[Any]) -> int | None:
    """Find the first of several conversations that the teacher's chat template renders differently; None: none."""
    for number, conversation in enumerate(messages):
        body = {"model": model, "messages": conversation, "add_generation_prompt": True}
        theirs = _tokenize(settings, body)
        ours = tokenizer.apply_chat_template(conversation, add_generation_prompt=True)
        if theirs != list(ours["input_ids"] if isinstance(ours, Mapping) else ours):
            return number
    return None
