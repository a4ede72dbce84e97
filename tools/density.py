"""Measure how densely Python files are written: a mirror for their authors, not a gate.

`python -m tools.density FOLDER ...` prints a row for each folder: names for each line of code, tuples among the targets
of assignments, conditional expressions for each 1,000 lines of code, comment lines, and references of docstrings to
others ("see `X`", "likewise") for each 1,000 lines. Tests and vendored code of a folder count as well.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Self

_REFERENCE = re.compile(r"\b[Ss]ee [`A-Z]|[Ll]ikewise")
_NO_CODE = (
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)
_HEAD = f"{'folder':<44} names/line  tuples  ternaries  comments  see"


class Counts(NamedTuple):
    """What was counted in some files.

    Attributes:
        lines: all lines.
        code: lines with code, without docstrings.
        comments: lines with a comment.
        names: names and attributes.
        assigns: assignments.
        tuples: assignments to a tuple.
        ternaries: conditional expressions.
        references: of docstrings and comments to others.
    """

    lines: int = 0
    code: int = 0
    comments: int = 0
    names: int = 0
    assigns: int = 0
    tuples: int = 0
    ternaries: int = 0
    references: int = 0

    @classmethod
    def of(cls, source: str) -> Self:
        """Count in a file."""
        nodes = list(ast.walk(ast.parse(source)))
        assigns = [node for node in nodes if isinstance(node, ast.Assign)]
        texts = {line for node in nodes for line in _docstring_lines(node)}
        code: set[int] = set()
        comments = set()
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                comments.add(token.start[0])
            elif token.type not in _NO_CODE:
                code.update(range(token.start[0], token.end[0] + 1))
        return cls(
            lines=source.count("\n"),
            code=len(code - texts),
            comments=len(comments),
            names=sum(isinstance(node, ast.Name | ast.Attribute) for node in nodes),
            assigns=len(assigns),
            tuples=sum(isinstance(assign.targets[0], ast.Tuple) for assign in assigns),
            ternaries=sum(isinstance(node, ast.IfExp) for node in nodes),
            references=len(_REFERENCE.findall(source)),
        )

    def row(self, name: str) -> str:
        """Return the row of these counts."""
        figures = (
            f"{self.names / max(self.code, 1):10.2f}",
            f"{100 * self.tuples / max(self.assigns, 1):5.1f} %",
            f"{1000 * self.ternaries / max(self.code, 1):9.1f}",
            f"{100 * self.comments / max(self.lines, 1):6.1f} %",
            f"{1000 * self.references / max(self.lines, 1):4.1f}",
        )
        return f"{name:<44}" + "  ".join(figures)


def _docstring_lines(node: ast.AST) -> Iterator[int]:
    if (
        not isinstance(
            node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        )
        or not node.body
    ):
        return
    first = node.body[0]
    if (
        isinstance(first, ast.Expr)
        and isinstance(first.value, ast.Constant)
        and isinstance(first.value.value, str)
    ):
        yield from range(first.lineno, (first.end_lineno or first.lineno) + 1)


def density_below(folder: Path) -> Counts:
    """Return the counts of all Python files below a folder."""
    counts = [Counts.of(path.read_text()) for path in folder.rglob("*.py")]
    return Counts(*map(sum, zip(*counts, strict=True)))


if __name__ == "__main__":
    print(_HEAD)
    for name in sys.argv[1:]:
        print(density_below(Path(name)).row(name))
