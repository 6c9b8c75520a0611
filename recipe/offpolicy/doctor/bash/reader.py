"""Follows a script's commands without running its programs, and notes what it would launch."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .builtin import BUILTINS, DECLARING
from .conditions import Condition, Truth
from .grammar import Case, Chain, Command, Function, Group, If, Loop, Pipeline, Simple, Test, assigns, parsed
from .lexer import Token
from .programs import (
    LARGEST,
    answer_of,
    importable,
    imported,
    is_lookup,
    looks_only,
    output_of,
    python_code,
    script_of,
    short,
    text_of,
)
from .values import Breaks, Ends, Field, ScriptError, State, Unknown
from .words import Words
from .written import under, written

_ROUNDS = 1000
_DEPTH = 20


@dataclass(frozen=True)
class Called:
    """A program that the script would run.

    Attributes:
        words: the program and its arguments.
        line: of the script.
        doubt: why it is not known whether it would run at all.
    """

    words: tuple[Field, ...]
    line: int
    doubt: Unknown | None = None


class Reader:
    """Reads commands in a state; ``calls`` are the programs that were met, in order."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.calls: list[Called] = []
        self._doubt: Unknown | None = None
        self._depth = 0
        self.printed: list[Field] | None = None  # of a substitution
        self.end: Ends | None = None  # by which the script itself ended

    def script(self, source: str, first_line: int = 1) -> None:
        """Reads a script to its end or to where it ends itself.

        Raises:
            ScriptError: a form of bash that is not read.
        """
        try:
            self.run(parsed(source, first_line))
        except Ends as end:
            self.end = end

    @property
    def _words(self) -> Words:
        return Words(self.state, self._substituted)

    def run(self, commands: list[Command]) -> Truth:
        status: Truth = True
        for command in commands:
            status = self._command(command)
        return status

    def _command(self, command: Command) -> Truth:
        match command:
            case Simple():
                return self._simple(command)
            case Test():
                return self._test(command)
            case Chain():
                return self._chain(command)
            case Pipeline():
                return self._pipeline(command)
            case If():
                return self._if(command)
            case Loop():
                return self._for(command) if command.name else self._while(command)
            case Case():
                return self._case(command)
            case Group():
                return self._group(command)
            case Function():
                self.state.functions[command.name] = command.body
                return True

    # Commands that choose ---------------------------------------------------------------------------------------

    def _chain(self, chain: Chain) -> Truth:
        status = self._command(chain.first)
        for operator, command in chain.rest:
            if isinstance(status, Unknown):
                self._maybe(lambda command=command: self._command(command), status)  # type: ignore[misc]
            elif status is (operator == "&&"):
                holds = written(chain.first) if operator == "&&" else f"! {written(chain.first)}"
                with under(holds):
                    status = self._command(command)
        return status

    def _if(self, command: If) -> Truth:
        for index, (condition, body) in enumerate(command.branches):
            holds = self.run(condition)
            if isinstance(holds, Unknown):
                rest = If(command.line, command.branches[index + 1 :], command.otherwise)
                return self._either(lambda body=body: self.run(body), lambda rest=rest: self._if(rest), holds)  # type: ignore[misc]
            if holds:
                with under(" ".join(map(written, condition))):
                    return self.run(body)
        tried = " or ".join(" ".join(map(written, condition)) for condition, _ in command.branches)
        with under(f"! ( {tried} )" if tried else ""):
            return self.run(command.otherwise)

    def _case(self, command: Case) -> Truth:
        subject = self._words.text(command.subject.text, command.subject.line)
        if isinstance(subject, Unknown) and not subject.may_be_empty:
            for _, body in command.branches:
                self._maybe(lambda body=body: self.run(body), subject)  # type: ignore[misc]
            return subject
        value = subject if isinstance(subject, str) else ""
        for patterns, body in command.branches:
            for pattern in patterns:
                fitting = self._words.pattern(pattern.text, pattern.line)
                if isinstance(fitting, str) and fnmatch.fnmatchcase(value, fitting):
                    with under(f"{command.subject.text} is {fitting}"):
                        return self.run(body)
        return True

    def _for(self, command: Loop) -> Truth:
        for value in [field for word in command.words for field in self._words.fields(word.text, word.line)]:
            self.state.variables[command.name] = value
            try:
                self.run(command.body)
            except Breaks as stopped:
                if str(stopped) == "break":
                    break
        return True

    def _while(self, command: Loop) -> Truth:
        if command.counted:
            why = Unknown("for ((...)) is not followed", command.line)
            self._maybe(lambda: self.run(command.body), why)
            return why
        for _ in range(_ROUNDS):
            holds = self.run(command.condition)
            if isinstance(holds, Unknown):
                self._maybe(lambda: self.run(command.body), holds)
                return holds
            if holds is command.until:
                return True
            try:
                self.run(command.body)
            except Breaks as stopped:
                if str(stopped) == "break":
                    break
        else:
            raise ScriptError(f"line {command.line}: the loop has no end that can be read")
        return True

    def _group(self, command: Group) -> Truth:
        if not command.subshell:
            return self.run(command.body)
        outside, self.state = self.state, self.state.copy()
        try:
            return self.run(command.body)
        except Ends:
            return True
        finally:
            self.state = outside

    def _maybe(self, run: Callable[[], object], why: Unknown) -> None:
        """What may run or not: what it would change is not known afterwards, unless it ends the script."""
        self._either(run, lambda: None, why)

    def _either(self, first: Callable[[], object], second: Callable[[], object], why: Unknown) -> Unknown:
        before, doubt = self.state, self._doubt
        ends: list[State | None] = []
        stopped: Ends | Breaks | None = None
        for run in (first, second):
            self.state, self._doubt = before.copy(), doubt or why
            try:
                run()
                ends.append(self.state)
            except (Ends, Breaks) as end:
                # After a break the script goes on.
                stopped = stopped if isinstance(stopped, Breaks) else end
                ends.append(None)
        self._doubt = doubt
        left = [end for end in ends if end is not None]
        if not left:
            self.state = before
            assert stopped is not None
            raise stopped
        self.state = left[0] if len(left) == 1 else _merged(left[0], left[1], why)
        return why

    # Commands that are run --------------------------------------------------------------------------------------

    def _test(self, command: Test) -> Truth:
        if command.tokens and command.tokens[0].kind == "arithmetic":
            number = self._words.number(command.tokens[0].text, command.line)
            return number if isinstance(number, Unknown) else number != "0"
        words: list[Field] = []
        for index, token in enumerate(command.tokens):
            pattern = index > 0 and command.tokens[index - 1].text in ("=", "==", "!=")
            read = self._words.pattern if pattern else self._words.text
            words.append(token.text if token.kind == "operator" else read(token.text, token.line))
        return Condition(words, self.state, command.line, patterns=True).holds()

    def _pipeline(self, pipeline: Pipeline) -> Truth:
        given: Field = ""
        status: Truth = True
        for index, command in enumerate(pipeline.commands):
            if index + 1 == len(pipeline.commands):
                status = self._piped(command, given)
            else:
                given = self._captured(lambda command=command, given=given: self._piped(command, given))  # type: ignore[misc]
        return status if isinstance(status, Unknown) or not pipeline.negated else not status

    def _piped(self, command: Command, given: Field) -> Truth:
        return self._simple(command, given) if isinstance(command, Simple) else self._command(command)

    def _captured(self, run: Callable[[], object]) -> Field:
        """What is printed meanwhile."""
        outer, self.printed = self.printed, []
        try:
            run()
        finally:
            printed, self.printed = self.printed, outer
        unknown = next((each for each in printed if isinstance(each, Unknown)), None)
        return unknown or "".join(map(str, printed))

    def _substituted(self, source: str, line: int) -> Field:
        outside, self.state = self.state, self.state.copy()
        calls = len(self.calls)

        def run() -> None:
            try:
                self.run(parsed(source, line))
            except Ends:
                return

        try:
            printed = self._captured(run)
        finally:
            self.state = outside
            del self.calls[calls:]
        return printed.rstrip("\n") if isinstance(printed, str) else printed

    def _simple(self, command: Simple, given: Field = "") -> Truth:
        if not command.words:
            for token in command.assignments:
                self._assign(token)
            # $(< FILE) prints the file.
            return self.call(["cat"], command.line, self._input(command.input)) if command.input else True
        if command.input is not None:
            given = self._input(command.input)
        declares = command.words[0].text in DECLARING
        words = [field for word in command.words for field in self._element(word, declares)]
        if not words:
            return True
        return self.call(words, command.line, given)

    def _input(self, token: Token) -> Field:
        text = token.words[0]
        if token.text == "<":
            return self._content(self._words.text(text.text, text.line), text.line)
        if token.text == "<<<":
            value = self._words.text(text.text, text.line)
            return value if isinstance(value, Unknown) else f"{value}\n"
        return text.text if token.words[1].text else self._words.document(text.text, text.line)

    def _content(self, name: Field, line: int) -> Field:
        if isinstance(name, Unknown):
            return name
        path = self.state.directory / name
        try:
            # Of a pipe or a device there may be no end.
            return text_of(path) if path.is_file() or path == Path(os.devnull) else Unknown(f"{name} is no file", line)
        except (OSError, ValueError):
            return Unknown(f"{name} is not read", line)

    def _element(self, token: Token, declares: bool) -> list[Field]:
        if token.kind == "array" or (declares and assigns(token.text)):
            self._assign(token)
            return []
        return self._words.fields(token.text, token.line)

    def _assign(self, token: Token) -> None:
        self._set(token)
        name = token.text.partition("=")[0].removesuffix("+")
        value = self.state.variables.get(name)
        size = sum(len(str(each)) + 1 for each in value) if isinstance(value, list) else len(str(value))
        if size > LARGEST:
            self.state.variables[name] = Unknown(f"${name} has become too long to be read", token.line)

    def _set(self, token: Token) -> None:
        name, _, written = token.text.partition("=")
        appends = name.endswith("+")
        name = name.removesuffix("+")
        variables = self.state.variables
        if token.kind == "array":
            elements = [field for word in token.words for field in self._words.fields(word.text, word.line)]
            before = variables.get(name, [])
            if appends and isinstance(before, Unknown):
                return
            variables[name] = [*(before if isinstance(before, list) else [before]), *elements] if appends else elements
            return
        value = self._words.text(written, token.line)
        if "[" in name:
            owner = name.partition("[")[0]
            variables[owner] = Unknown(f"an element of {owner} is assigned by its index", token.line)
        elif appends and (before := variables.get(name, "")) != "":
            if isinstance(before, list):
                first: Field = before[0] if before else ""
                variables[name] = [_sum(first, value), *before[1:]]
            else:
                variables[name] = _sum(before, value)
        else:
            variables[name] = value

    def call(self, words: list[Field], line: int, given: Field) -> Truth:
        name, *arguments = words
        if isinstance(name, str) and name in self.state.functions:
            return self._function(name, arguments)
        if isinstance(name, str) and (builtin := BUILTINS.get(name)):
            return builtin(self, name, arguments, line)
        if all(isinstance(word, str) for word in words) and isinstance(given, str):
            texts = [str(word) for word in words]
            code = python_code(texts, given)
            if looks_only(texts) or (code is not None and is_lookup(code)):
                answer = output_of(texts, self.state.directory, given) if code is None else answer_of(code)
                if answer is not None:
                    return self.looked(*answer)
                return self._not_known(f"`{short(words)}` has no end, or prints what is not read", line)
            if code is not None and (modules := imported(code)):
                return self.looked("", all(map(importable, modules)))
        self.calls.append(Called(tuple(words), line, self._doubt))
        inner = script_of(words)
        if inner is not None:
            self._inner(inner, line)
        shown = name if isinstance(name, str) else "a program that is not known"
        return self._not_known(f"it depends on what `{short(words)}` says, and {shown} is not run", line)

    def _not_known(self, why: str, line: int) -> Unknown:
        said = Unknown(why, line)
        if self.printed is not None:
            self.printed.append(said)
        return said

    def looked(self, printed: str, succeeded: bool) -> Truth:
        if self.printed is not None:
            self.printed.append(printed)
        return succeeded

    def _inner(self, words: list[Field], line: int) -> None:
        """bash -c TEXT, and bash FILE with its arguments."""
        if self._depth >= _DEPTH:
            raise ScriptError(f"line {line}: scripts call each other without an end")
        flag, *rest = words
        outside, calls, end = self.state, len(self.calls), self.end
        self.state = self.state.copy()
        self._depth += 1
        try:
            if flag == "-c" and rest and isinstance(rest[0], str):
                self.script(rest[0], line)
            elif isinstance(flag, str) and (path := self.state.directory / flag).is_file():
                self.state.script, self.state.arguments = path, rest
                self.script(text_of(path))
        finally:
            self.state, self._depth, self.end = outside, self._depth - 1, end
        # Lines are those of the script that was asked for.
        self.calls[calls:] = [Called(call.words, line, call.doubt) for call in self.calls[calls:]]

    def _function(self, name: str, arguments: list[Field]) -> Truth:
        if self._depth >= _DEPTH:
            raise ScriptError(f"the function {name} calls itself without an end")
        outside, self.state.arguments = self.state.arguments, arguments
        self._depth += 1
        try:
            return self._command(self.state.functions[name])  # type: ignore[arg-type]
        except Ends as end:
            if str(end) != "return":
                raise
            return True
        finally:
            self.state.arguments, self._depth = outside, self._depth - 1


def _sum(first: Field, second: Field) -> Field:
    if isinstance(first, Unknown) or isinstance(second, Unknown):
        return first if isinstance(first, Unknown) else second
    return first + second


def _merged(first: State, second: State, why: Unknown) -> State:
    for name in {*first.variables, *second.variables}:
        if first.variables.get(name) != second.variables.get(name):
            first.variables[name] = why
    if first.arguments != second.arguments:
        first.arguments = [why]
    return first
