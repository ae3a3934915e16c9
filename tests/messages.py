"""The messages that the code can raise, read from its source: what docs/troubleshooting.md must list.

Every message of the package is a sentence: the place, the value, the rule, the fix. So a message is a text in the
source, outside docstrings, help and prints, that an error is raised with; or, in a file that knows errors or
problems, one that holds the end of a sentence. Of it the first sentence is taken, with "…" for what is filled in.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

HOLE = "…"
_FEWEST_LETTERS = 6
"""Of what is constant in a message; a text with fewer only frames a message that is written elsewhere."""

_KNOWS_ERRORS = re.compile(r"^from ds_hybrid\.(errors|problems) import", re.MULTILINE)
_SENTENCE_END = re.compile(r"(?<=[\w)\]\"'`…])[.?!](?=\s|$|…$)")
_HELP = frozenset({"description", "help", "epilog", "metavar", "title", "label"})
_TELLERS = frozenset({"print", "tell", "write", "info", "warning", "debug", "log_dist", "add_argument", "add_parser"})


@dataclass(frozen=True)
class Message:
    """The beginning of a message, and where it is written."""

    head: str
    file: str
    line: int


def messages_of(source: str, file: str) -> list[Message]:
    """The messages in the source of a file, in its order, each head once."""
    found: dict[str, Message] = {}
    module = _Module(ast.parse(source), knows_errors=bool(_KNOWS_ERRORS.search(source)))
    for node in module.texts():
        head = head_of(module.pattern(node))
        if _num_letters(head) >= _FEWEST_LETTERS:
            found.setdefault(head, Message(head, file, node.lineno))
    return sorted(found.values(), key=lambda message: message.line)


def head_of(pattern: str) -> str:
    """The first sentence of a message, without its full stop and on one line; more where it says next to nothing."""
    first, *others = _SENTENCE_END.split(" ".join(pattern.split()))
    while others and (" " not in first or _num_letters(first) < _FEWEST_LETTERS):
        first = f"{first}.{others.pop(0)}"
    return first.replace("`", "")


def _num_letters(text: str) -> int:
    return sum(character.isascii() and character.isalpha() for character in text)


class _Module:
    def __init__(self, tree: ast.Module, *, knows_errors: bool) -> None:
        self.tree = tree
        self.knows_errors = knows_errors
        self.parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}

    @cached_property
    def constants(self) -> Mapping[str, str]:
        """Texts that the module gives a name to."""
        named = {}
        for node in self.tree.body:
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str(text))):
                    named[name] = text
                case ast.AnnAssign(target=ast.Name(id=name), value=ast.Constant(value=str(text))):
                    named[name] = text
        return named

    def texts(self) -> Iterator[ast.expr]:
        """The outermost texts of the module that are messages."""
        for node in ast.walk(self.tree):
            match node:
                case ast.JoinedStr() | ast.BinOp(op=ast.Add()) | ast.Constant(value=str()):
                    pattern = self.pattern(node)
                    if " " in pattern and self._is_outermost(node) and self._is_message(node, pattern):
                        yield node

    def pattern(self, node: ast.expr) -> str:
        """A text with its constant parts, and a hole for each part that is filled in."""
        return re.sub(f"{HOLE}+", HOLE, self._pattern(node))

    def _pattern(self, node: ast.expr) -> str:
        match node:
            case ast.Constant(value=str(text)):
                return text
            case ast.JoinedStr(values=values):
                return "".join(map(self._pattern, values))
            case ast.FormattedValue(value=ast.Name(id=name)) | ast.Name(id=name) if name in self.constants:
                return self.constants[name]
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return self._pattern(left) + self._pattern(right)
        return HOLE

    def _is_outermost(self, node: ast.expr) -> bool:
        """Whether it is no docstring and no part of another text."""
        above = self.parents[node]
        if isinstance(above, ast.Expr):
            return False
        while not isinstance(above, ast.stmt | ast.Call):
            if isinstance(above, ast.JoinedStr | ast.BinOp):
                return False
            above = self.parents[above]
        return True

    def _is_message(self, node: ast.expr, pattern: str) -> bool:
        above: ast.AST = node
        while not isinstance(above, ast.stmt):
            below, above = above, self.parents[above]
            match above:
                case ast.keyword(arg=str(name)) if name in _HELP:
                    return False
                case ast.Dict(keys=keys, values=values) if below in values:
                    key = keys[values.index(below)]
                    if isinstance(key, ast.Constant) and key.value in _HELP:
                        return False
                case ast.Call(func=ast.Name(id="Problem"), args=[place, *_]) if place is below:
                    return False
                case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
                    if name in _TELLERS or name in ("ArgumentTypeError", "AssertionError", "AttributeError"):
                        return False
                    if name == "Problem" or name.endswith("Error"):
                        return True
                case ast.Assert():
                    return False
                case ast.Assign(targets=[ast.Name(id=name)]) if name in self.constants:
                    return False
        is_other = pattern.startswith("examples:") or re.match(r"\w\w?\. ", pattern)
        return self.knows_errors and not is_other and bool(_SENTENCE_END.search(pattern))
