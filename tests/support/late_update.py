"""Updates copies of one model on one batch, by the evidence's loss without a correction and by verl's own.

python late_update.py FOLDER     # prints, as JSON, how far the updates are apart, and how far they went
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "evidence")]

import torch  # noqa: E402
from collapse import in_process  # noqa: E402  sets the environment that verl is imported in
from collapse.in_process import SampledRows, Trainer, build_actor_config, join_process_group  # noqa: E402
from transformers import Qwen2ForCausalLM  # noqa: E402

from recipe.offpolicy.correction import CorrectionSpec  # noqa: E402
from scripts.quickstart.model import build_model, build_tokenizer  # noqa: E402
from verl.workers.utils.losses import ppo_loss  # noqa: E402


def main(folder: Path) -> None:
    tokenizer = build_tokenizer("Spell this word backward: ")
    tokenizer.save_pretrained(folder)
    build_model(tokenizer, spread=0.2).save_pretrained(folder)
    join_process_group()
    torch.manual_seed(0)
    task = in_process.Spelling(folder)
    chosen = [entry for entry in task.entries["train"][:4] for _ in range(2)]
    sampler = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = task.encode(chosen)
    answers, log_mu, _ = in_process.sample(sampler, task.tokenizer, prompts)
    rows = SampledRows(
        prompts=[torch.tensor(each) for each in prompts],
        responses=answers,
        advantages=[torch.full((len(answer),), (-1.0) ** row) for row, answer in enumerate(answers)],
        log_mu=log_mu,
    )
    spec, weights = CorrectionSpec.from_mapping({}), []
    for own in (True, False):
        config = build_actor_config(1e-3, prompts=2, rollouts=2)
        trainer = Trainer(folder, config)
        rows.pi_old = trainer.compute_log_probs(rows)
        before = trainer.copy_weights()
        loss = in_process.MeasuredLoss(spec, config) if own else partial(ppo_loss, config=config)
        trainer.update(loss, spec, rows, step=1)
        weights.append(trainer.copy_weights())
    apart, moved = (
        max(float((weights[0][name] - other[name]).abs().max()) for name in before) for other in (weights[1], before)
    )
    print(json.dumps({"apart": apart, "moved": moved}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
