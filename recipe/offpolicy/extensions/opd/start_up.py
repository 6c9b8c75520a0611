"""Start-up checks of on-policy distillation: conflicting keys of verl, and the teacher itself."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import requests

from ...batch.declared_keys import Configured
from ...correction import Problem
from ..add_on import own_launch
from ..setting_checks import count_rollouts, list_train_files, load_tokenizer, read_train_column
from .settings import OpdSettings, TeacherSettings
from .teacher_client import REFUSED, Row, TeacherClient, TeacherError, explain_key, open_session, parse_object, request

PATIENCE = 10.0
"""Seconds to wait for an answer during the start-up checks."""
REPEATS = {"float32": 1e-3, "bfloat16": 0.05}
"""Nats by which a log-prob may differ between two requests. A difference above the float32 limit is reported; a teacher
above the bfloat16 limit is rejected."""
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
"""Strings that tokenizers split differently: scripts, digits, white space, code, markers."""


def _ask(settings: TeacherSettings, url: str, path: str, body: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
    """Get or post JSON.

    Raises:
        TeacherError: the server is not reachable, or does not answer with a JSON object.
    """
    with open_session(settings) as session:
        try:
            answer = request(session, f"{url}{path}", body, time.monotonic() + PATIENCE)
        except requests.RequestException as error:
            raise TeacherError(f"{url}{path}: {type(error).__name__}") from None
    if (status := answer.status_code) != 200:
        raise TeacherError(f"{url}{path}: HTTP {status}.", explain_key(settings) if status in REFUSED else "")
    return parse_object(answer.content, f"{url}{path}")


def _tokenize(settings: TeacherSettings, body: Mapping[str, Any]) -> object:
    answer = _ask(settings, settings.urls[0], "/tokenize", body)
    if not isinstance(answer.get("tokens"), list):
        raise TeacherError(f"{settings.urls[0]}/tokenize: no list of tokens")
    return answer["tokens"]


def find_model(settings: TeacherSettings) -> tuple[str, frozenset[str]]:
    """Find the model that all addresses serve: its name, and all other names for the same weights.

    Raises:
        TeacherError: an address is not reachable, or serves a different model or several models.
    """
    model, names = _describe(settings)
    return str(model["id"]), names


def _describe(settings: TeacherSettings) -> tuple[Mapping[str, Any], frozenset[str]]:
    """Return the model's entry in the servers' lists, and all names under which its weights are served."""
    found: list[Mapping[str, Any]] = []
    names: set[str] = set()
    for url in settings.urls:
        listed = _ask(settings, url, "/v1/models").get("data")
        if not isinstance(listed, list) or not all(isinstance(each, dict) and "id" in each for each in listed):
            raise TeacherError(f"{url}/v1/models: no list of models")
        served = {str(each["id"]): each for each in listed}
        wanted = settings.model or (next(iter(served)) if len(served) == 1 else None)
        if wanted not in served:
            wish = f"but not {settings.model}" if settings.model else "so one of these models must be selected"
            raise TeacherError(f"{url} serves {', '.join(served) or 'no model'}, {wish}")
        found.append(model := served[wanted])
        names |= {name for name, each in served.items() if model.get("root") and each.get("root") == model["root"]}
    if len({each["id"] for each in found}) > 1:
        raise TeacherError(f"the addresses serve different models: {', '.join(str(each['id']) for each in found)}")
    shortest = min(found, key=lambda each: each["max_model_len"] if _has_length(each) else math.inf)
    return shortest, frozenset(names | {str(shortest["id"])})


def _has_length(model: Mapping[str, Any]) -> bool:
    return isinstance(model.get("max_model_len"), int)


def measure_repeats(settings: TeacherSettings, model: str, ids: Sequence[Sequence[int]]) -> float:
    """Measure by how many nats a row's log-probs differ between requests, alone and together with other rows.

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
    return max(
        abs(one - other)
        for number in range(len(rows))
        for found in (alone[2 * number + 1][0], *together[number :: len(rows)])
        for one, other in zip(alone[2 * number][0], found, strict=True)
    )


