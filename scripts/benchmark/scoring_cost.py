"""Measures the cost of scoring prefixes in the server's front end, in microseconds per position, without the model.

    python scripts/benchmark/scoring_cost.py [--positions 2200]

Two forms of vLLM's log-probs of a prompt are measured. The first form consists of flat lists, of which
``process_reward`` reads the last entries. The second form has one object per position, as in verl's own requests; its
cost includes verl's extraction and the pickling for Ray. Figures are medians of the repeats.
"""

from __future__ import annotations

import pickle
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.harness import add_counts, build_parser, take_turns, time_call

ANSWER = 4
"""Number of tokens in an answer."""


def measure(positions: int, repeats: int) -> dict[str, float]:
    """Measure "flat" and "by position", each in microseconds per position."""
    # Imported here because these packages take seconds to import and --help does not need them.
    import torch
    from vllm.logprobs import create_prompt_logprobs
    from vllm.v1.engine.logprobs import LogprobsProcessor
    from vllm.v1.outputs import LogprobsTensors

    from recipe.offpolicy.extensions.process_reward.prefix_scorer import ScoredPrompt, read_answer

    ids = torch.randint(0, 1000, (positions, 1))
    tensors = LogprobsTensors(ids, -torch.rand(positions, 1), torch.ones(positions, dtype=torch.int64))
    prompt = [0, *ids[:, 0].tolist()]

    def lay_out(flat: bool) -> Any:
        made = LogprobsProcessor(
            tokenizer=None,
            logprobs=None,
            prompt_logprobs=create_prompt_logprobs(flat),
            cumulative_logprob=None,
            num_logprobs=None,
            num_prompt_logprobs=0,
        )
        made._update_prompt_logprobs(tensors)
        return made.prompt_logprobs

    def flat() -> None:
        found = lay_out(True)
        scored = ScoredPrompt(found.token_ids, found.logprobs, 0)
        assert read_answer(scored, prompt, prompt[-ANSWER:], read_cache=True) is not None

    def by_position() -> None:
        pairs = [(token, each.logprob) for found in lay_out(False)[1:] for token, each in found.items()]
        pickle.dumps({"ids": [[token] for token, _ in pairs], "log_probs": [[value] for _, value in pairs]})

    ways = {"flat": partial(time_call, flat), "by position": partial(time_call, by_position)}
    found = take_turns(ways, repeats)
    return {name: 1e6 * statistics.median(one.wall for one in each) / positions for name, each in found.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = build_parser(__doc__)
    add_counts(parser, positions=2200, repeats=20)
    options = parser.parse_args(arguments)
    if options.positions <= ANSWER:
        parser.error(f"--positions must be greater than {ANSWER}.")
    for name, cost in measure(options.positions, options.repeats).items():
        print(f"{name:12} {cost:5.2f} us a position")
    return 0


if __name__ == "__main__":
    sys.exit(main())
