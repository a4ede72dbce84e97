"""Sessions of the facades, for the fuzzers; and the Gymnasium env that they run."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict

from envherd.executor import ExecutorOptions
from tests.oracles.fuzz_envs import NUM_ACTIONS, WIDTH, Life, Traps, When
from tests.oracles.fuzz_session import Session
from tests.oracles.fuzzing import Given, Row, Transition, Violation


class GymnasiumFuzzEnv(gymnasium.Env):
    """A `FuzzEnv` as a Gymnasium env."""

    observation_space = gymnasium.spaces.Box(-(2**62), 2**62, (WIDTH,), np.int64)
    action_space = gymnasium.spaces.Discrete(NUM_ACTIONS)
    mark = 0

    def __init__(self, folder: str, num_envs: int, env_id: int, length: int | None) -> None:
        self.env_id = env_id
        self._traps = Traps(folder, num_envs)
        self._traps.spring(env_id, When.BUILD)
        self.life = Life(folder, env_id, 0, length)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Begin an episode."""
        self._traps.spring(self.env_id, When.RESET)
        row = self.life.reset(seed, int((options or {}).get("level", 0)))
        self._traps.spring(self.env_id, When.RESET_DONE)
        return row, {"t": 0}

    def step(self, action: Any) -> Any:
        """Make a step."""
        self._traps.spring(self.env_id, When.STEP)
        row, reward, terminated, truncated = self.life.step(int(action))
        self._traps.spring(self.env_id, When.STEP_DONE)
        return row, reward, terminated, truncated, {"t": self.life.t}

    def where(self) -> list[int]:
        """Return nonce, episode and step."""
        return self.life.where()

    def echo(self, number: int) -> int:
        """Return the number."""
        return number

    def close(self) -> None:
        """Close the diary."""
        self.life.close()


class FacadeSession(Session):
    """The base of the facades' sessions, which differ in the ends of episodes."""

    WEIGHTS: ClassVar[dict[str, int]] = {
        "reset": 3,
        "step": 30,
        "get": 3,
        "echo": 3,
        "statistics": 1,
        "trap": 8,
        "kill": 3,
        "kill_soon": 3,
    }

    def _open(self, folder: str) -> Any:
        self.oracle.checks_seeds = False
        self.needs_reset = True
        options = ExecutorOptions(**{k: v for k, v in self.setting.options.items() if k not in ("infos", "poison")})
        make = [
            functools.partial(GymnasiumFuzzEnv, folder, self.num_envs, i, self.setting.lengths[i])
            for i in range(self.num_envs)
        ]
        self.watch.begin(f"open {type(self).__name__} {self.setting}")
        return self.make(make, options)

    def make(self, make: list[Any], options: ExecutorOptions) -> Any:
        """Open the facade."""
        raise NotImplementedError

    @property
    def executor(self) -> Any:
        """The executor below the facade."""
        return self.env.executor

    def settle(self) -> None:
        """See `Session.settle`."""
        self.ask_where()

    def ask_where(self) -> list[list[int]]:
        """Ask all envs where they are."""
        raise NotImplementedError

    def attempt(self, what: str, call: Any, env_ids: Any = None) -> Any:
        """See `Session.attempt`; after a broken-off call the envs need a reset."""
        result = super().attempt(what, call, env_ids)
        self.needs_reset |= result is None
        return result

    def _get(self) -> None:
        found = self.attempt("where", self.ask_where, [])
        for env_id, where in enumerate(found or ()):
            row = self.oracle.at[env_id, 0]
            if row is not None and not self._has_lost() and tuple(where) != (row.nonce, row.episode, row.t):
                raise Violation(f"env {env_id} is at {where}, its row has {row}")

    def take_reset(self, observations: Any, given: Given, mask: Any = None) -> None:
        """Check the rows of a reset (of some envs) against the oracle."""
        for env_id, row in enumerate(_rows(observations)):
            if mask is None or mask[env_id]:
                self.oracle.begin((env_id, 0), row, given)
            else:
                self.oracle.root((env_id, 0), row, done=self.oracle.ended[env_id, 0])
        self.needs_reset = False
        self.doubt.clear()

    def take_step(self, env_id: int, action: int, row: Row, reward: Any, flags: tuple[Any, Any], *, lost: bool) -> None:
        """Check one env's step against the oracle."""
        terminated, truncated = (bool(flag) for flag in flags)
        one = Transition(
            root=None,
            action=action,
            next=row,
            reward=float(reward),
            done=terminated or truncated,
            terminated=terminated,
            truncated=truncated,
            interrupted=lost,
        )
        self.oracle.follow((env_id, 0), one)

    def _drawn(self) -> np.ndarray:
        return np.array([self.rng.randrange(NUM_ACTIONS) for _ in range(self.num_envs)])

    def _draw_given(self) -> tuple[Any, dict[str, Any] | None, Given]:
        """Draw a seed and options, and derive what each env gets."""
        kind = self.rng.choice(["", "int", "list", "level"])
        none = (None,) * self.num_envs
        if kind == "int":
            seed = self.rng.randrange(1000)
            return seed, None, Given(seeds=tuple(seed + i for i in range(self.num_envs)))
        if kind == "list":
            seeds = [self.rng.choice([None, self.rng.randrange(1000)]) for _ in range(self.num_envs)]
            return seeds, None, Given(seeds=tuple(seeds))
        level = self.rng.randint(1, 9) if kind else 0
        return None, {"level": level} if level else None, Given(seeds=none, levels=(level,) * self.num_envs)


