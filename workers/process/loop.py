"""The worker's loop: wait for the doorbell, find the envs with a new command, carry it out.

Guarantees: a command is carried out once (its number is compared with the last one done); numbers are written after the
rows they announce, and the parent is woken after that. Mail is read before any later command.
Assumes: 8-byte aligned words are written whole, and stores become visible in program order (x86-64)
or with the doorbell that follows them (everywhere).
"""

import time
from collections.abc import Callable

from envherd.shm.slab import NUM_BINS, Slab, bin_of
from envherd.shm.sync import Bells, keep_order
from envherd.shm.tally import Counter
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
