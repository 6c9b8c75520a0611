"""Branches, loops and subshells of a script, and the commands in them that may or may not run."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .conditions import Truth
from .grammar import Case, Chain, Command, CommandGroup, If, Loop, Pipeline, Simple, Test
from .lexer import Token
from .shell_values import LoopBreak, ProgramCall, ScriptEnd, ShellState, Unknown
from .words import WordExpander

_LONGEST = 80
_ROUNDS = 100
"""Rounds after which a loop counts as endless."""


def format_condition(condition: object) -> str:
    """Format a condition as written, in one line, shortened if it is long."""
    text = " ".join(_list_words(condition)).replace("\n", " ")
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _list_words(part: object) -> Iterator[str]:
    """List the words and operators of commands or of their parts."""
    match part:
        case str():
            yield part
        case Token(text=text):
            yield text
        case list() | tuple():
            for each in part:
                yield from _list_words(each)
        case Simple() | Test() | Chain() | Pipeline():
            yield from _list_words([value for name, value in vars(part).items() if name != "cut"])


@contextmanager
def note_condition(condition: str) -> Iterator[None]:
    """If ScriptEnd is raised inside, record in it the innermost condition under which it was raised."""
    try:
        yield
    except ScriptEnd as end:
        end.because = end.because or condition
        raise


class Branches:
    """Commands that decide which other commands run; ``interpreter.Interpreter`` runs all other commands.

    Attributes:
        state: the shell's state.
        calls: the programs that would run, in order.
    """

    def __init__(self, state: ShellState) -> None:
        self.state = state
        self.calls: list[ProgramCall] = []
        self._doubt: Unknown | None = None
        self._broken: list[Unknown] = []  # why the loop may have been left in this round

    def run(self, commands: list[Command]) -> Truth:
        """Run commands in order, and return the status of the last one."""
        status: Truth = True
        for command in commands:
            status = self._run_command(command)
        return status

    def _run_command(self, command: Command) -> Truth:
        raise NotImplementedError

    @property
    def _words(self) -> WordExpander:
        raise NotImplementedError

    def _run_chain(self, chain: Chain) -> Truth:
        tested = len(self.state.missing)
        status = self._run_command(chain.first)
        latest = chain.first
        for place, (operator, command) in enumerate(chain.rest):
            if isinstance(status, Unknown):
                self._run_either(lambda command=command: self._run_command(command), None, status)  # type: ignore[misc]
            elif status is (operator == "&&"):
                holds = f"{'! ' * (operator == '||')}{format_condition(latest)}"
                latest = command
                try:
                    with note_condition(holds):
                        status = self._run_command(command)
                except ScriptEnd as end:
                    before = Chain(chain.line, chain.first, chain.rest[:place])
                    if not self._needs_file(end, tested, [before], holds=operator == "&&"):
                        raise
                    status = operator != "&&"
        return status

    def _needs_file(self, end: ScriptEnd, tested: int, condition: list[Command], holds: bool) -> bool:
        """Return True if an exit with an error is due to a file that is missing here, and note the assumed file.

        A script uses such a condition to check that it runs on the launch machine, which may not be this machine.

        Args:
            tested: number of missing files before the condition.
            condition: the condition of the exit; ``holds``: its result.
        """
        missing, calls = " and ".join(dict.fromkeys(self.state.missing[tested:])), len(self.calls)
        if end.name != "exit" or end.status in ("", "0") or not missing or self.state.all_exist:
            return False
        self.state.all_exist = True
        try:
            differs = self.run(condition) is (not holds)
        finally:
            self.state.all_exist = False
            del self.calls[calls:]
        if differs:
            self.state.assumed.append(
                f"line {end.line}: the doctor assumes that {missing} exists, because otherwise the script would end"
            )
        return differs

    def _run_if(self, command: If) -> Truth:
        tested = len(self.state.missing)
        for index, (condition, body) in enumerate(command.branches):
            holds = self.run(condition)
            if isinstance(holds, Unknown):
                rest = If(command.line, command.branches[index + 1 :], command.otherwise)
                return self._run_either(lambda body=body: self.run(body), lambda rest=rest: self._run_if(rest), holds)  # type: ignore[misc]
            if holds:
                try:
                    with note_condition(format_condition(condition)):
                        return self.run(body)
                except ScriptEnd as end:
                    if not self._needs_file(end, tested, condition, holds=True):
                        raise
        tried = " or ".join(format_condition(condition) for condition, _ in command.branches)
        try:
            with note_condition(f"! ( {tried} )" if tried else ""):
                return self.run(command.otherwise)
        except ScriptEnd as end:
            for condition, body in command.branches:
                if self._needs_file(end, tested, condition, holds=False):
                    return self.run(body)
            raise

    def _run_case(self, command: Case) -> Truth:
        subject = self._words.expand_text(command.subject.text, command.subject.line)
        if isinstance(subject, Unknown) and not subject.may_be_empty:
            for _, body in command.branches:
                self._run_either(lambda body=body: self.run(body), None, subject)  # type: ignore[misc]
            return subject
        value = subject if isinstance(subject, str) else ""
        for patterns, body in command.branches:
            for pattern in patterns:
                fitting = self._words.expand_pattern(pattern.text, pattern.line)
                if isinstance(fitting, str) and fnmatch.fnmatchcase(value, fitting):
                    with note_condition(f"{command.subject.text} is {fitting}"):
                        return self.run(body)
        return True

    def _run_for(self, command: Loop) -> Truth:
        outside, self._broken = self._broken, []
        for value in [field for word in command.words for field in self._words.expand_fields(word.text, word.line)]:
            self.state.variables[command.name] = value
            try:
                self.run(command.body)
            except LoopBreak as stopped:
                if str(stopped) == "break":
                    break
        self._broken = outside
        return True

    def _run_while(self, command: Loop) -> Truth:
        """Run a loop until its condition fails; an endless loop may end for a reason that is known only at run time."""
        outside, self._broken = self._broken, []
        why = Unknown("the end of the loop cannot be determined", command.line)
        try:
            for _ in range(_ROUNDS):
                holds = self.run(command.condition)
                if isinstance(holds, Unknown):
                    return self._run_either(lambda: self.run(command.body), None, holds)
                if holds is command.until:
                    return True
                before = self.state.copy()
                try:
                    self.run(command.body)
                except LoopBreak as stopped:
                    if str(stopped) == "break":
                        return True
                if self._broken:
                    why = self._broken[0]
                    break
            self.state = _merge(self.state, before, why)  # its changes are unknown after any round
            return why
        finally:
            self._broken = outside

    def _run_group(self, command: CommandGroup) -> Truth:
        if not command.subshell:
            return self.run(command.body)
        outside, self.state = self.state, self.state.copy()
        try:
            return self.run(command.body)
        except ScriptEnd:
            return True  # exit in a subshell only ends the subshell
        finally:
            self.state = outside

    def _run_either(self, first: Callable[[], object], second: Callable[[], object] | None, why: Unknown) -> Unknown:
        """Process commands of which at most one runs; everything that they change is unknown afterwards.

        A branch that ends the script changes nothing.
        """
        before, doubt = self.state, self._doubt
        left: list[ShellState] = []
        broken: list[ShellState] = []
        stopped: ScriptEnd | LoopBreak | None = None
        for run in (first, second):
            self.state, self._doubt = before.copy(), doubt or why
            try:
                if run is not None:
                    run()
                left.append(self.state)
            except (ScriptEnd, LoopBreak) as end:
                # After a break, the script continues with the assignments made before it; after an exit, it does not
                # continue.
                broken += [self.state] * isinstance(end, LoopBreak)
                stopped = stopped if isinstance(stopped, LoopBreak) else end
        self._doubt = doubt
        if broken and left:
            self._broken.append(why)
        if not left:
            self.state = broken[0] if broken else before
            assert stopped is not None
            raise stopped
        left += broken
        self.state = left[0] if len(left) == 1 else _merge(left[0], left[1], why)
        return why


def _merge(first: ShellState, second: ShellState, why: Unknown) -> ShellState:
    for name in {*first.variables, *second.variables}:
        if first.variables.get(name) != second.variables.get(name):
            first.variables[name] = why
    if first.arguments != second.arguments:
        first.arguments = [why]
    return first
