"""Shell completion of ENV, from the names of envs of installed families.

Guarantees: a family's package is imported only for a prefix that needs it: `gymnasium:` and names that begin with a
capital letter need Gymnasium, `vmas:` needs VMAS. `complete_env` raises nothing and prints nothing.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterable, Iterator, MutableMapping

#: Environment variable with the part of ENV before the word to complete; see `join_words`.
_BEFORE = "_ENVHERD_COMPLETE_BEFORE"


def complete_env(incomplete: str) -> list[str]:
    """Return the names of envs that begin with `incomplete`; without a colon in it, also the families."""
    before = os.environ.get(_BEFORE, "")
    text = before + incomplete
    with contextlib.suppress(Exception), _silence():
        return [name.removeprefix(before) for name in _names(text) if name.startswith(text)]
    return []


def complete_family(incomplete: str) -> list[str]:
    """Return the families of `envherd list` that begin with `incomplete`."""
    from envherd.executor.cli.env_names import LISTED

    return [family for family in LISTED if family.startswith(incomplete)]


def _names(text: str) -> Iterator[str]:
    from envherd.workers.adapters.named import FAMILIES

    family, colon, rest = text.partition(":")
    if colon:
        yield from (f"{family}:{name}" for name in _names_of(family, rest))
        return
    yield from (f"{one}:" for one in FAMILIES)
    if text[:1].isupper():  # Gymnasium's ids begin so
        yield from _names_of("gymnasium", text)
    elif text:
        yield from _names_of("meltingpot", text)  # which does not import Melting Pot


def _names_of(family: str, start: str) -> Iterable[str]:
    """Return the names of a family's envs; if no Gymnasium id begins with `start`, those of installed plug-ins."""
    from envherd.executor.cli.env_names import known_names
    from envherd.workers.adapters.named import plug_in_ids

    is_gymnasium = family in ("gymnasium", "gymnasium_vec")
    known = known_names("gymnasium" if is_gymnasium else family)
    return plug_in_ids() if is_gymnasium and not any(name.startswith(start) for name in known) else known


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Discard what packages print while they are imported."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def join_words(environ: MutableMapping[str, str]) -> None:
    """Join the words of a command line that bash split at colons for completion; update `environ`.

    The word to complete keeps only the part after the last colon, because bash replaces only that part.
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
