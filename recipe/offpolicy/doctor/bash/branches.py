"""Branches, loops and subshells of a script, and the commands in them that may or may not run."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable

from .conditions import Truth
from .grammar import Case, Chain, Command, CommandGroup, If, Loop, parse
from .shell_values import Field, LoopBreak, ProgramCall, ScriptEnd, ShellState, Unknown
from .words import WordExpander, concatenate

_ROUNDS = 100
"""Rounds after which a loop counts as endless."""


class Branches:
    """Runs the commands that decide which other commands run; ``interpreter.Interpreter`` runs all others.

    Attributes:
        state: the shell's state.
        calls: the programs that would run, in order.
        printed: output of the substitution that is being evaluated; None outside substitutions.
    """

    def __init__(self, state: ShellState) -> None:
        self.state = state
        self.calls: list[ProgramCall] = []
        self.printed: list[Field] | None = None
        self._doubt: Unknown | None = None
        self._broken: list[Unknown] = []  # why the loop may have been left in this round

    def run(self, commands: list[Command]) -> Truth:
        """Run commands in order, and return the status of the last one."""
        status: Truth = True
        for command in commands:
            status = self._run_command(command)
        return status

    def run_source(self, source: str, first_line: int = 1) -> Truth:
        """Parse and run source."""
        return self.run(parse(source, first_line))

    def call(self, words: list[Field], line: int, given: Field = "") -> Truth:
        """Call a function, a builtin or a program."""
        raise NotImplementedError

    def print(self, printed: Field) -> None:
        """Append to the output, which is kept as a single value so that its length is limited."""
        if self.printed is not None:
            self.printed = [concatenate([*self.printed, printed])]

    def _run_command(self, command: Command) -> Truth:
        raise NotImplementedError

    @property
    def _words(self) -> WordExpander:
        raise NotImplementedError

    def _run_chain(self, chain: Chain) -> Truth:
        tested = len(self.state.missing)
        status = self._run_command(chain.first)
        for operator, command in chain.rest:
            if isinstance(status, Unknown):
                self._run_either(lambda command=command: self._run_command(command), None, status)  # type: ignore[misc]
            elif status is (operator == "&&"):
                try:
                    status = self._run_command(command)
                except ScriptEnd as end:
                    if not self._needs_file(end, tested):
                        raise
                    status = operator != "&&"
        return status

    def _needs_file(self, end: ScriptEnd, tested: int) -> bool:
        """Return True if an exit with an error may be due to a file that is missing here, and note the file as assumed.

        A script uses such a condition to check that it runs on the launch machine, which may not be this machine.

        Args:
            tested: number of missing files before the condition of the exit.
        """
        missing = " and ".join(dict.fromkeys(self.state.missing[tested:]))
        if end.name != "exit" or end.status in ("", "0") or not missing:
            return False
        self.state.assumed.append(
            f"line {end.line}: the doctor assumes that {missing} exists, because otherwise the script would end"
        )
        return True

    def _run_if(self, command: If) -> Truth:
        tested = len(self.state.missing)
        for index, (condition, body) in enumerate(command.branches):
            holds = self.run(condition)
            if isinstance(holds, Unknown):
                rest = If(command.line, command.branches[index + 1 :], command.otherwise)
                return self._run_either(lambda body=body: self.run(body), lambda rest=rest: self._run_if(rest), holds)  # type: ignore[misc]
            if holds:
                try:
                    return self.run(body)
                except ScriptEnd as end:
                    if not self._needs_file(end, tested):
                        raise
        try:
            return self.run(command.otherwise)
        except ScriptEnd as end:
            if not self._needs_file(end, tested):
                raise
            return self.run(command.branches[0][1])

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
        """Process branches, at most one of which runs; everything that they change is unknown afterwards.

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
