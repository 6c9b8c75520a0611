"""Score prefixes with a real vLLM engine on a CPU, and print the differences from float32 Hugging Face.

Usage: ``python -m tests.support.score_by_vllm FOLDER``; the model is written to FOLDER, and the output is one line of
JSON, {"auto": {...}, "off": {...}}.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROWS, RESPONSE, BLOCK = 8, 100, 32


def main(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM
    from vllm import LLM, SamplingParams

    from recipe.offpolicy.extensions.process_reward.prefix_scorer import (
        PrefixScorer,
        Row,
        RowValues,
        Tail,
        TailScores,
        score_tails,
    )
    from recipe.offpolicy.extensions.process_reward.scoring_server import keep_flat
    from recipe.offpolicy.extensions.process_reward.settings import ProcessSettings
    from scripts.quickstart.model import build_model
    from scripts.quickstart.sums import build_sums_tokenizer
    from verl.workers.rollout.vllm_rollout.utils import extract_prompt_logprobs

    torch.set_num_threads(1)
    tokenizer = build_sums_tokenizer()
    model = build_model(tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    engine = LLM(
        str(folder),
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        block_size=BLOCK,
        enable_prefix_caching=True,
    )
    rng = random.Random(0)
    prompts = [[rng.randrange(256) for _ in range(12)] for _ in range(ROWS)]
    sampled = engine.generate(
        [{"prompt_token_ids": each} for each in prompts],
        SamplingParams(temperature=1.0, max_tokens=RESPONSE, ignore_eos=True),
        use_tqdm=False,
    )

    extract = keep_flat(extract_prompt_logprobs)

    async def generate(prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str) -> Any:
        """Return what verl's server makes of vLLM's answer."""
        params = SamplingParams(**sampling_params)
        (answer,) = engine.generate([{"prompt_token_ids": prompt_ids}], params, use_tqdm=False)
        fields: dict[str, Any] = {"global_steps": 0}
        extract(answer, params.prompt_logprobs, fields)
        return SimpleNamespace(stop_reason="completed", extra_fields=fields)

    async def ask(request: str, row: Sequence[int], tails: Sequence[Tail], read_cache: bool) -> TailScores:
        return await score_tails(generate, row, tails, read_cache=read_cache)

    def value(ids: list[int], count: int) -> float:
        with torch.no_grad():
            log_probs = torch.log_softmax(reference(torch.tensor([ids])).logits[0].float(), -1)
        return sum(log_probs[place - 1, ids[place]].item() for place in range(len(ids) - count, len(ids))) / count

    found = {}
    for cache in ("auto", "off"):
        values = {"think_end": "", "markers": [], "max_tokens": 20, "max_episodes": 8, "prefix_cache": cache}
        settings = ProcessSettings.from_mapping("process_reward", values)
        scorer = PrefixScorer(settings, ask, tokenizer)
        errors, values, forward, cached, rescored = [], 0, 0, 0, 0
        for prompt, output in zip(prompts, sampled, strict=True):
            response = list(output.outputs[0].token_ids)
            row = Row(prompt, response, [1] * len(response), {"ground_truth": "42"}, version=0)
            # Twice: the second time answers are in the cache as well.
            for _ in range(2):
                scored = RowValues(**asyncio.run(scorer.score(row)))
                assert scored.error is None, scored.error
                ids, count = scored.answers[0]
                for end, each in zip((0, *scored.ends), scored.values, strict=True):
                    errors.append(abs(each - value([*prompt, *response[:end], *ids], count)))
                values, forward = values + len(scored.values), forward + scored.forward
                cached, rescored = cached + scored.cached, rescored + scored.rescored
        share = cached / (forward + cached)
        found[cache] = {"error": max(errors), "values": values, "cached_share": share, "rescored": rescored}
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
