"""EnvPool: n envs that its threads step together, behind the partial-reset protocol.

EnvPool resets a row that ended in place of its next step, ignores the seeds of resets, and returns only the rows that
were reset. Its dm API gives discount 0 both for a termination and for a time limit. The adapter differs:

- a row that ended is reset with `reset(env_id)` before it is stepped, so that no step is spent on a reset;
- rows are ordered by the ids that EnvPool returns with them;
- `terminated` and `truncated` are read from the pool's own state, for the gymnasium and the dm API alike;
- the pool is built again, from its own config, at the first reset after a seed was set: EnvPool takes seeds only when a
  pool is built, and the same seed in every worker would give every worker the same episodes. Row i gets seed + i. If
  resets carry no seeds, the factory's pool keeps the seeds it was built with.
- a pool in async mode (batch_size below num_envs) is built again in sync mode, as all its rows are wanted at once.

Guarantees: one step is one send and one receive of all rows and resets none of them; the last observation of an episode
is in `next`. Keys are those of EnvPool's observation and action spaces, in both APIs.
Does not limit how many threads a pool runs (`num_threads`), in addition to the workers.
"""

import warnings
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces

from envherd.shm.specs import EnvSpec, LeafSpec, done_leaves
from envherd.workers.adapters.base import Adapter, Mask, Options, StepValues
from envherd.workers.adapters.common.tree import RESERVED_NAMES, Leaf
from envherd.workers.adapters.gymnasium import spaces as gymnasium_spaces
from envherd.workers.adapters.gymnasium.spaces import mosaic
from envherd.workers.errors import FactoryError, ResetNeeded, SpecError

#: EnvPool takes int32, and gives row i the seed + i.
_MAX_SEED = 2**31
#: Entries of an action that name the rows it is for.
_NO_ACTIONS = ("env_id", "players.env_id")


class EnvPoolAdapter(Adapter):
    """One EnvPool of n envs, of the gymnasium or the dm API: batch shape `(n,)`; see the module.

    Shapes have n in front; the reward is float32 `[n, 1]`. `reset` takes no options.

    Args:
        env: what `envpool.make` returned; it is neither reset nor stepped here.

    Attributes:
        env: the pool in use; a new one after a seed was set.
        info: the pool's last info of every row, arrays `[n, ...]` by name.

    Raises:
        FactoryError: the pool's envs have several players.
        SpecError: an observation has a name that a batch uses itself.
    """

    family: ClassVar[str] = "envpool"

    def __init__(self, env: Any) -> None:
        self.env = env
        self.info: Mapping[str, Any] = {}
        config = env.spec.config
        self.num_rows = n = int(config.num_envs)
        if config.max_num_players > 1:
            raise FactoryError(
                f"the factory failed: expected an EnvPool of single-player envs, got {type(env).__name__} with "
                f"max_num_players={config.max_num_players}. Build it with max_num_players=1 if the task allows that."
            )
        self._names = list(env.spec.state_array_spec)
        self._observed = [name for name in self._names if name.startswith("obs")]
        self._actions = [
            name for name in env.spec.action_array_spec if name not in _NO_ACTIONS
        ]
        self._action_dtypes = [
            env.spec.action_array_spec[name].dtype for name in self._actions
        ]
        with warnings.catch_warnings():
            # EnvPool makes spaces whose bounds lose precision.
            warnings.simplefilter("ignore")
            observation = _observation_leaves(
                env.spec.gymnasium_observation_space,
                self._observed,
                n,
            )
            action = _action_leaves(env.spec.gymnasium_action_space, self._actions, n)
        self._give = [leaf.give for leaf in action]
        self._ids = np.arange(n, dtype=np.int32)
        self._ended = np.ones(n, bool)
        # The current values of all rows, by the pool's own names.
        self._state: dict[str, np.ndarray] = {}
        self._info_names = {
            name: name.removeprefix("info:")
            for name in self._names
            if name.startswith("info:")
        }
        self._info_names["elapsed_step"] = "elapsed_step"
        self._is_reseeded = True
        self.spec = EnvSpec(
            observation=tuple(leaf.spec for leaf in observation),
            action=tuple(leaf.spec for leaf in action),
            reward=(LeafSpec(("reward",), (n, 1), "float32"),),
            done=done_leaves((n,)),
            batch_shape=(n,),
            family=self.family,
            metadata={
                "env": type(env).__name__,
                "max_episode_steps": int(config.max_episode_steps),
            },
        )

    def reseeded(self) -> None:
        """Build the pool again at its next reset."""
        self._is_reseeded = True

    def reset(
        self,
        seed: int | None,
        options: Options = None,
        mask: Mask = None,
    ) -> list[Any]:
        """Start new episodes in some rows; the others keep theirs.

        Args:
            seed: used by the first reset of all rows after a seed was set; otherwise the rows' generators continue.
            options: must be empty.
            mask: bool `[n, 1]`; None resets all rows.

        Raises:
            TypeError: there are options.
        """
        if options:
            raise TypeError(
                f"reset failed: expected no options for EnvPool, got `{next(iter(options))}`. Leave it out."
            )
        if mask is None or mask.all() or not self._state:
            if self._is_reseeded and (seed is not None or self.env.is_async):
                self.env = self._rebuilt(seed)
            self._is_reseeded = False
            rows = self._ids
        else:
            rows = self._ids[mask[:, 0]]
        self.env._reset(rows)  # noqa: SLF001  # the public method drops `trunc` and the names
        self._receive(len(rows))
        self._ended[rows] = False
        return [self._state[name] for name in self._observed]

    def _rebuilt(self, seed: int | None) -> Any:
        """Close the pool and return a new one like it, in sync mode."""
        old = self.env
        config = old.spec.config._replace(batch_size=self.num_rows)
        if seed is not None:
            config = config._replace(
                seed=seed % (_MAX_SEED - self.num_rows),
                env_seed=[],
            )
        new = type(old)(type(old.spec)(config))
        for name, value in vars(old).items():
            # `envpool.make` has set these; the config lacks them.
            if name.startswith("_render"):
                setattr(new, name, value)
        old.close()
        return new

    def _receive(self, num_rows: int) -> None:
        """Copy the rows that the pool has ready into the state of all rows, in private memory."""
        state = dict(zip(self._names, self.env._recv(), strict=True))  # noqa: SLF001  # as above
        ids = state["info:env_id"]
        if len(ids) != num_rows:
            raise SpecError(
                f"receiving failed: expected {num_rows} rows from {type(self.env).__name__}, got {len(ids)}. "
                f"Did other code step the pool?"
            )
        # Some rows only, or all in another order.
        if not np.array_equal(ids, self._ids):
            for name, value in state.items():
                whole = (
                    self._state[name].copy()
                    if self._state
                    else np.zeros((self.num_rows, *value.shape[1:]), value.dtype)
                )
                whole[ids] = value
                state[name] = whole
        self._state = state
        self.info = {self._info_names[name]: state[name] for name in self._info_names}

    def step(self, action: list[Any]) -> StepValues:
        """Make one transition in every row.

        Raises:
            ResetNeeded: a row has ended, or was never reset.
        """
        if self._ended.any():
            raise ResetNeeded(
                f"step failed: expected running rows, got rows {np.flatnonzero(self._ended).tolist()} that have ended "
                f"or were never reset. Reset them with a '_reset' mask."
            )
        given = {}
        for name, value, give, dtype in zip(
            self._actions,
            action,
            self._give,
            self._action_dtypes,
            strict=True,
        ):
            given[name] = np.ascontiguousarray(
                value if give is None else give(value),
                dtype,
            )
        self.env.send({**given, "env_id": self._ids, "players.env_id": self._ids})
        self._receive(self.num_rows)
        state = self._state
        ended = state["done"].astype(bool)
        truncated = state["trunc"].astype(bool)
        self._ended = ended
        truncated &= ended
        terminated = ended & ~truncated
        return (
            [state[name] for name in self._observed],
            [state["reward"][:, None]],
            terminated[:, None],
            truncated[:, None],
        )

    def render(self) -> Any:
        """Return what the rows draw, side by side in a square, uint8 `[H, W, 3]`, or None if they draw no arrays."""
        if getattr(self.env, "_render_mode", None) != "rgb_array":
            return None
        return mosaic(self.env.render(env_ids=self._ids))

    def close(self) -> None:
        """Close and drop the pool, which ends its threads."""
        env = self.env
        self.env = None
        if env is not None:
            env.close()


