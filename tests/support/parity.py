"""One batch and one model for every worker path of every release, and the update that each is to make.

The reference is a plain single process in float64: a forward pass a row, without padding, and formulas written out.
What a path did is seen by a policy loss of the test's own, which verl's public registry puts where ``vanilla`` is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from recipe.offpolicy.batch.checksums import hash_rows
from recipe.offpolicy.extensions.opd.columns import ROW, SCALE, TEACHER
from recipe.offpolicy.extensions.opd.evidence import check_reports
from recipe.offpolicy.extensions.opd.opd_worker import OpdWorker
from recipe.offpolicy.extensions.opd.settings import OpdSettings
from tests.support import reference
from tests.support import training_worker as tw

VOCABULARY = 32
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
    "kl_weight": {
        "masks": {"narrow": {**ICEPOP, "lower": 0.9}},
        "kl_weight": {"ratio": "full", "upper": 1.1},
    },
    "excluded": {
        "masks": {"icepop": ICEPOP},
        "penalty": {"ratio": "ppo", "coefficient": 0.3},
        "nonfinite": "excluded",
    },
}
LOST = ((0, 1), (3, 0), (6, 2), (6, 5))
"""(row, token) without a finite mu where ``nonfinite`` is excluded; of row 3 it is the only one."""
TAUGHT = (1, 3, 4, 6)
"""Rows that are eligible where a teacher is asked."""
TEACHER_COEF, MAX_GAP = 0.3, 1.0


def tiny_model(folder: Path) -> Path:
    """A Qwen2 of two layers whose weights are the same numbers in every release of transformers."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    vocabulary = {f"t{i}": i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="t1", pad_token="t2").save_pretrained(folder)
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
    model = Qwen2ForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            values = 0.25 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1.0 + values if "norm" in name else values)
    model.float().save_pretrained(folder)
    return folder


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
        """The case with a teacher up to some nats from pi_old, or itself without a mode; scale is none."""
        if not mode:
            return self
        columns = dict(self.columns)
        mask, student = columns["response_mask"].bool(), columns["old_log_probs"]
        row = torch.zeros(ROWS, dtype=torch.int8)
        row[list(TAUGHT)] = 1
        scored = mask & row.bool()[:, None]
        apart = 1.5 * torch.randn(student.shape, generator=torch.Generator().manual_seed(3))
        teacher = (student + apart).masked_fill(~scored, math.nan)
        columns |= {TEACHER: teacher, ROW: row, SCALE: torch.ones(ROWS)}
        if mode == "advantage":
            signal = TEACHER_COEF * (teacher - student).clamp(-MAX_GAP, MAX_GAP)
            columns["advantages"] = torch.where(scored, signal, columns["advantages"])
        return Case(self.model, columns, mode)

    def of_correction(self, name: str) -> Case:
        """The case that a correction of ``CORRECTIONS`` is shown on."""
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
        """Hold the reports of an update of all rows against what was shipped, as the trainer does."""
        scored = ~self.columns[TEACHER].isnan()
        numbers = hash_rows(self.columns["responses"], scored, self.columns[TEACHER])[scored.any(-1)].tolist()
        check_reports([packet.reports["opd"] for packet in packets], numbers, self.distilled)

    def forward(self, row: int) -> tuple[Tensor, Tensor]:
        """log pi and entropy of a row's response, each (length,) float64."""
        present = self.columns["attention_mask"][row].bool()
        ids = self.columns["input_ids"][row][present]
        logits = self.model(input_ids=ids[None]).logits[0].double() / TEMPERATURE
        log_p = torch.log_softmax(logits, -1)[PROMPTS[row] - 1 : -1]
        return log_p.gather(-1, ids[PROMPTS[row] :, None])[:, 0], -(log_p.exp() * log_p).sum(-1)

    def response(self, name: str, row: int) -> Tensor:
        return self.columns[name][row, : LENGTHS[row]].double()


def padded(values: Tensor) -> Tensor:
    return torch.nn.functional.pad(values, (0, WIDTH - len(values)))


