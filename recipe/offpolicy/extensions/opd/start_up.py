"""Start-up checks of on-policy distillation: conflicting keys of verl, and the teacher itself."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ...correction import Problem
from ...correction.problem import set_to
from ..registry import own_launch
from .settings import OpdSettings, TeacherSettings
from .teacher_checks import (
    REPEATS,
    find_length,
    find_model,
    find_other_template,
    find_other_vocabulary,
    measure_repeats,
)
from .teacher_client import TeacherError

_ROLLOUT = "actor_rollout_ref.rollout"
_FILTER = "algorithm.filter_groups.enable"
_ESTIMATOR = "algorithm.adv_estimator"
CONVERSATIONS = 8
LOOKED_AT = 64
"""Number of rows of the training data that are searched for images, audio and videos."""


def find_problems(section: str, settings: OpdSettings, config: DictConfig) -> Iterator[Problem]:
    """Find conflicts of the settings with the configuration; the teacher is contacted if there are none."""
    found = list(_find_conflicts(section, settings, config))
    yield from found
    key, shown = f"{section}.teacher.url", settings.shown
    if any(teacher.shown != teacher.urls for teacher in settings.teachers.values()):
        reason = "verl and Hydra write the configuration to files and to the loggers, with the secrets in this address."
        fix = f"Remove them, and name an environment variable for a header in {section}.teacher.headers."
        yield Problem(key, shown, reason, fix, parts=(section,))
        return
    if not own_launch.get():
        yield Problem(
            key, shown, "an address that a script names is not contacted, so it was not checked.", "", "NOTE", ()
        )
    elif not any(problem.verdict == "ERROR" for problem in found):
        for source, teacher in settings.teachers.items():
            at = f"{section}.teacher.sources.{source}" if source else f"{section}.teacher"
            yield from _examine_teacher(section, at, teacher, config)


def _find_conflicts(section: str, settings: OpdSettings, config: DictConfig) -> Iterator[Problem]:
    parts = (section,)
    if OmegaConf.select(config, "distillation.enabled"):
        key = "distillation.enabled"
        reason = f"verl's own distillation and {section} are both on, and verl's loss would replace the corrected one."
        yield Problem(key, True, reason, f"Set {key}=false, or {section}=null.", parts=parts)
    temperature = OmegaConf.select(config, f"{_ROLLOUT}.temperature")
    if temperature is not None and float(temperature) != 1.0:
        key = f"{_ROLLOUT}.temperature"
        reason = "the teacher's log-probs are computed at temperature 1, the student's are not."
        fix = f"Set {key}=1.0, or {section}=null."
        yield Problem(key, temperature, reason, fix, parts=parts)
    if settings.mode == "advantage" and OmegaConf.select(config, _ESTIMATOR) == "gae":
        reason = (
            "the critic predicts rewards, but the advantages of eligible tokens would be the teacher's log-probs, "
            "about which it knows nothing."
        )
        fix = f"Set {section}=loss, or an estimator without a critic, such as grpo."
        yield Problem(_ESTIMATOR, "gae", reason, fix, parts=parts)
    for key, column in _find_media(config):
        reason = f"the training data has {column}, but the teacher only gets token ids."
        yield Problem(key, column, reason, f"Train on text only, or set {section}=null.", parts=parts)
    yield from _find_unknown_sources(section, settings, config)
    rollouts = int(OmegaConf.select(config, f"{_ROLLOUT}.n") or 1)
    gate = settings.eligible
    if rollouts > 1 and 0 < gate.max_pass_rate * rollouts < 1:
        key, least = f"{section}.eligible.max_pass_rate", math.ceil(1e4 / rollouts) / 1e4
        reason = (
            f"of {rollouts} rollouts per prompt either none passes or a share of at least {least:g}, so it acts "
            f"as 0: only prompts without a passing rollout are eligible."
        )
        fix = f"Set {key}={least:g} for prompts with one passing rollout, or 0 if these are not intended."
        yield Problem(key, gate.max_pass_rate, reason, fix, "NO-OP", (), (set_to(key, least),))
    if OmegaConf.select(config, _FILTER):
        never = gate.rows == "failed" and gate.max_pass_rate * rollouts < 1
        reason = (
            f"it drops prompts without a passing rollout; no other has a pass rate of at most {gate.max_pass_rate:g}."
            if never
            else f"it drops prompts without a passing rollout, which {section} is meant for."
        )
        fix = f"Set {_FILTER}=false, or {section}=null."
        yield Problem(_FILTER, True, reason, fix, "NO-OP" if never else "ERROR", parts)


def _examine_teacher(section: str, at: str, teacher: TeacherSettings, config: DictConfig) -> Iterator[Problem]:
    key, value = f"{at}.url", ", ".join(teacher.shown)

    def wrong(reason: str, fix: str) -> Problem:
        return Problem(key, value, reason, fix, parts=(section,))

    try:
        (model, _), length = find_model(teacher), find_length(teacher)
        needed = (
            sum(int(OmegaConf.select(config, f"data.max_{part}_length") or 0) for part in ("prompt", "response")) + 1
        )
        if length is not None and length < needed:
            fix = f"Serve it with --max-model-len {needed}, or longer."
            yield wrong(f"it takes {length} tokens, but prompt and response have up to {needed - 1}.", fix)
            return
        apart = measure_repeats(teacher, model, [[1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 2, 3]])
        if apart > REPEATS["bfloat16"]:
            fix = "Serve it in float32, or without features that make it depend on other requests."
            yield wrong(f"it does not repeat itself: log-probs of one sequence differ by {apart:.2g} nats.", fix)
        elif apart > REPEATS["float32"]:
            reason = f"log-probs of one sequence differ by {apart:.2g} nats between requests, as usual in 16 bits."
            yield Problem(key, value, reason, "", "NOTE", (section,))
        yield from _compare_tokens(section, at, teacher, config, model)
    except TeacherError as error:
        yield wrong(f"{error}.", "Start it with scripts/teacher.sh, or name the address at which it serves.")


def _compare_tokens(
    section: str, at: str, teacher: TeacherSettings, config: DictConfig, model: str
) -> Iterator[Problem]:
    url, key = teacher.shown[0], f"{at}.url"
    student = str(OmegaConf.select(config, "actor_rollout_ref.model.path"))
    tokenizer = _load_tokenizer(student)
    if tokenizer is None:
        reason = f"no student tokenizer is available at {student}: vocabulary and chat template are not compared."
        yield Problem(key, url, reason, "", "NOTE", (section,))
        return
    fix = "Serve a teacher of the student's own family: distillation compares log-probs of the same tokens."
    if teacher.tokenizer is not None:
        other = _load_tokenizer(teacher.tokenizer)
        if other is None or other.get_vocab() != tokenizer.get_vocab():
            reason = "it does not exist." if other is None else "its vocabulary is not the student's."
            yield Problem(f"{at}.tokenizer", teacher.tokenizer, reason, fix, parts=(section,))
            return
    texts = list(find_other_vocabulary(teacher, model, tokenizer))
    if texts:
        reason = f"its tokenizer gives other ids than the student's for {len(texts)} texts, such as {texts[0]!r}."
        yield Problem(key, url, reason, fix, parts=(section,))
    elif not teacher.other_template and getattr(tokenizer, "chat_template", None):
        number = find_other_template(teacher, model, tokenizer, _read_conversations(config))
        if number is not None:
            reason = f"its chat template renders training prompt {number} as other ids than the student's."
            fix = f"Serve it with the student's --chat-template, or set {at}.other_template=true."
            yield Problem(key, url, reason, fix, parts=(section,))


def _find_media(config: DictConfig) -> Iterator[tuple[str, str]]:
    """Find the image, video and audio columns of the training prompts: (key that names it, column)."""
    first = _first_file(config)
    if first is None:
        return
    import pyarrow.parquet as pq

    file = pq.ParquetFile(first)
    for key in ("data.image_key", "data.video_key", "data.audio_key"):
        column = OmegaConf.select(config, key)
        if column in file.schema_arrow.names:
            head = next(file.iter_batches(LOOKED_AT, columns=[column]), None)
            if head is not None and any(head.column(0).to_pylist()):
                yield key, column


def _find_unknown_sources(section: str, settings: OpdSettings, config: DictConfig) -> Iterator[Problem]:
    """Find data sources with a teacher that the training data does not have."""
    column, named = str(OmegaConf.select(config, "data.reward_fn_key") or "data_source"), set(settings.teachers) - {""}
    files = _list_files(config)
    if not named or not files or not all(map(_is_here, files)):
        return
    import pandas

    found: set[str] = set()
    for file in files:
        found |= set(pandas.read_parquet(file, columns=[column])[column].map(str))
    for source in sorted(named - found):
        key, shown = f"{section}.teacher.sources.{source}.url", ", ".join(settings.teachers[source].shown)
        reason = f"no training prompt has the {column} {source}."
        yield Problem(key, shown, reason, f"The data has: {', '.join(sorted(found))}.", parts=(section,))


def _load_tokenizer(path: str) -> Any:
    """Load a tokenizer from this machine or its cache; None if it is not there."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError):
        return None


def _read_conversations(config: DictConfig) -> list[Any]:
    """Read the first prompts of the training data; none if its files are not available."""
    import pandas

    first = _first_file(config)
    if first is None:
        return []
    column = str(OmegaConf.select(config, "data.prompt_key") or "prompt")
    prompts = pandas.read_parquet(first, columns=[column])[column].head(CONVERSATIONS)
    return [[dict(message) for message in prompt] for prompt in prompts]


def _first_file(config: DictConfig) -> str | None:
    """Return the first file of the training data if it is available."""
    first = next(iter(_list_files(config)), "")
    return first if _is_here(first) else None


def _list_files(config: DictConfig) -> list[str]:
    files = OmegaConf.select(config, "data.train_files")
    return [files] if isinstance(files, str) else list(map(str, files or []))


def _is_here(file: str) -> bool:
    return file.endswith(".parquet") and Path(file).is_file()
