"""Hooks of the documentation site: examples become pages, and links to other files outside of docs/ become names."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, InclusionLevel

_EXAMPLES = Path(__file__).parents[1] / "examples"
# A file has one heading and long lines, so it takes the room of the table of contents. Guides are found before it.
_WIDE = "---\nhide: [toc]\nsearch: {boost: 0.3}\n---\n\n"


def on_files(files: Any, *, config: Any, **_: Any) -> Any:
    """Return the site's files, with a page for each example."""
    for path in sorted(_EXAMPLES.iterdir()):
        if path.suffix in (".py", ".ipynb"):
            name = f"This page shows the file `examples/{path.name}`."
            if path.suffix == ".ipynb":
                content = f"{_notebook(path)}\n\n{name}\n"
            else:
                content = f"# {path.name}\n\n{name}\n\n{_block(path.read_text())}\n"
            content = _WIDE + content
            page = File.generated(config, f"examples/{path.name}.md", content=content)
            page.inclusion = InclusionLevel.NOT_IN_NAV
            files.append(page)
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Return a page's text with links that stay on the site."""
    if page.file.src_uri.startswith("reference/"):
        markdown = _nested(markdown)
    up = "../" * page.file.src_uri.count("/")
    markdown = re.sub(
        rf"\]\({re.escape(up)}\.\./examples/([\w.]+)\)",
        rf"]({up}examples/\1.md)",
        markdown,
    )
    return re.sub(
        rf"\[([^\]]+)\]\({re.escape(up)}\.\./(?!\.\./)[^)]+\)", r"\1", markdown
    )


def on_page_content(html: str, *, page: Any, **_: Any) -> str:
    """Return a page's HTML: no line ends at the hyphen of an option or a range, and pictures open in full size.

    What a function returns is shown as code by mkdocstrings, so the backquotes of the docstring go. Docstrings name
    pages by their files, which become links. Long names in tables have places for a break.
    """
    up = "../" * page.url.count("/")
    html = re.sub(r"\bdocs/([\w/]+)\.md\b", rf'<a href="{up}\1/">docs/\1.md</a>', html)
    html = re.sub(
        r"<code>[^<]*`[^<]*</code>", lambda found: found[0].replace("`", ""), html
    )
    html = re.sub(
        r"(?<!</span>)(<code>|<td[^>]*>)([^<]+)(?=</code>|</td>)",
        _with_whole_words,
        html,
    )
    html = re.sub(r"<t[dh][ >].*?</t[dh]>", _with_breaks, html, flags=re.DOTALL)
    html = re.sub(r"(?<=[\d.]) (?=(?:s|ms|us|µs|MiB|GiB)\b[^<>]*</td>)", "&nbsp;", html)
    return re.sub(r'<img [^>]*src="([^"]+)"[^>]*>', r'<a href="\1">\g<0></a>', html)


def _with_whole_words(found: re.Match[str]) -> str:
    words = re.sub(
        r"(?<!\S)(?=\S{,32}(?!\S))\S*-\S*", r'<span class="word">\g<0></span>', found[2]
    )
    return found[1] + words


def _with_breaks(cell: re.Match[str]) -> str:
    """Return a cell of a table in which names of 24 characters or more may be broken after their parts."""
    return re.sub(
        r"[\w/.,{}*()=&;#]{24,}(?=[^<>]*<)",
        lambda name: re.sub(
            r"(?<=[a-zA-Z*}])[_/.,(=]+(?=[a-zA-Z{*&])(?!(py|c|md)\b)",
            r"\g<0><wbr>",
            name[0],
        ),
        cell[0],
    )


def _nested(markdown: str) -> str:
    """Return a page of the reference in which the objects after a heading are one level below it."""
    start, *groups = re.split(r"(?m)^(?=## )", markdown)
    deeper = r"\g<0>\n    options:\n      heading_level: 3"
    return start + re.sub(r"(?m)^::: \S+$(?!\n +)", deeper, "".join(groups))


def _block(code: str) -> str:
    return f"```python\n{code.rstrip()}\n```"


def _notebook(path: Path) -> str:
    """Return the cells of a notebook as Markdown, without their output."""
    cells = []
    for cell in json.loads(path.read_text())["cells"]:
        text = "".join(cell["source"])
        cells.append(
            _block(text)
            if cell["cell_type"] == "code"
            else text.replace("](../docs/", "](../")
        )
    return "\n\n".join(cells)
