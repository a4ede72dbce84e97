"""Commands in C (`workers.native`) for one pool: to all envs, and to some of them.

Guarantees: words are written in the order of `CommandWords.write`, and answers count as in `WorkerPool.wait_some`:
these are the specification. The call that gives a command also counts it, so no interrupt comes in between. Longer
waits, and answers with more than rows, are left to Python.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from envherd.executor.pools.command_words import CommandWords
from envherd.shm.sync import Bell
from envherd.workers import native

#: Seconds without an answer after which the caller checks the workers' pidfds.
LOOK_S = 0.01


def native_caller(
    words: CommandWords,
    bells: Sequence[Bell],
    done: Bell,
    tally: Mapping[str, np.ndarray],
    worker_of: np.ndarray,
) -> Any:
    """Return the `Caller` of the C extension over the words and doorbells of a pool; None without the extension.

    Args:
        words: of its commands.
        bells: one of each worker.
        done: the doorbell by which workers wake the caller.
        tally: the words of `shm.tally`.
        worker_of: int64 `[N]`.
    """
    module = native.load()
    if module is None:
        return None
    return module.Caller(
        {
            "number": words.number,
            "command": words.command,
            "command_seq": words.command_seq,
            "reply_seq": words.reply_seq,
            "status": words.status,
            "answers_lost": words.answers_lost,
            "answered": tally["answered"],
            "ring_at": tally["ring_at"],
            "worker_of": worker_of,
            "go": [bell.memory for bell in bells],
            "done": done.memory,
            "look_ns": int(LOOK_S * 1e9),
            **native.waiting_facts(),
        }
    )
