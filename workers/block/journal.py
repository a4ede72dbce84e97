"""The journal of an env: the inputs of its steps since its latest reset, kept in the slab, where a crash leaves them.

Guarantees: an input is in the journal before the env gets it, byte for byte. `native/step.c` writes the same journal.
After more steps than fit, it has the latest ones: step `i` is at row `i % num_rows`.
Who writes: the worker that runs the env. Who reads: the parent, once the env has raised or its worker has ended.
"""

from collections.abc import Iterable, Mapping
from enum import IntFlag

import numpy as np

from envherd.shm.layout import Name
from envherd.shm.slab import JOURNAL_FACTS

_LARGEST_SEED = 2**63 - 1
STEPS, EPISODE, SEED, FLAGS = range(len(JOURNAL_FACTS))


class JournalFlag(IntFlag):
    """What else happened in an episode."""

    BEGUN = 1  # the env was reset; without it the journal means nothing
    SEEDED = 2  # with the seed among the facts
    WITH_OPTIONS = 4  # with keyword arguments
    IN_PARTS = 8  # some rows of the env were reset since, and others were not
    CHANGED = 16  # a caller has called, set or loaded something since


class Journal:
    """The journal of one env.

    Args:
        arrays: `GroupSlab.journal` of the env's group.
        inputs: of the group.
        row: of the env.

    Attributes:
        facts: int64 `[4]`, one for each of `JOURNAL_FACTS` (VIEW).
        rows: the journaled inputs, one array `[num_rows, ...]` for each leaf (VIEWS).
        sources: where each is read, `[1, ...]` (VIEWS).
    """

    def __init__(
        self,
        arrays: Mapping[Name, np.ndarray],
        inputs: Mapping[Name, np.ndarray],
        row: int,
    ) -> None:
        names = [name for name in arrays if name[0] == "input"]
        self.facts = arrays["facts",][row]
        self.rows = [arrays[name][row] for name in names]
        self.sources = [inputs[name][row : row + 1] for name in names]
        # All have the same number; an env without inputs needs no rows.
        self.num_rows = next(map(len, self.rows), 1)
        self._words = self.facts.data
        self._kept_bytes = [*map(_bytes_of, self.rows)]
        self._source_bytes = [*map(_bytes_of, self.sources)]

    def begin(
        self,
        episode: int,
        seed: int | None,
        flags: Iterable[JournalFlag] = (),
    ) -> None:
        """Note that the env is reset as a whole."""
        words = self._words
        begun = sum(flags, JournalFlag.BEGUN)
        words[STEPS] = 0
        words[EPISODE] = episode
        words[SEED] = 0
        if seed is not None:
            begun |= JournalFlag.SEEDED
            # A negative one in the journal is one that the word cannot hold, and a capsule reports it.
            words[SEED] = seed if 0 <= seed <= _LARGEST_SEED else -1
        # Last, as in C: the flags of this episode are never with the seed of another one.
        words[FLAGS] = begun

    def note(self, flag: JournalFlag) -> None:
        """Note what else has happened."""
        self._words[FLAGS] |= flag

    def keep(self) -> None:
        """Note the input of the step that is about to be made."""
        words = self._words
        steps = words[STEPS]
        row = steps % self.num_rows
        for kept, source in zip(self._kept_bytes, self._source_bytes, strict=True):
            nbytes = source.nbytes
            kept[row * nbytes : (row + 1) * nbytes] = source
        words[STEPS] = steps + 1


def _bytes_of(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data
