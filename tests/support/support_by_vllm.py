"""Program: supports of a real vLLM engine on the CPU beside those of float32 Hugging Face, in vLLM's order.

python -m tests.support.support_by_vllm FOLDER, which gets the model; one line of JSON, a sampling setting each.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

SETTINGS: dict[str, dict[str, float | int]] = {
    "top_k": {"top_k": 5, "temperature": 1.0},
    "top_p": {"top_p": 0.8, "temperature": 1.0},
    "top_p at 0.7": {"top_p": 0.8, "temperature": 0.7},
    "min_p": {"min_p": 0.1, "temperature": 1.0},
    "all at 0.7": {"top_p": 0.9, "top_k": 8, "min_p": 0.02, "temperature": 0.7},
    "more than are asked for": {"top_k": 60, "temperature": 1.0},
}
SIZE, RESPONSE, ROWS = 40, 40, 6


def main(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM
    from vllm import LLM, SamplingParams

    from recipe.offpolicy.support.client import ANSWER
    from recipe.offpolicy.support.support_server import ask_for_supports, extract_supports
    from recipe.offpolicy.support.support_settings import SupportSettings
    from recipe.offpolicy.support.truncated_softmax import compute_truncated_log_probs
    from scripts.quickstart.model import build_model
    from scripts.quickstart.sums import build_sums_tokenizer

    torch.set_num_threads(1)
    tokenizer = build_sums_tokenizer()
    model = build_model(tokenizer)
    with torch.no_grad():  # at random a model is of one mind about all tokens
        model.get_output_embeddings().weight.mul_(15)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    engine = LLM(
        str(folder),
        dtype="float32",
        enforce_eager=True,
        max_model_len=128,
        max_logprobs=SIZE,
        logprobs_mode="processed_logprobs",
    )
    build = ask_for_supports(SamplingParams, SupportSettings(SIZE, "mask"))
    extract = extract_supports(lambda *given: None)
    rng = random.Random(0)
    prompts = [[rng.randrange(256) for _ in range(8)] for _ in range(ROWS)]
    found: dict[str, Any] = {}
    for name, settings in SETTINGS.items():
        params = build(logprobs=0, max_tokens=RESPONSE, ignore_eos=True, seed=1, **settings)
        answers = engine.generate([{"prompt_token_ids": each} for each in prompts], params, use_tqdm=False)
        tokens = known = alike = outside = 0
        masses, errors = [], []
        for prompt, answer in zip(prompts, answers, strict=True):
            fields: dict[str, Any] = {}
            extract(answer, None, fields)
            (output,), supports = answer.outputs, fields[ANSWER]
            response = list(output.token_ids)
            mu = [each[token].logprob for each, token in zip(output.logprobs, response, strict=True)]
            with torch.no_grad():
                logits = reference(torch.tensor([[*prompt, *response]])).logits[0][len(prompt) - 1 : -1]
            ids = torch.from_numpy(supports.pad())
            pi = compute_truncated_log_probs(
                logits,
                torch.arange(len(response)),
                torch.tensor(response),
                ids,
                torch.full((len(response),), float(settings["temperature"])),
            )
            for place, token in enumerate(response):
                tokens += 1
                if not supports.sizes[place]:
                    continue
                members = {each for each in ids[place].tolist() if each >= 0}
                known += 1
                alike += members == truncate(logits[place], **settings)
                outside += token not in members
                masses.append(abs(float(supports.masses[place]) - 1))
                errors.append(abs(float(pi[place]) - mu[place]))
        found[name] = {
            "tokens": tokens,
            "known": known,
            "alike": alike,
            "outside": outside,
            "mass_error": max(masses, default=0.0),
            "error": max(errors, default=0.0),
        }
    print(json.dumps(found), flush=True)


def truncate(logits: Any, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> set[int]:
    """The support by definition: temperature, then min-p, then top-k, then top-p of what is left."""
    probabilities = (logits.double() / temperature).softmax(-1)
    left = [each for each in probabilities.argsort(descending=True).tolist() if probabilities[each] > 0]
    left = [each for each in left if probabilities[each] >= min_p * probabilities.max()]
    left = left[:top_k] if top_k else left
    total, before, kept = float(probabilities[left].sum()), 0.0, set()
    for each in left:
        if before < top_p * total:
            kept.add(each)
        before += float(probabilities[each])
    return kept


if __name__ == "__main__":
    main(Path(sys.argv[1]))
