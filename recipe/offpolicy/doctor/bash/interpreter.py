"""The interpreter: follows a script's commands without running its programs, and records those it would launch."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from .branches import Branches
from .builtin import BUILTINS, DECLARING
from .conditions import Truth, evaluate_test
from .grammar import (
    Case,
    Chain,
    Command,
    CommandGroup,
    Function,
    If,
    Loop,
    Pipeline,
    Simple,
    Test,
    is_assignment,
)
from .lexer import Token
from .programs import (
    find_inner_script,
    find_python_code,
    is_importable,
    is_lookup,
    is_read_only,
    list_imports,
    read_text,
    run_lookup,
    run_program,
    shorten,
)
from .shell_values import (
    COMMANDS,
    WORDS,
    Field,
    OverBudget,
    ProgramCall,
    ScriptEnd,
    ScriptError,
    ShellState,
    Unknown,
    find_unknown,
    limit_seconds,
)
from .words import WordExpander, concatenate

_DEPTH = 20  # limit for scripts and functions that call each other
_LOST = re.compile(r"[+~]{0,2}[A-Za-z_][\w./@-]*=.*|--?[A-Za-z][\w-]*(=.*)?", re.S)
"""Words that cannot be names of programs: overrides and flags."""
_SECONDS = 20.0


class Interpreter(Branches):
    """An interpreter of parsed commands in a shell state; ``calls`` lists the programs that would run, in order.

    Attributes:
        line: line of the latest command.
    """

    def __init__(self, state: ShellState) -> None:
        super().__init__(state)
        self.line = 0
        self._commands = self._depth = 0
        self._chosen: list[Token] = []  # assignments that look like overrides

    def check_assignments(self) -> None:
        """Reject an unused variable with the name of a Hydra group and the value of an option.

        Raises:
            ScriptError: there is such a variable, as in ``launch ...; correction=gsm``.
        """
        for token in self._chosen:
            if token.text.partition("=")[0] not in self.state.read:
                raise ScriptError(
                    f"line {token.line}: {token.text} is a variable that the script does not use, not an override. "
                    f"Fix: put it after the module, and end each line of the launch except the last with a backslash."
                )

    @property
    def _words(self) -> WordExpander:
        return WordExpander(self.state, self._substitute)

    @property
    def _tested_words(self) -> WordExpander:
        return WordExpander(self.state, self._substitute, unset_is_empty=True)

    def _run_command(self, command: Command) -> Truth:
        self.line = command.line
        self._commands += 1
        if self._commands > COMMANDS:
            raise OverBudget(f"more than {COMMANDS} commands would run before the launch is reached.")
        match command:
            case Simple():
                return self._run_simple(command)
            case Test():
                return self._run_test(command)
            case Chain():
                return self._run_chain(command)
            case Pipeline():
                return self._run_pipeline(command)
            case If():
                return self._run_if(command)
            case Loop():
                return self._run_for(command) if command.name else self._run_while(command)
            case Case():
                return self._run_case(command)
            case CommandGroup():
                return self._run_group(command)
            case Function():
                self.state.functions[command.name] = command.body
                return True

    def _run_test(self, command: Test) -> Truth:
        if command.tokens and command.tokens[0].kind == "arithmetic":
            number = self._words.evaluate_arithmetic(command.tokens[0].text, command.line)
            return number if isinstance(number, Unknown) else number != "0"
        words: list[Field] = []
        for index, token in enumerate(command.tokens):
            pattern = index > 0 and command.tokens[index - 1].text in ("=", "==", "!=")
            read = self._tested_words.expand_pattern if pattern else self._tested_words.expand_text
            word: Field = token.text if token.kind == "operator" else read(token.text, token.line)
            if token.kind != "operator" and word in ("&&", "||"):
                word = Unknown(f"a value {word} in a test is not supported", token.line)
            words.append(word)
        return evaluate_test(words, self.state, command.line, patterns=True)

    def _run_pipeline(self, pipeline: Pipeline) -> Truth:
        given: Field = ""
        *before, last = pipeline.commands
        for command in before:
            given = self._capture(lambda command=command, given=given: self._run_piped(command, given))  # type: ignore[misc]
        status = self._run_piped(last, given)
        return status if isinstance(status, Unknown) or not pipeline.negated else not status

    def _run_piped(self, command: Command, given: Field) -> Truth:
        return self._run_simple(command, given) if isinstance(command, Simple) else self._run_command(command)

    def _capture(self, run: Callable[[], object]) -> Field:
        """Run ``run`` and return its output."""
        outer, self.printed = self.printed, []
        try:
            run()
        finally:
            printed, self.printed = self.printed, outer
        return concatenate(printed)

    def _substitute(self, source: str, line: int) -> Field:
        outside, self.state = self.state, self.state.copy()

        def run() -> None:
            with suppress(ScriptEnd):
                self.run_source(source, line)

        try:
            printed = self._capture(run)
        finally:
            self.state = outside
        return printed.rstrip("\n") if isinstance(printed, str) else printed

    def _run_simple(self, command: Simple, given: Field = "") -> Truth:
        self._chosen += filter(_chooses_option, command.assignments)
        for token in command.assignments if not command.words else ():
            self._assign(token)
        if not command.words:
            # $(< FILE) prints the file.
            return self.call(["cat"], command.line, self._read_input(command.input)) if command.input else True
        if command.input is not None:
            given = self._read_input(command.input)
        declares, tests = (command.words[0].text in names for names in (DECLARING, ("[", "test")))
        words = [field for word in command.words for field in self._expand_element(word, declares, tests)]
        if not words:
            if "@" in command.words[0].text:  # "$@" or an array, which is empty here
                self._refuse_lost(command.words[0].text, command)
            return True
        first = words[0].prefix if isinstance(words[0], Unknown) else words[0]
        if _LOST.fullmatch(first):
            self._refuse_lost(first, command)
        return self.call(words, command.line, given)

    def _refuse_lost(self, word: str, command: Simple) -> NoReturn:
        raise ScriptError(
            f"line {command.line}: {shorten([word])} is a separate command, not part of the launch. Fix: end each line "
            f"of the launch except the last with a backslash, and put no blanks, comments, empty lines, ;, & or | "
            f"between the lines."
        )

    def _read_input(self, token: Token) -> Field:
        """Read a here-document, a here-string or a file."""
        text = token.words[0]
        if token.text not in ("<", "<<<"):
            return text.text if token.words[1].text else self._words.expand_document(text.text, text.line)
        value = self._words.expand_text(text.text, text.line)
        if isinstance(value, Unknown) or token.text == "<<<":
            return value if isinstance(value, Unknown) else f"{value}\n"
        path = self.state.directory / value
        try:
            # Reading from a pipe or a device may never end.
            return (
                read_text(path)
                if path.is_file() or path == Path(os.devnull)
                else Unknown(f"{value} is no file", text.line)
            )
        except (OSError, ValueError):
            return Unknown(f"{value} cannot be read", text.line)

    def _expand_element(self, token: Token, declares: bool, tests: bool) -> list[Field]:
        if token.kind == "array" or (declares and is_assignment(token.text)):
            self._assign(token)
            return []
        return (self._tested_words if tests else self._words).expand_fields(token.text, token.line)

    def _assign(self, token: Token) -> None:
        name, _, written = token.text.partition("=")
        appends, name = name.endswith("+"), name.removesuffix("+")
        variables = self.state.variables
        before = variables.get(name, "") if appends else ""
        if isinstance(before, Unknown):
            return
        if token.kind == "array":
            elements = [field for word in token.words for field in self._words.expand_fields(word.text, word.line)]
            kept = before if isinstance(before, list) else [before] * (appends and name in variables)
            variables[name] = [*kept, *elements]
            if len(kept) + len(elements) > WORDS:
                raise OverBudget(f"an array of more than {WORDS} words is too long.")
        else:
            value = self._words.expand_text(written, token.line)
            owner, index, _ = name.partition("[")
            if index:
                name, value = owner, Unknown(f"an element of {owner} is assigned by index", token.line)
            first = before[0] if isinstance(before, list) and before else "" if isinstance(before, list) else before
            whole = concatenate((first, value))
            variables[name] = [whole, *before[1:]] if isinstance(before, list) else whole

    def call(self, words: list[Field], line: int, given: Field = "") -> Truth:
        """Call a function, a builtin or a program; programs that are not read-only are recorded in ``calls``."""
        if len(words) > WORDS:
            raise OverBudget(f"a command of {len(words)} words is too long.")
        name, *arguments = words
        if isinstance(name, str) and name in self.state.functions:
            return self._run_function(name, arguments)
        if isinstance(name, str) and (builtin := BUILTINS.get(name)):
            return builtin(self, name, arguments, line)
        if find_unknown(words) is None and isinstance(given, str):
            texts = [str(word) for word in words]
            code = find_python_code(texts, given)
            if is_read_only(texts) or (code is not None and is_lookup(code)):
                answer = run_program(texts, self.state.directory, given) if code is None else run_lookup(code)
                if answer is None:
                    why = Unknown(f"`{shorten(words)}` does not end, or its output is not supported", line)
                    self.print(why)
                    return why
                self.print(answer[0])
                return answer[1]
            if code is not None and (modules := list_imports(code)):
                return all(map(is_importable, modules))
        self.calls.append(ProgramCall(tuple(words), line, self._doubt))
        inner = find_inner_script(words)
        if inner is not None:
            self._run_inner(inner, line)
        shown = name if isinstance(name, str) else "an unknown program"
        why = Unknown(f"it depends on the output of `{shorten(words)}`, and {shown} is not run", line)
        self.print(why)
        return why

    def _run_inner(self, words: list[Field], line: int) -> None:
        """Run ``bash -c TEXT``, or ``bash FILE`` with its arguments, in a copy of the state."""
        if self._depth >= _DEPTH:
            raise ScriptError(f"line {line}: scripts call each other endlessly")
        flag, *rest = words
        outside, calls = self.state, len(self.calls)
        self.state = self.state.copy()
        self._depth += 1
        try:
            with suppress(ScriptEnd):
                if flag == "-c" and rest and isinstance(rest[0], str):
                    self.run_source(rest[0], line)
                elif isinstance(flag, str) and (path := self.state.directory / flag).is_file():
                    self.state.script, self.state.arguments = path, rest
                    self.run_source(read_text(path))
        finally:
            self.state, self._depth = outside, self._depth - 1
        # Messages refer to lines of the outer script.
        self.calls[calls:] = [ProgramCall(call.words, line, call.doubt) for call in self.calls[calls:]]

    def _run_function(self, name: str, arguments: list[Field]) -> Truth:
        if self._depth >= _DEPTH:
            raise ScriptError(f"the function {name} calls itself endlessly")
        outside, self.state.arguments = self.state.arguments, arguments
        self._depth += 1
        try:
            return self._run_command(self.state.functions[name])  # type: ignore[arg-type]
        except ScriptEnd as end:
            if end.name != "return":
                raise
            return True
        finally:
            self.state.arguments, self._depth = outside, self._depth - 1


def _chooses_option(token: Token) -> bool:
    """Return True for an assignment such as ``correction=gsm``, which is probably meant as an override."""
    name, _, value = token.text.partition("=")
    if name in ("correction", "model_engine") or not name.islower():  # environment variables are upper case
        return name.islower()
    from ...preflight.own_keys import list_groups  # imports torch

    options = list_groups().get(name, ())
    return any(each in options for each in re.findall(r"\w+", value))


@dataclass(frozen=True)
class Script:
    """The result of following a script.

    Attributes:
        calls: the programs that it would run, in order.
        looked_at: the script arguments that the script itself reads.
        end: how the script ends before its last line; None if it does not.
        unset: the variables that the script reads before ``end`` and that are unset here; "1" stands for any argument.
        assumed: assumptions about files that do not exist here.
    """

    calls: list[ProgramCall]
    looked_at: frozenset[Field]
    end: ScriptEnd | None
    unset: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()


def read_script(path: Path, arguments: list[str], environment: dict[str, str]) -> Script:
    """Follow a script without running it.

    Args:
        arguments: arguments of the script.
        environment: its initial environment variables.

    Raises:
        ScriptError: the file is not a readable script; the message names file and line.
    """
    own = {"PWD": str(Path.cwd()), "UID": str(os.getuid()), "EUID": str(os.geteuid()), "HOSTNAME": platform.node()}
    state = ShellState({**environment, **own}, list(arguments), Path.cwd(), path)
    interpreter, ended = Interpreter(state), None
    try:
        with limit_seconds(_SECONDS):
            source = read_text(path)
            if "\r\n" in source:
                line = source[: source.index("\r\n")].count("\n") + 1
                raise ScriptError(
                    f"line {line}: the line ends in a carriage return, which bash treats as a part of the last word. "
                    f"Fix: sed -i 's/\\r$//' {path}"
                )
            try:
                interpreter.run_source(source)
            except ScriptEnd as end:
                ended = end
            interpreter.check_assignments()
    except OSError as error:
        raise ScriptError(f"{path}: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise ScriptError(f"{path}: not a text file ({error}).") from error
    except ScriptError as error:
        raise ScriptError(f"{path}, {str(error).rstrip('.')}.") from error
    except OverBudget as error:
        raise ScriptError(
            f"{path}, line {interpreter.line}: {error} Fix: check the launch itself, with its overrides."
        ) from error
    except (IndexError, ValueError, RecursionError) as error:
        raise ScriptError(f"{path}: cannot be read: {error}.") from error
    assumed = tuple(dict.fromkeys(state.assumed))
    unset = tuple(dict.fromkeys(state.unset))
    return Script(interpreter.calls, frozenset(state.looked_at), ended, unset, assumed)
