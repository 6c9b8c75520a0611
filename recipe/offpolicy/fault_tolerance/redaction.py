"""Replaces secrets with ``(hidden)`` in everything that is printed or written.

A secret is recognised by its key (``wandb_token``, ``api-key``), by its form (``Bearer ...``, user and password in a
URL, a web hook, the prefix of a known issuer), or because it is the value of an environment variable with such a name.

40 hexadecimal digits may be a Weights & Biases key or a git revision. They are hidden unless the preceding text
contains revision, commit, sha or a similar word, or ends in / or @.
"""

from __future__ import annotations

import base64
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping
from threading import RLock
from typing import IO, Any

HIDDEN = "(hidden)"
_hidden_values: set[str] = set()
_SHORTEST = 8
"""Minimum length of an environment variable's value that is searched for; shorter values would occur by chance."""

_ALWAYS = re.compile(
    r"(?:^|_)(?:secrets?|passw\w*|passphrases?|pwd|pw|pswd|cred(?:ential)?s?|authorization|cookies?|webhooks?|web_hooks?|"
    r"shared_access_signatures?|"
    r"(?:api|access|priv|private|auth|bearer|signing|encryption)_?(?:keys?|tokens?|toks?))(?:_|$)"
)
"""Names that hide their value, and everything under them, at any position in a dotted key."""
_LAST = re.compile(r"(?:^|_)(?:(?P<before>[a-z0-9]+)_)?(?P<kind>token|tok|key|auth|pass|pat|jwt|bearer)$")
"""Names of secrets in text. The word before such a name distinguishes it from vocabulary tokens and table columns."""
_NO_SECRET = {
    "token": re.compile(
        r"[be]os|pad|unk|sep|cls|mask|stop|start|end|begin|first|last|next|image|video|audio|vision|think|special|"
        r"prompt|response|max|min|per|[tm]is|opsm"
    ),
    "key": re.compile(
        r"prompt|response|messages?|tools|image|video|audio|modal|teacher|fn|model|source|thinking|answer|label|text|"
        r"data|info|index|group|sort|metric|full"
    ),
}
_NO_SECRET["tok"] = re.compile(rf"{_NO_SECRET['token'].pattern}|num|n|new|out|in|sec|s|ms|micro")
_NO_TEXT = re.compile(r"(?i:null|none|true|false)|[-+]?[\d._]+(?:e[-+]?\d+)?|\{.*", re.DOTALL)
_SHAPES = re.compile(
    r"(?<=://)[^/\s'\"]+(?=@)|(?<=://)[^/\s:'\"]+:(?!\d*/)[^\s'\"@?]+(?=@[\w.-]+(?:[:/]|$))"
    r"|(?<=(?<![:\w])//)[^/\s:'\"]+:[^/\s'\"]+(?=@)|(?<=%3A%2F%2F)(?:(?!%2F|%40)[\w.%~+-])+(?=%40)"
    # k or a number after @ is part of a metric and not a host, as in verl's log line 12:00:00,123:pass@k.
    r"|(?<![\w/.+-])[\w.+-]+:[^\s:@/'\",]+(?=@(?!sha256|(?:k|\d{1,4})(?![\w.:-]))[A-Za-z0-9])"
    r"|(?<=hooks\.slack\.com/)[\w/-]+|(?<=/webhooks/)[\w/-]+|(?<=/webhook/)(?!send\?)[\w/@-]+|(?<=/v2/hook/)[\w-]+"
    r"|(?P<user>\bcurl\b[^\n|;&]{0,300}?[\s'\"](?:-[a-zA-Z]*u|--(?:proxy-)?user)[\s'\",=]*)[^\s:'\",]+:[^\s'\",]+"
    r"|(?P<said>\b(?i:passw\w*|passphrase)\s+(?:is|was)\s+['\"]?)(?=\S*\d)[^\s'\",;]{6,}"
    r"|(?P<signed>(?<![\w-])sig=)[\w%+/=-]{16,}"
    r"|(?P<query>[?&](?:key|sig|code|(?i:[\w-]*signature))=)[^\s&'\"#]+"
    r"|(?<=api\.telegram\.org/bot)\d+:[\w-]+|(?P<login>\blogin\(\s*key=\s*|\blogin\s+\S+\s+password\s+)[^\s,()]+"
    r"|(?P<cookie>\b(?i:cookie)['\"]?\s*:\s*['\"]?)[^\n'\"]+"
    r"|(?P<scheme>\b(?i:bearer|authorization['\"]?\s*[:=]\s*['\"]?(?:basic|token|digest))[\\\s]+)[\w.~+/=-]+"
    r"|(?P<basic>\b[Bb]asic\s+)(?P<pair>[A-Za-z0-9+/]{6,}={0,2})(?![\w+/=])"
    r"|(?<![0-9A-Za-z])(?P<digits>[0-9a-f]{40})(?![\w-])"
    r"|(?<=PRIVATE KEY-----)[\w\s+/=\\]+"
    r"|(?<![\w-])(?:c?sk-[\w-]{12,}|[rs]k_(?:live|test)_\w{12,}|dckr_pat_[\w-]{16,}|shp[a-z]{2}_[0-9a-f]{32}|"
    r"ATATT3x[\w=-]{20,}|hv[sb]\.[\w-]{20,}|dp\.[a-z]{2,5}\.[\w-]{20,}|lsv2_(?:pt|sk)_\w{20,}|npm_[A-Za-z0-9]{20,}|AIza[\w-]{30,}|gh[oprsu]_[A-Za-z0-9]{20,}|"
    r"github_pat_\w{20,}|gl[a-z]{2,4}-[\w-]{16,}|glpat-[\w-]{12,}|hf_[A-Za-z0-9]{20,}|api_org_[A-Za-z0-9]{20,}|"
    r"xox[a-z]-[\w-]{8,}|xapp-[\w-]{8,}|nvapi-[\w-]{8,}|dapi[0-9a-f]{16,}(?:-\d+)?|SG\.[\w-]{8,}\.[\w-]{8,}|"
    r"wandb_v\d_\w{16,}|(?:gsk|r8|xai|fw|tgp|dop|pplx|tvly|nvcf|pypi|whsec|lin_api|ntn)[_-](?=\w*\d)[\w-]{20,}|ya29\.[\w-]{16,}|"
    r"AGE-SECRET-KEY-1\w{20,}|A[KS]IA[0-9A-Z]{16}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
)
_KEPT = ("scheme", "basic", "query", "login", "cookie", "user", "said", "signed")
"""Groups that match the visible text before a secret."""
_SHA = re.compile(r"[0-9a-f]{40}")
_REVISION = re.compile(
    r"commit|sha|rev|git|hash|digest|checksum|fingerprint|snapshot|tree|branch|merge|parent|head\b|tag\b|[@/]$", re.I
)
_OVERRIDE = re.compile(r"(?P<name>[+~-]*[\w./@:-]+)=(?P<value>(?:(?!: ).)*)", re.DOTALL)
"""The value may contain spaces. In a message about a secret, the text after a colon is not hidden."""
_PAIR = re.compile(
    r"(?P<name>(?<![\w.-])[A-Za-z_][\w.-]*)(?P<between>=|\\*['\"]?\s*:(?!//)\s*)"
    r"(?P<value>b?\"(?:[^\"\\]|\\.)*\"|b?'[^']*'|\\+\"[^\"]*\"|[^\s,;&{}\[\]()'\"]+(?<!:))"
)
_QUOTE = re.compile(r'\\*"')
_TUPLE = re.compile(
    r"(?P<name>(?<=\(['\"])[\w-]+|(?<=\(b['\"])[\w-]+)(?P<between>['\"]\s*,\s*)(?P<value>b?(?:'[^']*'|\"[^\"]*\"))"
)
"""A header printed as a Python pair. Pairs may also contain levels and kinds, such as token, which are not headers."""
_VARIABLE = re.compile(r"[A-Z]+(?:_[A-Z\d]+)+")
"""Name of an environment variable that contains a secret, such as a variable in ``opd.teacher.headers``."""
_NAME = r"[A-Z][A-Z\d_]*"
"""Usual form of an environment variable's name; a key or password rarely has this form."""
_NAMED_HEADERS = re.compile(r"(?P<before>\bheaders\\*['\"]?\s*[=:]\s*)(?P<value>\{[^{}]*\})")
_HEADERS = re.compile(rf"\{{(?:\s*['\"]?[\w-]+['\"]?\s*:\s*['\"]?{_NAME}['\"]?\s*,?)*\s*\}}")
_FLAG = re.compile(
    r"(?P<name>--[\w-]+)(?P<between>=['\"]?|\s+|['\"]?\s*,\s*['\"]?)(?P<value>[^\s,;\[\]'\"-][^\s,;\[\]'\"]*)"
)
"""``--token abc`` or ``--token=abc``, in a command or a list of its arguments."""


