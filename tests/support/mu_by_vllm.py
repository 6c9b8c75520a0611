"""Print the difference between vLLM's log-probs of its own samples and the trainer's at equal weights, as a line of
JSON.

Usage: ``python -m tests.support.mu_by_vllm FOLDER``; the model is written to FOLDER. Both engines compute in bfloat16,
on a GPU if there is one.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

ROWS, RESPONSE, TEMPERATURE = 8, 64, 0.8


def main(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM
    from vllm import LLM, SamplingParams

    from scripts.quickstart.model import build_model, build_tokenizer

    tokenizer = build_tokenizer("Spell the word backward:")
    build_model(tokenizer, spread=0.2).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    engine = LLM(
        str(folder),
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=128,
        gpu_memory_utilization=0.3,
        logprobs_mode="processed_logprobs",
    )
    draw = random.Random(0)
    prompts = [[draw.randrange(256) for _ in range(12)] for _ in range(ROWS)]
    answers = engine.generate(
        [{"prompt_token_ids": each} for each in prompts],
        SamplingParams(temperature=TEMPERATURE, max_tokens=RESPONSE, ignore_eos=True, logprobs=0, seed=0),
        use_tqdm=False,
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device).eval()
    sampled, trained = [], []
    for prompt, answer in zip(prompts, answers, strict=True):
        (output,) = answer.outputs
        ids = list(output.token_ids)
        with torch.no_grad():
            logits = model(torch.tensor([prompt + ids], device=device)).logits[0, len(prompt) - 1 : -1]
        log_probs = (logits.float() / TEMPERATURE).log_softmax(-1)
        trained.append(log_probs.gather(-1, torch.tensor(ids, device=device)[:, None])[:, 0].cpu())
        sampled.append(torch.tensor([place[token].logprob for place, token in zip(output.logprobs, ids, strict=True)]))
    mu, old = torch.stack(sampled), torch.stack(trained)
    gap = mu - old
    found = {
        "device": device,
        "same": float(gap.abs().mean()),
        "shifted": float((mu.roll(1, -1) - old).abs().mean()),
        "k3": float((old - mu).exp().sub(1).sub(old - mu).mean()),
        "mean": float(mu.mean()),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