@dataclass
class Update:
    """What one mini-batch does.

    Attributes:
        factor: what each token's policy term is multiplied by, by (row, token) of the batch.
        loss: of the policy term.
        gradients: of the whole loss, by parameter.
    """

    factor: dict[tuple[int, int], float]
    loss: float
    gradients: dict[str, Tensor]


def expected(case: Case, correction: Mapping[str, Any], mode: str, rows: range) -> Update:
    """The update of one mini-batch of ``rows`` by the formulas."""
    from recipe.offpolicy.correction import CorrectionSpec

    plain = CorrectionSpec.from_mapping(correction).to_mapping()
    outputs = {row: case.forward(row) for row in rows}
    old = "rollout_log_probs" if plain["proximal"] == "bypass" else "old_log_probs"
    batch = reference.Batch(
        mu=[case.response("rollout_log_probs", row).tolist() for row in rows],
        old=[case.response(old, row).tolist() for row in rows],
        pi=[outputs[row][0].tolist() for row in rows],
        mask=[case.response("response_mask", row).bool().tolist() for row in rows],
        advantages=[case.response("advantages", row).tolist() for row in rows],
        segments=[[0] * LENGTHS[row] for row in rows],
        versions=[[0] * LENGTHS[row] for row in rows],
    )
    decided = reference.expected(plain, batch)
    assert decided.margin > 1e-4, "something stands on its bound: float32 may decide otherwise"
    counted = [(b, t) for b, row in enumerate(batch.mask) for t, counts in enumerate(row) if counts]
    rejected = {token for tokens in decided.rejected.values() for token in tokens}
    scale = len(counted) / len(set(counted) - rejected) if plain["denominator"] == "kept" else 1.0
    lost = [token for token in counted if not math.isfinite(batch.mu[token[0]][token[1]])]
    gone = [b for b, row in enumerate(batch.mask) if sum(row) == sum(token[0] == b for token in lost)]
    excludes = plain.get("nonfinite") == "excluded"
    total = torch.zeros((), dtype=torch.float64)
    policy = torch.zeros((), dtype=torch.float64)
    factors = {}
    for b, row in enumerate(rows):
        pi, entropy = outputs[row]
        mask = case.response("response_mask", row)
        if excludes:
            here = sum(token[0] == b for token in lost)
            of_row = float(mask.sum()) / (float(mask.sum()) - here) if b not in gone else 1.0
            of_rows = len(rows) / (len(rows) - len(gone))
            scale = {
                "token-mean": len(counted) / (len(counted) - len(lost)),
                "seq-mean-token-sum": of_rows,
                "seq-mean-token-mean": of_rows * of_row,
            }[mode]
        factor = torch.tensor([w * k for w, k in zip(decided.weight[b], decided.keep[b], strict=True)]) * scale
        factors |= {(row, t): float(factor[t]) for t in range(LENGTHS[row]) if mask[t]}
        term = factor * ppo(pi, case.response(old, row), case.response("advantages", row))
        apart = case.response("ref_log_prob", row) - pi
        kl = apart.exp() - apart - 1
        if kl_weight := plain.get("kl_weight"):
            other = case.response({"full": "rollout_log_probs", "ppo": old}[kl_weight["ratio"]], row)
            kl = (pi - other).exp().clamp(max=kl_weight["upper"]) * kl
        rest = KL_COEF * kl - ENTROPY_COEFF * entropy
        if penalty := plain.get("penalty"):
            other = case.response({"full": "rollout_log_probs", "ppo": old}[penalty["ratio"]], row)
            squares = torch.where(other.isfinite(), pi - other.nan_to_num(), 0.0).square()
            rest = rest + penalty["coefficient"] * (scale if excludes else 1.0) * squares
        if case.distilled == "loss":
            rest = rest + TEACHER_COEF * factor * k2(pi, case.response(TEACHER, row))
        divisor = {
            "token-mean": len(counted),
            "seq-mean-token-sum": len(rows),
            "seq-mean-token-mean": len(rows) * float(mask.sum()),
        }[mode]
        policy = policy + (term * mask).sum() / divisor
        total = total + ((term + rest) * mask).sum() / divisor
    names, parameters = zip(*case.model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(total, parameters, allow_unused=True)
    found = {name: g for name, g in zip(names, gradients, strict=True) if g is not None}
    return Update(factors, float(policy.detach()), found)


def k2(log_prob: Tensor, teacher: Tensor) -> Tensor:
    """(s - t)^2 / 2 of a token, linear beyond ``MAX_GAP``; 0 where nothing scored it."""
    gap = torch.where(teacher.isnan(), 0.0, log_prob - teacher.nan_to_num())
    return torch.where(gap.abs() <= MAX_GAP, gap**2 / 2, MAX_GAP * (gap.abs() - MAX_GAP / 2))


def ppo(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor) -> Tensor:
    """The clipped loss of a token, with verl's dual clip for negative advantages."""
    ratio = (log_prob - old_log_prob).exp()
    clipped = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - CLIP, 1 + CLIP))
    return torch.where(advantages < 0, torch.minimum(clipped, -advantages * DUAL_CLIP), clipped)