def _observation_leaves(space: Any, names: list[str], num_rows: int) -> list[Leaf]:
    """Describe a pool's observations: a single array has key `observation`; of several, `obs:a.b` has key `a`, `b`."""
    make_leaf = gymnasium_spaces.observations_of(num_rows)
    leaves = []
    for name in names:
        path = tuple(name.removeprefix("obs:").replace(":", ".").split("."))
        key = ("observation",) if len(names) == 1 else path
        if key[0] in RESERVED_NAMES:
            raise SpecError(
                f"reading EnvPool's spec failed: expected observations of names other than those a batch uses itself, "
                f"got {name!r}. Register an adapter of your own for this task."
            )
        leaves.append(make_leaf(_with_true_bounds(_inside(space, path)), key))
    return leaves


def _action_leaves(space: Any, names: list[str], num_rows: int) -> list[Leaf]:
    """Describe a pool's actions: a single array has key `action`; several have keys below it."""
    make_leaf = gymnasium_spaces.actions_of(num_rows)
    paths = [tuple(name.split(".")) for name in names]
    keys = [("action",) if len(names) == 1 else ("action", *path) for path in paths]
    return [
        make_leaf(_with_true_bounds(_inside(space, path)), key)
        for path, key in zip(paths, keys, strict=True)
    ]


def _inside(space: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        if isinstance(space, spaces.Dict):
            space = space[name]
    return space


def _with_true_bounds(space: Any) -> Any:
    """Return a space without the lower bounds that EnvPool sets to the least positive float, meaning minus infinity."""
    if isinstance(space, spaces.Box) and space.dtype.kind == "f":
        limits = np.finfo(space.dtype)
        low = np.where(space.low == limits.tiny, -np.inf, space.low)
        high = np.where(space.high >= limits.max, np.inf, space.high)
        return spaces.Box(
            low.astype(space.dtype),
            high.astype(space.dtype),
            space.shape,
            space.dtype.type,
        )
    return space
