"""Parser that converts tokens to a tree of commands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from .lexer import REDIRECTS, Lexer, Token
from .shell_values import ScriptError


@dataclass
class Simple:
    """A simple command: assignments, words, and an input, which is a here-document, a here-string, or a file name.

    Attributes:
    """

    line: int
    assignments: list[Token] = field(default_factory=list)
    words: list[Token] = field(default_factory=list)
    input: Token | None = None


@dataclass
class Test:
    """``[[ ... ]]``, or ``(( ... ))`` as one token."""

    line: int
    tokens: list[Token]


@dataclass
class Chain:
    """Commands joined by && and ||: each of ``rest`` runs if its operator matches the preceding status."""

    line: int
    first: Command
    rest: list[tuple[str, Command]]


@dataclass
class Pipeline:
    """Commands joined by |, or one command negated by !."""

    line: int
    commands: list[Command]
    negated: bool


@dataclass
class If:
    """An if command: (condition, body) of each branch, and the else branch."""

    line: int
    branches: list[tuple[list[Command], list[Command]]]
    otherwise: list[Command]


@dataclass
class Loop:
    """``for name in words``, or while and until with a condition; for ``for ((...))``, the condition is the text."""

    line: int
    body: list[Command]
    name: str = ""
    words: list[Token] = field(default_factory=list)
    condition: list[Command] = field(default_factory=list)
    until: bool = False


@dataclass
class Case:
    """A case command: (patterns, body) of each branch."""

    line: int
    subject: Token
    branches: list[tuple[list[Token], list[Command]]]


@dataclass
class CommandGroup:
    """Commands in braces, or in parentheses, which run in a subshell."""

    line: int
    body: list[Command]
    subshell: bool


@dataclass
class Function:
    """A definition of a function."""

    line: int
    name: str
    body: Command


Command = Simple | Test | Chain | Pipeline | If | Loop | Case | CommandGroup | Function

_CLOSING = {"then", "fi", "else", "elif", "do", "done", "esac", "}"}


def parse(source: str, first_line: int = 1) -> list[Command]:
    """Parse a script into commands.

    Raises:
        ScriptError: a construct is not closed, or bash syntax is not supported.
    """
    parser = _Parser(Lexer(source, first_line).tokenize())
    commands = parser.parse_commands(set())
    parser.expect_end()
    return commands


class _Parser:
    def __init__(self, tokens: list[Token]) -> None:
        self._tokens = tokens
        self._place = 0

    @property
    def _token(self) -> Token:
        return self._tokens[self._place]

    def _take(self) -> Token:
        self._place += 1
        return self._tokens[self._place - 1]

    def _is(self, *texts: str) -> bool:
        return self._token.kind in ("word", "operator") and self._token.text in texts

    def _skip(self, *, separators: bool = True) -> None:
        while self._token.kind == "newline" or (separators and self._is(";", "&")):
            self._take()

    def _expect(self, text: str, opened: int) -> None:
        if not self._is(text):
            found = f"{self._token.text!r} at line {self._token.line}"
            raise ScriptError(f"line {opened}: expected {text!r} to follow, found {found}")
        self._take()

    def expect_end(self) -> None:
        if self._token.kind != "end":
            raise ScriptError(f"line {self._token.line}: {self._token.text!r} is not expected here")

    def parse_commands(self, until: set[str]) -> list[Command]:
        found: list[Command] = []
        self._skip()
        while self._token.kind != "end" and not self._is(*until, *_CLOSING, ")", ";;"):
            found.append(self._parse_chain())
            if self._token.kind in ("word", "array") and not self._is(*until, *_CLOSING):
                raise ScriptError(f"line {self._token.line}: {self._token.text!r} is not expected here")
            self._skip()
        return found

    def _parse_chain(self) -> Command:
        line, first, rest = self._token.line, self._parse_pipeline(), []
        while self._is("&&", "||"):
            operator = self._take().text
            self._skip(separators=False)
            rest.append((operator, self._parse_pipeline()))
        return Chain(line, first, rest) if rest else first

    def _parse_pipeline(self) -> Command:
        line, negated = self._token.line, False
        while self._is("!"):
            self._take()
            negated = not negated
        commands = [self._parse_command()]
        while self._is("|", "|&"):
            self._take()
            self._skip(separators=False)
            commands.append(self._parse_command())
        return Pipeline(line, commands, negated) if negated or len(commands) > 1 else commands[0]

    def _parse_command(self) -> Command:
        token = self._token
        if token.kind == "arithmetic":
            return Test(token.line, [self._take()])
        if token.kind == "word":
            readers: dict[str, Callable[[], Command]] = {
                "if": self._parse_if,
                "for": self._parse_for,
                "while": self._parse_while,
                "until": self._parse_while,
                "case": self._parse_case,
                "[[": self._parse_test,
                "{": self._parse_group,
                "function": self._parse_function,
            }
            if token.text in readers:
                return self._skip_redirects(readers[token.text]())
            following = self._tokens[self._place + 1]
            if following.kind == "operator" and following.text == "(":
                return self._parse_function()
        if self._is("("):
            return self._skip_redirects(self._parse_group())
        return self._parse_simple()

    def _skip_redirects(self, command: Command) -> Command:
        while self._is(*REDIRECTS) or (self._token.kind == "word" and self._token.text.isdigit()):
            self._parse_redirect(Simple(command.line))
        return command

    def _parse_simple(self) -> Simple:
        command, redirected = Simple(self._token.line), False
        while self._token.kind in ("word", "array") or self._is(*REDIRECTS):
            if self._is(*REDIRECTS):
                redirected = True
                self._parse_redirect(command)
                continue
            token = self._take()
            next_is_redirect = self._is(*REDIRECTS)
            if token.kind == "word" and token.text.isdigit() and next_is_redirect:
                continue  # 2>
            if not command.words and (token.kind == "array" or is_assignment(token.text)):
                command.assignments.append(token)
            else:
                command.words.append(token)
        if not command.words and not command.assignments and command.input is None and not redirected:
            raise ScriptError(f"line {self._token.line}: {self._token.text!r} is not expected here")
        return command

    def _parse_redirect(self, command: Simple) -> None:
        if not self._is(*REDIRECTS):
            self._take()
            return
        operator = self._take()
        if operator.text in ("<<", "<<-"):
            command.input = operator
        else:
            target = self._take()
            if operator.text in ("<<<", "<"):
                command.input = Token("operator", operator.text, operator.line, [target])

    def _parse_if(self) -> If:
        line = self._take().line
        branches = []
        while True:
            condition = self.parse_commands({"then"})
            self._expect("then", line)
            branches.append((condition, self.parse_commands({"elif", "else", "fi"})))
            if self._is("elif"):
                self._take()
                continue
            break
        otherwise = []
        if self._is("else"):
            self._take()
            otherwise = self.parse_commands({"fi"})
        self._expect("fi", line)
        return If(line, branches, otherwise)

    def _parse_for(self) -> Loop:
        line = self._take().line
        name, words = self._take(), []
        self._skip(separators=False)
        if self._is("in"):
            self._take()
            while self._token.kind == "word":
                words.append(self._take())
        elif name.kind == "word":
            words = [Token("word", '"$@"', line)]
        self._skip()
        self._expect("do", line)
        body = self.parse_commands({"done"})
        self._expect("done", line)
        if name.kind != "arithmetic":
            return Loop(line, body, name=name.text, words=words)
        return Loop(line, body, condition=[Test(line, [name])])

    def _parse_while(self) -> Loop:
        token = self._take()
        condition = self.parse_commands({"do"})
        self._expect("do", token.line)
        body = self.parse_commands({"done"})
        self._expect("done", token.line)
        return Loop(token.line, body, condition=condition, until=token.text == "until")

    def _parse_case(self) -> Case:
        line = self._take().line
        subject, branches = self._take(), []
        self._skip()
        self._expect("in", line)
        self._skip()
        while not self._is("esac"):
            if self._is("("):
                self._take()
            patterns = [self._take()]
            while self._is("|"):
                self._take()
                patterns.append(self._take())
            self._expect(")", line)
            branches.append((patterns, self.parse_commands({"esac"})))
            if self._is(";;"):
                self._take()
            self._skip()
        self._take()
        return Case(line, subject, branches)

    def _parse_test(self) -> Test:
        line, tokens = self._take().line, []
        while not self._is("]]"):
            if self._token.kind == "end":
                raise ScriptError(f"line {line}: [[ is not closed")
            tokens.append(self._take())
        self._take()
        return Test(line, [token for token in tokens if token.kind != "newline"])

    def _parse_group(self) -> CommandGroup:
        opened = self._take()
        closer = "}" if opened.text == "{" else ")"
        body = self.parse_commands({closer})
        self._expect(closer, opened.line)
        return CommandGroup(opened.line, body, subshell=closer == ")")

    def _parse_function(self) -> Function:
        token = self._take()
        name = self._take().text if token.text == "function" else token.text
        if self._is("("):
            self._take()
            self._expect(")", token.line)
        self._skip(separators=False)
        return Function(token.line, name, self._parse_command())


def is_assignment(text: str) -> bool:
    """Return True if an unexpanded word assigns: name=..., name+=..., name[index]=..."""
    name, equals, _ = text.partition("=")
    name = name.removesuffix("+")
    return bool(equals) and (name.isidentifier() or (name.partition("[")[0].isidentifier() and name.endswith("]")))