def find_other_vocabulary(settings: TeacherSettings, model: str, tokenizer: Any) -> Iterator[str]:
    """Find strings that the teacher's tokenizer and the student's ``tokenizer`` convert to different ids."""
    for text in PROBES:
        theirs = _tokenize(settings, {"model": model, "prompt": text, "add_special_tokens": False})
        if theirs != tokenizer(text, add_special_tokens=False)["input_ids"]:
            yield text


def find_other_template(settings: TeacherSettings, model: str, tokenizer: Any, messages: Sequence[Any]) -> int | None:
    """Find the first conversation that the teacher's chat template renders differently; None if there is none."""
    for number, conversation in enumerate(messages):
        body = {"model": model, "messages": conversation, "add_generation_prompt": True}
        theirs = _tokenize(settings, body)
        ours = tokenizer.apply_chat_template(conversation, add_generation_prompt=True)
        if theirs != list(ours["input_ids"] if isinstance(ours, Mapping) else ours):
            return number
    return None


_ROLLOUT = "actor_rollout_ref.rollout"
CONVERSATIONS = 8
LOOKED_AT = 64
"""Number of rows of the training data that are searched for images, audio and videos."""


def find_problems(section: str, settings: OpdSettings, run: Configured) -> Iterator[Problem]:
    """Find conflicts between the settings and the configuration; if there are none, contact the teacher."""
    found = list(_find_conflicts(section, settings, run))
    yield from found
    key, shown = f"{section}.teacher.url", settings.shown
    if any(teacher.shown != teacher.urls for teacher in settings.teachers.values()):
        reason = "the address contains secrets, and verl and Hydra write the configuration to files and loggers."
        fix = f"Send the secrets in a header instead: set {section}.teacher.headers to NAME: ENVIRONMENT_VARIABLE."
        yield run.problem(key, reason, fix, value=shown)
        return
    if not own_launch.get():
        reason = "the doctor does not contact an address that a script sets, so the teacher was not checked."
        yield run.problem(key, reason, parts=(), verdict="NOTE", value=shown)
    elif not any(problem.verdict == "ERROR" for problem in found):
        for source, teacher in settings.teachers.items():
            at = f"{section}.teacher.sources.{source}" if source else f"{section}.teacher"
            yield from _examine_teacher(at, teacher, run)


def _find_conflicts(section: str, settings: OpdSettings, run: Configured) -> Iterator[Problem]:
    off = f"or {section}=null."
    if run.get(key := "distillation.enabled"):
        reason = f"verl's own distillation would replace the corrected loss, so it cannot be used with {section}."
        yield run.problem(key, reason, f"Set {key}=false, {off}")
    if run.get(key := f"{_ROLLOUT}.temperature") not in (None, 1):
        reason = "the teacher's log-probs are computed at temperature 1, but the student's are not."
        yield run.problem(key, reason, f"Set {key}=1.0, {off}")
    if settings.mode == "advantage" and run.get(key := "algorithm.adv_estimator") == "gae":
        reason = "the critic predicts rewards, but eligible tokens get their advantages from the teacher."
        yield run.problem(key, reason, f"Set {section}=loss, or use an estimator without a critic, such as grpo.")
    for key, column in _find_media(run):
        reason = f"the training data has a column {column}, but the teacher receives only token ids."
        yield run.problem(key, reason, f"Train on text only, or set {section}=null.")
    yield from _find_unknown_sources(section, settings, run)
    rollouts, share = count_rollouts(run), settings.eligible.max_pass_rate
    if rollouts > 1 and 0 < share * rollouts < 1:
        key, least = f"{section}.eligible.max_pass_rate", math.ceil(1e4 / rollouts) / 1e4
        reason = f"this acts like 0: with {rollouts} rollouts per prompt, the smallest pass rate above 0 is {least:g}."
        fix = f"Set {key}={least:g} to include prompts with one passing rollout, or {key}=0 to exclude them."
        yield run.problem(key, reason, fix, {key: least}, (), "NO-OP", value=share)
    if run.get(key := "algorithm.filter_groups.enable"):
        never = settings.eligible.rows == "failed" and share * rollouts < 1
        reason = f"the filter drops prompts without a passing rollout, but {section} is meant for these prompts."
        yield run.problem(key, reason, f"Set {key}=false, {off}", verdict="NO-OP" if never else "ERROR")


