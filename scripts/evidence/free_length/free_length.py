"""Measures length over steps, without and with each kind of penalty, before and after normalisation.

    python scripts/evidence/free_length/free_length.py run MODEL [--seeds 8] [--steps 30] [--out OUT]
    python scripts/evidence/free_length/free_length.py show MEASURED.csv [--png FILE]
    python scripts/evidence/free_length/free_length.py collect FOLDER [--out measured_verl.csv]

`python -m scripts.quickstart.prepare --cache DIR free_length_model` makes MODEL. `run` skips the runs that OUT
(default: outputs/free_length) already contains, and writes the figures of all runs to OUT/measured.csv. `show` prints
them as a table and checks whether they meet the expectations fixed beforehand; docs/evidence/length.md presents the
measured.csv in this script's folder. `collect` does the same with metrics.jsonl of full runs on verl,
`TASK=free_length bash scripts/quickstart.sh`, copied to FOLDER as none-1.jsonl and uniform-after-1.jsonl.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__" and {"-h", "--help"} & set(sys.argv):  # before imports that take seconds
    sys.exit(print(__doc__))

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "evidence")]

import numpy as np
import pandas
import torch
from collapse.in_process import sample
from omegaconf import OmegaConf
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, Qwen2ForCausalLM

from recipe.offpolicy.analysis.plotting import apply_style, create_axes, save
from recipe.offpolicy.extensions.add_ons import AddOns
from recipe.offpolicy.extensions.length_penalty.length_penalty import LengthPenalty
from recipe.offpolicy.trainer.batch_view import DataProtoBatch
from scripts.harness import build_parser, format_markdown, read_records
from scripts.quickstart.free_length import ANCHOR, COEFFICIENTS, MOST_TOKENS
from scripts.quickstart.reward import score_last_word
from scripts.quickstart.task import Entry, TaskSettings, splits
from scripts.quickstart.warm_start import pad_left, tokenize_prompts
from verl import DataProto
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage, compute_policy_loss_vanilla
from verl.workers.config import FSDPActorConfig

ARMS = ("none", *(f"{kind}/{place}" for kind in ("uniform", "group", "anchor") for place in ("after", "before")))
BLOCK, VERL_BLOCK = 5, 4
"""Number of steps over which a raw figure is averaged, and the same for the shorter runs on verl itself."""
LAST, VERL_LAST = 2, 1
"""Number of blocks over which the start and the end are averaged, and the same for runs on verl itself."""
SHARE, SEEDS = 1 / 3, 0.75
"""A collapse is expected to shorten answers to less than ``SHARE`` of the length of ``none`` in at least ``SEEDS`` of
the seeds."""
WITHIN = 0.05
"""Largest expected difference between the share of correct answers with an anchor and with ``none``."""
COLUMNS = {"response_length/mean": "tokens", "critic/score/mean": "right", "length/anchor/mean": "anchor"}
"""Metric -> raw figure; the anchor is NaN in arms without an anchor."""
RUN = ["arm", "seed"]
PROMPTS, ROWS, RATE = 8, 8, 3e-4
"""Number of prompts per in-process training step, number of answers per prompt, and learning rate."""


def build_penalty(arm: str) -> LengthPenalty:
    """Build the extension of an arm; anchors are kept by source, because no prompt is repeated here."""
    kind, _, place = arm.partition("/")
    settings = {"kind": kind, "place": place or "after", "coefficient": COEFFICIENTS.get(kind)}
    penalty = LengthPenalty("length_penalty", settings | {"anchor": ANCHOR})
    algorithm = {"adv_estimator": "grpo", "norm_adv_by_std_in_grpo": True}
    penalty.begin(OmegaConf.create({"algorithm": algorithm, "data": {"max_response_length": MOST_TOKENS}}))
    return penalty


def score_tokens(
    model: Qwen2ForCausalLM, prompts: Sequence[list[int]], tokens: Tensor, mask: Tensor, pad: int
) -> Tensor:
    """Compute log pi of sampled tokens, (B, T), right-padded, with their gradient."""
    padded, given = pad_left(list(prompts), pad)
    ids, there = torch.cat([padded, tokens], -1), torch.cat([given, mask.long()], -1)
    places = (there.cumsum(-1) - 1).clamp(min=0)
    logits = model(input_ids=ids, attention_mask=there, position_ids=places).logits[:, padded.shape[1] - 1 : -1]
    return logits.log_softmax(-1).gather(2, tokens[..., None])[..., 0] * mask


def estimate(tokens: Tensor, mask: Tensor, scores: Tensor, penalty: LengthPenalty, step: int) -> Tensor:
    """Compute verl's GRPO advantages of right-padded answers, with the penalty applied around it, (B, T)."""
    count = len(scores)
    rewards = torch.zeros(mask.shape)
    rewards[torch.arange(count), mask.sum(-1) - 1] = scores
    ones = torch.ones(count, 1, dtype=torch.int64)
    columns = {"prompts": ones, "responses": tokens, "response_mask": mask.long(), "token_level_scores": rewards}
    batch = DataProto.from_dict(columns | {"attention_mask": torch.cat([ones, mask.long()], -1)})
    batch.batch["token_level_rewards"] = rewards
    uids = np.array([str(row // ROWS) for row in range(count)], dtype=object)
    batch.non_tensor_batch |= {"uid": uids, "data_source": np.array(["words"] * count, dtype=object)}
    view = DataProtoBatch(batch, step)

    def grpo() -> None:
        lowered = batch.batch["token_level_rewards"].clone()
        view.put_advantages(compute_grpo_outcome_advantage(lowered, mask.float(), uids)[0], returns=True)

    AddOns([penalty]).compute_advantages(view, grpo)
    return view.advantages


def train(arm: str, seed: int, folder: Path, entries: Sequence[Entry], steps: int) -> list[dict[str, Any]]:
    """Train from the warm start in ``folder``; return lengths, penalties and share of correct answers at each step."""
    torch.manual_seed(seed)
    order = random.Random(seed)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    config = FSDPActorConfig(
        strategy="fsdp2", ppo_mini_batch_size=PROMPTS, ppo_micro_batch_size_per_gpu=64, rollout_n=ROWS,
        use_torch_compile=False,
    )  # fmt: skip
    penalty, history = build_penalty(arm), []
    for step in range(1, steps + 1):
        chosen = [entry for entry in order.sample(list(entries), PROMPTS) for _ in range(ROWS)]
        prompts = tokenize_prompts(tokenizer, [entry["question"] for entry in chosen])
        answers, log_mu, _ = sample(model, tokenizer, prompts, most=MOST_TOKENS)
        texts = tokenizer.batch_decode([answer.tolist() for answer in answers], skip_special_tokens=True)
        scores = torch.tensor([score_last_word("", text, e["answer"]) for text, e in zip(texts, chosen, strict=True)])
        tokens = pad_sequence(answers, batch_first=True, padding_value=tokenizer.pad_token_id)
        mask = pad_sequence([torch.ones(len(answer)) for answer in answers], batch_first=True)
        old = pad_sequence(log_mu, batch_first=True)
        advantages = estimate(tokens, mask.bool(), scores, penalty, step)
        # There are two gradient steps on each batch, as in the quickstart.
        for rows in torch.arange(len(chosen)).tensor_split(2):
            of_rows = [prompts[row] for row in rows.tolist()]
            log_prob = score_tokens(model, of_rows, tokens[rows], mask[rows], tokenizer.pad_token_id)
            loss, _ = compute_policy_loss_vanilla(
                old[rows], log_prob, advantages[rows], mask[rows], "token-mean", config
            )
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        data = {name: value for name, value in penalty.metrics().items() if name.startswith("length/")}
        data |= {"response_length/mean": float(mask.sum(-1).mean()), "critic/score/mean": float(scores.mean())}
        history.append({"step": step, "data": data})
    return history


# --- evaluation of the runs


def read_runs(folder: Path, block: int = BLOCK) -> pandas.DataFrame:
    """Read the metrics of a folder's runs, such as ``uniform-before-1.jsonl``, as means over blocks of steps.

    Returns:
        The columns arm, seed, step (the last step of the block), tokens, right and anchor.
    """
    found = []
    for arm in ARMS:
        for path in sorted(folder.glob(f"{arm.replace('/', '-')}-[0-9]*.jsonl")):
            lines = pandas.DataFrame([{"step": step, **data} for step, data in read_records(path)])
            lines = lines.reindex(columns=["step", *COLUMNS]).rename(columns=COLUMNS).dropna(subset="tokens")
            lines = lines.apply(pandas.to_numeric, errors="coerce").reset_index(drop=True)
            blocks = lines.groupby(lines.index // block)
            means = blocks.mean().assign(step=blocks["step"].last().astype(int))
            found.append(means.assign(arm=arm, seed=int(path.stem.rpartition("-")[2])))
    return pandas.concat(found, ignore_index=True)[[*RUN, "step", *COLUMNS.values()]]


def write_measured(measured: pandas.DataFrame, path: Path) -> None:
    """Write the raw figures."""
    digits = {"tokens": 2, "right": 4, "anchor": 1}
    texts = {name: measured[name].map(f"{{:.{count}f}}".format, na_action="ignore") for name, count in digits.items()}
    measured.assign(**texts).to_csv(path, index=False)


def compute_ends(measured: pandas.DataFrame, last: int = LAST) -> pandas.DataFrame:
    """For each (arm, seed), compute tokens and share of correct answers: means over the first and last blocks."""
    runs = measured.groupby(RUN, sort=False)
    first, final = (
        part.groupby(RUN, sort=False)[["tokens", "right"]].mean() for part in (runs.head(last), runs.tail(last))
    )
    return first.add_suffix("_first").join(final.add_suffix("_last"))


def judge(ends: pandas.DataFrame) -> list[tuple[str, bool, str]]:
    """Judge the expectations that were fixed before any run: (expectation, whether it was met, the figures).

    Expected before normalisation: ``uniform`` and ``group`` collapse, so in at least ``SEEDS`` of all seeds, the
    answers at the end are shorter than ``SHARE`` of the length of ``none``, and are correct less often than at the
    start. Expected before and after normalisation: an anchor does not collapse, so on average over the seeds, its
    answers are shorter than those of ``none``, and the share of correct answers differs by at most ``WITHIN``.
    """
    found = []
    none = ends.loc["none"].add_suffix("_none")
    by_arm = {arm: ends.loc[arm].join(none, how="inner") for arm in ends.index.unique("arm")}
    for arm in ("uniform/before", "group/before"):
        both = by_arm[arm]
        shorter = both["tokens_last"] < SHARE * both["tokens_last_none"]
        count = int((shorter & (both["right_last"] < both["right_first"])).sum())
        text = f"{arm} collapses in {SEEDS:.0%} of seeds"
        found.append((text, count >= SEEDS * len(both), f"{count} of {len(both)}"))
    for arm in ("anchor/before", "anchor/after"):
        both = by_arm[arm]
        length, right = ((both[f"{name}_last"] - both[f"{name}_last_none"]).mean() for name in ("tokens", "right"))
        came_true = bool(length < 0 and abs(right) <= WITHIN)
        figures = f"{length:+.1f} tokens, {right:+.3f} right"
        found.append((f"{arm} is shorter than none and as right", came_true, figures))
    return found


def print_table(ends: pandas.DataFrame) -> None:
    """Print the seeds of each arm, their means, and the range of the last length."""
    rows = []
    for arm in ends.index.unique("arm"):
        each = ends.loc[arm]
        first, right_first, last, right_last = each.mean()
        least_to_most = f"{each['tokens_last'].min():.1f} to {each['tokens_last'].max():.1f}"
        rows.append(
            (arm, len(each), f"{first:.1f}", f"{last:.1f}", least_to_most, f"{right_first:.3f}", f"{right_last:.3f}")
        )
    headings = ("arm", "seeds", "tokens, first", "tokens, last", "least to most", "right, first", "right, last")
    print("\n".join(format_markdown(headings, rows)))


def draw(measured: pandas.DataFrame, path: Path) -> None:
    """Draw length and share of correct answers over steps: means over seeds, and a thin line for each seed."""
    with apply_style():
        figure, (lengths, right) = create_axes(1, 2)
        for number, arm in enumerate(ARMS):
            kind, _, place = arm.partition("/")
            label = f"{kind}, {place} normalising" if place else "no penalty"
            look: dict[str, Any] = {"color": f"C{number}", "linestyle": "--" if place == "before" else "-"}
            for axes, name in ((lengths, "tokens"), (right, "right")):
                curves = measured[measured["arm"] == arm].pivot(index="step", columns="seed", values=name)
                axes.plot(curves, alpha=0.2, linewidth=0.7, **look)
                axes.plot(curves.mean(axis=1), label=label, **look)
        lengths.set(title="Length of answers", xlabel="step", ylabel="mean response tokens")
        lengths.set_ylim(bottom=0)
        right.set(title="Right answers", xlabel="step", ylabel="share", ylim=(0, 1))
        right.legend()
    save(figure, path)


def run(options: argparse.Namespace) -> None:
    """Execute the runs that are still missing, and write the raw figures."""
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    entries, start = splits(TaskSettings())["train"], time.monotonic()
    for seed in range(options.seeds):
        for arm in ARMS:
            path = options.out / f"{arm.replace('/', '-')}-{seed}.jsonl"
            if not path.exists():
                history = train(arm, seed, options.model, entries, options.steps)
                path.write_text("".join(json.dumps(each) + "\n" for each in history))
                print(f"{path.name}: {time.monotonic() - start:.0f} s", flush=True)
    write_measured(read_runs(options.out), options.out / "measured.csv")


def show(options: argparse.Namespace) -> None:
    """Print the table of measured figures, and which expectations were met; draw the figures."""
    measured = pandas.read_csv(options.measured)
    ends = compute_ends(measured)
    print_table(ends)
    for expectation, came_true, figures in judge(ends):
        print(f"{expectation}: {'yes' if came_true else 'no'} ({figures})")
    if options.png is not None:
        draw(measured, options.png)


def collect(options: argparse.Namespace) -> None:
    """Write the raw figures of whole runs on verl, and print their table."""
    measured = read_runs(options.folder, VERL_BLOCK)
    write_measured(measured, options.out)
    print_table(compute_ends(measured, VERL_LAST))


def main() -> None:
    """Run, show or collect."""
    parser = build_parser(__doc__)
    commands = parser.add_subparsers(required=True)
    running, showing, collecting = (commands.add_parser(each.__name__) for each in (run, show, collect))
    running.add_argument("model", type=Path)
    running.add_argument("--seeds", type=int, default=8)
    running.add_argument("--steps", type=int, default=30)
    running.add_argument("--out", type=Path, default=ROOT / "outputs" / "free_length")
    running.set_defaults(command=run)
    showing.add_argument("measured", type=Path)
    showing.add_argument("--png", type=Path)
    showing.set_defaults(command=show)
    collecting.add_argument("folder", type=Path)
    collecting.add_argument("--out", type=Path, default=Path(__file__).with_name("measured_verl.csv"))
    collecting.set_defaults(command=collect)
    options = parser.parse_args()
    options.command(options)


if __name__ == "__main__":
    main()
