"""Catalogue of the statistics that ``correction.telemetry`` measures, and the table of docs/metrics.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Final

from recipe.offpolicy.correction.statistics import BUCKETS, SIGNS, STALENESS, TURNS, Reduction

_DISTRIBUTION: Final = {part: Reduction(part) for part in ("mean", "std", "min", "max", "ess", "chi2")}


@dataclass(frozen=True)
class StatisticEntry:
    """Entry of the catalogue: metric keys that share one meaning.

    Attributes:
        key: under ``offpolicy/``; {a,b} stands for each of a and b, and <name> for any name.
        parts: last part of the key -> its reduction.
        meaning: one-line description.
    """

    key: str
    parts: Mapping[str, Reduction]
    meaning: str

    def expand(self) -> Iterator[tuple[str, Reduction]]:
        """Yield each key, with <name> unchanged, and its reduction."""
        pieces = [piece.split(",") for piece in self.key.replace("{", "\0").replace("}", "\0").split("\0")]
        for chosen in product(*pieces):
            for part, reduction in self.parts.items():
                yield f"{''.join(chosen)}/{part}", reduction

    def format_row(self) -> str:
        """Format the entry as a row of a Markdown table."""
        parts = ",".join(self.parts)
        key = f"{self.key}/{{{parts}}}" if len(self.parts) > 1 else f"{self.key}/{parts}"
        reductions = list(dict.fromkeys(reduction.value for reduction in self.parts.values()))
        return f"| `{key}` | {self.meaning} | {', '.join(reductions)} |"


def _group(names: tuple[str, ...] | Mapping[str, object]) -> str:
    return "{" + ",".join(names) + "}"


def _means(*parts: str) -> dict[str, Reduction]:
    return dict.fromkeys(parts, Reduction.MEAN)


_BY_DRIFT: Final = {"token_count": Reduction.SUM, "kl_k3": Reduction.MEAN}
_MASKED: Final = _means("masked_token_share", "masked_sequence_share")

ENTRIES: Final = (
    StatisticEntry(
        "{rollout_ratio,ppo_ratio,full_ratio}",
        _DISTRIBUTION,
        "pi_old / mu, pi / pi_old and pi / mu per token; ess = (sum r)^2 / (n sum r^2), chi2 = mean r^2 - 1",
    ),
    StatisticEntry("rollout_ratio_sequence", _DISTRIBUTION, "pi_old / mu per sequence: exp of the summed log-ratio"),
    StatisticEntry(
        "log_prob_difference", _means("mean", "abs_mean") | {"std": Reduction.STD}, "log pi_old - log mu, nats"
    ),
    StatisticEntry(
        "kl", _means("k1", "k3"), "estimates of KL(mu, pi_old), nats per token: mean of -log r and of r - 1 - log r"
    ),
    StatisticEntry(
        "perplexity",
        dict.fromkeys(("rollout", "old", "current"), Reduction.PERPLEXITY),
        "exp(-mean log-prob) of the sampled tokens under mu, pi_old and pi",
    ),
    StatisticEntry(
        "weight",
        _DISTRIBUTION | _means("truncated_share"),
        "the applied weight per token, which is 0 for a rejected token; truncated_share: share of tokens whose raw "
        "weight is outside the bounds",
    ),
    StatisticEntry("raw_weight", _DISTRIBUTION, "the weight before bounds and normalisation, if one is configured"),
    StatisticEntry("penalty", _means("mean"), "mean (log r)^2 per token, where r is the penalised ratio"),
    StatisticEntry(
        "keep",
        _means("token_share", "sequence_share", "token_mask_ratio"),
        "share of response tokens that are kept, of sequences with at least one kept token, and of response tokens "
        "that token-level masks reject",
    ),
    StatisticEntry(
        f"keep/{_group(SIGNS)}",
        _means("token_share", "sequence_share"),
        "the same for sequences with a positive or negative mean advantage",
    ),
    StatisticEntry(
        "{mask/<name>,weights/<name>,weight}",
        _MASKED,
        "for each mask and each weight of kind reject: the rejected share of the tokens, and of the sequences, to "
        "which it applies; a mask on pi / pi_old or on age also applies to tokens without mu",
    ),
    StatisticEntry(
        f"{{mask/<name>,weights/<name>,weight}}/{_group(SIGNS)}",
        _MASKED,
        "the same for sequences with a positive or negative mean advantage",
    ),
    StatisticEntry(
        f"length/{_group(BUCKETS)}",
        {"sequences": Reduction.SUM}
        | _means("keep_token_share", "keep_sequence_share", "geometric_keep_share", "product_keep_share"),
        "sequences grouped by length (T <= 16, 17 to 64, ...): their number, their kept shares, and the shares that a "
        "geometric mask [0.99, 1.01] and a product mask [0.5, 2] on pi_old / mu would keep",
    ),
    StatisticEntry(
        f"turn/{_group(TURNS)}",
        _BY_DRIFT | _means("keep_token_share"),
        "tokens of the first turn, and tokens after a tool's output: their number, KL(mu, pi_old) by k3 and kept share",
    ),
    StatisticEntry(
        f"turn/{_group(TURNS)}/rollout_ratio",
        {"mean": Reduction.MEAN, "std": Reduction.STD},
        "pi_old / mu of the tokens of the first turn, and of those after a tool's output",
    ),
    StatisticEntry(
        "staleness",
        {"mean": Reduction.MEAN, "max": Reduction.MAX},
        "number of weight versions between sampling and use: per token if versions are recorded per token, otherwise "
        "per sequence",
    ),
    StatisticEntry(
        f"staleness/{_group(STALENESS)}",
        _BY_DRIFT | _means("keep_token_share"),
        "tokens with staleness 0, 1, 2, and 3 or more: their number, KL(mu, pi_old) by k3 and kept share",
    ),
    StatisticEntry(
        "nonfinite",
        dict.fromkeys(("rollout_log_prob", "old_log_prob", "log_prob", "advantages"), Reduction.SUM),
        "number of response tokens with a non-finite value; the correction excludes tokens with a non-finite mu or "
        "pi_old, and other non-finite values stop the run",
    ),
)

SHADOW_ENTRIES: Final = (
    StatisticEntry(
        "shadow/<option>",
        _means("keep_token_share", "keep_sequence_share"),
        "share of tokens and sequences that an inactive correction would have kept",
    ),
    StatisticEntry(
        f"shadow/<option>/{_group((*SIGNS, *(f'turn/{turn}' for turn in TURNS)))}",
        _means("keep_token_share"),
        "the same by the sign of the sequence's mean advantage, and by turn",
    ),
    StatisticEntry(f"shadow/<option>/length/{_group(BUCKETS)}", _means("keep_sequence_share"), "the same by length T"),
    StatisticEntry(
        "shadow/<option>/weight",
        _means("mean", "truncated_share") | {"ess": Reduction.ESS},
        "the weight of the inactive correction, if it has one",
    ),
)


def format_markdown() -> str:
    """Format all statistics as the Markdown table of docs/metrics.md."""
    rows = (entry.format_row() for entry in (*ENTRIES, *SHADOW_ENTRIES))
    return "\n".join(("| key | meaning | reduction |", "|---|---|---|", *rows)) + "\n"
