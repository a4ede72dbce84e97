"""The words for commands and answers of envs, written and read by the caller's side.

Guarantees: a command's number is stored after all that it announces. An answer lost with a worker is marked as lost
before it counts as answered. What is read after an answer's number is what the worker wrote before it.

Order, because workers read meanwhile, and a handler may raise between any two lines. The numbers are at the lines.
1. The counter of commands, before any word: after an interrupt, `number` says that a command may have been given.
2. The command and `answers_lost`, a fence, then the command's number, by which a worker finds it. `complete` comes
   before all of it: after an interrupt in between, its number is larger than that of the env's latest command.
3. `answers_lost` of a lost worker's envs, before its reply: no answer may exist that no worker gave.
4. The reply's number, a fence, then what the worker wrote before it.
"""

import numpy as np

from envherd.executor.pools.replies import Outcome
from envherd.shm.slab import Slab
from envherd.shm.sync import keep_order


class CommandWords:
    """The command words of all envs.

    Args:
        slab: of the words.

    Attributes:
        number: of the latest command, int64 `[1]`; it only increases. C writes it as well.
        answers_lost: bool `[N]`, whether a loss has taken the answer to the latest command of an env.
        has_completed: whether `complete` was called.
        command, command_seq, reply_seq, status: of the slab, one of each env (VIEWS).
    """

    def __init__(self, slab: Slab) -> None:
        words = slab.words
        self.command = words["command"]
        self.command_seq = words["command_seq"]
        self.reply_seq = words["reply_seq"]
        self.status = words["status"]
        self.has_completed = False
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
        self.has_completed = True
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
        if not self.has_completed:
            return numbers
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
