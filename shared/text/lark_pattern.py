"""Regular expression of a Lark grammar without nesting.

A tool call writes a text as a JSON string or between tags. llguidance applies a regular expression
to such a text, and a Lark grammar to whole outputs only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from lark.exceptions import LarkError
from lark.load_grammar import Grammar, load_grammar

from shared.text.grammar_source import InvalidGrammarError, checked

START = "start"
_IMPORT = re.compile(r"^\s*%import\s+(?!common\b)(\S+)", re.MULTILINE)
_BREAK = re.compile(r"\\(.)|\n", re.DOTALL)
_Symbols = Sequence[str]


def pattern_of(grammar: str) -> str:
    """Returns the regular expression of the texts that a Lark grammar matches.

    A rule may contain itself at its beginning or at its end, which is a repetition.

    Raises:
      InvalidGrammarError: The grammar is invalid, nests rules, or is too large.
    """
    if foreign := _IMPORT.search(grammar):
        reason = f"the grammar imports {foreign[1]:.80}; only terminals of common can be imported"
        raise InvalidGrammarError(reason)
    try:
        parsed, _ = load_grammar(grammar, "<grammar>", [], False)
        return _Expressions(parsed).whole()
    except LarkError as error:
        words = " ".join(str(error).split())
        raise InvalidGrammarError(f"the grammar is not valid Lark: {words:.200}") from error
    except RecursionError as error:
        raise InvalidGrammarError("the grammar nests its rules too deeply") from error


class _Expressions:
    """Regular expressions of the rules of a grammar."""

    def __init__(self, grammar: Grammar) -> None:
        terminals, rules, ignored = grammar.compile([START], "*")
        patterns = {each.name: _group(_one_line(each.pattern.to_regexp())) for each in terminals}
        skipped = "|".join(patterns[name] for name in ignored)
        self._space = f"(?:{skipped})*" if skipped else ""
        self._found = {name: self._space + pattern for name, pattern in patterns.items()}
        self._rules: dict[str, list[_Symbols]] = {}
        for rule in rules:
            symbols = [symbol.name for symbol in rule.expansion]
            self._rules.setdefault(rule.origin.name, []).append(symbols)
        self._open: list[str] = []

    def whole(self) -> str:
        if START not in self._rules:
            raise InvalidGrammarError(f"the grammar has no rule {START}; add it")
        return checked(self._of(START) + self._space)

    def _of(self, name: str) -> str:
        if name not in self._found:
            if name in self._open:
                reason = f"the rule {name:.80} of the grammar contains itself"
                advice = "use * and + for repetitions"
                raise InvalidGrammarError(f"{reason}, which is unsupported in tool calls; {advice}")
            self._open.append(name)
            self._found[name] = checked(self._rule(name))
            self._open.pop()
        return self._found[name]

    def _rule(self, name: str) -> str:
        others, before, after = [], [], []
        for symbols in self._rules[name]:
            if list(symbols) == [name]:
                continue
            if symbols and symbols[0] == name:
                after.append(symbols[1:])
            elif symbols and symbols[-1] == name:
                before.append(symbols[:-1])
            else:
                others.append(symbols)
        if before and after:  # of both, one order is not a repetition
            others += [[*symbols, name] for symbols in before]
            before = []
        middle = self._any(others)
        return self._repeated(before) + middle + self._repeated(after)

    def _repeated(self, options: Sequence[_Symbols]) -> str:
        return f"{self._any(options)}*" if options else ""

    def _any(self, options: Iterable[_Symbols]) -> str:
        return _group("|".join("".join(map(self._of, symbols)) for symbols in options))


def _group(expression: str) -> str:
    return f"(?:{expression})"


def _one_line(expression: str) -> str:
    """Returns an expression with escapes in place of line breaks."""
    return _BREAK.sub(lambda found: r"\n" if found[0].endswith("\n") else found[0], expression)
