"""Parts of a step on random inputs of any size, as calls without arguments that ``simulated_scale.py`` measures.

Columns of tokens are float32 log-probs and int64 ids and masks, as verl sends them. The length of a row is drawn at
random, up to 4096 tokens and half of that on average, so half of a padded batch is padding.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from tensordict import NonTensorStack, TensorDict
from torch import Tensor

from recipe.offpolicy.batch import micro_batch as mb
from recipe.offpolicy.batch import padding, plan, weight_versions
from recipe.offpolicy.correction import CorrectionSpec, RolloutStage, rollout_stage, step_stage, turns
from recipe.offpolicy.support.token_supports import RowSupports, SupportNote, read_supports
from recipe.offpolicy.worker.metrics import METRIC_KEY
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPActorConfig

WIDTH = 4096
PROMPT = 16
CORRECTION: dict[str, Any] = {
    "weight": {"level": "token", "kind": "truncate", "lower": None, "upper": 2.0},
    "masks": {
        "gsm": dict(ratio="rollout", level="sequence", aggregate="geometric", lower=0.99, upper=1.01, when="any"),
        "opsm": dict(ratio="full", level="sequence", aggregate="geometric", delta=0.1, when="negative"),
    },
}
"""The quickstart's correction, [tis_token, gsm, opsm]."""
BATCH_WIDE: dict[str, Any] = {
    "weight": CORRECTION["weight"] | {"normalize": True},
    "masks": {
        "gsm": CORRECTION["masks"]["gsm"],
        "m2po": dict(ratio="rollout", level="token", aggregate="second_moment", budget=0.04, when="any"),
    },
    "denominator": "kept",
}
"""A correction that uses every constant of a whole batch."""
ROWS_OF_A_RANK = 195
"""Number of rows per rank, so that 512 ranks have 100 000 rows."""
TOKENS_OF_A_ROW = 64
"""Average number of tokens per row in a batch that the driver checks."""
RANKS = 8
"""Number of ranks over which a batch of rows is split when it is planned."""
Call = Callable[[], Any]


@dataclass(frozen=True)
class Part:
    """A part of a step.

    Attributes:
        build: returns the call to measure for a given size.
        unit: the unit of its size.
        bytes: approximate bytes per unit, for inputs and call together; they determine which sizes are skipped.
        of_driver: whether the driver performs this part in each step.
        largest: number of units above which a call takes minutes.
    """

    build: Callable[[int], Call]
    unit: str
    bytes: int
    of_driver: bool = False
    largest: int = 2**27


