"""The quickstart's task with answers of free length, and a policy that has learnt that longer ones are better.

    python scripts/evidence/free_length/free_length_task.py OUT

A demonstration repeats the word 0 to 6 times and then spells it backward, rightly with probability 0.2 + 0.15 for each
repetition. Makes OUT/model, about two minutes on an idle core; data is the quickstart's.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

if __name__ == "__main__" and {"-h", "--help"} & set(sys.argv):  # before imports that take seconds
    print(__doc__)
    sys.exit()

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT)]

import torch  # noqa: E402
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM  # noqa: E402

from scripts.quickstart.model import build_model, build_tokenizer  # noqa: E402
from scripts.quickstart.task import Entry, TaskSettings, get_instruction, splits  # noqa: E402
from scripts.quickstart.warm_start import collate, tokenize_prompts  # noqa: E402

REPEATS, BASE, SLOPE = 6, 0.2, 0.15
STEPS, BATCH, RATE = 400, 64, 3e-3
MOST_TOKENS = 56
"""Of an answer: seven words of up to six letters, and what stands between them."""


def demonstrate(entry: Entry, rng: random.Random) -> str:
    """Sample an answer: copies of the word, then it backward, or as it stands."""
    copies = rng.randint(0, REPEATS)
    word = entry["metadata"]["word"]
    last = entry["answer"] if rng.random() < BASE + SLOPE * copies else word
    return " ".join([*[word] * copies, last])


def warm_start(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, entries: list[Entry], steps: int = STEPS
) -> float:
    """Train the model in place on demonstrations; return the last loss."""
    torch.manual_seed(0)
    rng = random.Random(0)
    prompts = tokenize_prompts(tokenizer, entries)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 50))
    assert tokenizer.eos_token_id is not None
    assert tokenizer.pad_token_id is not None
    last = 0.0
    for _ in range(steps):
        rows = rng.sample(range(len(entries)), min(BATCH, len(entries)))
        answers = [[*tokenizer(demonstrate(entries[row], rng))["input_ids"], tokenizer.eos_token_id] for row in rows]
        loss = model(**collate([prompts[row] for row in rows], answers, tokenizer.pad_token_id)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        last = loss.item()
    return last


def main(out: Path) -> None:
    """Make the model."""
    torch.set_num_threads(1)
    start = time.monotonic()
    entries = splits(TaskSettings())["warm_start"]
    tokenizer = build_tokenizer(get_instruction(entries))
    model = build_model(tokenizer)
    loss = warm_start(model, tokenizer, entries)
    model.save_pretrained(out / "model")
    tokenizer.save_pretrained(out / "model")
    print(f"{out / 'model'}: loss {loss:.3f} after {STEPS} steps, {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
