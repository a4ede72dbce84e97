"""docs/architecture.md matches the code: its tables, its picture, the named functions, and its rule."""

import ast
import functools
import re
from collections.abc import Iterator

import pytest

from tests.test_imports import ROOT
from tools import architecture
from tools.architecture import BOXES, COMMAND, PAGE, PARTS, PICTURE
from tools.statements import statements_below

TEXT = PAGE.read_text()
HOPS = [
    pytest.param(file, function, id=f"{section}: {function}")
    for section in (
        "A plain step",
        "A step",
        "A reset",
        "A loss",
        "A restart",
        "A branch",
    )
    for file, functions in architecture.hops(section)
    for function in functions
]
#: Modules that read a pool's reports besides rows: the flight, and its part for losses.
READERS = {
    "executor/protocol/flight.py",
    "executor/protocol/losses.py",
}
#: The size of the project, in statements (`python -m tools.statements FOLDER`): what comes in names what goes out.
SOURCE, TESTS = 26_000, 28_500
#: The head of a function in C, without the semicolon of a declaration.
C_FUNCTION = re.compile(r"^\w[\w *]*?(\w+)\([^;]*\)$", re.MULTILINE)
REPORTS = re.compile(r"\.(outcome|wait_all|wait_some)\b")


def defined_in(node: ast.AST, prefix: str = "") -> Iterator[str]:
    """Yield the classes and functions of a module by qualified name, but none inside a function."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
            yield prefix + child.name
        if isinstance(child, ast.ClassDef):
            yield from defined_in(child, f"{prefix}{child.name}.")


@functools.cache
def functions_of(file: str) -> set[str]:
    """Return the classes and functions of a file by qualified name."""
    text = (ROOT / file).read_text()
    return (
        set(C_FUNCTION.findall(text))
        if file.endswith(".c")
        else set(defined_in(ast.parse(text)))
    )


@pytest.mark.parametrize("name", PARTS)
def test_the_tables_are_those_of_the_code(name):
    begin, end = f"<!-- written by {name} -->", f"<!-- end of what {name} writes -->"
    written = TEXT.partition(begin)[2].partition(end)[0].strip().splitlines()
    assert written == PARTS[name](), (
        f"docs/architecture.md is out of date; run `{COMMAND}`"
    )


def test_the_picture_is_that_of_the_code():
    is_current = architecture.digest().encode() in PICTURE.read_bytes()
    assert is_current, (
        f"docs/images/architecture.png is out of date; run `{COMMAND}` and look at it"
    )


@pytest.mark.parametrize(("file", "function"), HOPS)
def test_the_functions_of_each_way_are_there(file, function):
    assert function in functions_of(file), (
        f"docs/architecture.md names {function}, which {file} does not have"
    )


@pytest.mark.parametrize(
    "page", ["CONTRIBUTING.md", "docs/architecture.md", "docs/design.md"]
)
def test_files_that_pages_name_are_there(page):
    named = re.findall(
        r"`((?:shm|workers|executor|benchmarks|tests|docs)/[\w/.]+\.\w+)`",
        (ROOT / page).read_text(),
    )
    assert [
        file for file in named if "NAME" not in file and not (ROOT / file).exists()
    ] == []


def test_ways_have_hops():
    assert len(HOPS) > 40


def test_only_flights_read_what_a_pool_reports():
    found = {
        path.relative_to(ROOT)
        for path in (ROOT / "executor").rglob("*.py")
        if REPORTS.search(path.read_text())
    }
    pools = {
        file
        for file in found
        if {"pools", "processes"} & {*file.parts} or file.stem == "portable"
    }
    assert {file.as_posix() for file in found - pools} == READERS


def test_every_arrow_points_down():
    imports = architecture.imported_boxes().items()
    assert [
        (one, other)
        for one, others in imports
        for other in others
        if BOXES[one].row <= BOXES[other].row
    ] == []


def test_no_boxes_overlap():
    places = [
        (box.row, column)
        for box in BOXES.values()
        for column in range(box.columns[0], box.columns[1] + 1)
    ]
    assert len(places) == len(set(places))


@pytest.mark.parametrize(
    ("folders", "limit"),
    [(("shm", "workers", "executor"), SOURCE), (("tests",), TESTS)],
)
def test_the_project_keeps_its_size(folders, limit):
    count = sum(statements_below(ROOT / folder) for folder in folders)
    assert count <= limit, (
        f"{', '.join(folders)} have {count} statements, and the limit is {limit}: remove some first"
    )
