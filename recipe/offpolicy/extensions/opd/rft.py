"""Rejection fine-tuning (RFT): SFT on the student's own correct answers, written in the teacher's format.

A teacher's log-probs are meaningful only if the student answers in the teacher's format. This module samples the
student's answers from a server and keeps the correct ones. verl's SFT trainer then trains the student on them.
"""

from __future__ import annotations

import importlib.util
import math
import random
import shlex
import time
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

from .settings import TeacherSettings
from .teacher_client import Server, TeacherError, parse_object

Score = Callable[..., Any]
"""verl's reward function: (data_source, solution_str, ground_truth, extra_info) -> a score or a mapping with a
score."""
DATASET = "pkg://recipe.offpolicy.extensions.opd.rft_dataset"


class RftError(RuntimeError):
    """The data set cannot be built; the message says what is wrong and what to do."""


@dataclass(frozen=True)
class Sampling:
    """Settings for sampling the student.

    Attributes:
        n: number of answers per prompt.
        max_tokens: maximum number of tokens per answer; longer answers are dropped.
        stop: texts that end an answer; they are not part of the answer.
    """

    n: int = 8
    temperature: float = 1.0
    max_tokens: int = 1024
    stop: tuple[str, ...] = ()
    seed: int = 0


@dataclass(frozen=True)
class Found:
    """Answers to one prompt.

    Attributes:
        finished: number of answers that ended before ``max_tokens``.
        right: number of correct answers among the finished ones.
        kept: distinct correct answers, in the teacher's format.
    """

    finished: int
    right: int
    kept: tuple[str, ...]