def _rows(observations: Any) -> list[Row]:
    return [Row(*map(int, one)) for one in observations]


class GymnasiumSession(FacadeSession):
    """A session of `facades.gymnasium.AsyncVectorEnv`."""

    def make(self, make: list[Any], options: ExecutorOptions) -> Any:
        """Open the facade, in one of its autoreset modes."""
        from envherd.executor.facades.gymnasium import AsyncVectorEnv

        self.mode = self.rng.choice(["NextStep", "SameStep", "Disabled"])
        self.watch.note(f"mode {self.mode}")
        self.resets_next = np.zeros(self.num_envs, bool)
        return AsyncVectorEnv(make, autoreset_mode=self.mode, num_workers=self.setting.num_workers, options=options)

    def ask_where(self) -> list[list[int]]:
        """See `FacadeSession`."""
        return list(self.env.call("where"))

    def ask_echo(self, number: int, env_ids: list[int] | None = None) -> None:
        """See `Session.ask_echo`."""
        answers = self.env.call("echo", number)
        if answers != (number,) * self.num_envs:
            raise Violation(f"asked {number}, got {answers}")

    def _reset(self) -> None:
        mask = None
        seed, options, given = self._draw_given()
        if not self.needs_reset and self.rng.random() < 0.5:
            mask = np.array([self.rng.random() < 0.5 for _ in range(self.num_envs)])
            if not mask.any():
                return
            options = {**(options or {}), "reset_mask": mask}
        self._do_reset(seed, options, given, mask)

    def _do_reset(self, seed: Any, options: dict[str, Any] | None, given: Given, mask: Any) -> None:
        printed = None if options is None else {k: v if k == "level" else v.tolist() for k, v in options.items()}
        made = self.attempt(f"reset seed={seed} options={printed}", lambda: self.env.reset(seed=seed, options=options))
        if made is None:
            return
        if mask is None or not self._has_lost():
            self.take_reset(made[0], given, mask)
        else:  # others may have been lost with them
            for env_id in np.flatnonzero(mask).tolist():
                self.oracle.begin((env_id, 0), Row(*map(int, made[0][env_id])), given)
        self.resets_next[slice(None) if mask is None else mask] = False

    def _step(self) -> None:
        if self.needs_reset:
            seed, options, given = self._draw_given()
            self._do_reset(seed, options, given, None)
        ended = np.array([self.oracle.ended[i, 0] for i in range(self.num_envs)])
        if self.mode == "Disabled" and ended.any() and not self._is_open():
            self._do_reset(None, {"reset_mask": ended}, Given(seeds=(None,) * self.num_envs), ended)
        if self._is_open():
            return
        actions = self._drawn()
        made = self.attempt("step", lambda: self.env.step(actions))
        if made is not None:
            self._take(actions.tolist(), *made)

    def _is_open(self) -> bool:
        """Return whether the envs' positions are unknown after a broken-off call."""
        return self.needs_reset

    def _take(self, actions: list[int], observations: Any, rewards: Any, ends: Any, cuts: Any, infos: Any) -> None:
        lost = infos.get("interrupted", np.zeros(self.num_envs, bool))
        for env_id, row in enumerate(_rows(observations)):
            place = (env_id, 0)
            if self.resets_next[env_id]:  # the env's step was a reset
                if rewards[env_id] or ends[env_id] or cuts[env_id]:
                    raise Violation(f"env {env_id}: a reset says {rewards[env_id]}, {ends[env_id]}, {cuts[env_id]}")
                self.oracle.begin(place, row)
                continue
            flags = (ends[env_id], cuts[env_id])
            last = row
            if self.mode == "SameStep" and any(flags):
                last = Row(*map(int, infos["final_obs"][env_id]))
            self.take_step(env_id, actions[env_id], last, rewards[env_id], flags, lost=bool(lost[env_id]))
            if self.mode == "SameStep" and any(flags):
                self.oracle.begin(place, row)
        if self.mode == "NextStep":
            self.resets_next = np.array([self.oracle.ended[i, 0] for i in range(self.num_envs)])