def redact(value: Any) -> Any:
    """Redact the secrets in ``value``, including nested mappings and lists; values other than text are unchanged."""
    return _hidden(value, _of_environment())


def redact_text(text: str) -> str:
    """Redact the secrets in a text, for example in a message or a Hydra override."""
    return _text(text, _of_environment())


def show_variable(name: str) -> str:
    """Show the name of an environment variable, unless the name may itself be a secret that was given by mistake."""
    return name if re.fullmatch(_NAME, name) else HIDDEN


def hide(secret: str) -> None:
    """From now on, redact this value and its last word wherever either occurs in this process."""
    _hidden_values.update(each for each in (secret, secret.split(" ")[-1]) if len(each) >= _SHORTEST // 2)


def redact_streams() -> None:
    """From now on, redact everything that this process prints. Idempotent."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, RedactedStream):
            setattr(sys, name, RedactedStream(stream))


class RedactedStream:
    """A text stream that redacts complete lines, because a name and its value may be written separately."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._line = ""
        self._lock = RLock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._lock:
            self._line += text
            end = max(self._line.rfind("\n"), self._line.rfind("\r")) + 1
            self._emit(end)
        return len(text)

    def flush(self) -> None:
        with self._lock:
            self._emit(len(self._line))
            self._stream.flush()

    def _emit(self, end: int) -> None:
        ready, self._line = self._line[:end], self._line[end:]
        if ready:
            self._stream.write(ready if ready.isspace() else redact_text(ready))

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)