def render_prompt(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Render a prompt with the student's chat template; without a template, join the messages' texts by newlines."""
    if getattr(tokenizer, "chat_template", None):
        ids = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True)
        return list(ids["input_ids"] if isinstance(ids, Mapping) else ids)
    text = "\n".join(str(message["content"]) for message in messages)
    return list(tokenizer(text)["input_ids"])


def sample(
    settings: TeacherSettings, model: str, prompts: Sequence[Sequence[int]], how: Sampling
) -> list[list[str | None]]:
    """Sample answers to each prompt from an OpenAI-compatible server; an answer that did not end is None.

    Raises:
        TeacherError: the server does not answer, or its answer is malformed.
    """
    server = Server(settings)

    def ask(number: int) -> list[str | None]:
        body = {
            "model": model,
            "prompt": list(prompts[number]),
            "n": how.n,
            "max_tokens": how.max_tokens,
            "temperature": how.temperature,
            "seed": how.seed + number,
            **({"stop": list(how.stop)} if how.stop else {}),
        }
        try:
            url, text = server.post(body, time.monotonic() + settings.timeout, f"prompt {number}")
        except requests.Timeout as error:
            raise TeacherError(
                str(error), "check whether the server is overloaded, or sample fewer answers (-n)."
            ) from error
        return _read_answers(text, url, how.n)

    try:
        with ThreadPoolExecutor(settings.concurrency, thread_name_prefix="student") as threads:
            return list(threads.map(ask, range(len(prompts))))
    finally:
        server.close()


def _read_answers(text: bytes, url: str, count: int) -> list[str | None]:
    choices = parse_object(text, url).get("choices")
    if not isinstance(choices, list) or len(choices) != count:
        raise TeacherError(f"{url} did not send {count} completions.")
    if not all(isinstance(each, Mapping) and isinstance(each.get("text"), str) for each in choices):
        raise TeacherError(f"{url} sent completions without text.")
    return [each["text"] if each.get("finish_reason") == "stop" else None for each in choices]


def format_answer(text: str, pattern: str) -> str:
    """Format an answer like the teacher: ``{response}`` is the whole answer, ``{last}`` its last nonempty line.

    Example:
        >>> format_answer("6 * 7\\nis 42", "<think>\\n{response}\\n</think>\\n\\n{last}")
        '<think>\\n6 * 7\\nis 42\\n</think>\\n\\nis 42'
    """
    lines = [line for line in text.strip().splitlines() if line.strip()]
    # str.format is not used, because braces are common in answers.
    return pattern.replace("{last}", lines[-1].strip() if lines else "").replace("{response}", text.strip())


def keep_right(
    answers: Sequence[str | None], row: Mapping[str, Any], score: Score, *, right_from: float, most: int, pattern: str
) -> Found:
    """Keep at most ``most`` distinct correct answers to one prompt, drawn at random.

    An answer counts as correct if its score is at least ``right_from`` both as sampled and in the teacher's format.

    Raises:
        RftError: no correct answer is still correct in the teacher's format, or the reward function does not return a
            finite score.
    """
    source = row.get("data_source")

    def is_right(text: str) -> bool:
        try:
            found = score(
                data_source=source,
                solution_str=text,
                ground_truth=(row.get("reward_model") or {}).get("ground_truth"),
                extra_info=row.get("extra_info"),
            )
            value = float(found["score"] if isinstance(found, Mapping) else found)
            if not math.isfinite(value):
                raise ValueError(f"a score of {value}")
        except Exception as error:
            reason = f"the reward function has no score for an answer of the data source {source}"
            fix = "Fix: give another reward function, --reward FILE.py:FUNCTION."
            raise RftError(f"{reason} ({type(error).__name__}: {error}). {fix}") from error
        return value >= right_from

    finished = [each for each in answers if each is not None]
    right = [each for each in finished if each.strip() and is_right(each)]
    texts = dict.fromkeys(format_answer(each, pattern) for each in right)
    fit = [text for text in texts if is_right(text)]
    if right and not fit:
        fix = "Fix: give another --format or --reward."
        raise RftError(f"no correct answer is still correct in the format {pattern!r}. {fix}")
    chosen = random.Random(0).sample(fit, min(most, len(fit)))
    return Found(len(finished), len(right), tuple(chosen))


def load_score(given: str | None) -> Score:
    """Load verl's own reward function, or a function with the same arguments given as FILE:FUNCTION.

    Raises:
        RftError: there is no such function.
    """
    if given is None:
        from verl.utils.reward_score import default_compute_score

        return default_compute_score
    path, _, name = given.rpartition(":")
    spec = importlib.util.spec_from_file_location("rft_reward", path) if Path(path).is_file() else None
    if spec is None or spec.loader is None:
        raise RftError(f"--reward {given}: no such file. Fix: give --reward FILE.py:FUNCTION.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not callable(found := getattr(module, name, None)):
        raise RftError(f"--reward {given}: {path} has no function {name}.")
    return found


def write_dataset(rows: Sequence[Mapping[str, Any]], found: Sequence[Found], folder: Path, teacher: Any) -> int:
    """Write ``train.parquet`` and the teacher's tokenizer, then load every row as verl's SFT trainer would.

    Returns:
        Length of the longest row, in tokens.

    Raises:
        RftError: no answer was kept, or the tokens that a row would train are not its answer.
    """
    import pandas

    from .rft_dataset import AnsweredPrompts

    lines: list[dict[str, Any]] = [
        {"messages": [*row["prompt"], {"role": "assistant", "content": text}], "data_source": row.get("data_source")}
        for row, each in zip(rows, found, strict=True)
        for text in each.kept
    ]
    if not lines:
        raise RftError("no answer was correct. Fix: sample more answers (-n), or pass easier prompts or a --reward.")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "train.parquet"
    pandas.DataFrame(lines).to_parquet(path)
    teacher.save_pretrained(folder / "tokenizer")
    data = AnsweredPrompts(str(path), teacher, {"pad_mode": "no_padding", "max_length": 2**30})
    longest = 0
    for number, line in enumerate(lines):
        item = data[number]
        ids, trained = item["input_ids"], item["loss_mask"].bool()
        answer = line["messages"][-1]["content"]
        text = teacher.decode(ids[trained], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if not _squeeze(text).startswith(_squeeze(answer)):
            raise RftError(f"row {number}: in the teacher's tokenizer, the trained tokens are not the answer.")
        longest = max(longest, len(ids))
    return longest


def _squeeze(text: str) -> str:
    """Remove differences that tokenizers introduce: white space, and different Unicode forms of one letter."""
    return unicodedata.normalize("NFKC", "".join(text.split()))


def build_command(folder: Path, student: str, longest: int, rows: int) -> list[str]:
    """Build verl's SFT command for the written data set."""
    return [
        *("torchrun", "--standalone", "--nproc_per_node=1", "-m", "verl.trainer.sft_trainer"),
        f"data.train_files={folder / 'train.parquet'}",
        f"data.custom_cls.path={DATASET}",
        "data.custom_cls.name=AnsweredPrompts",
        f"data.max_length={longest}",
        f"data.max_token_len_per_gpu={max(8192, longest)}",
        f"data.train_batch_size={min(rows, 64)}",
        f"model.path={student}",
        f"model.tokenizer_path={folder / 'tokenizer'}",
        f"trainer.default_local_dir={folder / 'checkpoints'}",
        "optim.lr=1e-5",
        "trainer.total_epochs=2",
        "trainer.save_freq=after_each_epoch",
        "trainer.logger=[console]",
        "checkpoint.save_contents=[model,optimizer,extra,hf_model]",
    ]


def show_command(command: Sequence[str]) -> str:
    """Format a command for a shell, one override per line."""
    words = [shlex.quote(each) for each in command]
    return " \\\n    ".join([" ".join(words[:5]), *words[5:]])


def read_rows(files: Sequence[Path], limit: int | None) -> list[Mapping[str, Any]]:
    """Read rows of verl's training data as plain Python.

    Raises:
        RftError: a file cannot be read, or has no prompts.
    """
    import pyarrow
    import pyarrow.parquet as pq

    rows: list[Mapping[str, Any]] = []
    for file in files:
        try:
            rows += pq.read_table(file).to_pylist()
        except (OSError, pyarrow.ArrowInvalid) as error:
            raise RftError(f"{file} is not a Parquet file: {error}") from error
    rows = rows[:limit]
    if not rows or not all(isinstance(row.get("prompt"), list) and row["prompt"] for row in rows):
        raise RftError(f"{', '.join(map(str, files))}: expected rows with a prompt that is a list of messages.")
    return rows


def load_tokenizer(path: str) -> Any:
    """Load a tokenizer.

    Raises:
        RftError: there is no tokenizer at this path.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise RftError(f"{path} has no tokenizer: {str(error).splitlines()[0]}") from None