class PettingZooSession(GymnasiumSession):
    """A session of `facades.pettingzoo.ParallelVectorEnv`."""

    def make(self, make: list[Any], options: ExecutorOptions) -> Any:
        """Open the facade, in one of its autoreset modes."""
        from tests.oracles.fuzz_pettingzoo import PettingZooFuzzEnv, PilotsEnv

        self.mode = self.rng.choice(["NextStep", "SameStep", "Disabled"])
        self.watch.note(f"mode {self.mode}")
        self.resets_next = np.zeros(self.num_envs, bool)
        make = [functools.partial(PettingZooFuzzEnv, *one.args) for one in make]
        return PilotsEnv(make, self.mode, self.setting.num_workers, options)


class Sb3Session(FacadeSession):
    """A session of `facades.sb3.SubprocVecEnv`."""

    def make(self, make: list[Any], options: ExecutorOptions) -> Any:
        """Open the facade."""
        from envherd.executor.facades.sb3 import SubprocVecEnv

        return SubprocVecEnv(make, num_workers=self.setting.num_workers, options=options)

    def ask_where(self) -> list[list[int]]:
        """See `FacadeSession`."""
        return list(self.env.env_method("where"))

    def ask_echo(self, number: int, env_ids: list[int] | None = None) -> None:
        """See `Session.ask_echo`."""
        answers = self.env.env_method("echo", number)
        if answers != [number] * self.num_envs:
            raise Violation(f"asked {number}, got {answers}")

    def _reset(self) -> None:
        seed, options, given = self._draw_given()
        if isinstance(seed, int):
            self.env.seed(seed)
        elif seed is not None:
            given = Given(seeds=(None,) * self.num_envs)
        if options:
            self.env.set_options(options)
        made = self.attempt(f"reset {given}", self.env.reset)
        if made is None:  # seeds and options may or may not be used up
            self.env._reset_seeds()
            self.env._reset_options()
            return
        self.take_reset(made, given)

    def _step(self) -> None:
        if self.needs_reset:
            self._reset()
            if self.needs_reset:
                return
        actions = self._drawn()
        made = self.attempt("step", lambda: self.env.step(actions))
        if made is None:
            return
        observations, rewards, dones, infos = made
        for env_id, row in enumerate(_rows(observations)):
            info, last = infos[env_id], row
            if dones[env_id]:
                last = Row(*map(int, info["terminal_observation"]))
            is_cut = bool(info["TimeLimit.truncated"])
            flags = (bool(dones[env_id]) and not is_cut, is_cut)
            lost = bool(info.get("interrupted", False))
            self.take_step(env_id, int(actions[env_id]), last, rewards[env_id], flags, lost=lost)
            if dones[env_id]:
                self.oracle.begin((env_id, 0), row)


def _wrapped(*arguments: Any) -> Any:
    """Build the env as a TorchRL env."""
    from torchrl.envs.libs.gym import GymWrapper

    return GymWrapper(GymnasiumFuzzEnv(*arguments), categorical_action_encoding=True)


