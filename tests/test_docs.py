"""README and docs: every Python block runs as printed, every link has a target, the reference is complete.

All blocks of a page are one script, in the page's order. A block after `<!-- fragment: REASON -->` is only compiled.
A line such as `data["action"]    # int64 [8, 200]` is checked against the comment: a shape, after a dtype or alone.
"""

import ast
import builtins
import dataclasses
import functools
import inspect
import pydoc
import re
import types
from pathlib import Path
from typing import NamedTuple

import pytest

import envherd
from envherd.executor.rollouts.rollout import RolloutRunner
from tests.extras import needs

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [
    *(ROOT / name for name in ("README.md", "AGENTS.md", "llms.txt")),
    *sorted(DOCS.glob("**/*.md")),
]
#: Page -> the extras that its blocks need.
NEEDED = {
    "README.md": ("meltingpot", "gymnasium", "sb3", "torchrl"),
    "llms.txt": ("gymnasium",),
    "docs/index.md": ("gymnasium",),
    "docs/checkpoints.md": ("gymnasium", "box2d"),
    "docs/cluster.md": ("gymnasium", "ray"),
    "docs/custom_envs.md": ("gymnasium",),
    "docs/evaluation.md": ("gymnasium",),
    "docs/faq.md": ("gymnasium", "media"),
    "docs/gymnasium.md": ("gymnasium",),
    "docs/logging.md": ("gymnasium", "prometheus"),
    "docs/meltingpot.md": ("meltingpot",),
    "docs/pettingzoo.md": ("pettingzoo",),
    "docs/sb3.md": ("sb3",),
    "docs/policies.md": ("gymnasium", "meltingpot"),
    "docs/vector_envs.md": ("gymnasium",),
    "docs/torchrl.md": ("gymnasium", "torchrl"),
}
BLOCK = re.compile(
    r"(?:^<!-- fragment: (?P<why>[^\n]+) -->\n)?^```python\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
SHAPED = re.compile(r"^(\s*)([^#]+?)\s+# (?:(\w+) )?(\[\d+(?:, \d+)*\])")
#: Takes the line of the page's title.
CHECK = (
    "def _holds(value, dtype, shape): "
    "assert list(value.shape) == shape and dtype in (None, str(value.dtype).removeprefix('torch.')), "
    "f'expected {dtype} {shape}, got {value.dtype} {list(value.shape)}'"
)
#: That the site shows of a line of code without a scroll bar.
COLUMNS = 84
LINK = re.compile(r"""(?:\]\(|src(?:set)?=")([^)"\s]+)[)"]""")
WORDS = (
    *(
        "whoever",
        "so many",
        "of its own",
        "of one's own",
        "beside",
        "told",
        "said",
        "has to see to",
        "for ever",
    ),
    *(
        "becomes of",
        "comes of",
        "comes to be",
        "gives and takes",
        "as far as it goes",
        "as it comes",
        "mends",
        "dear",
    ),
    *("save one", "it pays", "lies about"),
)
#: The objects on the pages of the reference, from the directives of mkdocstrings.
DIRECTIVES = [
    path
    for page in sorted((DOCS / "reference").glob("*.md"))
    for path in re.findall(r"^::: ([\w.]+)$", page.read_text(), re.MULTILINE)
]
#: A facade's object, which needs its extra.
OF_FACADE = re.compile(rf"envherd\.(executor\.facades|{'|'.join(envherd._FACADES)})\.")
MEMBERS = (types.FunctionType, property, classmethod, staticmethod)


class Block(NamedTuple):
    """One Python block.

    Attributes:
        line: of its first line of code, from 1.
        code: its text.
        why: the reason why it is only compiled, or None.
    """

    line: int
    code: str
    why: str | None


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks_of(text: str) -> list[Block]:
    return [
        Block(text[: found.start("code")].count("\n") + 1, found["code"], found["why"])
        for found in BLOCK.finditer(text)
    ]


def checked(line: str) -> str:
    """Return a line of code; an expression with a shape in its comment becomes a check of that shape."""
    found = SHAPED.match(line)
    if found is None:
        return line
    indent, expression, dtype, shape = found.groups()
    try:
        compile(expression, "line", "eval")
    except SyntaxError:
        return line
    return f"{indent}_holds({expression}, {dtype!r}, {shape})"


def script_of(text: str) -> str:
    """Return the script of a page, whose lines have the numbers that they have on the page."""
    lines = [CHECK] + [""] * text.count("\n")
    for block in blocks_of(text):
        if block.why is None:
            code = block.code.splitlines()
            lines[block.line - 1 : block.line - 1 + len(code)] = map(checked, code)
    return "\n".join(lines) + "\n"


def parameters() -> list[object]:
    pages = [
        page
        for page in PAGES
        if any(block.why is None for block in blocks_of(page.read_text()))
    ]
    return [
        pytest.param(
            page,
            marks=[pytest.mark.slow, needs(*NEEDED.get(name_of(page), ("gymnasium",)))],
            id=name_of(page),
        )
        for page in pages
    ]


@pytest.mark.parametrize("page", parameters())
@pytest.mark.long
def test_the_blocks_of_a_page_run_as_printed(page, script_host, tmp_path):
    # Ray would join a cluster that another test has on this machine.
    done = script_host.run_text(
        script_of(page.read_text()),
        folder=tmp_path,
        RAY_ADDRESS="local",
        FORKED_HELPERS="1",
    )
    assert done.returncode == 0, (
        f"{name_of(page)}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    )


def test_fragments_compile():
    for page in PAGES:
        for block in blocks_of(page.read_text()):
            compile(block.code, f"{name_of(page)}:{block.line}", "exec")


def test_each_block_of_the_readme_runs_alone():
    for block in blocks_of((ROOT / "README.md").read_text()):
        used, made = set(), set(dir(builtins))
        for node in ast.walk(ast.parse(block.code)):
            match node:
                case ast.Name(id=name, ctx=ast.Load()):
                    used.add(name)
                case (
                    ast.Name(id=name)
                    | ast.FunctionDef(name=name)
                    | ast.alias(name=name)
                ):
                    made.add(name)
        assert used <= made, f"README.md:{block.line}"


def test_the_readmes_installation_begins_with_its_two_commands():
    section = (ROOT / "README.md").read_text().split("## Installation\n")[1]
    before_pip = section[: section.index("pip install")]
    assert re.findall(r"^make (\w+) +# ", before_pip, re.MULTILINE) == [
        "rollout",
        "test",
    ]
    assert {"rollout", "test"} <= {
        *re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    }


def test_a_wrong_shape_is_noticed():
    script = script_of(
        "# Title\n```python\nimport torch\ntorch.zeros(2, 3)   # float32 [2, 4]\n```\n"
    )
    assert script.splitlines()[3] == "_holds(torch.zeros(2, 3), 'float32', [2, 4])"
    with pytest.raises(
        AssertionError,
        match=re.escape("expected float32 [2, 4], got torch.float32 [2, 3]"),
    ):
        exec(script, {})


def prose_of(page: Path) -> str:
    """Return a page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


@functools.cache
def anchors_of(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the site make them."""
    titles = re.findall(r"^#+ (.+)$", prose_of(page), re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")
        for title in titles
    }


def test_every_link_has_a_target():
    broken = []
    for page in (
        *PAGES,
        ROOT / "CONTRIBUTING.md",
        ROOT / "CHANGELOG.md",
        ROOT / "benchmarks" / "README.md",
    ):
        for link in (
            link for link in LINK.findall(prose_of(page)) if "://" not in link
        ):
            path, _, anchor = link.partition("#")
            target = page if not path else (page.parent / path).resolve()
            if not target.exists() or (anchor and anchor not in anchors_of(target)):
                broken.append((name_of(page), link))
    assert broken == []


def test_the_index_has_every_page_by_its_title():
    links = re.findall(
        r"\[([^\]]+)\]\(((?:\w+/)?\w+\.md)\)", (DOCS / "index.md").read_text()
    )
    titles = {DOCS / link: text for text, link in links}
    pages = [
        page for page in PAGES if page.is_relative_to(DOCS) and page.name != "index.md"
    ]
    assert {name_of(page): titles.get(page) for page in pages} == {
        name_of(page): re.search(r"^# (.+)$", prose_of(page), re.MULTILINE).group(1)
        for page in pages
    }


def test_code_fits_the_site():
    for page in PAGES:
        blocks = re.findall(r"^```.*?^```$", page.read_text(), re.MULTILINE | re.DOTALL)
        assert [
            line
            for block in blocks
            for line in block.splitlines()
            if len(line) > COLUMNS
        ] == [], name_of(page)


def test_pages_and_sources_avoid_the_worst_words():
    worst = re.compile(rf"\b(?:{'|'.join(WORDS)})\b", re.IGNORECASE)
    sources = [
        path
        for folder in ("executor", "shm", "workers")
        for path in sorted((ROOT / folder).glob("**/*.py"))
    ]
    texts = {path: path.read_text() for path in sources} | {
        page: re.sub(r"`[^`]*`|\"[^\"]*\"|\]\([^)]*\)", "", prose_of(page))
        for page in PAGES
    }
    assert {
        path: found for path, text in texts.items() if (found := worst.findall(text))
    } == {}


@pytest.mark.parametrize(
    "folder", ["shm", "workers", "executor", "tests", "tools", "benchmarks", "examples"]
)
def test_names_avoid_the_worst_words(folder):
    """Also comments, because to find the names among all words would take seconds."""
    worst = r"(?<![a-zA-Z])(?:said|told|whoever)(?![a-zA-Z])"
    for path in {*(ROOT / folder).glob("**/*.py")} - {Path(__file__)}:
        assert re.findall(worst, path.read_text(), re.IGNORECASE) == [], path


def members_of(path: str) -> dict[str, object]:
    """Return the documented parts of an object: itself, and for a class its public methods and properties."""
    value = pydoc.locate(path)
    assert value is not None, path
    found = {path: value}
    if inspect.isclass(value):
        for name in dir(value):
            member = inspect.getattr_static(value, name)
            is_ours = any(
                name in vars(base) and base.__module__.startswith("envherd.")
                for base in value.__mro__
            )
            if not name.startswith("_") and is_ours and isinstance(member, MEMBERS):
                found[f"{path}.{name}"] = member
    return found


def test_the_reference_has_every_public_name():
    assert {f"envherd.{name}" for name in envherd._HOMES} <= set(DIRECTIVES)
    assert len(DIRECTIVES) == len(set(DIRECTIVES))


def test_names_in_the_reference_have_docstrings():
    members = [
        one
        for path in DIRECTIVES
        if not OF_FACADE.match(path)
        for one in members_of(path).items()
    ]
    assert [name for name, member in members if not inspect.getdoc(member)] == []


def test_the_reference_has_every_option():
    attributes = inspect.getdoc(envherd.ExecutorOptions).partition("Attributes:")[2]
    assert re.findall(r"^ {4}(\w+): ", attributes, re.MULTILINE) == [
        field.name for field in dataclasses.fields(envherd.ExecutorOptions)
    ]


def test_the_tutorial_has_every_argument_of_rollout():
    parameters = dict(inspect.signature(RolloutRunner.run).parameters)
    del parameters["self"], parameters["env"]
    rows = dict(
        re.findall(
            r"^\| `(\w+)` \| (\w*) \|", (DOCS / "tutorial.md").read_text(), re.MULTILINE
        )
    )
    rows["max_steps"] = rows["max_steps"] or str(inspect.Parameter.empty)
    assert rows == {
        name: str(parameter.default) for name, parameter in parameters.items()
    }


def test_the_page_of_errors_has_the_whole_tree():
    tree = dict(
        re.findall(
            r"^\+-- (\w+) +\((\w+)\)", (DOCS / "errors.md").read_text(), re.MULTILINE
        )
    )
    known = [getattr(envherd, name) for name in envherd._HOMES]
    known = [
        one
        for one in known
        if inspect.isclass(one) and issubclass(one, envherd.EnvherdError)
    ]
    assert tree == {
        one.__name__: one.__bases__[1].__name__
        for one in known
        if one is not envherd.EnvherdError
    }


def test_the_limits_of_torchrl_name_tests_that_exist():
    page = (DOCS / "torchrl_limits.md").read_text()
    folder = ROOT / "tests" / "executor" / "facades"
    texts = {
        letter: (folder / name).read_text()
        for letter, name in re.findall(r"\b([A-Z])(?: is)? `(test_\w+\.py)`", page)
    }
    assert len(texts) == 4
    for row in re.findall(r"^\| .+ \| ([^|]+) \|$", page, re.MULTILINE):
        letter = None
        for named, words in re.findall(r"(?:\b([A-Z]) )?`([^`]+)`", row):
            letter = named or letter
            if "/" in words:
                assert (ROOT / words).exists(), row
            elif letter is not None:
                assert all(word in texts[letter] for word in words.split(" and ")), row


def test_the_index_has_every_example():
    assert {
        path.name
        for path in (ROOT / "examples").iterdir()
        if path.suffix in (".py", ".ipynb")
    } <= set(re.findall(r"\[(\w+\.\w+)\]", (DOCS / "index.md").read_text()))


def test_the_readmes_first_screen_has_the_ratios_of_its_tables():
    text = (ROOT / "README.md").read_text()
    row = re.compile(
        r"^\| ([^|]+) \| ([^|]+) \| [\d,]+ \| [\d,]+ \| ([\d.]+)x ", re.MULTILINE
    )
    ratios = {
        (work.split(" ")[0].strip(","), other): float(ratio)
        for work, other, ratio in row.findall(text)
    }
    assert len(ratios) == 6
    claim = re.search(
        r"has ([\d.]+)x the throughput of Gymnasium's `AsyncVectorEnv` at 200 µs a\s+step, and ([\d.]+)x for CartPole"
        r".*?make (\d+) to (\d+) times as many steps",
        text,
        re.DOTALL,
    )
    steady, cartpole, least, most = claim.groups()
    assert steady == f"{ratios['200', 'Gymnasium AsyncVectorEnv']:.1f}"
    assert cartpole == f"{ratios['CartPole', 'Gymnasium AsyncVectorEnv']:.1f}"
    scripts = re.findall(
        r"^\| 4 `MeltingpotEnv\([^|]+ \| [^|]+ \| ([\d.]+) ",
        (DOCS / "torchrl.md").read_text(),
        re.MULTILINE,
    )
    assert [least, most] == [
        f"{bound(map(float, scripts)):.0f}" for bound in (min, max)
    ]
