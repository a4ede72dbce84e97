"""Options whose values are checked while the command line is parsed, before anything starts."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from envherd.executor.guests.capsules.file import text_of

#: Above all root seeds that are drawn.
_LARGEST = 2**63


def picture(suffix: str) -> Callable[[Path | None], Path | None]:
    """Return the callback of an option that takes the path of a picture.

    Args:
        suffix: required end of the file's name; it selects the format.
    """

    def check(path: Path | None) -> Path | None:
        if path is not None and path.suffix.lower() != suffix:
            raise typer.BadParameter(
                f"expected a path that ends in {suffix}, got {str(path)!r}."
            )
        if path is not None:
            require_place(path)
        return path

    return check


def text_file(path: str | None) -> str | None:
    """Check the path of a file to write; the callback of options that also take `-`."""
    if path == "-" and sys.stdout is None:
        raise typer.BadParameter(
            "expected an open standard output for -, got a closed one."
        )
    if path not in (None, "-"):
        require_place(Path(path))
    return path


def write_json(path: str | None, report: Any, indent: int | None = 2) -> None:
    """Write a report as JSON to a file, or to standard output if `path` is `-`. If it is None, write nothing."""
    text = json.dumps(report, indent=indent) + "\n"
    if path == "-":
        sys.stdout.write(text)
        # An error belongs to the command, and a reader of `envherd top` waits for each line.
        sys.stdout.flush()
    elif path is not None:
        Path(path).write_text(text)


def require_number(name: str, value: Any) -> None:
    """Refuse NaN, infinity and numbers that no machine counts to, which the ranges of options let through.

    Args:
        name: of the option's field.
        value: of the option, of any type.

    Raises:
        typer.BadParameter: such a number.
    """
    if isinstance(value, (int, float)) and not abs(value) < _LARGEST:
        raise typer.BadParameter(
            f"expected a number below 2**63, got {value if isinstance(value, float) else 'a larger one'}.",
            param_hint=f"--{name.replace('_', '-')}",
        )


def new_folder(path: Path | None) -> Path | None:
    """Check the path of a folder to write; the callback of such options."""
    if path is not None and not path.is_dir():
        require_place(path)
    return path


def require_place(path: Path) -> None:
    """Refuse a path that cannot be written to. Commands replace a file that is there, and make no parent folder.

    A pipe with a name is refused: opening it waits for a reader. One without a name (`>(jq)`, /dev/stdout) has one.

    Raises:
        typer.BadParameter: there is a folder or no file, its parent folder does not exist, writing there is not
            permitted, or the path is not UTF-8, which torch cannot open.
    """
    name = str(path)
    real = Path(os.path.realpath(path))
    parent = real.parent if path.parent.is_dir() else path.parent
    for is_refused, got in (
        (path.is_dir(), f"the folder {name!r}"),
        (not parent.is_dir(), f"{name!r}: there is no folder {str(parent)!r}"),
        (
            os.path.lexists(real) and not (real.is_file() or real.is_char_device()),
            f"{name!r}: a pipe, a socket, a disk or a circular link",
        ),
        (
            not os.access(path if path.exists() else path.parent, os.W_OK),
            f"{name!r}: permission denied",
        ),
        (name.encode(errors="ignore").decode() != name, f"{name!r}: not UTF-8"),
    ):
        if is_refused:
            raise typer.BadParameter(
                f"expected a path that can be written to, got {got}."
            )


def _json_object(text: str) -> dict[str, Any]:
    """Return the keyword arguments in a text, or in the file that `@PATH` names; the parser of `--env-kwargs`."""
    try:
        found = json.loads(text_of(Path(text[1:])) if text.startswith("@") else text)
    except (OSError, ValueError, RecursionError) as error:
        raise typer.BadParameter(
            f"expected a JSON object, got {text!r} ({error})."
        ) from None
    if not isinstance(found, dict):
        raise typer.BadParameter(f"expected a JSON object, got {text!r}.")
    return found


# ---- options of several commands -------------------------------------------------------------------

ENV_HELP = (
    "meltingpot:NAME, gymnasium:ID, dm_control:DOMAIN/TASK, pettingzoo:ID-OR-MODULE, gymnasium_vec:ID[:ROWS], "
    "envpool:TASK[:ROWS], torchrl:MODULE:CALLABLE or python:MODULE:CALLABLE (a callable that "
    "returns an env)."
)

Env = Annotated[str, typer.Argument(metavar="ENV", help=ENV_HELP, show_default=False)]
EnvKwargs = Annotated[
    dict[str, Any] | None,
    typer.Option(
        metavar="JSON",
        parser=_json_object,
        help="Keyword arguments of the env as a JSON object, "
        "e.g. '{\"max_episode_steps\": 50}', or @FILE that holds one.",
    ),
]
MaxSteps = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Truncate episodes after this number of steps (meltingpot, gymnasium, pettingzoo).",
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Number of worker processes; default: one per usable core.",
    ),
]
Gif = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        callback=picture(".gif"),
        help="Write an animation (GIF).",
    ),
]
Sheet = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        callback=picture(".png"),
        help="Write a contact sheet (PNG).",
    ),
]
Json = Annotated[
    str | None,
    typer.Option(
        metavar="[PATH]",
        callback=text_file,
        help="Write the results as JSON; - or no PATH prints them.",
    ),
]
Quiet = Annotated[
    bool,
    typer.Option("--quiet", "-q", help="Print only errors, and what is written to -."),
]
