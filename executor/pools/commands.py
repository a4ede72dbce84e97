"""What the caller's side of a pool writes for workers and reads from them: commands, answers, reports."""

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from envherd.executor.processes.error_messages import Frame, log_notice
from envherd.shm.slab import Slab
from envherd.shm.sync import Bell, keep_order
from envherd.workers import native
from envherd.workers.errors import EnvherdError
from envherd.workers.info_rows import Schema, SchemaField

# ---- replies -----------------------------------------------------------------------------------
# Workers' reports besides their rows: faults, side values, infos, losses.


@dataclass
class Outcome:
    """The reports that were not handed out yet.

    Attributes:
        faults: env id -> fault message (an exception of the env).
        side: env id -> side values message.
        infos: env id -> infos message.
        losses: worker id -> the error that describes its loss.
        schemas: id -> the schema, of infos in rows of the slab; these are never handed out.
        completing: envs whose next reports complete the answer of a step, whose reports are kept.
    """

    faults: dict[int, Frame] = field(default_factory=dict)
    side: dict[int, Frame] = field(default_factory=dict)
    infos: dict[int, Frame] = field(default_factory=dict)
    losses: dict[int, EnvherdError] = field(default_factory=dict)
    schemas: dict[int, Schema] = field(default_factory=dict)
    completing: set[int] = field(default_factory=set)

    def __bool__(self) -> bool:
        """Return whether anything happened."""
        return bool(self.faults or self.side or self.infos or self.losses)

    def hand_out(self, env_ids: np.ndarray) -> "Outcome":
        """Remove and return the reports of some envs, int `[k]`, and all losses."""
        given = Outcome(losses=self.losses)
        self.losses = {}
        wanted = set(env_ids.tolist())
        self.completing -= wanted
        for name in ("faults", "side", "infos"):
            reported = getattr(self, name)
            if reported.keys() <= wanted:
                setattr(given, name, reported)
                setattr(self, name, {})
            else:
                setattr(
                    given,
                    name,
                    {i: reported.pop(i) for i in wanted & reported.keys()},
                )
        return given

    def keep(self, reported: "Outcome", env_ids: set[int]) -> None:
        """Keep what the steps of some envs have reported; their next reports complete it."""
        self.side |= {i: frame for i, frame in reported.side.items() if i in env_ids}
        self.infos |= {i: frame for i, frame in reported.infos.items() if i in env_ids}
        self.completing |= env_ids

    def forget_rows(self, env_ids: np.ndarray) -> None:
        """Drop the side values and infos of rows that were never completed."""
        for env_id in env_ids.tolist():
            self.side.pop(env_id, None)
            self.infos.pop(env_id, None)

    def take(self, frame: Frame) -> None:
        """Keep a message that came with rows."""
        kinds = {"fault": self.faults, "side": self.side, "infos": self.infos}
        if frame["kind"] in kinds:
            reported = kinds[frame["kind"]]
            env_id = frame["env_id"]
            # Of a step that a reset completes, only the root is new.
            if env_id in self.completing and "next" in reported.get(env_id, ()):
                frame = {**frame, "next": reported[env_id]["next"]}
            reported[env_id] = frame
        elif frame["kind"] == "schema":
            schema = Schema(SchemaField.from_plain(frame["root"]), frame["nbytes"])
            # Each env reports it. The one that is known may have been compiled.
            self.schemas.setdefault(schema.id, schema)
        else:
            log_notice(frame)


def crossed(answer: Mapping[str, Any]) -> Any:
    """Return the value of an answer from a worker."""
    if "pickled" in answer:
        return pickle.loads(answer["pickled"])  # only with infos="pickle"
    return answer["plain"]


# ---- command words -----------------------------------------------------------------------------
# The words for commands and answers of envs, written and read by the caller's side.
#
# Guarantees: a command's number is stored after all that it announces. An answer lost with a worker is marked as lost
# before it counts as answered. What is read after an answer's number is what the worker wrote before it.
#
# Order, because workers read meanwhile, and a handler may raise between any two lines. The numbers are at the lines.
# 1. The counter of commands, before any word: after an interrupt, `number` says that a command may have been given.
# 2. The command and `answers_lost`, a fence, then the command's number, by which a worker finds it. `complete` comes
#    before all of it: after an interrupt in between, its number is larger than that of the env's latest command.
# 3. `answers_lost` of a lost worker's envs, before its reply: no answer may exist that no worker gave.
# 4. The reply's number, a fence, then what the worker wrote before it.