def _is_secret(key: str, value: Any) -> bool:
    """Return True if the (dotted) name ``key`` makes ``value`` a secret; empty values and flags are not secret."""
    if isinstance(value, bool) or value in (None, "", [], {}, HIDDEN, "null"):
        return False
    names = [_words(part) for part in re.split(r"[./@]", key)]
    if re.fullmatch(r"authorization|x_.*", names[-1]) and isinstance(value, str) and _VARIABLE.fullmatch(value):
        return False
    # A name without quotes may be part of prose, as in "headers: none".
    if names[-1] == "headers" and isinstance(value, Mapping if len(names) == 1 else str):
        return not _HEADERS.fullmatch(value if isinstance(value, str) else json.dumps(dict(value), default=str))
    if any(map(_ALWAYS.search, names)):
        return True
    found = _LAST.search(names[-1])
    if found is None or not isinstance(value, str) or _NO_TEXT.fullmatch(value):
        return False
    kind, before = found["kind"], found["before"]
    if before is None:
        return kind != "key"
    return kind not in _NO_SECRET or not _NO_SECRET[kind].fullmatch(before)


def _words(name: str) -> str:
    """Convert ``accessToken`` and ``access-token`` to ``access_token``."""
    return re.sub(r"[^a-z0-9]+", "_", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()).strip("_")


def _of_environment() -> tuple[str, ...]:
    """List the values of environment variables with secret names, and the values given to ``hide``, longest first."""
    named = ((name, value) for name, value in os.environ.items() if name != "PWD")
    found = {value for name, value in named if len(value) >= _SHORTEST and _is_secret(name, value)}
    return tuple(sorted(found | _hidden_values, key=len, reverse=True))


def _hidden(value: Any, known: tuple[str, ...]) -> Any:
    if isinstance(value, Mapping):
        named = next((value[name] for name in ("key", "name") if isinstance(value.get(name), str)), "")
        return {
            key: HIDDEN
            if _is_secret(str(key), each) or (key == "value" and _is_secret(named, each))
            else each
            if isinstance(each, str) and _SHA.fullmatch(each) and _REVISION.search(str(key))
            else _hidden(each, known)
            for key, each in value.items()
        }
    if isinstance(value, list | tuple):
        return [
            HIDDEN if _is_flag(flag) and isinstance(each, str) and _is_secret(flag, each) else _hidden(each, known)
            for flag, each in zip(("", *value), value, strict=False)
        ]
    return _text(value, known) if isinstance(value, str) else value


def _is_flag(value: Any) -> bool:
    return isinstance(value, str) and value.startswith("--") and "=" not in value


def _text(text: str, known: tuple[str, ...]) -> str:
    for secret in known:
        text = text.replace(secret, HIDDEN)
    text = _NAMED_HEADERS.sub(_headers, text)
    override = _OVERRIDE.fullmatch(text)
    if override and _is_secret(override["name"], override["value"]):
        return f"{override['name']}={HIDDEN}"
    return _TUPLE.sub(_tuple, _FLAG.sub(_pair, _PAIR.sub(_pair, _SHAPES.sub(_shape, text))))


def _headers(found: re.Match[str]) -> str:
    if _HEADERS.fullmatch(found["value"]):
        return found[0]
    quote = (_QUOTE.search(found["value"]) or [""])[0]
    return f"{found['before']}{quote}{HIDDEN}{quote}"


def _shape(found: re.Match[str]) -> str:
    if found["digits"]:
        near = found.string[max(found.start() - 24, 0) : found.start()]
        return found[0] if _REVISION.search(near) else HIDDEN
    if found["basic"] and not _is_user_and_password(found["pair"]):
        return found[0]
    before = next((found[name] for name in _KEPT if found[name]), "")
    return f"{before}{HIDDEN}"


def _is_user_and_password(encoded: str) -> bool:
    try:
        return b":" in base64.b64decode(encoded, validate=True)
    except ValueError:
        return False


def _pair(found: re.Match[str]) -> str:
    secret = _is_secret(found["name"], found["value"].strip("'\"\\"))
    # In JSON, the quotes are kept. The value may itself be a pair, as in "login: pw=abc".
    quote = next((part for part in (_QUOTE.match(found["value"]), _QUOTE.match(found["between"])) if part), [""])[0]
    value = f"{quote}{HIDDEN}{quote}" if secret else _PAIR.sub(_pair, found["value"])
    return f"{found['name']}{found['between']}{value}"


def _tuple(found: re.Match[str]) -> str:
    return _pair(found) if _ALWAYS.search(_words(found["name"])) else found[0]
