"""`envherd init FILE`: writes a template with an env, its adapter and its factory, which runs unchanged."""

from pathlib import Path
from typing import Annotated

import typer

from envherd.executor.cli.options import require_place

#: The template. In the copy, the new module's name replaces that of the template.
_TEMPLATE = Path(__file__).with_name("env_template.py")


def init(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="The Python file to write."),
    ] = Path("my_env.py"),
    *,
    force: Annotated[
        bool,
        typer.Option("--force", help="Replace a file that exists."),
    ] = False,
) -> None:
    """Write a small env with its adapter and factory; replace it by your env.

    The file runs unchanged: `envherd check my_env:make_env`.
    """
    if file.suffix != ".py" or not file.stem.isidentifier():
        raise typer.BadParameter(
            f"expected the name of a Python module, e.g. my_env.py, got {str(file)!r}."
        )
    if file.exists() and not force:
        raise typer.BadParameter(
            f"expected a new file, got {str(file)!r}, which exists. --force replaces it."
        )
    require_place(file)
    name = f"{_module(file)}:make_env"
    file.write_text(_TEMPLATE.read_text().replace(f"{_TEMPLATE.stem}:make_env", name))
    typer.echo(f"{file} written. Next: envherd check {name}")


def _module(file: Path) -> str:
    """Return the dotted module name of a file below the current folder; of other files, only the file's own name."""
    here = Path.cwd()
    path = file.resolve()
    is_below = path.is_relative_to(here) and all(
        part.isidentifier() for part in path.relative_to(here).parent.parts
    )
    return (
        ".".join(path.relative_to(here).with_suffix("").parts)
        if is_below
        else file.stem
    )
