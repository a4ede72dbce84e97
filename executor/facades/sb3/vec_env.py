"""Stable-Baselines3's `SubprocVecEnv` on top of the executor.

Guarantees:
- As with SB3's own class, an env that ends is reset in the same call, with its last observation in
  `infos[i]["terminal_observation"]`; every info has `TimeLimit.truncated`; seeds and options apply only to the next
  reset; the caller owns infos, observations, rewards and dones.
- Transitions equal those of SB3's `DummyVecEnv`, bit for bit. Rewards are float32, as there.
- One reported transition is one `env.step`; a reset observation is never a terminal one.
- An env of another family whose agents are stacked (Melting Pot) gives one row per agent.
Does not support spaces nested more than once, as SB3 does not.
"""

import contextlib
import dataclasses
import multiprocessing
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from itertools import takewhile
from typing import Any, Literal, NoReturn

import numpy as np
from gymnasium import Wrapper
from stable_baselines3.common import vec_env
from stable_baselines3.common.vec_env.base_vec_env import VecEnv

from envherd.executor.facades import replaced
from envherd.executor.facades.errors import as_raised, listed
from envherd.executor.facades.gymnasium.rows import Observations
from envherd.executor.facades.rows import Column, ReadEpisodes, episode_reader
from envherd.executor.facades.sb3.factory import Sb3Factory
from envherd.executor.facades.sb3.rows import (
    Writer,
    check_observed,
    mask_reader,
    num_agents,
    observed_leaves,
    spaces_of,
)
from envherd.executor.facades.spaces import Space
from envherd.executor.facades.states import AsyncState, Hosted
from envherd.executor.keywords import names_right_keyword
from envherd.executor.options import ExecutorOptions, StartMethod
from envherd.executor.parallel import ParallelEnv
from envherd.executor.protocol.call_guard import call_name
from envherd.executor.sending.blueprint import checked_options
from envherd.shm.specs import EnvSpec
from envherd.workers.errors import Busy, EnvError, SpecError
from envherd.workers.options import Infos
from envherd.workers.protocol import Op

EnvFn = Callable[[], Any] | str
#: The method that sb3-contrib looks for.
_ACTION_MASKS = "action_masks"
#: SB3's methods that ask the envs, by what the executor asks.
_CALLS = {"get": "get_attr", "set": "set_attr", "has": "has_attr", "call": "env_method"}
Indices = None | int | Iterable[int]
Info = dict[str, Any]


