"""The adapter: what an env family implements so that workers can run its envs.

An adapter wraps ONE native env, already built by the user's factory, inside the worker. It never
resets by itself, never swallows an exception, and holds no shared memory: it takes and returns plain python and numpy
values. The worker's `Block` checks the returned values against the spec and copies them to the slab before it calls the
env again (an env may reuse buffers).

Values are lists aligned with the spec's leaves:
    observation  `list` aligned with `spec.observation`; an array may be given as the tuple of its rows, where
                 these are not next to each other in memory (what each agent of a group observes)
    reward       `list` aligned with `spec.reward`
    action       `list` aligned with `spec.action`, then `spec.state`; an int for a Discrete scalar
                 leaf (already with `start` added back by the adapter itself, NOT by the caller: the
                 adapter is given the index), else a numpy array that the env may keep
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from envherd.shm.specs import EnvSpec, Key
from envherd.workers.errors import Unsaveable
from envherd.workers.guest import guest

#: What `Adapter.reset` takes besides a seed.
Options = Mapping[str, Any] | None
Mask = np.ndarray | None
#: (observation values, reward values, terminated, truncated)
StepValues = tuple[list[Any], list[Any], Any, Any]


class EnvCall(NamedTuple):
    """What `Adapter.step` does around its one call of `env.step`, for code that makes this call itself.

    `env.step(action)` returns `(observation, reward, terminated, truncated, info)`; `adapter.info` becomes the info.
    With a `holder`, its attribute `latest` becomes the observation values instead, and `is_ahead` True.

    Attributes:
        read: result of `env.step` -> what `Adapter.step` returns; checks it and keeps its info.
        give: value of the only action leaf -> native action; None if they are the same.
        build: values of the action leaves -> native action, where that is a dict or tuple; else None.
        flatten: native observation -> its values; None if the observation is the only value.
        ready: what `give` returns for the first indices of a Discrete action; may be empty.
        reads_number: whether the reward is one number, of any numeric type; otherwise it is stored unchanged.
        holder: object whose attribute `env` is stepped; None for the adapter.
        flags: of each of the last observation leaves, which flag it is: 0 done, 1 terminated, 2 truncated.
    """

    read: Callable[[Any], StepValues]
    give: Callable[[Any], Any] | None = None
    build: Callable[[list[Any]], Any] | None = None
    flatten: Callable[[Any], list[Any]] | None = None
    ready: Sequence[Any] = ()
    reads_number: bool = True
    holder: Any = None
    flags: Sequence[int] = ()


_WITHOUT_STATE = (
    "expected an env whose state can be read, got {}: {}. ParallelEnv.branch copies it in memory. state_dict("
    "with_envs=False) saves only seeds. Or give the env or a wrapper methods state_dict() and load_state_dict(state)"
)


class Adapter(ABC):
    """One env of one family, behind the partial-reset protocol.

    Subclasses set `spec` in `__init__` without stepping the env (a family that can only learn its
    spec from a reset may reset once, and says so in its docstring).

    Attributes:
        env: the native env, as the factory returned it; `call`, `get` and `set` reach it.
        spec: what it returns and accepts.
    """

    #: Name of the family, e.g. "gymnasium"; used in messages and on the command line.
    family: ClassVar[str] = ""

    env: Any
    spec: EnvSpec
    #: The env's info of its last reset or step (VIEW); families without infos leave it empty.
    info: Mapping[str, Any] = {}  # never written to
    #: Observation leaves that `check_finite` does not check: numbers from infos.
    unchecked: frozenset[Key] = frozenset()
    #: Called with the info entries that the adapter cannot pass on, as name -> reason; set by the block.
    on_left_out: Callable[[Mapping[str, str]], None] | None = None
    #: Whether `step` also takes torch tensors, such as the caller's own; for families of torch simulators.
    takes_tensors: bool = False
    #: Whether `reset` and `step` may return the env's own tensors; set by an executor that accepts them.
    gives_tensors: bool = False
    #: Where the env's tensors are, a `torch.device`; None for families without tensors.
    device: Any = None
    #: Whether the state of the env consists of attributes and of simulators that `guests/saving/snapshot.py` knows.
    is_its_attributes: ClassVar[bool] = False
    #: Whether `state_dict` determines what the next steps return; else the env must be reset after a load.
    has_whole_state: bool = True
    #: Whether a process may hold only one env of the family.
    is_alone: bool = False
    #: The factory that built the env, for messages, and what it has returned; set by its caller.
    origin: str = ""
    returned: Any = None

    @abstractmethod
    def reset(
        self,
        seed: int | None,
        options: Options = None,
        mask: Mask = None,
    ) -> list[Any]:
        """Start a new episode and return its first observation.

        Args:
            seed: in `[0, 2**32)`, for this episode; None leaves the env's own generator as it is.
            options: the caller's keyword arguments of `reset`, or None; never mutated.
            mask: bool `[*batch_shape, 1]`, the inner rows to reset, for envs that are themselves a
                batch; None means all of them. Always None when `spec.batch_shape` is empty.

        Returns:
            Values aligned with `spec.observation`.
        """

    def reseeded(self) -> None:  # noqa: B027  # most families take the seeds of resets and need not know
        """Note that the caller has set a seed for the next reset, for envs that are seeded when they are built."""

    @abstractmethod
    def step(self, action: list[Any]) -> StepValues:
        """Make exactly one transition; never reset.

        Args:
            action: values aligned with `spec.action` and then `spec.state`.

        Returns:
            `(observation, reward, terminated, truncated)`: lists aligned with the spec, then two
            bools (bool arrays `[*batch_shape, 1]` for envs that are themselves a batch).
        """

    def env_call(self) -> EnvCall | None:
        """Return what `step` does around one call of `env.step`; None if it does anything else."""
        return None

    def done_values(self) -> list[Any]:
        """Return the values of the nested done leaves (`spec.done[3:]`) after the last reset or step."""
        return []

    def render(self) -> Any:
        """Return a picture of the env now, uint8 `[H, W, 3]`, or None if the env cannot draw itself."""
        return None

    def state_dict(self) -> Any:
        """Return the env's state as plain data; envs that cannot raise `NotImplementedError`."""
        if not self.is_its_attributes:
            raise self._without_state(
                f"its family ({self.family}) has no way to read it"
            )
        try:
            return guest("saving").save(self.env)
        except Unsaveable as error:
            raise self._without_state(str(error)) from None

    def load_state_dict(self, state: Any) -> None:
        """Restore a state that `state_dict` returned; envs that cannot raise `NotImplementedError`."""
        if not self.is_its_attributes:
            raise self._without_state(
                f"its family ({self.family}) has no way to set it"
            )
        self.read_state(state)()

    def read_state(self, state: Any) -> Callable[[], None]:
        """Check a state without a change of the env; return what restores it.

        A method `load_state_dict` of the env checks a state only when it restores it.

        Raises:
            ValueError: it is none of this env.
        """
        if not self.is_its_attributes:
            return functools.partial(self.load_state_dict, state)
        restore: Callable[[], None] = guest("saving").read(self.env, state)
        return restore

    def _without_state(self, why: str) -> NotImplementedError:
        innermost = getattr(self.env, "unwrapped", self.env)
        return NotImplementedError(_WITHOUT_STATE.format(type(innermost).__name__, why))

    def close(self) -> None:
        """Close the native env if it can be closed."""
        close = getattr(self.env, "close", None)
        if callable(close):
            close()
