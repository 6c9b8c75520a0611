"""The alarm on the overlap of teacher and student, with policies that were trained on one task."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor

from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.extensions.opd.distillation import OnPolicyDistillation
from recipe.offpolicy.monitor.alarm_settings import DEFAULTS
from recipe.offpolicy.monitor.alarms import AlarmError, Alarms
from tests.support import small_policies as sp
from tests.support.fake_teacher import FakeTeacher, serving

PROMPTS, ROLLOUTS, UPDATES = 6, 4, 3
OTHER_WORDS = [(5 * word + 3) % sp.WORDS for word in range(sp.WORDS)]
"""The word that a teacher with a permuted vocabulary has under each id."""


@cache
def student() -> sp.Policy:
    return sp.train(mistakes=0.15)


@cache
def near() -> sp.Policy:
    """The student's better sibling: another seed, and few mistakes."""
    return sp.train(mistakes=0.005, seed=1)


def score_permuted(ids: Sequence[int]) -> list[float]:
    return near().score([OTHER_WORDS[token] for token in ids])


@cache
def of_another_template() -> sp.Policy:
    return sp.train(mistakes=0.005, template=sp.other_template, seed=1)


TEACHERS = {
    "near": lambda ids: near().score(ids),
    "permuted vocabulary": score_permuted,
    "other template": lambda ids: of_another_template().score(ids),
}


@dataclass
class Batch:
    """Rollouts of the student, all of four tokens; a ``BatchView``."""

    prompts: list[list[int]]
    responses: list[list[int]]
    rewards: list[float]
    step: int = 1

    @classmethod
    def sample(cls, seed: int) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        made = cls([], [], [])
        while len(made.prompts) < PROMPTS * ROLLOUTS:
            letters = torch.randint(sp.LETTERS[0], sp.WORDS, (sp.LETTERS_OF_A_PROMPT,), generator=generator).tolist()
            prompt = sp.own_template(letters)
            for _ in range(ROLLOUTS):
                response = student().sample(prompt, generator)
                made.rewards.append(float(response == sp.answer(letters)))
                made.prompts.append(prompt)
                made.responses.append((response + [sp.END] * 4)[:4])
        return made

    @property
    def keys(self) -> list[str]:
        return [str(row) for row in range(len(self.prompts))]

    @property
    def uids(self) -> list[str]:
        return [str(row // ROLLOUTS) for row in range(len(self.prompts))]

    @property
    def sessions(self) -> list[str]:
        return [str(row) for row in range(len(self.prompts))]

    @property
    def is_padding(self) -> list[bool]:
        return [False] * len(self.prompts)

    @property
    def scores(self) -> Tensor:
        return torch.nn.functional.pad(torch.tensor(self.rewards)[:, None], (3, 0))

    @property
    def token_ids(self) -> list[tuple[list[int], list[int]]]:
        return list(zip(self.prompts, self.responses, strict=True))

    def rows(self, *names: str) -> dict[str, Any]:
        whole = [student().score([*prompt, *response])[-4:] for prompt, response in self.token_ids]
        columns = {
            "responses": torch.tensor(self.responses),
            "old_log_probs": torch.tensor(whole),
            "response_mask": torch.ones(len(whole), 4, dtype=torch.int64),
        }
        return {name: columns[name] for name in names}

    def put(self, **columns: Tensor) -> None:
        pass


def extreme_shares(teacher: str) -> list[float]:
    # Trained before the server's threads ask for them at once.
    student(), near(), of_another_template()
    with serving(FakeTeacher(score=TEACHERS[teacher])) as serves:
        settings = {"mode": "loss", "teacher": {"url": serves.url}, "eligible": {"max_pass_rate": 0.75}}
        opd = OnPolicyDistillation("opd", settings)
        opd.begin(None)  # type: ignore[arg-type]
        found = []
        for update in range(UPDATES):
            batch = Batch.sample(update)
            opd.on_rollout(batch)
            assert opd.shape_advantages(batch, torch.zeros(len(batch.prompts), 4)) is None
            found.append(opd.metrics()["opd/gap/extreme_share"])
        opd.end()
    return found


def alarms(**changes: Any) -> Alarms:
    values = {name: {"action": "off"} for name in DEFAULTS} | {"opd_overlap": changes}
    return Alarms(OmegaConf.create({"offpolicy": {"alarms": values}, "opd": {"mode": "loss"}}))


@pytest.mark.parametrize("teacher", TEACHERS)
def test_a_teacher_of_other_words_or_prompts_raises_it(teacher: str, caplog: pytest.LogCaptureFixture) -> None:
    """With the start-up checks left out, which refuse both."""
    shares = extreme_shares(teacher)
    made = alarms()
    with caplog.at_level(logging.WARNING, logger="verl.offpolicy"):
        for share in shares:
            made.judge(CorrectionSpec(), {}, {"opd/gap/extreme_share": share})
    if teacher == "near":
        assert max(shares) < 0.3
        assert made.metrics()["alarm/opd_overlap"] == 0
        assert caplog.text == ""
    else:
        assert min(shares) > 0.5
        assert made.metrics()["alarm/opd_overlap"] == 1
        assert "alarm opd_overlap: opd/gap/extreme_share was" in caplog.text


def test_stopped_by_it_a_run_says_how_to_go_on() -> None:
    made = alarms(action="stop", patience=1)
    with pytest.raises(AlarmError, match=r"opd_overlap: opd/gap/extreme_share was 0\.9 in an.*fix the cause.*If"):
        made.judge(CorrectionSpec(), {}, {"opd/gap/extreme_share": 0.9})
