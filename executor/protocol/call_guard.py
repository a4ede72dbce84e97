"""The call guard: one caller at a time, in the process that made the executor, until it is closed.

Guarantees: the executor remains usable after an exception at any bytecode (a signal handler that raises). The
interrupted call is no longer in progress once its frame has ended, and the next call begins with `Engine.recover`.
"""

import logging
import sys
import weakref
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from envherd.executor.batches.fast_tensordict import get_leaf
from envherd.executor.batches.transfer import as_array
from envherd.shm.platforms import register_at_fork
from envherd.shm.specs import EnvSpec
from envherd.workers.errors import Busy, Closed, EnvherdError

#: Modules whose functions wrap methods.
_WRAPPERS = ("envherd.executor.keywords", "envherd.executor.batches.fast_tensordict")

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


# ---- stale roots -------------------------------------------------------------------------------
# Notice loops that act on roots which the envs have left: `td = env.step(policy(td))` without `td = td["next"]`.
#
# Guarantees: a loop whose roots are the envs' present ones is not reported, also if its batches hold an old `next`.
# Plain steps are not looked at: only those of a batch that already has a `next`, and the first ones of these.

_log = logging.getLogger("envherd")
_NUM_LOOKS = 32
_STALE = (
    "%s acts on roots that the envs have left: env %d has made another step, and the observation in the batch is still "
    "the one from before. Pass the policy the envs' present roots: td['next'] after step, the second value of "
    "step_and_maybe_reset, or current() after recv. This is reported once."
)


class _Hashes(NamedTuple):
    """Of a row of the root, and of the same row of `next`."""

    root: int
    next: int


class StaleRoots:
    """Looks at the batches of steps for one executor: see the section.

    Args:
        keys: for each env, those of the observation.
        action_keys: for each env, that of one leaf of the action, or None.

    Attributes:
        looks_left: how many batches are still looked at.
    """

    looks_left = _NUM_LOOKS

    def __init__(
        self,
        keys: Sequence[Sequence[Any]],
        action_keys: Sequence[Any],
    ) -> None:
        self._keys = keys
        self._action_keys = action_keys
        # Env id -> those of its latest rows.
        self._seen: dict[int, _Hashes] = {}
        self._action: Any = lambda: None  # the latest one

    @classmethod
    def of(cls, specs: Sequence[EnvSpec]) -> Self:
        """Return one for envs with these specs."""
        return cls(
            [
                [leaf.key for leaf in spec.observation if not leaf.is_side]
                for spec in specs
            ],
            [spec.action[0].key if spec.action else None for spec in specs],
        )

    def forget(self) -> None:
        """Note that envs were reset."""
        self._seen.clear()

    def look(self, td: TensorDictBase, env_ids: np.ndarray) -> None:
        """Look at a batch `[k]` of some envs, which have been given its actions, before its `next` is replaced."""
        if (
            not self.looks_left
            or not len(env_ids)
            or (following := get_leaf(td, "next")) is None
        ):
            return
        # A look costs more than a step: a loop is judged by its first steps.
        self.looks_left -= 1
        roots = self._hashes(td, env_ids)
        nexts = self._hashes(following, env_ids)
        done = following.get("done", None)
        action_key = self._action_keys[env_ids[0]]
        # A lazy stack makes a new tensor each time, its rows do not.
        first = td
        if isinstance(td, LazyStackedTensorDict):
            first = td[0]
        action = None
        if action_key is not None:
            action = first.get(action_key, None)
        if roots is None or nexts is None or done is None:
            return
        # Such as frame skips, which ignore the roots.
        is_repeated = action is not None and action is self._action()
        has_left = []
        is_present = False
        for row, (env_id, root, next_) in enumerate(
            zip(
                env_ids.tolist(),
                roots,
                nexts,
                strict=True,
            )
        ):
            now = _Hashes(root, next_)
            before = self._seen.get(env_id, now)
            self._seen[env_id] = now
            if as_array(done[row].cpu()).any():
                continue
            # A step's batch that is passed again has the same root; one of `recv` has the `next` before its own.
            is_present = is_present or root not in before
            if next_ not in (root, before.next):
                has_left.append(env_id)
        if has_left and not is_present and not is_repeated:
            self.looks_left = 0
            _log.warning(_STALE, call_name(), has_left[0])
        self._action = (lambda: None) if action is None else weakref.ref(action)

    def _hashes(self, td: TensorDictBase, env_ids: np.ndarray) -> list[int] | None:
        """Return a hash of the observation in each row; None if it is not there."""
        if isinstance(td, LazyStackedTensorDict):
            rows = [
                self._hashes(row[None], env_ids[at : at + 1])
                for at, row in enumerate(td.unbind(0))
            ]
            return None if None in rows else [row[0] for row in rows if row]
        leaves = [td.get(key, None) for key in self._keys[env_ids[0]]]
        if not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
            return None
        arrays = [as_array(leaf.cpu()) for leaf in leaves]
        return [
            hash(tuple(array[row].tobytes() for array in arrays))
            for row in range(len(td))
        ]
