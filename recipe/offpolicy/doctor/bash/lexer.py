"""Lexer that splits bash source into tokens: unexpanded words, operators, array assignments and here-documents."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from .shell_values import ScriptError

Kind = Literal["word", "operator", "newline", "array", "arithmetic", "end"]
REDIRECTS = ("<<<", "<<-", "&>>", "&>", "<<", ">>", ">&", "<&", ">|", "<", ">")
# The longest first.
_OPERATORS = sorted((*REDIRECTS, "&&", "||", ";;", "|&", "|", "&", ";", "(", ")"), key=len, reverse=True)
_COMMAND_FOLLOWS = {";", "&&", "||", "|", "if", "for", "while", "until", "!", "then", "do", "else"}
_ARRAY = re.compile(r"[A-Za-z_]\w*(\[[^\]]*\])?\+?=\(")
_HERE = re.compile(r"(?<!<)<<(?!<)")
_ANSI_QUOTED = re.compile(r"\$'(?:[^'\\]|\\.)*'", re.S)
_CLOSERS = {"{": "}", "(": ")"}


@dataclass
class Token:
    """A token with the line where it starts.

    Attributes:
        text: a word as written, with quotes; for an array, its name with = or +=.
        line: counted from 1.
        words: an array's elements, or the document of the operator <<.
    """

    kind: Kind
    text: str
    line: int
    words: list[Token] = field(default_factory=list)


class Lexer:
    """A lexer of one script."""

    def __init__(self, source: str, first_line: int = 1) -> None:
        self.source = source
        self.place = 0
        self.line = first_line
        self._documents: list[tuple[Token, str, bool, bool]] = []

    def tokenize(self) -> list[Token]:
        """Return all tokens; the last is an ``end``.

        Raises:
            ScriptError: a quote, a bracket or an array is not closed.
        """
        found: list[Token] = []
        while (token := self._read_token(found)).kind != "end":
            found.append(token)
        return [*found, token]

    def _read_token(self, before: list[Token]) -> Token:
        self._skip_blanks()
        line = self.line
        if self.place >= len(self.source):
            return Token("end", "", line)
        if self.source[self.place] == "\n":
            self._advance(1)
            self._read_documents()
            return Token("newline", "\n", line)
        starts = not before or before[-1].kind == "newline" or before[-1].text in _COMMAND_FOLLOWS
        # "((" opens an arithmetic command only at the start of a command; elsewhere it is two parentheses.
        if starts and self.source.startswith("((", self.place):
            start = self.place
            self._skip_bracketed(start)
            return Token("arithmetic", self.source[start + 2 : self.place - 2], line)
        for operator in _OPERATORS:
            if self.source.startswith(operator, self.place) and not self.source.startswith(("<(", ">("), self.place):
                self._advance(len(operator))
                token = Token("operator", operator, line)
                if operator in ("<<", "<<-"):
                    self._announce_document(token)
                return token
        if found := _ARRAY.match(self.source, self.place):
            self._advance(len(found[0]))
            return Token("array", found[0][:-1], line, self._read_elements())
        return Token("word", self._read_word(), line)

    def _skip_blanks(self) -> None:
        while self.place < len(self.source):
            if self.source.startswith("\\\n", self.place):
                self._advance(2)
            elif self.source[self.place] in " \t" or self.source[self.place :] == "\\":  # bash ignores the latter
                self._advance(1)
            elif self.source[self.place] == "#":
                end = self.source.find("\n", self.place)
                self._advance((len(self.source) if end < 0 else end) - self.place)
            else:
                return

    def _read_elements(self) -> list[Token]:
        started, words = self.line, list[Token]()
        while True:
            self._skip_blanks()
            if self.place >= len(self.source):
                raise ScriptError(f"line {started}: an array is not closed")
            if self.source[self.place] == "\n":
                self._advance(1)
            elif self.source[self.place] == ")":
                self._advance(1)
                return words
            else:
                line = self.line
                words.append(Token("word", self._read_word(), line))

    def _read_word(self) -> str:
        start = self.place
        while self.place < len(self.source):
            character = self.source[self.place]
            if character in " \t\n;&|()<>" and not self.source.startswith(("<(", ">("), self.place):
                break
            self._skip_piece()
        if self.place == start:
            raise ScriptError(f"line {self.line}: {self.source[start]!r} is not expected here")
        return self.source[start : self.place]

    def find_piece_end(self, start: int) -> int:
        """Return the position after one character, or after a quoted or bracketed piece, that starts at ``start``."""
        self.place = start
        self._skip_piece()
        return self.place

    def _skip_piece(self) -> None:
        if self.source.startswith(("<(", ">("), self.place):
            self._skip_bracketed(self.place + 1)
        else:
            self._step()

    def _step(self) -> None:
        """Skip one character, or one quoted or bracketed piece, which may be inside another piece."""
        character = self.source[self.place]
        if character == "\\":
            self._advance(2)
        elif character == "'":
            self._skip_to("'", self.place + 1)
        elif character == '"':
            self._skip_double_quoted()
        elif character == "`":
            self._skip_to("`", self.place + 1)
        elif character == "$" and self.source[self.place + 1 : self.place + 2] in ("{", "("):
            self._skip_bracketed(self.place + 1)
        elif ansi := _ANSI_QUOTED.match(self.source, self.place):
            self._advance(ansi.end() - self.place)
        else:
            self._advance(1)

    def _skip_to(self, closer: str, start: int) -> None:
        end = self.source.find(closer, start)
        if end < 0:
            raise ScriptError(f"line {self.line}: {closer} is not closed")
        self._advance(end + 1 - self.place)

    def _skip_double_quoted(self) -> None:
        line = self.line
        self._advance(1)
        while self.place < len(self.source) and self.source[self.place] != '"':
            if self.source.startswith(("'", "$'"), self.place):
                self._advance(1)
            else:
                self._step()
        if self.place >= len(self.source):
            raise ScriptError(f'line {line}: " is not closed')
        self._advance(1)

    def _skip_bracketed(self, start: int) -> None:
        """Skip ${...}, $(...) and similar constructs, including nested ones."""
        line = self.line
        self._advance(start - self.place)
        opener = self.source[self.place]
        arithmetic = self.source.startswith("((", self.place)
        depth = 0
        while self.place < len(self.source):
            character = self.source[self.place]
            if character == opener:
                depth += 1
                self._advance(1)
            elif character == _CLOSERS[opener]:
                depth -= 1
                self._advance(1)
                if depth == 0:
                    return
            elif opener == "(" and not arithmetic and _HERE.match(self.source, self.place):
                self._skip_document()
            elif opener == "(" and character == "#" and self.source[self.place - 1] in " \t\n":
                self._advance(max(self.source.find("\n", self.place), self.place + 1) - self.place)
            else:
                self._step()
        raise ScriptError(f"line {line}: {opener} is not closed")

    def _skip_document(self) -> None:
        """Skip a here-document inside $(...); its text may contain any quotes."""
        found = re.compile(r"<<-?\s*(['\"]?)(\w+)\1").match(self.source, self.place)
        if found is None:
            self._advance(2)
            return
        end = re.compile(rf"\n\t*{found[2]}(?=\n|\s*\)|$)").search(self.source, found.end())
        if end is None:
            raise ScriptError(f"line {self.line}: the here-document {found[2]} is not closed")
        self._advance(end.end() - self.place)

    def _announce_document(self, token: Token) -> None:
        self._skip_blanks()
        written = self._read_word()
        name = written.strip("'\"").replace("\\", "")
        self._documents.append((token, name, written != name, token.text == "<<-"))

    def _read_documents(self) -> None:
        for token, name, quoted, dashed in self._documents:
            line, lines = self.line, []
            while True:
                if self.place >= len(self.source):
                    raise ScriptError(f"line {token.line}: the here-document {name} is not closed")
                end = self.source.find("\n", self.place)
                end = len(self.source) if end < 0 else end
                text = self.source[self.place : end]
                self._advance(end + 1 - self.place)
                if (text.lstrip("\t") if dashed else text) == name:
                    break
                lines.append(text)
            token.words = [Token("word", "\n".join(lines), line), Token("word", "quoted" if quoted else "", line)]
        self._documents = []

    def _advance(self, count: int) -> None:
        self.line += self.source.count("\n", self.place, self.place + count)
        self.place += count
