"""Count statements: of Python without docstrings, and of C by its semicolons. Lines are not counted.

`python -m tools.statements shm workers executor` prints the numbers of these folders.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

#: What holds semicolons in C that end no statement.
_C_TEXT = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\])*"', re.DOTALL)


def _is_text(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def statements_of(path: Path) -> int:
    """Return the number of statements of a file of Python or C."""
    text = path.read_text()
    if path.suffix in (".c", ".h"):
        return _C_TEXT.sub("", text).count(";")
    return sum(
        isinstance(node, ast.stmt) and not _is_text(node)
        for node in ast.walk(ast.parse(text))
    )


def statements_below(folder: Path) -> int:
    """Return the number of statements of all files of Python and C below a folder."""
    return sum(
        statements_of(path)
        for path in folder.rglob("*")
        if path.suffix in (".py", ".c", ".h")
    )


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(name, statements_below(Path(name)))
