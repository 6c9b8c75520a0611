"""One table of what is hidden and what is not, for everything that is written for display."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path
from pprint import pprint
from typing import Any

import pytest
from omegaconf import OmegaConf

from recipe.offpolicy import report
from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.extensions.add_on import Extension
from recipe.offpolicy.extensions.add_ons import AddOns
from recipe.offpolicy.fault_tolerance.checkpoints import guard_save
from recipe.offpolicy.fault_tolerance.redaction import HIDDEN, RedactedStream, redact, redact_streams, redact_text
from recipe.offpolicy.recording.run import RunRecord
from tests.support.applications import NEEDED, application
from tests.support.paths import ROOT

BY_KEY: dict[str, Any] = {
    "wandb_token": "x",
    "api-key": "x",
    "aws_access_key_id": "x",
    "secret_file": "/s",
    "pwd": 12345678,
    "credentials": {"user": "u", "key": "k"},
    "Authorization": "Basic dTpw",
    "set-cookie": "x",
    "bearer": "x",
    "github_pat": "x",
    "db_pw": "x",
    "api_tok": "x",
    "headers": {"X-Team": "not-a-variable"},
}
NOT_BY_KEY: dict[str, Any] = {
    "eos_token": "</s>",
    "token_level": "sequence",
    "tis_token": {"upper": 2.0},
    "tokenizer": "/models/small",
    "key": "actor_rollout_ref.actor.strategy",
    "use_auth": True,
    "num_tok": "auto",
    "commit": "0123456789abcdef" * 2 + "01234567",
    "headers": {"X-Team": "TEAM", "X-Key": "KEY_2"},
    "password": None,
}
IN_TEXT = [
    ("Bearer sk-live-abcdef", f"Bearer {HIDDEN}"),
    ("https://user:pass@host:80/path", f"https://{HIDDEN}@host:80/path"),
    ("user:pass@k:80 user:pass@10.0.0.1", f"{HIDDEN}@k:80 {HIDDEN}@10.0.0.1"),
    ("https://user:p@ss@host/a@b", f"https://{HIDDEN}@host/a@b"),
    ("https://hooks.slack.com/services/T0/B0/xyz", f"https://hooks.slack.com/{HIDDEN}"),
    ("opd.teacher.headers={X-Team: abc-1, X-Key: KEY}", f"opd.teacher.headers={HIDDEN}"),
    ("sk-proj-abcdefghijkl", HIDDEN),
    ("use ghp_abcdefghijklmnopqrst1234.", f"use {HIDDEN}."),
    ("hf_abcdefghijklmnopqrstuvwxyz", HIDDEN),
    ("trainer.wandb_token=abc", f"trainer.wandb_token={HIDDEN}"),
    ("++trainer.password=two words, and 'more'", f"++trainer.password={HIDDEN}"),
    ("+logging={token: abc, level: 3}", f"+logging={{token: {HIDDEN}, level: 3}}"),
    ('{"github_token": "abc", "n": 1}', f'{{"github_token": "{HIDDEN}", "n": 1}}'),
    ("trainer.pwd='a b': unknown key.", f"trainer.pwd={HIDDEN}: unknown key."),
    ("+ray_kwargs.ray_init.runtime_env.env_vars={WANDB_API_KEY: abc, HOME: /root}",
     f"+ray_kwargs.ray_init.runtime_env.env_vars={{WANDB_API_KEY: {HIDDEN}, HOME: /root}}"),
    ("curl -H X-Api-Key:abc", f"curl -H X-Api-Key:{HIDDEN}"),
    ("serve --api-key abc --port 80", f"serve --api-key {HIDDEN} --port 80"),
    ("opd.teacher.url=http://user:secret@host:8100/v1", f"opd.teacher.url=http://{HIDDEN}@host:8100/v1"),
    ("wandb login " + "0123456789" * 4, f"wandb login {HIDDEN}"),
    ("proxy: Basic dXNlcjpwYXNz", f"proxy: Basic {HIDDEN}"),
    ("login: pw=abc, tok=def", f"login: pw={HIDDEN}, tok={HIDDEN}"),
    ("https://api.telegram.org/bot12:Ab-c/send", f"https://api.telegram.org/bot{HIDDEN}/send"),
    ('{\\"api_key\\": \\"abc\\"}', f'{{\\"api_key\\": \\"{HIDDEN}\\"}}'),
    ("Cookie: a=abc; b=def", f"Cookie: {HIDDEN}"),
    ("wandb.login(key='abc')", f"wandb.login(key={HIDDEN})"),
    ("curl -sSu user:hunter2 https://h/x", f"curl -sSu {HIDDEN} https://h/x"),
    ("SharedAccessSignature sr=x&sig=ab%3D&se=1", f"SharedAccessSignature sr=x&sig={HIDDEN}&se=1"),
    ("sig=" + "aB3%2F" * 8, f"sig={HIDDEN}"),
    ("login failed: the password is hunter2", f"login failed: the password is {HIDDEN}"),
    ("-----BEGIN PRIVATE KEY-----\nab/c\n-----END PRIVATE KEY-----",
     f"-----BEGIN PRIVATE KEY-----{HIDDEN}-----END PRIVATE KEY-----"),
]  # fmt: skip
NOT_IN_TEXT = [
    "INFO:2026-11-27 15:53:23,964:pass@k LIVE on 48 sequences",
    "correction=[tis_token,gsm]",
    "+correction.masks.token={ratio: rollout, level: token, upper: 1.01}",
    "ppo_max_token_len_per_gpu=${x.y}",
    "trainer.token=null",
    "https://host/path@v1",
    "python -u user:mod",
    "the password is wrong",
    "hf_transformer_config_override",
    "serve --tokenizer-path /a --prompt-key prompt",
    "commit " + "0123456789" * 4,
    "opd.teacher.headers={Authorization: TEACHER_AUTH}",
    "actor/checksum: " + "0123456789" * 4,
    "sha256:" + "0123456789abcdef" * 4,
    "http://127.0.0.1:8100, http://localhost:8100",
    "masks.opsm_token: it rejects nothing",
]


@pytest.mark.parametrize(("key", "value"), BY_KEY.items())
def test_hidden_by_key(key: str, value: Any) -> None:
    assert redact({"a": [{key: value}]}) == {"a": [{key: HIDDEN}]}


@pytest.mark.parametrize(("key", "value"), NOT_BY_KEY.items())
def test_kept_under_its_key(key: str, value: Any) -> None:
    assert redact({key: value}) == {key: value}


@pytest.mark.parametrize(("text", "shown"), IN_TEXT)
def test_hidden_in_text(text: str, shown: str) -> None:
    assert redact_text(text) == shown
    assert redact([text, {"x": text}]) == [shown, {"x": shown}]
    assert redact_text(shown) == shown


@pytest.mark.parametrize("text", NOT_IN_TEXT)
def test_kept_in_text(text: str) -> None:
    assert redact_text(text) == text


def test_what_is_named_beside_its_value() -> None:
    """Environment entries as Kubernetes lists them, and flags of a program."""
    assert redact([{"name": "HF_TOKEN", "value": "abc"}, {"name": "HOME", "value": "/root"}]) == [
        {"name": "HF_TOKEN", "value": HIDDEN},
        {"name": "HOME", "value": "/root"},
    ]
    assert redact(["--api-key", "abc", "--steps", "3"]) == ["--api-key", HIDDEN, "--steps", "3"]


def test_values_of_secret_environment_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "abcdef123456")
    monkeypatch.setenv("SHORT_KEY", "abc")
    monkeypatch.setenv("PWD", "/runs/somewhere")
    given = {"a": "x abcdef123456 y", "b": "abc", "c": "/runs/somewhere/else"}
    assert redact(given) == {"a": f"x {HIDDEN} y", "b": "abc", "c": "/runs/somewhere/else"}


@pytest.mark.slow
def test_nothing_of_verls_own_configuration_is_hidden() -> None:
    with application(*NEEDED) as config:
        values = OmegaConf.to_container(config)
    assert redact(values) == values


def test_what_is_printed_is_redacted_by_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name and its value printed one by one, a secret cut in two, and many lines at once."""
    target = io.StringIO()
    monkeypatch.setattr(sys, "stdout", target)
    redact_streams()
    redact_streams()
    pprint({"pw": "ab" * 40, "url": "http://user:secret@host"})
    sys.stdout.write("hf_abcdefghijkl")
    sys.stdout.writelines(["mnopqrstuvwxyz\n", "open"])
    assert target.getvalue().splitlines() == [f"{{'pw': {HIDDEN},", f" 'url': 'http://{HIDDEN}@host'}}", HIDDEN]
    sys.stdout.flush()
    assert target.getvalue().endswith(f"{HIDDEN}\nopen")
    assert isinstance(sys.stdout, RedactedStream)
    assert not sys.stdout.isatty()


