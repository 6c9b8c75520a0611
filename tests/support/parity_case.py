"""One batch and one model for every worker path of every release, with the reference's own forward pass in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from recipe.offpolicy.batch.plan import BatchSplit, build_plan
from recipe.offpolicy.extensions.opd.settings import OpdSettings
from recipe.offpolicy.extensions.opd.signal import CENTRE, FACTOR, ROW, TEACHER, OpdWorker, check_reports
from tests.support.training_worker import VOCABULARY, save_tokenizer

PROMPT, WIDTH = 5, 9
TEMPERATURE = 0.8
ENTROPY_COEFF, KL_COEF = 0.02, 0.05
CLIP, DUAL_CLIP = 0.2, 3.0
LENGTHS = (9, 3, 5, 1, 7, 9, 4, 6)
PROMPTS = (5, 2, 4, 3, 5, 2, 3, 4)
ADVANTAGES = (1.0, -0.7, 0.4, -1.3, 0.9, -0.2, 1.6, -0.8)
MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")
ROWS = len(LENGTHS)

TIS = dict(level="token", kind="truncate", lower=None, upper=1.1)
MIS = dict(level="sequence", kind="reject", lower=0.5, upper=2.0)
GSM = dict(ratio="rollout", level="sequence", aggregate="geometric", lower=0.9, upper=1.1, when="any")
OPSM = dict(ratio="full", level="sequence", aggregate="geometric", delta=0.05, when="negative")
ICEPOP = dict(ratio="rollout", level="token", aggregate="any", lower=0.8, upper=1.25, when="any")
CORRECTIONS: dict[str, dict[str, Any]] = {
    "tis": {"weight": TIS},
    "mis": {"weight": MIS},
    "icepop": {"masks": {"icepop": ICEPOP}},
    "stacked": {"weight": TIS, "masks": {"gsm": GSM, "opsm": OPSM}},
    "bypass": {"proximal": "bypass", "masks": {"opsm": OPSM}},
    "kept": {"masks": {"gsm": GSM}, "denominator": "kept"},
    "signs": {
        "weights": {
            "down": {**TIS, "level": "sequence", "upper": 1.0, "when": "negative"},
            "up": {**TIS, "when": "positive"},
        }
    },
    "penalty": {"masks": {"gsm": GSM}, "penalty": {"ratio": "full", "coefficient": 0.3}},
    "kl_weight": {"masks": {"narrow": {**ICEPOP, "lower": 0.9}}, "kl_weight": {"ratio": "full", "upper": 1.1}},
    "excluded": {"masks": {"icepop": ICEPOP}, "penalty": {"ratio": "ppo", "coefficient": 0.3}, "nonfinite": "excluded"},
}
FOR_BFLOAT16 = tuple(name for name in CORRECTIONS if name not in ("stacked", "bypass"))
"""Corrections that decide by shipped log-probs; rounded log pi would move tokens across OPSM's delta and PPO's clip."""
BFLOAT16 = {"factor": 1e-5, "loss": 0.1, "gradient": 0.2}
"""Largest relative errors in bfloat16, which has an 8-bit mantissa; on a CPU, the errors were 0, 0.02 and 0.09."""
LOST = ((0, 1), (3, 0), (6, 2), (6, 5))
"""(row, token) whose mu is not finite, for ``nonfinite=excluded``; in row 3, it is the only token."""
TAUGHT = (1, 3, 4, 6)
"""Rows that are eligible if there is a teacher."""
TEACHER_COEF, MAX_GAP = 0.3, 1.0


def tiny_model(folder: Path) -> Path:
    """A Qwen2 of two layers whose weights are the same numbers in every release of transformers."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    save_tokenizer(folder)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    return save_drawn(Qwen2ForCausalLM(config), folder, seed=0)


def save_drawn(model: Any, folder: Path, *, seed: int) -> Path:
    """Save a model with drawn weights, in the order of their names; norms are about 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            values = 0.25 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1.0 + values if "norm" in name else values)
    model.float().save_pretrained(folder)
    return folder


def add_plan(columns: dict[str, Tensor], spec: Any, split: BatchSplit) -> tuple[Any, dict[str, Tensor]]:
    """Return the plan of a batch, and the batch's columns with those of the plan."""
    rows = TensorDict(columns, batch_size=ROWS)
    plan, more = build_plan(spec, {}, step=1, rows=lambda: rows, batch_split=lambda: split)
    return plan, columns | more


