"""Sample a student, keep its correct answers in the teacher's chat template, and print verl's command to train on them.

bash scripts/teacher.sh STUDENT --port 8200 &
python -m recipe.offpolicy.rft train.parquet --student STUDENT --teacher TEACHER --url http://127.0.0.1:8200 --out rft

DATA is verl's training data: prompt, data_source, reward_model. Writes OUT/train.parquet and OUT/tokenizer. Exit
status: 0; 2 if an argument is invalid, the server does not answer, or no answer was correct.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .command_line import name_program, parse_count, parse_score, refuse, require_modules, run


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    options = build_parser().parse_args(arguments)
    require_modules("rft", "torch", "pyarrow", "pandas", "transformers", "verl", "requests")
    from .extensions.opd import rft
    from .extensions.opd.settings import TeacherSettings
    from .extensions.opd.start_up import find_model
    from .extensions.opd.teacher_client import TeacherError

    how = rft.Sampling(options.n, options.temperature, options.max_tokens, tuple(options.stop), options.seed)
    try:
        rows = rft.read_rows(options.data, options.limit)
        student, teacher = (rft.load_tokenizer(path) for path in (options.student, options.teacher))
        if student.get_vocab() != teacher.get_vocab():
            raise rft.RftError(f"{options.teacher} and {options.student} have different vocabularies.")
        if not getattr(teacher, "chat_template", None):
            raise rft.RftError(f"{options.teacher} has no chat template, so there is no format to learn.")
        score = rft.load_score(options.reward)
        urls = tuple(url.rstrip("/").removesuffix("/v1") for url in options.url)
        settings = TeacherSettings(urls, api_key=options.api_key)
        model = options.model or find_model(settings)[0]
        answers = rft.sample(settings, model, [rft.render_prompt(student, row["prompt"]) for row in rows], how)
        found = [
            rft.keep_right(each, row, score, right_from=options.right_from, most=options.most, pattern=options.format)
            for each, row in zip(answers, rows, strict=True)
        ]
        longest = rft.write_dataset(rows, found, options.out, teacher)
    except (rft.RftError, TeacherError, OSError) as error:
        return refuse("rft", error)
    finished, right = (sum(getattr(each, name) for each in found) for name in ("finished", "right"))
    kept, solved = sum(len(each.kept) for each in found), sum(each.right > 0 for each in found)
    print(  # noqa: T201
        f"{len(rows)} prompts, {how.n * len(rows)} answers: {finished} finished, {right} correct; {solved} prompts "
        f"solved; {kept} different answers kept in {options.out / 'train.parquet'}, at most {longest} tokens. Train on "
        "them:\n"
    )
    print(rft.show_command(rft.build_command(options.out.resolve(), options.student, longest, kept)))  # noqa: T201
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the command's arguments."""
    parser = argparse.ArgumentParser(
        prog=name_program("rft"), description="Correct answers of a student in the teacher's chat template, for SFT."
    )
    add = parser.add_argument
    count: dict[str, Any] = {"type": parse_count, "metavar": "N"}
    add("data", metavar="DATA", nargs="+", type=Path, help="Parquet files with prompt, data_source, reward_model")
    add("--student", required=True, metavar="FOLDER", help="folder or hub name of the student")
    add("--teacher", required=True, metavar="FOLDER", help="folder or hub name of the teacher's tokenizer")
    add("--url", required=True, nargs="+", metavar="URL", help="servers of the student, with vLLM's interface")
    add("--out", required=True, type=Path, metavar="DIR", help="folder to write")
    add("--model", metavar="NAME", help="served model name (default: the only one)")
    add("--api-key", metavar="VARIABLE", help="environment variable with the server's API key")
    add("-n", default=8, help="answers per prompt (8)", **count)
    add("--temperature", default=1.0, help="(1.0)", type=parse_score)
    add("--max-tokens", default=1024, help="tokens per answer; longer answers are dropped (1024)", **count)
    stop = "texts that end an answer, for students without a template"
    add("--stop", nargs="*", default=(), metavar="TEXT", help=stop)
    add("--seed", type=int, default=0, metavar="N", help="seed of the sampling (0)")
    add("--limit", help="number of prompts (all)", **count)
    add("--reward", metavar="FILE:FUNCTION", help="reward function, as custom_reward_function (default: verl's own)")
    right = "smallest score that counts as correct (1.0)"
    add("--right-from", type=parse_score, default=1.0, metavar="SCORE", help=right)
    add("--most", default=4, help="number of different correct answers to keep per prompt (4)", **count)
    pattern = "answer to train on, built from {response} and {last}, the last line of the response"
    add("--format", default="{response}", metavar="TEXT", help=pattern)
    return parser


if __name__ == "__main__":
    sys.exit(run(main))