def actor_settings(mode: str) -> dict[str, Any]:
    """Fields of verl's ActorConfig under which the reference's formulas hold."""
    from verl.workers.config import PolicyLossConfig

    return dict(
        policy_loss=PolicyLossConfig(loss_mode="witness"),
        loss_agg_mode=mode,
        entropy_coeff=ENTROPY_COEFF,
        use_kl_loss=True,
        kl_loss_type="low_var_kl",
        kl_loss_coef=KL_COEF,
    )


def build_case_plan(case: Case, spec: Any, mode: str, mini_rows: int) -> tuple[Any, dict[str, torch.Tensor]]:
    """Columns and plan as the V0 trainer sends them."""
    from tensordict import TensorDict

    from recipe.offpolicy.batch.plan import BatchSplit, build_plan

    columns = dict(case.columns)
    if spec.proximal == "bypass":
        columns["old_log_probs"] = columns["rollout_log_probs"]
    rows = TensorDict(columns, batch_size=ROWS)
    plan, more = build_plan(
        spec,
        {},
        step=1,
        rows=lambda: rows,
        batch_split=lambda: BatchSplit(ranks=1, mini_batch_rows=mini_rows, loss_agg_mode=mode),
    )
    return plan, columns | more


def batch_v0(case: Case, spec: Any, mode: str, mini_rows: int) -> Any:
    """The TensorDict that the V0 trainer sends to the engine's workers."""
    from verl import DataProto
    from verl.workers.utils.padding import left_right_2_no_padding

    from recipe.offpolicy.batch.plan import PLAN

    plan, columns = build_case_plan(case, spec, mode, mini_rows)
    return left_right_2_no_padding(DataProto.from_dict(columns, meta_info={PLAN: plan}).to_tensordict())


def batch_v1(case: Case, spec: Any, mode: str, mini_rows: int) -> Any:
    """The TensorDict that the V1 trainer sends: everything nested by row."""
    from verl.utils import tensordict_utils as tu

    from recipe.offpolicy.batch.plan import PLAN

    plan, columns = build_case_plan(case, spec, mode, mini_rows)

    def by_row(name: str) -> list[torch.Tensor]:
        return [columns[name][row, : LENGTHS[row]] for row in range(ROWS)]

    present = columns["attention_mask"].bool()
    rollout = tw.Rollout(
        prompts=[columns["prompts"][row][present[row, :PROMPT]] for row in range(ROWS)],
        responses=by_row("responses"),
        response_mask=by_row("response_mask"),
        advantages=by_row("advantages"),
        rollout_log_probs=by_row("rollout_log_probs"),
        old_log_probs=by_row("old_log_probs"),
        ref_log_probs=by_row("ref_log_prob"),
    )
    data = rollout.to_tensordict()
    for name in columns.keys() - case.columns.keys() | columns.keys() & {ROW, SCALE}:
        data[name] = columns[name]
    if case.distilled:
        data[TEACHER] = torch.nested.as_nested_tensor(by_row(TEACHER), layout=torch.jagged)
    tu.assign_non_tensor(data, **{PLAN: plan})
    return data