@dataclass
class Case:
    """A batch, padded as the V0 trainer ships it: prompts on the left, responses on the right.

    Attributes:
        model: the reference's, in float64.
        columns: float32 and int64 tensors by verl's names.
        distilled: mode of on-policy distillation; empty where there is none.
    """

    model: Any
    columns: dict[str, Tensor]
    distilled: str = ""

    @classmethod
    def of(cls, folder: Path) -> Case:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").double().train()
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(3, VOCABULARY, (ROWS, PROMPT + WIDTH), generator=generator)
        prompts = torch.arange(PROMPT) >= PROMPT - torch.tensor(PROMPTS)[:, None]
        whole = torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]
        mask = whole.clone()
        # Tool tokens inside the longest rows.
        mask[whole.all(-1), 3:5] = False
        attention = torch.cat([prompts, whole], dim=-1).long()
        ids = torch.where(attention.bool(), ids, 2)
        columns = {
            "prompts": ids[:, :PROMPT].clone(),
            "responses": ids[:, PROMPT:].clone(),
            "input_ids": ids,
            "attention_mask": attention,
            "position_ids": (attention.cumsum(-1) - 1).clamp(min=0),
            "response_mask": mask.long(),
        }
        case = cls(model, columns)
        with torch.no_grad():
            log_prob = torch.stack([padded(pi) for pi, _ in map(case.forward, range(ROWS))])

        def noise(scale: float) -> Tensor:
            return scale * torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)

        # A row that drifts as a whole, so that sequence masks have something to reject.
        drift = torch.tensor([0.0, 0.3, 0.0, 0.0, -0.3, 0.0, 0.0, 0.15], dtype=torch.float64)[:, None]
        old = log_prob + noise(0.15)
        for name, values in {
            "old_log_probs": old,
            "rollout_log_probs": old + drift + noise(0.1),
            "ref_log_prob": log_prob + noise(0.2),
            "advantages": torch.tensor(ADVANTAGES, dtype=torch.float64)[:, None].expand(-1, WIDTH),
        }.items():
            columns[name] = (values * mask).float()
        return case

    def with_teacher(self, mode: str) -> Case:
        """Return the case with a teacher that differs from pi_old by some nats, or the case itself without a mode;
        scale is none.
        """
        if not mode:
            return self
        columns = dict(self.columns)
        mask, student = columns["response_mask"].bool(), columns["old_log_probs"]
        row = torch.zeros(ROWS, dtype=torch.int8)
        row[list(TAUGHT)] = 1
        scored = mask & row.bool()[:, None]
        apart = 1.5 * torch.randn(student.shape, generator=torch.Generator().manual_seed(3))
        teacher = (student + apart).masked_fill(~scored, math.nan)
        columns |= {TEACHER: teacher, ROW: row, FACTOR: torch.ones(ROWS), CENTRE: torch.zeros(ROWS)}
        if mode == "advantage":
            signal = TEACHER_COEF * (teacher - student).clamp(-MAX_GAP, MAX_GAP)
            columns["advantages"] = torch.where(scored, signal, columns["advantages"])
        return Case(self.model, columns, mode)

    def of_correction(self, name: str) -> Case:
        """Return the case on which a correction of ``CORRECTIONS`` is shown."""
        if "nonfinite" not in CORRECTIONS[name]:
            return self
        mu = self.columns["rollout_log_probs"].clone()
        mu[tuple(zip(*LOST, strict=True))] = math.nan
        return Case(self.model, self.columns | {"rollout_log_probs": mu}, self.distilled)

    @property
    def extensions(self) -> dict[str, OpdWorker]:
        """The workers' half of the distillation."""
        if not self.distilled:
            return {}
        values = {"mode": self.distilled, "coef": TEACHER_COEF, "max_gap": MAX_GAP, "teacher": {"url": "http://none:1"}}
        return {"opd": OpdWorker(OpdSettings.from_mapping("opd", values))}

    def check_taught(self, packets: list[Any]) -> None:
        """Judge the reports of an update of all rows, as the trainer does."""
        reports = [packet.reports["opd"] for packet in packets]
        check_reports(reports, self.distilled)

    def forward(self, row: int) -> tuple[Tensor, Tensor]:
        """Return log pi and entropy of a row's response, (length,) float64 each."""
        present = self.columns["attention_mask"][row].bool()
        ids = self.columns["input_ids"][row][present]
        logits = self.model(input_ids=ids[None]).logits[0].double() / TEMPERATURE
        log_p = torch.log_softmax(logits, -1)[PROMPTS[row] - 1 : -1]
        return log_p.gather(-1, ids[PROMPTS[row] :, None])[:, 0], -(log_p.exp() * log_p).sum(-1)

    def response(self, name: str, row: int) -> Tensor:
        return self.columns[name][row, : LENGTHS[row]].double()


def padded(values: Tensor) -> Tensor:
    return torch.nn.functional.pad(values, (0, WIDTH - len(values)))