def draw_log_probs(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draw mu, pi_old and pi, (tokens,) each."""
    generator = torch.Generator().manual_seed(0)
    mu = torch.empty(tokens).exponential_(generator=generator).neg_()
    old = torch.empty(tokens).normal_(0, 0.02, generator=generator).add_(mu)
    pi = torch.empty(tokens).normal_(0, 0.01, generator=generator).add_(old)
    return mu, old, pi


def draw_offsets(tokens: int, mean: int) -> Tensor:
    """Draw rows that are stored end to end: their starts, and ``tokens``. Lengths are uniform up to twice the mean."""
    rows = max(tokens // mean, 1)
    lengths = torch.full((rows,), mean)
    # Lengths are drawn in pairs, so that they add up to the requested number.
    apart = torch.randint(mean, (rows // 2,), generator=torch.Generator().manual_seed(1))
    lengths[: rows // 2] -= apart
    lengths[rows // 2 : rows // 2 * 2] += apart
    lengths[-1] += tokens - int(lengths.sum())
    return torch.cat((torch.tensor([0]), lengths.cumsum(0)))


def nest(values: Tensor, offsets: Tensor) -> Tensor:
    """Split packed values into the rows of nested tensors."""
    lengths = offsets.diff()
    least, most = int(lengths.amin()), int(lengths.amax())
    return torch.nested.nested_tensor_from_jagged(values, offsets, min_seqlen=least, max_seqlen=most)


def draw_signs(rows: int) -> Tensor:
    """Draw advantages that alternate between -1 and 1."""
    return torch.arange(rows) % 2 * 2.0 - 1


def draw_tokens(tokens: int, *, nested: bool) -> dict[str, Tensor]:
    """Draw the columns of a batch that has this many tokens, including padding: (B, T), or nested by row."""
    mu, old, pi = draw_log_probs(tokens)
    columns = {"rollout_log_prob": mu, "old_log_prob": old, "log_prob": pi}
    if nested:
        offsets = draw_offsets(tokens, WIDTH // 2)
        columns["advantages"] = draw_signs(len(offsets) - 1).repeat_interleave(offsets.diff())
        columns["response_mask"] = torch.ones(tokens, dtype=torch.bool)
        return {name: nest(column, offsets) for name, column in columns.items()}
    rows = tokens // WIDTH
    lengths = torch.randint(1, WIDTH + 1, (rows,), generator=torch.Generator().manual_seed(1))
    columns = {name: column.view(rows, WIDTH) for name, column in columns.items()}
    columns["advantages"] = draw_signs(rows)[:, None].expand(rows, WIDTH).contiguous()
    return columns | {"response_mask": torch.arange(WIDTH) < lengths[:, None]}


def build_stage(tokens: int, *, nested: bool, step: bool = False) -> Call:
    """Build a call of a rollout stage with all of its statistics, or of a step stage for an existing rollout stage."""
    given: dict[str, Any] = {**draw_tokens(tokens, nested=nested)}
    spec = CorrectionSpec.from_mapping(CORRECTION)
    of_step = {name: given.pop(name) for name in ("log_prob", "advantages")}

    def run_rollout_stage() -> RolloutStage:
        return rollout_stage(spec, **given, segment_ids=turns(given["response_mask"]))

    return partial(step_stage, spec, run_rollout_stage(), **of_step) if step else run_rollout_stage


def build_batch(columns: dict[str, Tensor], *, micro_batches: int = 1, last: bool = True) -> TensorDict:
    """Build a micro-batch of nested columns in the form in which verl's engine passes it to its loss.

    Args:
        micro_batches: number of micro-batches in the mini-batch, all of the same size.
        last: whether the micro-batch belongs to the update's last mini-batch.
    """
    responses: Any = columns["responses"]
    rows, tokens = len(responses), int(responses.offsets()[-1])
    data = TensorDict({**columns, "response_mask": torch.ones_like(responses)}, batch_size=rows)
    counts = {"batch_num_tokens": tokens * micro_batches, "global_batch_size": rows * micro_batches}
    tu.assign_non_tensor(data, dp_size=1, **counts, **{plan.PLAN: plan.SharedPlan(step=1), mb.LAST: last})
    return data


def build_note(prompt: Sequence[int], response: Tensor, log_q: Tensor, size: int) -> tuple[Tensor, RowSupports]:
    """Build the note of a row's likeliest tokens in the same way as the rollout servers' client.

    Args:
        log_q: (T, V), log mu of the whole vocabulary.

    Returns:
        log mu of the response, (T,), and the note.
    """
    values, ids = log_q.topk(size)
    own = log_q.gather(-1, response[:, None])
    listed, log_probs = (torch.cat(pair, 1).flatten().tolist() for pair in ((response[:, None], ids), (own, values)))
    note = SupportNote()
    found = read_supports(listed, log_probs, len(response), likeliest=True)
    note.add(list(prompt), response.tolist(), found)
    return own[:, 0], note.finish()


def build_micro_batch(tokens: int, lengths: Sequence[int] = (), device: str = "cpu") -> tuple[Call, TensorDict]:
    """Build a micro-batch of drawn rows; return a call that yields the model's output, and the batch.

    Args:
        lengths: lengths of the rows, ``tokens`` in total; drawn if not given.
        device: device of the output and the batch.
    """
    mu, old, pi = draw_log_probs(tokens)
    offsets = torch.tensor([0, *accumulate(lengths)]) if lengths else draw_offsets(tokens, WIDTH // 2)
    rows = len(offsets) - 1
    starts = torch.arange(rows + 1) * PROMPT
    flat = torch.zeros(tokens + rows * PROMPT)
    places = torch.arange(tokens).add_((torch.arange(1, rows + 1) * PROMPT).repeat_interleave(offsets.diff()))
    # The values of a token are stored one position before the token.
    flat[places - 1] = pi
    responses, ids = torch.arange(tokens) % 997, torch.ones_like(flat, dtype=torch.int64)
    ids[places] = responses
    data = build_batch(
        {
            "prompts": nest(torch.ones(rows * PROMPT, dtype=torch.int64), starts),
            "responses": nest(responses, offsets),
            "input_ids": nest(ids, offsets + starts),
            "position_ids": nest(torch.arange(len(ids)), offsets + starts),
            "advantages": nest(draw_signs(rows).repeat_interleave(offsets.diff()), offsets),
            "old_log_probs": nest(old, offsets),
            "rollout_log_probs": nest(mu, offsets),
        }
    ).to(device)
    leaf, whole = flat.to(device).requires_grad_(), (offsets + starts).to(device)

    def output() -> dict[str, Any]:
        leaf.grad = None
        return {"log_probs": nest(leaf * 1.0, whole)}

    return output, data


def build_actor_config(rows: int) -> Any:
    """Build verl's configuration of an actor whose mini-batch has this many rows."""
    sizes = {"ppo_mini_batch_size": rows, "ppo_micro_batch_size_per_gpu": rows}
    return FSDPActorConfig(strategy="fsdp2", rollout_n=1, **sizes)


def build_loss(tokens: int, *, corrected: bool) -> Call:
    """Build a call of a loss with its backward pass and, if ``corrected``, its statistics."""
    from recipe.offpolicy.worker.loss import OffPolicyLoss
    from verl.workers.utils.losses import ppo_loss

    output, data = build_micro_batch(tokens)
    config = build_actor_config(len(data))
    loss = OffPolicyLoss(CorrectionSpec.from_mapping(CORRECTION), config) if corrected else partial(ppo_loss, config)

    def update() -> None:
        value, metrics = loss(model_output=output(), data=data)
        value.backward()
        if corrected:
            metrics[METRIC_KEY].settle()

    return update


def build_proof(tokens: int) -> Call:
    """Build a call that does the first update's additional work: verl's loss and ours, repeated on trial inputs."""
    from recipe.offpolicy.proof.gradient import prove
    from recipe.offpolicy.worker.loss import OffPolicyLoss

    output, data = build_micro_batch(tokens)
    loss_of_worker = OffPolicyLoss(CorrectionSpec.from_mapping(CORRECTION), build_actor_config(len(data)))
    adapter = loss_of_worker.copy_for_trials(torch.get_rng_state())
    batch = mb.read(output(), data)
    loss, _, _ = adapter.compute_corrected(batch)
    return lambda: prove(adapter, batch, loss)


def draw_rollout(rows: int) -> TensorDict:
    """Draw a batch, nested by row, in the form in which the driver reads it."""
    tokens = rows * TOKENS_OF_A_ROW
    offsets = draw_offsets(tokens, TOKENS_OF_A_ROW)
    mu, old, _ = draw_log_probs(tokens)
    ids = torch.arange(tokens) % 997
    columns = {"responses": ids, "response_mask": torch.ones_like(ids), "rollout_log_probs": mu, "old_log_probs": old}
    return TensorDict({name: nest(column, offsets) for name, column in columns.items()}, batch_size=rows)


def build_check(rows: int, *, aligned: bool) -> Call:
    """Build a call of the driver's checks of a rollout, or of its checks of mu against pi_old, in groups of 8 rows."""
    from recipe.offpolicy.proof.rollout_log_probs import RolloutChecker

    checker, batch = RolloutChecker(), draw_rollout(rows)
    if not aligned:
        return partial(checker.check_sampled, batch)
    return partial(checker.check_aligned, batch, [str(row // 8) for row in range(rows)])


def build_versions_call(rows: int) -> Call:
    """Build the call that reads the versions that sampled each token; every fourth row was sampled by two versions."""
    batch = draw_rollout(rows)
    mask = batch["response_mask"]
    notes = []
    for row, tokens in enumerate(mask.offsets().diff().tolist()):
        chunks = [(3, tokens)] if row % 4 or tokens < 2 else [(3, tokens // 2), (4, tokens - tokens // 2)]
        versions = {weight_versions.OLDEST_VERSION: chunks[0][0], weight_versions.NEWEST_VERSION: chunks[-1][0]}
        notes.append(versions | {weight_versions.CHUNKS: [chunks]})
    batch[weight_versions.EXTRA_FIELDS] = NonTensorStack(*notes)
    return lambda: weight_versions.read_versions(batch, mask)


def build_plan_call(rows: int) -> Call:
    """Build a call that computes a plan with every constant of a whole batch."""
    batch, spec = draw_rollout(rows), CorrectionSpec.from_mapping(BATCH_WIDE)
    split = plan.BatchSplit(RANKS, rows // 4 // RANKS * RANKS, "token-mean")
    return lambda: plan.build_plan(spec, {}, step=1, rows=lambda: batch, batch_split=lambda: split)


def build_regrouping(rows: int) -> Call:
    """Build a call of ``baseline=exclude``, which regroups without rejected rows and zeroes silent rows' advantages."""
    batch, spec = draw_rollout(rows), CorrectionSpec.from_mapping(CORRECTION)
    uids = [str(row // 8) for row in range(rows)]

    def regroup() -> None:
        groups = plan.regroup_without_rejected(spec, batch, uids)
        for name in ("old_log_probs", "rollout_log_probs"):  # as long as advantages and returns
            padding.zero_rows(batch[name], groups.silent)

    return regroup


def build_collection(ranks: int) -> Call:
    """Build a call that processes the packets of an update in the driver: unpickling, checks, merging and metrics."""
    from omegaconf import OmegaConf

    from recipe.offpolicy.trainer.supervision import Supervision
    from recipe.offpolicy.worker.loss import OffPolicyLoss

    spec = CorrectionSpec.from_mapping(CORRECTION)
    output, data = build_micro_batch(4 * WIDTH)
    loss, metrics = OffPolicyLoss(spec, build_actor_config(len(data)))(output(), data)
    loss.backward()
    packet = metrics[METRIC_KEY]
    packet.before_sending()
    sent, rows = [], iter(range(1, ranks * ROWS_OF_A_RANK + 1))
    for _ in range(ranks):
        # Checksums have 64 bits and are uniformly distributed.
        packet.rows = [row * 0x9E3779B97F4A7C15 % 2**63 for _, row in zip(range(ROWS_OF_A_RANK), rows, strict=False)]
        sent.append(pickle.dumps(packet))
    allowed = {"allow_identical_log_probs": False, "allow_unrelated_log_probs": False}
    config = OmegaConf.create({"actor_rollout_ref": {"actor": {"ppo_epochs": 1}}, "offpolicy": allowed})
    supervision = Supervision(spec, config)
    supervision.proving = False
    supervision._sampled_rows = [row for one in map(pickle.loads, sent) for row in one.rows]

    def collect() -> None:
        supervision.begin_step()
        supervision.begin()
        supervision.collect({METRIC_KEY: [[pickle.loads(one)] for one in sent]})
        supervision.metrics(), supervision.step_metrics()

    return collect


PARTS: dict[str, Part] = {
    "rollout stage, padded": Part(partial(build_stage, nested=False), "token", 140),
    "rollout stage, packed": Part(partial(build_stage, nested=True), "token", 150),
    "step stage, padded": Part(partial(build_stage, nested=False, step=True), "token", 150),
    "step stage, packed": Part(partial(build_stage, nested=True, step=True), "token", 155),
    "verl's loss": Part(partial(build_loss, corrected=False), "token", 230, largest=2**22),
    "loss with a correction": Part(partial(build_loss, corrected=True), "token", 330),
    "proof of the first update": Part(build_proof, "token", 640, largest=2**20),
    "checks of a rollout": Part(partial(build_check, aligned=False), "row", 100 * TOKENS_OF_A_ROW, of_driver=True),
    "checks of mu and pi_old": Part(partial(build_check, aligned=True), "row", 100 * TOKENS_OF_A_ROW, of_driver=True),
    "versions of the weights": Part(build_versions_call, "row", 150 * TOKENS_OF_A_ROW, of_driver=True),
    "plan": Part(build_plan_call, "row", 200 * TOKENS_OF_A_ROW, of_driver=True),
    "groups without rejected rows": Part(build_regrouping, "row", 200 * TOKENS_OF_A_ROW, of_driver=True),
    "packets": Part(build_collection, "rank", 1 << 19, of_driver=True),
}