class CommandWords:
    """The command words of all envs.

    Args:
        slab: of the words.

    Attributes:
        number: of the latest command, int64 `[1]`; it only increases. C writes it as well.
        answers_lost: bool `[N]`, whether a loss has taken the answer to the latest command of an env.
        command, command_seq, reply_seq, status: of the slab, one of each env (VIEWS).
    """

    def __init__(self, slab: Slab) -> None:
        words = slab.words
        self.command = words["command"]
        self.command_seq = words["command_seq"]
        self.reply_seq = words["reply_seq"]
        self.status = words["status"]
        # Of each env, the number of its latest command that completes another one.
        self._completing = np.zeros(len(self.command_seq), np.int64)
        # Of each env, the number of the caller's command that this one completes: by it, envs keep their order.
        self._completed = np.zeros(len(self.command_seq), np.int64)
        # A memoryview, because reading an item of an array takes three times as long.
        self.number = np.zeros(1, np.int64).data
        self.answers_lost = np.zeros(len(self.command_seq), bool)

    def write(self, env_ids: np.ndarray, commands: np.ndarray | int) -> None:
        """Write some envs' next commands, int64 `[k]` or one for all of them, under one number."""
        self.number[0] += 1  # 1
        self.command[env_ids] = commands
        if 1 in self.answers_lost.tobytes():
            self.answers_lost[env_ids] = False
        keep_order()  # 2
        self.command_seq[env_ids] = self.number[0]

    def complete(self, env_ids: np.ndarray) -> None:
        """Note that the next command completes the latest one of some envs, int `[k]`: they keep their place."""
        self._completed[env_ids] = self._order_of(env_ids)
        self._completing[env_ids] = self.number[0] + 1

    def must_complete(self) -> np.ndarray:
        """Return the envs whose lost answer no command completes yet, bool `[N]`.

        Also those for which an interrupt came between `complete` and the number of the command (2).
        """
        return self.answers_lost | (self._completing > self.command_seq)

    def _order_of(self, env_ids: np.ndarray) -> np.ndarray:
        """Return the numbers of the caller's latest commands to some envs, int64 `[k]`."""
        numbers = self.command_seq[env_ids]
        is_completing = numbers == self._completing[env_ids]
        return np.where(is_completing, self._completed[env_ids], numbers)

    def has_answered(self) -> np.ndarray:
        """Return which envs owe no answer, bool `[N]`."""
        has_answered = np.asarray(self.command_seq == self.reply_seq)
        keep_order()  # 4
        return has_answered

    def ready(self, env_ids: np.ndarray) -> np.ndarray:
        """Return those of some envs that owe no answer."""
        return env_ids[self.has_answered()[env_ids]]

    def by_order(self, env_ids: np.ndarray) -> np.ndarray:
        """Return some envs, int `[k]`, the oldest command of the caller first."""
        return np.asarray(env_ids[self._order_of(env_ids).argsort(kind="stable")])

    def have_all_answered(self) -> bool:
        """Return whether no env owes an answer."""
        have_all = self.command_seq.tobytes() == self.reply_seq.tobytes()
        keep_order()  # 4
        return have_all

    def lose_answers(self, env_ids: np.ndarray, outcome: Outcome) -> np.ndarray:
        """Count envs of a lost worker as answered; return those that owed an answer."""
        owing = env_ids[~self.has_answered()[env_ids]]
        self.answers_lost[owing] = True  # 3
        outcome.forget_rows(owing)
        self.status[owing] = 0
        self.reply_seq[owing] = self.command_seq[owing]
        return owing


# ---- fast commands -----------------------------------------------------------------------------
# Commands in C (`workers.native`) for one pool: to all envs, and to some of them.
#
# Guarantees: words are written in the order of `CommandWords.write`, and answers count as in `WorkerPool.wait_some`:
# these are the specification. The call that gives a command also counts it, so no interrupt comes in between. Longer
# waits, and answers with more than rows, are left to Python.

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
        tally: the words of `shm.sync`.
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
