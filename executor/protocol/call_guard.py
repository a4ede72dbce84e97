"""The call guard: one caller at a time, in the process that made the executor, until it is closed.

Guarantees: the executor remains usable after an exception at any bytecode (a signal handler that raises). The
interrupted call is no longer in progress once its frame has ended, and the next call begins with `Engine.recover`.
"""

import sys
import weakref
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from envherd.shm.platforms import register_at_fork
from envherd.workers.errors import Busy, Closed, EnvherdError

#: Modules whose functions wrap methods.
_WRAPPERS = ("envherd.executor.keywords", "envherd.executor.batches.grad_mode")

_guards: "weakref.WeakSet[CallGuard]" = weakref.WeakSet()


def _disown_in_fork() -> None:
    for guard in list(_guards):
        guard.is_foreign = True


register_at_fork(after_in_child=_disown_in_fork)


def call_name() -> str:
    """Return the public method of the executor or of a facade that user code has called, for error messages."""
    name: str = "the call"
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        own = frame.f_code.co_name
        if not module.startswith("envherd.executor.") or module.startswith(
            "envherd.executor.cli."
        ):
            break
        if not own.startswith(("_", "<")) and module not in _WRAPPERS:
            name = own
        frame = frame.f_back
    return name


class CallGuard:
    """Holds the engine for one call: refuses a second thread, a call inside a call, a closed executor, a forked copy.

    The call's frame is its holder. The policy and the callback of a rollout may make calls inside that call, other than
    those with `refuse_rolling`.

    Args:
        engine: its `is_dirty` is set after a call was broken off, unless no command was under way (`is_in_flight`), and
            its `recover` clears it. While `is_rolling`, calls may be nested.

    Attributes:
        is_closed: the executor was closed.
        is_foreign: this process is a fork of the one that made the executor.
        dependents: objects with a thread that uses the executor; their `begin_close` is called when it is closed.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._holder: dict[str, FrameType] = {}
        # One C function, so only one of two threads is first.
        self._hold = self._holder.setdefault
        self.is_closed = False
        self.is_foreign = False
        self.dependents: weakref.WeakSet[Any] = weakref.WeakSet()
        _guards.add(self)

    def shut(self) -> None:
        """Refuse all further calls: the executor is closed."""
        self.is_closed = True
        for dependent in list(self.dependents):
            dependent.begin_close()

    def shut_with(self, owner: object) -> None:
        """Shut when the owner is freed, or at the interpreter's exit; keeps neither of them alive."""
        weakref.finalize(owner, _shut, weakref.ref(self))

    def check(self) -> None:
        """Raise `Closed` unless this process can use the executor."""
        if self.is_closed:
            raise Closed(
                f"{call_name()} failed: this executor is closed. Make a new one."
            )
        if self.is_foreign:
            raise Closed(
                f"{call_name()} failed: this executor belongs to the process that made it. Make one here."
            )

    def refuse_asking(self) -> None:
        """Raise `Busy` while a facade's `call_async` is open: the workers keep the answers to one question only."""
        if self._engine.is_asking:
            raise Busy(
                f"{call_name()} failed: expected no open call of the envs, got one that `call_async` has begun. Call "
                f"`call_wait` first."
            )

    def refuse_rolling(self) -> None:
        """Raise `Busy` inside a rollout."""
        if self._engine.is_rolling:
            raise Busy(
                f"{call_name()} failed: a rollout is in progress. Its policy and callback cannot step or reset envs."
            )

    def held(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that makes a call while its caller holds the guard, for calls of a few microseconds.

        The function does nothing and returns None if another call holds the guard, or if this one must be refused or
        begin with a recovery. Its caller then uses `with`, which decides that.
        """
        hold = self._hold
        release = self._holder.clear
        engine = self._engine
        frame_of = sys._getframe

        def call_held(*args: Any, **named: Any) -> Any:
            # The caller's: a frame that has itself as a local would keep the batch of the call.
            frame = frame_of(1)
            if hold("call", frame) is not frame:
                return None
            try:
                result = None
                if not (self.is_closed or self.is_foreign or engine.is_dirty):
                    result = call(*args, **named)
                release()
                return result
            except BaseException as error:
                self._break_off(frame, error)
                raise

        return call_held

    def __enter__(self) -> None:
        frame = sys._getframe(1)
        holder = self._hold("call", frame)
        if holder is not frame and not self._take_over(holder, frame):
            self.check()
            return
        if self.is_closed or self.is_foreign or self._engine.is_dirty:
            try:
                self.check()
                self._engine.recover()
            except BaseException:
                self._holder.clear()
                raise

    def _take_over(self, holder: FrameType, frame: FrameType) -> bool:
        """Take over from an interrupted call; return False if the call is nested in the holder's and allowed.

        Raises:
            Busy: the call is in progress.
        """
        if self.is_foreign:  # that call's thread does not exist in this process
            return False
        if _is_below(holder, frame):
            if self._engine.is_rolling:
                return False
            raise Busy(
                f"{call_name()} failed: it was made inside another call of this executor (by a signal handler?)."
            )
        tops = sys._current_frames()  # noqa: SLF001  # the documented way to the stacks of all threads
        if any(_is_below(holder, top) for top in tops.values()):
            raise Busy(
                f"{call_name()} failed: another thread is using this executor. One caller at a time."
            )
        self._engine.is_dirty = True
        self._holder["call"] = frame
        return True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self._break_off(sys._getframe(1), error)
        elif self._holder.get("call") is sys._getframe(1):
            self._holder.clear()

    def _break_off(self, frame: FrameType, error: BaseException) -> None:
        """Release the guard after an exception.

        Args:
            frame: of the call; it holds the guard, unless it has already released it.
            error: the exception.

        Raises:
            Closed: the executor was closed meanwhile.
        """
        if self._holder.get("call") is frame:
            if not isinstance(error, EnvherdError) or self._engine.is_in_flight:
                self._engine.is_dirty = True
            self._holder.clear()
        if (
            self.is_closed
            and isinstance(error, Exception)
            and not isinstance(error, Closed)
        ):
            raise Closed(
                f"{call_name()} failed: this executor was closed while it waited. Make a new one."
            ) from error


def _is_below(frame: FrameType, top: FrameType) -> bool:
    """Return whether a frame is on the stack that ends in `top`."""
    current: FrameType | None = top
    while current is not None:
        if current is frame:
            return True
        current = current.f_back
    return False


def _shut(guard: weakref.ref[CallGuard]) -> None:
    if (one := guard()) is not None:
        one.shut()
