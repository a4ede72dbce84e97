"""The worker's loop: wait for the doorbell, find the envs with a new command, carry it out.

Guarantees: a command is carried out once (its number is compared with the last one done); numbers are written after the
rows they announce, and the parent is woken after that. Mail is read before any later command.
Assumes: 8-byte aligned words are written whole, and stores become visible in program order (x86-64)
or with the doorbell that follows them (everywhere).
"""

import time
from collections.abc import Callable
from typing import Any

from envherd.shm.slab import NUM_BINS, Slab, bin_of
from envherd.shm.sync import Bells, Counter, keep_order
from envherd.workers import native
from envherd.workers.block.block import Block
from envherd.workers.protocol import EACH, LEAVE

#: Wakes. Checking the log costs a microsecond, and an env may print a megabyte per step.
TIDY_EVERY = 64


class Loop:
    """Serves one block.

    Args:
        block: carries commands out.
        slab: where commands are read and answers are written.
        bells: `go` wakes this loop, `done` the parent.
        read_mail: handles one message and returns its number, or None to exit.
        tidy: called every `TIDY_EVERY` wakes.
        mail_read: number of the latest message that was read.
    """

    def __init__(
        self,
        block: Block,
        slab: Slab,
        bells: Bells,
        read_mail: Callable[[], int | None],
        tidy: Callable[[], None],
        mail_read: int = 0,
    ) -> None:
        self._block = block
        self._go, self._done = bells
        self._read_mail = read_mail
        self._tidy = tidy
        self._is_leaving = False
        self._words = {name: array.data for name, array in slab.words.items()}
        self._counter = Counter(self._words, block.worker_id)
        # A successor carries out what its predecessor has left without a reply.
        self._latest = {
            env_id: self._words["reply_seq"][env_id] for env_id in block.slots
        }
        self._mail_read = mail_read
        # Of this worker alone: it is read before each command.
        self._mail_sent = self._words["mail_seq"][block.worker_id :]
        self._num_wakes = self._num_scans = 0

    def run(self) -> None:
        """Serve until a message tells it to exit."""
        serve = self.server()
        self._go.wait()
        while serve():
            self._go.wait()

    def server(self) -> Callable[[], bool]:
        """Return the function that serves one token; it returns False if a message says to exit."""
        worker_id = self._block.worker_id
        since = self._words["since_ns"]
        phase = self._words["phase"]
        busy = self._words["busy_ns"]

        def serve() -> bool:
            began = time.perf_counter_ns()
            since[worker_id] = began
            goes_on = self._serve_token()
            phase[worker_id] = 0
            since[worker_id] = ended = time.perf_counter_ns()
            busy[worker_id] += ended - began
            return goes_on

        return serve

    def _serve_token(self) -> bool:
        """Do what has come since the last token; return False if a message says to exit."""
        self._num_wakes += 1
        if self._num_wakes % TIDY_EVERY == 0:
            self._tidy()
        # Once per token is enough: a token follows every command and message.
        if self._check_mail():
            self._scan()
        return not self._is_leaving

    def _check_mail(self) -> bool:
        while self._mail_read < self._mail_sent[0]:
            number = self._read_mail()
            if number is None:
                self._is_leaving = True
                return False
            self._mail_read = number
        return True

    def _scan(self) -> None:
        """Carry out all new commands."""
        words = self._words
        latest = self._latest
        numbers = words["command_seq"]
        commands = words["command"]
        status = words["status"]
        owes_ring = False
        pending = [env_id for env_id in latest if numbers[env_id] != latest[env_id]]
        if len(pending) > 1 and commands[pending[0]] & EACH:
            # They were sent one by one: the longest waiting first.
            pending.sort(key=numbers.__getitem__)
        # Again: what came by mail for these commands was sent before their numbers were written, but perhaps after
        # the mail was read for this token.
        if not self._check_mail() or not pending:
            return
        # The numbers were read, and what they announce is read from here on.
        keep_order()
        self._num_scans += 1
        # Time one command per scan: 0.2 us, for any number of envs.
        sampled = pending[self._num_scans % len(pending)]
        for env_id in pending:
            # The owner closes: without this look, it would wait for the steps of all envs.
            if self._mail_sent[0] == LEAVE:
                self._check_mail()
                return
            # Now, because the owner writes the next number as soon as it has the reply.
            number = numbers[env_id]
            command = commands[env_id]
            if env_id == sampled:
                status[env_id] = self._execute_timed(env_id, command, len(pending))
            else:
                status[env_id] = self._block.execute(env_id, command)
            latest[env_id] = number
            if command & EACH:
                words["answered_ns"][env_id] = time.perf_counter_ns()
            # The rows and the status before the reply, which the owner may see at once.
            keep_order()
            words["reply_seq"][env_id] = number
            if command & EACH:
                if self._counter.add():
                    self._done.ring()
            else:
                owes_ring = True
        if owes_ring:
            self._done.ring()

    def _execute_timed(self, env_id: int, command: int, weight: int) -> int:
        """Carry out a command, and count its time for `weight` commands, of which it is the sample."""
        words = self._words
        worker_id = self._block.worker_id
        before = words["resets"][env_id]
        began = time.perf_counter_ns()
        status = self._block.execute(env_id, command)
        took = time.perf_counter_ns() - began
        if words["resets"][env_id] == before:
            words["step_bins"][worker_id * NUM_BINS + bin_of(took)] += 1
        else:
            words["reset_ns"][worker_id] += took * weight
        return status