class TorchRLSession(FacadeSession):
    """A session of `facades.torchrl.ParallelEnv`, whose workers import torchrl: it takes seconds to open."""

    WEIGHTS: ClassVar[dict[str, int]] = {**FacadeSession.WEIGHTS, "fused": 20, "rollout": 8, "reset_some": 4}

    last: Any = None

    def make(self, make: list[Any], options: ExecutorOptions) -> Any:
        """Open the facade."""
        from envherd.executor.facades.torchrl import ParallelEnv

        make = [functools.partial(_wrapped, *one.args) for one in make]
        env = ParallelEnv(self.num_envs, make, num_processes=self.setting.num_workers, options=options)
        env.start()
        return env

    @property
    def executor(self) -> Any:
        """The pool's engine, which has what sessions ask of an executor."""
        return _Below(self.env._crew_at_work()._engine)

    def close(self) -> None:
        """See `Session.close`."""
        self.env.close(raise_if_closed=False)
        self.traps.close()

    def ask_where(self) -> list[list[int]]:
        """See `FacadeSession`."""
        return list(self.env.where())

    def ask_echo(self, number: int, env_ids: list[int] | None = None) -> None:
        """See `Session.ask_echo`."""
        answers = list(self.env.echo(number))
        if answers != [number] * self.num_envs:
            raise Violation(f"asked {number}, got {answers}")

    def _reset(self) -> None:
        td = self.attempt("reset", self.env.reset)
        if td is not None:
            self.take_reset(td["observation"].tolist(), Given(seeds=(None,) * self.num_envs))

    def _reset_some(self) -> None:
        if self.needs_reset:
            return
        mask = torch.tensor([[self.rng.random() < 0.5] for _ in range(self.num_envs)])
        if mask.any():
            self._reset_masked(mask)

    def _reset_masked(self, mask: torch.Tensor) -> None:
        root = self.last.clone().set("_reset", mask)
        td = self.attempt(f"reset {mask.flatten().tolist()}", lambda: self.env.reset(root))
        if td is None:
            return
        if self._has_lost():  # others may have been lost with them
            mask = mask.clone()
            for env_id, row in enumerate(_rows(td["observation"].tolist())):
                mask[env_id] |= row != self.oracle.at[env_id, 0]
        self.take_reset(td["observation"].tolist(), Given(seeds=(None,) * self.num_envs), mask.flatten().tolist())
        self.last = td

    def take_reset(self, observations: Any, given: Given, mask: Any = None) -> None:
        """See `FacadeSession`."""
        super().take_reset(observations, given, mask)
        shape = (self.num_envs, 1)
        flags = {key: torch.zeros(shape, dtype=torch.bool) for key in ("done", "terminated", "truncated")}
        self.last = TensorDict({"observation": torch.tensor(observations), **flags}, [self.num_envs])

    def _is_ready(self) -> bool:
        if self.needs_reset:
            self._reset()
        elif any(self.oracle.ended.values()):
            self._reset_masked(torch.tensor([[self.oracle.ended[i, 0]] for i in range(self.num_envs)]))
        return not self.needs_reset

    def _acted_on(self) -> Any:
        return self.last.clone().set("action", torch.tensor(self._drawn()))

    def _step(self) -> None:
        if self._is_ready():
            td = self._acted_on()
            made = self.attempt("step", lambda: self.env.step(td))
            if made is not None:
                self._take(made)
                self.last = made["next"].exclude("reward")

    def _fused(self) -> None:
        if not self._is_ready():
            return
        td = self._acted_on()
        made = self.attempt("step_and_maybe_reset", lambda: self.env.step_and_maybe_reset(td))
        if made is None:
            return
        self._take(made[0])
        for env_id, row in enumerate(_rows(made[1]["observation"].tolist())):
            if self.oracle.ended[env_id, 0]:
                self.oracle.begin((env_id, 0), row)
            self.oracle.root((env_id, 0), row, done=bool(made[1]["done"][env_id]))
        self.last = made[1]

    def _take(self, td: Any) -> None:
        after = td["next"]
        for env_id, row in enumerate(_rows(after["observation"].tolist())):
            flags = (after["terminated"][env_id], after["truncated"][env_id])
            lost = row == self.oracle.at[env_id, 0] and self._has_lost()  # TorchRL has no key for it
            action = int(td["action"][env_id])
            self.take_step(env_id, action, row, after["reward"][env_id], flags, lost=lost)

    def _rollout(self) -> None:
        num_steps = self.rng.randint(1, 8)
        data = self.attempt(
            f"rollout {num_steps}", lambda: self.env.rollout(num_steps, break_when_any_done=False), None
        )
        if data is None:
            return
        for t in range(num_steps):
            td = data[:, t]
            for env_id, row in enumerate(_rows(td["observation"].tolist())):
                if t == 0 or self.oracle.ended[env_id, 0]:
                    self.oracle.begin((env_id, 0), row)
            self._take(td)
        self.needs_reset = False
        self.doubt.clear()
        self.last = data[:, -1]["next"].exclude("reward")


class _Below:
    """The part of an executor that sessions use, over the engine of the TorchRL facade."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.statistics = engine.statistics


SESSIONS: dict[str, type[FacadeSession]] = {
    "gymnasium": GymnasiumSession,
    "pettingzoo": PettingZooSession,
    "sb3": Sb3Session,
    "torchrl": TorchRLSession,
}