@dataclass
class Witness:
    """Stands under verl's loss_mode ``witness``, calls ``vanilla``, and remembers what it was given.

    Attributes:
        calls: by micro-batch, the loss and the factor of each token by its responses' row in ``case``.
    """

    case: Case
    factors: list[dict[tuple[int, int], float]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def register(self) -> None:
        from verl.trainer.ppo import core_algos

        core_algos.POLICY_LOSS_REGISTRY["witness"] = self

    def update(self, gradients: dict[str, Tensor]) -> Update:
        """All micro-batches together."""
        factors = {token: factor for call in self.factors for token, factor in call.items()}
        return Update(factors, sum(self.losses), gradients)

    def __call__(self, **given: Any) -> Any:
        from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla

        loss, metrics = compute_policy_loss_vanilla(**given)
        weights, mask = given["rollout_is_weights"], given["response_mask"].bool()
        ones = torch.ones_like(given["log_prob"])
        weights = ones if weights is None else weights
        self.losses.append(float(loss.detach()))
        self.factors.append({})
        # No two rows have one advantage, unless a teacher gave them.
        theirs, name = ("old_log_prob", "old_log_probs") if self.case.distilled else ("advantages", "advantages")
        known = self.case.columns[name][:, 0]
        for line, values in enumerate(given[theirs]):
            row = int((known.to(values.device) - values[mask[line]][0]).abs().argmin())
            for t in range(LENGTHS[row]):
                if mask[line, t]:
                    self.factors[-1][row, t] = float(weights[line, t])
        return loss, metrics


def register_witness(case: Case, monkeypatch: pytest.MonkeyPatch) -> Witness:
    """Register a witness for one test; verl's own registry is left as it was."""
    from verl.trainer.ppo import core_algos

    monkeypatch.setattr(core_algos, "POLICY_LOSS_REGISTRY", dict(core_algos.POLICY_LOSS_REGISTRY))
    witness = Witness(case)
    witness.register()
    return witness


def update_by_engine(worker: Any, witness: Witness, layout: Any, name: str, mode: str, split: Any) -> Update:
    """What an engine's worker does with the batch in ``layout``; ``split``: rows of a micro-batch, or dynamic."""
    from recipe.offpolicy.correction import CorrectionSpec
    from recipe.offpolicy.worker.loss import OffPolicyLoss
    from recipe.offpolicy.worker.metrics import take_packets

    spec = CorrectionSpec.from_mapping(CORRECTIONS[name])
    dynamic = split == "dynamic"
    metrics, gradients = tw.gradients(
        worker,
        OffPolicyLoss(spec, tw.actor_config(**actor_settings(mode)), extensions=witness.case.extensions),
        layout(witness.case, spec, mode, ROWS),
        micro_batch_size=None if dynamic else split,
        max_token_len=24 if dynamic else None,
        calculate_entropy=True,
        temperature=TEMPERATURE,
    )
    if witness.case.distilled:
        witness.case.check_taught(take_packets(metrics))
    return witness.update(gradients)


def assert_same(found: Update, demanded: Update, *, tolerance: float = 1e-5) -> None:
    """Equal within ``tolerance``, relative to the greatest of its kind."""
    assert found.factor.keys() == demanded.factor.keys()
    for token, value in demanded.factor.items():
        assert math.isclose(found.factor[token], value, rel_tol=tolerance, abs_tol=0.0), (token, found, demanded)
    assert math.isclose(found.loss, demanded.loss, rel_tol=tolerance, abs_tol=tolerance * 0.1)
    scale = max(float(gradient.abs().max()) for gradient in demanded.gradients.values())
    assert found.gradients.keys() == demanded.gradients.keys()
    for name, gradient in demanded.gradients.items():
        error = float((found.gradients[name].double() - gradient).abs().max()) / scale
        assert error < tolerance, f"{name}: relative error {error:.2g}"


def fingerprint(update: Update) -> list[float]:
    """A few numbers that tell one update from another: loss, sum of factors, and moments of the gradients."""
    numbers = [update.loss, sum(update.factor.values())]
    for name in sorted(update.gradients):
        if "layers.1" in name or "lm_head" in name:
            gradient = update.gradients[name].double().flatten()
            numbers += [float(gradient.norm()), float(gradient @ torch.linspace(-1, 1, len(gradient)).double())]
    return numbers
