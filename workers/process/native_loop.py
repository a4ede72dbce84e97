"""The worker's loop in C: its arguments, and the functions in Python that it calls.

Guarantees: those of `Loop`: the same rows, words and messages. `Block.execute` does the rest: whole commands, or the
rest of a command whose env was stepped in C.
"""

from collections.abc import Callable
from typing import Any

from envherd.shm.slab import NUM_BINS
from envherd.workers import native
from envherd.workers.process.loop import TIDY_EVERY, Loop


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
