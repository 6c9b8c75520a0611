"""mu compared with the trainer's policy: batches with wrong log-probs are found, healthy batches are not."""

from __future__ import annotations

import pytest
import torch

from recipe.offpolicy.proof.token_alignment import AlignmentChecker, AlignmentError, AlignmentTally, tally_agreements

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def batch(
    generator: torch.Generator, rows: int = 128, width: int = 10, noise: float = 0.005, drift: float = 0.0
) -> Batch:
    """(log pi_old, log mu, mask): most tokens are certain, the rest exponential; noise grows with -log p, as in
    engines.
    """
    sure = torch.rand(rows, width, generator=generator) > 0.3
    size = torch.empty(rows, width).exponential_(generator=generator) * 2.0 * torch.rand(rows, 1, generator=generator)
    old = -torch.where(sure, 0.001 * torch.rand(rows, width, generator=generator), size)
    error = noise * (old.abs() + 0.02).sqrt() * torch.randn(rows, width, generator=generator)
    lengths = torch.randint(width // 2 + 1, width + 1, (rows,), generator=generator)
    return old, old + error - drift, torch.arange(width) < lengths[:, None]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_counts_by_hand() -> None:
    # Column 0: the trainer finds row 0 likelier, mu too. Column 1: the trainer row 0, mu row 1. Column 2 differs by
    # less than the margin. A pair counts twice, as (0, 1) and as (1, 0).
    trainer = torch.tensor([[-0.25, -0.20, -0.27], [-1.0, -2.0, -0.35]])
    mu = torch.tensor([[-0.2, -3.0, -0.30], [-1.5, -1.0, -2.00]])
    count = tally_agreements(trainer, mu, torch.ones(2, 3)).rows
    assert count.pairs[1] == 4
    assert count.agreeing[1] == 2
    assert count.rows == 2
    assert count.concordance() == 0.0
    # With mu of the token after: column 0 against mu's column 1, column 1 against mu's column 2.
    assert count.pairs[2] == 4
    assert count.agreeing[2] == 2
    # Neighbouring tokens: (0, 1) and (1, 2) of row 1 only disagree in sign with mu: -1.0 > -2.0 and -1.5 < -1.0.
    tokens = tally_agreements(trainer, mu, torch.ones(2, 3)).tokens
    assert tokens.pairs[1] == 2
    assert tokens.agreeing[1] == 0


@pytest.mark.parametrize("noise", [0.0, 1.0])
@pytest.mark.parametrize(("rows", "width"), [(128, 10), (8, 4), (512, 1), (1, 2000)])
def test_healthy_batches_pass(rows: int, width: int, noise: float) -> None:
    # Up to noise of one nat at log p = -1, far beyond what staleness does; with a drift common to all tokens.
    watch, source = AlignmentChecker(), generator(rows + width)
    for _ in range(40):
        watch.judge(tally_agreements(*batch(source, rows, width, noise, drift=0.5)))


def first_error(batches: list[AlignmentTally]) -> str:
    watch = AlignmentChecker()
    for one in batches:
        try:
            watch.judge(one)
        except AlignmentError as error:
            return str(error)
    raise AssertionError("nothing was found")


@pytest.mark.parametrize(("by", "where"), [(1, "after"), (-1, "before")])
@pytest.mark.parametrize(("rows", "width", "within"), [(128, 10, 1), (8, 6, 12), (1, 2000, 12)])
def test_off_by_one_token(rows: int, width: int, within: int, by: int, where: str) -> None:
    for seed in range(5):
        source = generator(seed)
        batches = []
        for _ in range(within):
            old, mu, mask = batch(source, rows, width)
            batches.append(tally_agreements(old, mu.roll(by, -1), mask))
        message = first_error(batches)
        assert "off by one token" in message
        assert f"mu of the token {where}" in message


@pytest.mark.parametrize(
    ("rows", "width", "within"),
    [
        (128, 10, 3),
        (512, 1, 2),
        *(pytest.param(*many, marks=pytest.mark.extended) for many in ((16, 8, 32), (64, 200, 4))),
    ],
)
@pytest.mark.parametrize("other", ["permuted", "another batch"])
def test_log_probs_of_other_rows(rows: int, width: int, within: int, other: str) -> None:
    for seed in range(8):
        source, batches = generator(seed), []
        for _ in range(within):
            old, mu, mask = batch(source, rows, width)
            permuted = mu[torch.randperm(rows, generator=source)]
            strange = permuted if other == "permuted" else batch(source, rows, width)[1]
            batches.append(tally_agreements(old, strange, mask))
        assert "belong to other sequences" in first_error(batches)


def test_rows_of_one_prompt_mixed_up_among_themselves() -> None:
    # Prompts are of very different difficulty, so that rows of other prompts still agree.
    source, batches = generator(), []
    for _ in range(4):
        level = torch.repeat_interleave(torch.linspace(0.1, 8.0, 16), 8)[:, None]
        old = -level * (1.0 + 0.5 * torch.rand(128, 10, generator=source))
        mixed = torch.cat([8 * group + torch.randperm(8, generator=source) for group in range(16)])
        groups = [str(row // 8) for row in range(128)]
        order = torch.randperm(128, generator=source)
        shuffled = [groups[int(row)] for row in order]
        batches.append(tally_agreements(old[order], old[mixed][order], torch.ones(128, 10), shuffled))
        assert batches[-1].rows.concordance() > 0.5
        healthy = tally_agreements(old[order], old[order], torch.ones(128, 10), shuffled)
        assert healthy.siblings.concordance() == healthy.rows.concordance() == 1.0
    assert "of siblings" in first_error(batches)


def test_meant_log_probs_are_only_measured() -> None:
    old, mu, mask = batch(generator())
    metrics = AlignmentChecker(allow_unrelated=True).judge(tally_agreements(old, mu.flip(0), mask))
    assert abs(metrics["concordance_rows"]) < 0.3
    with pytest.raises(AlignmentError, match="allow_unrelated_log_probs=true"):
        AlignmentChecker().judge(tally_agreements(old, mu.flip(0), mask))