# ---- native loop -------------------------------------------------------------------------------
# The worker's loop in C: its arguments, and the functions in Python that it calls.
#
# Guarantees: those of `Loop`: the same rows, words and messages. `Block.execute` does the rest: whole commands, or the
# rest of a command whose env was stepped in C.


def loop_class() -> type[Loop]:
    """Return the loop of workers that start now: the one in C, or the one in Python without the extension."""
    return Loop if native.load() is None else NativeLoop


class NativeLoop(Loop):
    """Serves one block as `Loop` does, in C."""

    def run(self) -> None:
        self.make().run()

    def server(self) -> Callable[[], bool]:
        serve: Callable[[], bool] = self.make().serve
        return serve

    def make(self) -> Any:
        """Create the loop in C."""
        return native.load().Loop(self.facts())

    def facts(self) -> dict[str, Any]:
        """Return the arguments of the loop in C."""
        block = self._block
        return {
            "words": self._words,
            "worker_id": block.worker_id,
            "slots": list(block.slots.items()),
            "go": self._go.memory,
            "done": self._done.memory,
            "num_bins": NUM_BINS,
            "tidy_every": TIDY_EVERY,
            "mail_read": self._mail_read,
            "step_type": native.load().Step,
            "calls": {
                "execute": block.execute,
                "hand_over": self._hand_over,
                "fail": self._fail,
                "go_on": self._go_on,
                "check_mail": self._check_mail,
                "tidy": self._tidy,
                "hand_over_reset": self._hand_over_reset,
            },
            **native.waiting_facts(),
        }

    def _hand_over(
        self,
        env_id: int,
        command: int,
        hand_over: Callable[[int, Any], list[Any]],
        result: Any,
    ) -> int:
        """Complete a command whose env returned a result that is not plain."""
        return self._block.execute(
            env_id, command, lambda column: hand_over(column, result)
        )

    def _fail(
        self,
        env_id: int,
        command: int,
        error: BaseException,
        *observation: Any,
    ) -> int:
        """Complete a command whose env raised in its step, or in its reset.

        Args:
            env_id: which env.
            command: as `Block.execute` takes it.
            error: what the env raised.
            observation: after a reset, the step's observation, or None without a step; else nothing.
        """

        def raise_again(_column: int = 0) -> list[Any]:
            nonlocal error
            try:
                raise error
            finally:
                # Frames that its traceback holds would hold it: the cycle would keep the env after it was closed.
                del error

        if not observation:
            return self._block.execute(env_id, command, raise_again)
        return self._block.execute(
            env_id, command, lambda _column: observation[0], raise_again
        )

    def _go_on(self, env_id: int, command: int, observation: list[Any]) -> int:
        """Complete a command whose step was stored, and in which the env has ended."""
        return self._block.execute(env_id, command, lambda _column: observation)

    def _hand_over_reset(
        self,
        env_id: int,
        command: int,
        observation: Any,
        root: list[Any],
    ) -> int:
        """Complete a command whose env was reset (after a step, if any) and returned a result that is not plain."""
        return self._block.execute(
            env_id, command, lambda _column: observation, lambda: root
        )
