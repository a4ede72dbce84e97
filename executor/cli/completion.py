"""Completion of ENV in the shell: what a name may go on with, of installed families.

Guarantees: a family's package is imported only for a prefix that needs it: `gymnasium:` and names that begin with a
capital need Gymnasium, `vmas:` needs VMAS. Nothing is raised, and nothing printed.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterable, Iterator, MutableMapping

#: What stands before the word to complete in the same argument; see `join_words`.
_BEFORE = "_ENVHERD_COMPLETE_BEFORE"


def complete_env(incomplete: str) -> list[str]:
    """Return the names of envs that begin so; of one without a family, also the families."""
    before = os.environ.get(_BEFORE, "")
    text = before + incomplete
    with contextlib.suppress(Exception), _silence():
        return [name.removeprefix(before) for name in _names(text) if name.startswith(text)]
    return []


def complete_family(incomplete: str) -> list[str]:
    """Return the families that `envherd list` lists and that begin so."""
    from envherd.executor.cli.env_names import LISTED

    return [family for family in LISTED if family.startswith(incomplete)]


def _names(text: str) -> Iterator[str]:
    from envherd.executor.cli.env_names import FAMILIES

    family, colon, rest = text.partition(":")
    if colon:
        yield from (f"{family}:{name}" for name in _names_of(family, rest))
        return
    yield from (f"{one}:" for one in FAMILIES)
    if text[:1].isupper():  # as the ids of Gymnasium
        yield from _names_of("gymnasium", text)
    elif text:
        yield from _names_of("meltingpot", text)  # without importing it


def _names_of(family: str, start: str) -> Iterable[str]:
    """Return the names of a family's envs; those that packages register with Gymnasium, if no others begin so."""
    from envherd.executor.cli.env_names import known_names
    from envherd.workers.adapters.named import plug_in_ids

    is_gymnasium = family in ("gymnasium", "gymnasium_vec")
    known = known_names("gymnasium" if is_gymnasium else family)
    return plug_in_ids() if is_gymnasium and not any(name.startswith(start) for name in known) else known


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Keep what packages print while they are imported out of the shell."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def join_words(environ: MutableMapping[str, str]) -> None:
    """Undo what bash does to the words of a command line that is completed: it splits them at colons.

    Of the word to complete only what follows the last colon is left, as bash replaces no more than that.
    """
    if "COMP_WORDS" not in environ:
        return
    joined: list[str] = []
    for word in environ["COMP_WORDS"].split("\n")[: int(environ["COMP_CWORD"]) + 1]:
        if len(joined) > 1 and (word == ":" or joined[-1].endswith(":")):
            joined[-1] += word
        else:
            joined.append(word)
            environ[_BEFORE] = ""
    before, colon, last = joined[-1].rpartition(":")
    environ[_BEFORE] = before + colon
    environ["COMP_WORDS"], environ["COMP_CWORD"] = "\n".join([*joined[:-1], last]), str(len(joined) - 1)