def _examine_teacher(at: str, teacher: TeacherSettings, run: Configured) -> Iterator[Problem]:
    problem = partial(run.problem, f"{at}.url", value=", ".join(teacher.shown))
    try:
        served, _ = _describe(teacher)
        needed = sum(int(run.get(f"data.max_{part}_length") or 0) for part in ("prompt", "response")) + 1
        if _has_length(served) and (length := served["max_model_len"]) < needed:
            fix = f"Serve the teacher with --max-model-len {needed} or more."
            yield problem(f"the teacher accepts {length} tokens, but prompt and response have up to {needed - 1}.", fix)
            return
        apart = measure_repeats(teacher, str(served["id"]), [[1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 2, 3]])
        differ = f"log-probs of one sequence differ by {apart:.2g} nats between requests"
        if apart > REPEATS["bfloat16"]:
            fix = "Serve the teacher in float32, or without features that make its answers depend on other requests."
            yield problem(f"the teacher's answers are not repeatable: {differ}.", fix)
        elif apart > REPEATS["float32"]:
            yield problem(f"{differ}, as is usual in 16 bits.", verdict="NOTE")
        yield from _compare_tokens(at, teacher, run, str(served["id"]))
    except TeacherError as error:
        fix = error.fix or "start the teacher with scripts/teacher.sh, or set the address at which it serves."
        yield problem(f"{error.reason.rstrip('.')}.", f"{fix[0].upper()}{fix[1:]}")


def _compare_tokens(at: str, teacher: TeacherSettings, run: Configured, model: str) -> Iterator[Problem]:
    problem = partial(run.problem, f"{at}.url", value=teacher.shown[0])
    student = str(run.get("actor_rollout_ref.model.path"))
    if (tokenizer := load_tokenizer(student)) is None:
        reason = f"there is no tokenizer at {student}, so vocabulary and chat template are not compared."
        yield problem(reason, verdict="NOTE")
        return
    fix = "Serve a teacher of the student's own family: distillation compares log-probs of the same tokens."
    if teacher.tokenizer is not None:
        other = load_tokenizer(teacher.tokenizer)
        if other is None or other.get_vocab() != tokenizer.get_vocab():
            reason = "this tokenizer was not found." if other is None else "its vocabulary differs from the student's."
            yield run.problem(f"{at}.tokenizer", reason, fix, value=teacher.tokenizer)
            return
    if texts := list(find_other_vocabulary(teacher, model, tokenizer)):
        yield problem(
            f"its tokenizer and the student's disagree on the ids of {len(texts)} texts: {texts[0]!r} ...", fix
        )
    elif not teacher.other_template and getattr(tokenizer, "chat_template", None):
        number = find_other_template(teacher, model, tokenizer, _read_conversations(run))
        if number is not None:
            reason = f"the chat templates of teacher and student render training prompt {number} as different ids."
            fix = f"Serve the teacher with the student's --chat-template, or set {at}.other_template=true."
            yield problem(reason, fix)


def _find_media(run: Configured) -> Iterator[tuple[str, str]]:
    """Find the image, video and audio columns of the training prompts: (key that names the column, column)."""
    for key in ("data.image_key", "data.video_key", "data.audio_key"):
        if (column := run.get(key)) and any(any(head) for _, head in read_train_column(run, str(column), LOOKED_AT)):
            yield key, column


def _find_unknown_sources(section: str, settings: OpdSettings, run: Configured) -> Iterator[Problem]:
    """Find data sources that have a teacher but do not occur in the training data."""
    column, named = str(run.get("data.reward_fn_key") or "data_source"), set(settings.teachers) - {""}
    files = dict(read_train_column(run, column)) if named else {}
    if not files or len(files) < len(set(list_train_files(run))):
        return
    found = {str(each) for values in files.values() for each in values}
    for source in sorted(named - found):
        key, shown = f"{section}.teacher.sources.{source}.url", ", ".join(settings.teachers[source].shown)
        reason = f"no training prompt has the {column} {source}."
        yield run.problem(key, reason, f"The data has: {', '.join(sorted(found))}.", value=shown)


def _read_conversations(run: Configured) -> list[Any]:
    """Read the first prompts of the training data; return an empty list if the files are not available."""
    column = str(run.get("data.prompt_key") or "prompt")
    for _, prompts in read_train_column(run, column, CONVERSATIONS):
        return [each for each in prompts if isinstance(each, list) and each]
    return []