class SubprocVecEnv(Hosted, VecEnv):  # type: ignore[misc]  # mypy is not shown SB3's types
    """Envs in worker processes, in place of `stable_baselines3.common.vec_env.SubprocVecEnv`.

    Args:
        env_fns: functions that build one env each; called in a worker. They are pickled by cloudpickle, and the user's
            script is not run again, so `if __name__ == "__main__"` is not needed.
        start_method: "forkserver" (the default: workers fork from a private helper), "spawn" or "fork".
        num_workers: processes; None for one per usable core, at most one per env; "auto" measures the first env for
            some seconds and decides (see docs/sizing.md). Envs in one process share its global random generators unless
            `options.isolate_rng` is set.
        options: further `ExecutorOptions`; the facade overrides those that SB3's protocol determines.

    Attributes:
        executor: the `ParallelEnv` that runs the envs.
        num_envs: rows: envs, or agents of all envs.
        num_agents: rows per env.

    Raises:
        ValueError: no env, or a start method that the platform lacks.
        FactoryError: not a function, cannot be pickled, returned no env, or raised.
        NotImplementedError: spaces that SB3 does not support.
    """

    _remedy = "Call reset()."

    @names_right_keyword
    def __init__(
        self,
        env_fns: Sequence[EnvFn],
        start_method: str | None = None,
        *,
        num_workers: int | Literal["auto"] | None = None,
        options: ExecutorOptions | None = None,
    ) -> None:
        options = _as_sb3(checked_options(options), start_method)
        factories = [
            Sb3Factory(env_fn, env_id)
            for env_id, env_fn in enumerate(listed("SubprocVecEnv", env_fns))
        ]
        executor = ParallelEnv(
            len(factories),
            factories,
            num_workers=num_workers,
            options=options,
        )
        # For `rebuild`, which gets functions of the user.
        executor.hosted = Sb3Factory
        self._host(executor, Op.STEP_RESET)

    def _take(self) -> None:
        executor = self.executor
        self._positions = self._engine.positions
        _check_alike(self._engine.pool.specs)
        self.num_agents = num_agents(executor.spec)
        self._is_gymnasium = executor.spec.family == "gymnasium"
        self._agents = (
            executor.spec.metadata["agent_names"]
            if executor.spec.family == "pettingzoo"
            else ()
        )
        observation_space, action_space = self._find_spaces()
        check_observed(observation_space)
        slab = self._positions.slab
        num_rows = executor.num_envs * self.num_agents
        self._observations = Observations(
            self._engine,
            observation_space,
            observed_leaves(executor.spec),
            num_rows,
            is_copy=True,
        )
        self._rewards = Column(
            slab,
            "next",
            [group.spec.reward[0].key for group in slab.groups],
            num_rows,
            (),
        )
        self._ends = {
            name: Column(
                slab,
                "next",
                [(name,)] * len(slab.groups),
                executor.num_envs,
                (),
            )
            for name in ("terminated", "truncated")
        }
        self._writer = Writer(slab, action_space, self.num_agents)
        self._masks = mask_reader(self._positions, self.num_agents)
        self._episodes = episode_reader(slab, self.num_agents)
        # `Monitor` counts the time `t` of an episode from its own start.
        self._began = time.time()
        super().__init__(num_rows, observation_space, action_space)
        if executor.spec.family in ("gymnasium", "pettingzoo") and self.has_attr(
            "metadata"
        ):
            # Scripts name files by it, a VecVideoRecorder reads it.
            self.metadata = self.get_attr("metadata", 0)[0]

    def _find_spaces(self) -> tuple[Space, Space]:
        if not self._is_gymnasium:
            return spaces_of(self.executor.spec)
        return (
            self._ask("get", [0], name="observation_space")[0],
            self._ask("get", [0], name="action_space")[0],
        )

    # ---- reset and step ----------------------------------------------------------------------

    def reset(self) -> Any:
        """Reset all envs and return their observations; this uses up `seed` and `set_options`.

        Returns:
            `[num_envs, ...]`: array, dict or tuple of arrays, according to the observation space. Own memory.
        """
        if self.waiting:
            self._move("step_wait")  # and so the next line drops the step
        self._move("begin")
        # SB3 has a seed and options for each row; an env gets those of its first agent.
        seeds = self._seeds[:: self.num_agents]
        options = self._options[:: self.num_agents]
        try:
            if any(seed is not None for seed in seeds) or any(options):
                self.executor.reset(
                    seed=seeds,
                    list_of_kwargs=[{"options": one} if one else {} for one in options],
                )
            else:
                self.executor.reset()
        except EnvError as error:
            raise as_raised(error) from error.__cause__
        self._move("land")
        self._reset_seeds()
        self._reset_options()
        infos = self._engine.side.infos.read("root")
        self.reset_infos = [self._of_row(infos, row) for row in range(self.num_envs)]
        return self._observations.now()

    def step_async(self, actions: Any) -> None:
        """Begin a step of all envs; the caller continues, and `step_wait` ends the step.

        Args:
            actions: `[num_envs, ...]` according to the action space, or a sequence of its samples. Read at once.

        Raises:
            ActionError: they do not fit. No env was stepped.
            ResetNeeded: an env has failed since the last reset. No env was stepped.
            Busy: the last step was not waited for.
        """
        self._begin(actions, is_parked=True)
        self._move("step_async")

    def _begin(self, actions: Any, *, is_parked: bool) -> None:
        self._move("begin")
        with self._guard:
            self._flight = self._command(
                write_inputs=partial(self._writer.write, actions),
                is_parked=is_parked,
            )

    def step_wait(self) -> tuple[Any, np.ndarray, np.ndarray, list[Info]]:
        """Wait for the step and return observations, rewards float32 `[N]`, dones bool `[N]`, and infos.

        Raises:
            EnvError: an env raised, and the others were stepped; also an instance of the raised type.
            WorkerLost, WorkerTimeout: see `BatchedEnv.step`.
            RuntimeError: no step was begun.
        """
        self._move("step_wait")
        return self._results()

    def step(self, actions: Any) -> tuple[Any, np.ndarray, np.ndarray, list[Info]]:
        """Make a step: `step_async` and `step_wait` in one, or these if a subclass has others."""
        if (type(self).step_async, type(self).step_wait) != (
            SubprocVecEnv.step_async,
            SubprocVecEnv.step_wait,
        ):
            return super().step(actions)
        self._begin(actions, is_parked=False)
        return self._results()

    def _results(self) -> tuple[Any, np.ndarray, np.ndarray, list[Info]]:
        try:
            if not self._flight.has_landed:
                with self._guard:
                    self._flight.land()
        except EnvError as error:
            raise as_raised(error) from error.__cause__
        self._move("land")
        column = self._flight.at
        ended = self._flight.ended
        agents = self.num_agents
        dones = np.zeros(self.num_envs, bool)
        infos = self._step_infos()
        if ended is not None:
            if agents > 1:
                # The rows of an env's agents are consecutive.
                ended = (ended[:, None] * agents + np.arange(agents)).ravel()
            dones[ended] = True
            self._finish_episodes(ended, column, infos)
        return (
            self._observations.after(column, ended),
            self._rewards.look(column).astype(np.float32),
            dones,
            infos,
        )

    def _step_infos(self) -> list[Info]:
        """Return a fresh info for every row."""
        infos = self._engine.side.infos.read("next")
        fresh: list[Info] = [
            {"TimeLimit.truncated": False} for _ in range(self.num_envs)
        ]
        if self.num_agents == 1 and not self._agents:
            for row, info in infos.items():
                fresh[row] = {**info, "TimeLimit.truncated": False}
        elif infos:
            for row in range(self.num_envs):
                # Some share one.
                info = deepcopy(self._of_row(infos, row))
                fresh[row] = {**info, "TimeLimit.truncated": False}
        return fresh

    def _of_row(self, infos: Mapping[int, Info], row: int) -> Info:
        """Return the info of a row: of its env, or of its agent where the env has an info for each (PettingZoo)."""
        env_id, agent = divmod(row, self.num_agents)
        info = infos.get(env_id, {})
        if not self._agents:
            return info
        return next(
            (own for name, own in info.items() if str(name) == self._agents[agent]),
            {},
        )

    def _finish_episodes(
        self,
        rows: np.ndarray,
        column: int,
        infos: list[Info],
    ) -> None:
        """Put the last observations of ended episodes into their infos, and take the infos of new episodes."""
        terminated = self._ends["terminated"].look(column)
        truncated = self._ends["truncated"].look(column)
        has_interrupted = self._positions.has_interrupted
        interrupted = self._positions.interrupted
        infos_of_reset = self._engine.side.infos.read("root")
        # A new list: the caller may have kept the latest one.
        self.reset_infos = list(self.reset_infos)
        if self._episodes is not None:
            self._note_episodes(self._episodes, rows, infos)
        for row in rows.tolist():
            env_id = row // self.num_agents
            info = infos[row]
            info["TimeLimit.truncated"] = (
                bool(truncated[env_id]) and not terminated[env_id]
            )
            info["terminal_observation"] = self._observations.last_of(row, column)
            if has_interrupted and interrupted[env_id, 0]:
                info["interrupted"] = True
            self.reset_infos[row] = self._of_row(infos_of_reset, row)

    def _note_episodes(
        self,
        read: ReadEpisodes,
        rows: np.ndarray,
        infos: list[Info],
    ) -> None:
        """Put what SB3's `Monitor` reports of an episode into the infos of rows that have ended."""
        returns, lengths, _ = read(self._flight.at)
        # Rounded as by `Monitor`.
        elapsed = round(time.time() - self._began, 6)
        for row in rows.tolist():
            env_id, agent = divmod(row, self.num_agents)
            infos[row]["episode"] = {
                "r": round(float(returns[env_id, agent]), 6),
                "l": int(lengths[env_id]),
                "t": elapsed,
            }

    def __repr__(self) -> str:
        """Name the executor, which describes envs and workers."""
        return f"{type(self).__name__}({self.executor!r})"

    @property
    def waiting(self) -> bool:
        """Whether a step was begun and `step_wait` was not called yet."""
        return self._state is AsyncState.WAITING_STEP

    def _refuse(self, event: str, call: str) -> NoReturn:  # noqa: ARG002
        if event == "step_wait":
            raise RuntimeError(
                "step_wait failed: no step was begun. Call step_async(actions) first."
            )
        self._guard.check()
        raise Busy(
            f"{call_name()} failed: the last step was not waited for. Call step_wait() first."
        )

    def close(self) -> None:
        """Close the envs, and end the processes if there are any. Idempotent."""
        self.closed = True
        self.executor.close()

    # ---- attributes and methods of the envs --------------------------------------------------

    def has_attr(self, attr_name: str) -> bool:
        """Return whether all envs have an attribute on any wrapper; True for `action_masks` if rows have masks."""
        if attr_name == _ACTION_MASKS and self._masks is not None:
            return True
        return all(self._ask("has", self._env_ids(None), name=attr_name))

    def get_attr(self, attr_name: str, indices: Indices = None) -> list[Any]:
        """Return an attribute of each env in `indices`, on any wrapper; a copy if it comes from a worker.

        Raises:
            AttributeError: an env has none.
        """
        return self._by_row("get", indices, name=attr_name)

    def set_attr(self, attr_name: str, value: Any, indices: Indices = None) -> None:
        """Set an attribute of the outermost wrapper of each env."""
        env_ids = self._env_ids(indices)
        self._ask("set", env_ids, name=attr_name, args=(value,) * len(env_ids))

    def env_method(
        self,
        method_name: str,
        *method_args: Any,
        indices: Indices = None,
        **method_kwargs: Any,
    ) -> list[Any]:
        """Call a method of each env in `indices`, on any wrapper, and return the results."""
        if method_name == _ACTION_MASKS and self._masks is not None:
            if self.waiting:
                self._refuse("begin", "")
            masks = self._masks()
            return [masks[row] for row in self._rows_of(indices)]
        return self._by_row(
            "call",
            indices,
            name=method_name,
            args=method_args,
            kwargs=method_kwargs,
        )

    def action_masks(self) -> np.ndarray:
        """Return which actions are legal now, bool `[num_envs, actions]`, own memory; for sb3-contrib's `MaskablePPO`.

        They are the agents' `action_mask` (PettingZoo), the entry `action_mask` of infos that
        `ExecutorOptions(infos={"action_mask": ...})` selects, or the result of the envs' own `action_masks()`. The
        first two are read from shared memory, without a request to the workers.

        Raises:
            AttributeError: the envs have no masks.
        """
        return np.stack(self.env_method(_ACTION_MASKS))

    def env_is_wrapped(
        self,
        wrapper_class: type,
        indices: Indices = None,
    ) -> list[bool]:
        """Return whether each env asked for is inside a wrapper of a class (or of a subclass of it).

        Classes are compared by name: a worker need not import the class, nor the package that it is in.
        """
        name = f"{wrapper_class.__module__}.{wrapper_class.__qualname__}"
        return [_has_layer(layers, name) for layers in self._by_row("layers", indices)]

    def get_images(self) -> Sequence[np.ndarray | None]:
        """Return a picture of each env, if their render mode is "rgb_array"; else warn, and return Nones."""
        if self.render_mode != "rgb_array":
            warnings.warn(
                f"The render mode is {self.render_mode}, but this method assumes it is `rgb_array` to obtain images.",
                stacklevel=2,
            )
            return [None] * self.executor.num_envs
        if not self._is_gymnasium:
            return self._ask("render", self._env_ids(None))
        return self._ask("call", self._env_ids(None), name="render")

    def _rows_of(self, indices: Indices) -> list[int]:
        rows = [
            int(i)
            # As a single index, SB3 takes only integers of Python.
            for i in self._get_indices(
                int(indices) if isinstance(indices, np.integer) else indices
            )
        ]
        outside = next(
            (i for i in rows if not -self.num_envs <= i < self.num_envs),
            None,
        )
        if outside is not None:
            raise IndexError(
                f"{call_name()} failed: expected indices below {self.num_envs}, got {outside}."
            )
        return [i % self.num_envs for i in rows]

    def _env_ids(self, indices: Indices) -> list[int]:
        return list(
            dict.fromkeys(row // self.num_agents for row in self._rows_of(indices))
        )

    def _by_row(self, what: str, indices: Indices, **question: Any) -> list[Any]:
        """Send a request to the envs of some rows, once per env, and return the answer for each row."""
        if (
            what == "get"
            and question["name"] == "render_mode"
            and not self._is_gymnasium
        ):
            # Without one, envs render in any case.
            mode = self.executor.spec.metadata.get("render_mode", "rgb_array")
            return [mode] * len(self._rows_of(indices))
        env_ids = self._env_ids(indices)
        answers = dict(zip(env_ids, self._ask(what, env_ids, **question), strict=True))
        return [answers[row // self.num_agents] for row in self._rows_of(indices)]

    def _ask(self, what: str, env_ids: list[int], **question: Any) -> list[Any]:
        if self.waiting:
            self._refuse("begin", "")
        try:
            return self.executor.ask(what, env_ids, **question)
        except EnvError as error:
            call = what
            if what in _CALLS:
                call = f"{_CALLS[what]} {question['name']}"
            raise as_raised(error, call) from error.__cause__


def _check_alike(specs: Sequence[EnvSpec]) -> None:
    """Refuse envs whose rows have different shapes or dtypes; SB3 would fail in the first reset.

    Raises:
        SpecError: with the first difference.
    """
    rows = [
        [(leaf.key, leaf.shape, leaf.dtype) for leaf in (*s.observation, *s.action)]
        for s in specs
    ]
    for env_id, own in enumerate(rows):
        if own != rows[0]:
            raise SpecError(
                f"making the envs failed: expected envs with equal spaces, got different ones for env 0 and env "
                f"{env_id}: {specs[0].difference(specs[env_id])}.",
                env_ids=(0, env_id),
            )


def _as_sb3(options: ExecutorOptions, start_method: str | None) -> ExecutorOptions:
    """Return the options with those that SB3's protocol requires."""
    if start_method is not None:
        # Raises ValueError for an unknown method.
        multiprocessing.get_context(start_method)
        # A `fork` is made by a helper process that has imported nothing.
        ours: dict[str, StartMethod] = {
            "forkserver": "zygote",
            "fork": "zygote",
            "spawn": "spawn",
        }
        options = dataclasses.replace(
            options,
            start_method=ours[start_method],
            preload=() if start_method == "fork" else options.preload,
        )
    return dataclasses.replace(
        options,
        infos=Infos("pickle", options.info_keys),
        episode_seeds=False,
        check_actions="off",
        poison=False,
    )


def _has_layer(layers: list[list[str]], name: str) -> bool:
    return any(
        name in layer
        for layer in takewhile(
            lambda layer: f"{Wrapper.__module__}.{Wrapper.__qualname__}" in layer,
            layers,
        )
    )


def installed() -> contextlib.AbstractContextManager[None]:
    """Replace SB3's `SubprocVecEnv` by ours, in all of SB3, for a block."""
    return replaced("stable_baselines3", {vec_env.SubprocVecEnv: SubprocVecEnv})