@pytest.mark.slow
def test_a_check_prints_no_secret_of_the_teachers_address(capfd: pytest.CaptureFixture[str]) -> None:
    """The start-up checks name an address that does not answer."""
    address = "opd.teacher.url=http://user:hunter2@127.0.0.1:9"
    command = ["recipe.offpolicy.main_offpolicy", "--check", *NEEDED, "opd=loss", address]
    subprocess.run([sys.executable, "-m", *command], cwd=ROOT, check=False)
    printed = "".join(capfd.readouterr())
    assert "127.0.0.1:9" in printed
    assert "hunter2" not in printed


def test_every_command_line_prints_redacted_json(capfd: pytest.CaptureFixture[str]) -> None:
    """The output goes through the one entry point of all commands; JSON stays JSON."""
    code = """
import json, sys
from recipe.offpolicy.command_line import run
print_it = lambda: print(json.dumps({"api_key": 'a"hunter2', "n": {"url": "http://u:hunter2@h"}}))
sys.exit(run(print_it) or "http://u:hunter2@h")
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False)
    printed = capfd.readouterr()
    assert json.loads(printed.out) == {"api_key": HIDDEN, "n": {"url": f"http://{HIDDEN}@h"}}
    assert printed.err == f"http://{HIDDEN}@h\n"


@pytest.mark.slow
def test_no_file_of_a_run_holds_a_secret(tmp_path: Path) -> None:
    """The card of a recording, a checkpoint's record, and the report of a card into which an editor has put a
    secret.
    """
    secrets = {"api_key": "hunter2", "url": "http://user:hunter2@host", "command": "curl -u user:hunter2 host"}
    planted = [f"++trainer.of_mine.{name}='{value}'" for name, value in secrets.items()]
    places = [f"offpolicy.record.dir={tmp_path / 'rec'}", f"trainer.default_local_dir={tmp_path / 'checkpoints'}"]
    hooks = AddOns([Extension("mine", secrets)])
    with application("correction=gsm", *planted, *places, *NEEDED) as config:
        spec = CorrectionSpec()
        RunRecord(config, spec, {}, {"mine": secrets})
        (tmp_path / "checkpoints/global_step_1").mkdir(parents=True)
        with guard_save(config, 1, spec, extensions=hooks.state):
            pass
        old = {"mine": {"settings": secrets, "state": {}}}
        assert hooks.differences(old) == hooks.differences(hooks.state(tmp_path)) == []
    recording = tmp_path / "healthy-10"
    shutil.copytree(ROOT / "tests/data/faults/held_out/healthy-10", recording)
    card = json.loads((recording / "run.json").read_text())
    card["config"] = {"of_mine": secrets}
    (recording / "run.json").write_text(json.dumps(card))
    assert report.main([str(recording), "--out", str(tmp_path / "report.html")]) == 0
    (recording / "run.json").unlink()
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"run.json", "offpolicy.json", "report.html"} <= {path.name for path in written}
    assert [path for path in written if b"hunter2" in path.read_bytes()] == []
    for name in ("run.json", "offpolicy.json"):
        (path,) = (path for path in written if path.name == name)
        assert HIDDEN in path.read_text()
