"""Sessions of the facades, for the fuzzers; and the Gymnasium env that they run."""

import functools
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict

from envherd.executor import ExecutorOptions
from envherd.executor.guests.monitor import count
from tests.oracles.fuzz_collector import CollectorSession
from tests.oracles.fuzz_envs import NUM_ACTIONS, WIDTH, FuzzEnv
from tests.oracles.fuzz_session import Session
from tests.oracles.fuzzing import Given, Row, Transition


class GymnasiumFuzzEnv(gymnasium.Env):
    """A `FuzzEnv` as a Gymnasium env, which observes the same array again and again."""

    observation_space = gymnasium.spaces.Box(-(2**62), 2**62, (WIDTH,), np.int64)
    action_space = gymnasium.spaces.Discrete(NUM_ACTIONS)

    def __init__(self, *arguments: Any) -> None:
        self.env = FuzzEnv(*arguments)
        self.where, self.echo = self.env.where, self.env.echo

    def close(self) -> None:
        """Close the diary."""
        self.env.close()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> Any:
        """Begin an episode."""
        (row,) = self.env.reset(seed, options)
        return row, {"t": 0}

    def step(self, action: Any) -> Any:
        """Make a step."""
        (row,), (reward,), terminated, truncated = self.env.step([action])
        return row, reward, terminated, truncated, {"t": int(row[4])}


class Seen(NamedTuple):
    """The data of one env's step, as a host hands them out.

    Attributes:
        last: the row of the step; None if the step was a reset.
        reward, terminated, truncated: of the step.
        lost: whether the row is interrupted.
        root: the first row of an episode that the step has begun; None for none.
    """

    last: Row | None
    reward: Any
    terminated: Any
    truncated: Any
    lost: Any = False
    root: Row | None = None


class FacadeSession(Session):
    """The base of the facades' sessions, which differ in the ends of episodes."""

    WEIGHTS: ClassVar[dict[str, int]] = {
        "reset": 3,
        "step": 30,
        "get": 3,
        "echo": 3,
        "statistics": 1,
        "trap": 8,
        "kill": 6,
    }

    def _open(self, folder: str) -> Any:
        self.oracle.checks_seeds = False
        self.needs_reset = True
        options = ExecutorOptions(
            **{
                k: v
                for k, v in self.setting.options.items()
                if k not in ("infos", "poison")
            }
        )
        make = [
            functools.partial(
                GymnasiumFuzzEnv, folder, self.num_envs, i, self.setting.lengths[i]
            )
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
        self.ask("where")

    def ask(self, name: str, *args: Any, env_ids: list[int] | None = None) -> list[Any]:
        """See `Session.ask`."""
        answers = self.ask_all(name, *args)
        return [answers[i] for i in (self.everyone if env_ids is None else env_ids)]

    def ask_all(self, name: str, *args: Any) -> list[Any]:
        """Call a method of all envs."""
        raise NotImplementedError

    def act(self, actions: np.ndarray) -> Any:
        """Step all envs."""
        return self.env.step(actions)

    def seen(self, made: Any) -> Iterator[Seen]:
        """Yield the data of each env from the result of a step."""
        raise NotImplementedError

    def attempt(self, what: str, call: Any, env_ids: Any = None) -> Any:
        """See `Session.attempt`; after a broken-off call the envs need a reset."""
        result = super().attempt(what, call, env_ids)
        self.needs_reset |= result is None
        return result

    def take_reset(self, observations: Any, given: Given, mask: Any = None) -> None:
        """Check the rows of a reset (of some envs) against the oracle."""
        for env_id, row in enumerate(map(Row.of, observations)):
            # It was lost with others.
            is_new = self._has_lost() and row != self.oracle.at[env_id, 0]
            if mask is None or mask[env_id] or is_new:
                self.oracle.begin((env_id, 0), row, given)
            else:
                self.oracle.root((env_id, 0), row, done=self.oracle.ended[env_id, 0])
        self.needs_reset = False
        self.doubt.clear()

    def _is_ready(self) -> bool:
        """Reset the envs if they need it; return whether they can be stepped."""
        if self.needs_reset:
            self._reset()
        return not self.needs_reset

    def _ended(self) -> np.ndarray:
        return np.array([self.oracle.ended[place] for place in self.places])

    def _step(self) -> None:
        if not self._is_ready():
            return
        actions = self._drawn()
        made = self.attempt("step", lambda: self.act(actions))
        if made is not None:
            self.take(actions, self.seen(made))

    def take(self, actions: Any, seen: Iterable[Seen]) -> None:
        """Check a step of all envs against the oracle."""
        for place, action, one in zip(self.places, actions, seen, strict=True):
            terminated, truncated = bool(one.terminated), bool(one.truncated)
            done = terminated or truncated
            assert one.last is not None or not (one.reward or done), (
                f"{place}: a reset says {one}"
            )
            if one.last is not None:
                made = Transition(
                    None,
                    int(action),
                    one.last,
                    float(one.reward),
                    done,
                    terminated,
                    truncated,
                    bool(one.lost),
                )
                self.oracle.follow(place, made)
            if one.root is not None:
                self.oracle.begin(place, one.root)

    def _drawn(self) -> np.ndarray:
        return np.array([self.rng.randrange(NUM_ACTIONS) for _ in range(self.num_envs)])

    def _draw_given(self) -> tuple[Any, dict[str, Any] | None, Given]:
        """Draw a seed and options, and derive what each env gets."""
        none = (None,) * self.num_envs
        seed, level = self.rng.randrange(1000), self.rng.randint(1, 9)
        seeds = tuple(
            self.rng.choice([None, self.rng.randrange(1000)])
            for _ in range(self.num_envs)
        )
        cases: list[tuple[Any, dict[str, Any] | None, Given]] = [
            (None, None, Given(seeds=none)),
            (seed, None, Given(seeds=tuple(seed + i for i in range(self.num_envs)))),
            (list(seeds), None, Given(seeds=seeds)),
            (
                None,
                {"level": level},
                Given(seeds=none, levels=(level,) * self.num_envs),
            ),
        ]
        return self.rng.choice(cases)


class GymnasiumSession(FacadeSession):
    """A session of `facades.gymnasium.AsyncVectorEnv`."""

    def make(self, make: list[Any], options: ExecutorOptions) -> Any:
        """Open the facade, in one of its autoreset modes."""
        self.mode = self.rng.choice(["NextStep", "SameStep", "Disabled"])
        self.watch.note(f"mode {self.mode}")
        self.resets_next = np.zeros(self.num_envs, bool)
        return self.vector_env(make, options)

    def vector_env(self, make: list[Any], options: ExecutorOptions) -> Any:
        """Make the vector env."""
        from envherd.gymnasium import AsyncVectorEnv

        return AsyncVectorEnv(
            make,
            autoreset_mode=self.mode,
            num_workers=self.setting.num_workers,
            options=options,
        )

    def ask_all(self, name: str, *args: Any) -> list[Any]:
        """See `FacadeSession`."""
        return list(self.env.call(name, *args))

    def _reset(self) -> None:
        mask = None
        seed, options, given = self._draw_given()
        if not self.needs_reset and self.rng.random() < 0.5:
            mask = np.array([self.rng.random() < 0.5 for _ in range(self.num_envs)])
            if not mask.any():
                return
            options = {**(options or {}), "reset_mask": mask}
        self._do_reset(seed, options, given, mask)

    def _do_reset(
        self, seed: Any, options: dict[str, Any] | None, given: Given, mask: Any
    ) -> None:
        printed = (
            None
            if options is None
            else {k: v if k == "level" else v.tolist() for k, v in options.items()}
        )
        made = self.attempt(
            f"reset seed={seed} options={printed}",
            lambda: self.env.reset(seed=seed, options=options),
        )
        if made is not None:
            self.take_reset(made[0], given, mask)
            self.resets_next[slice(None) if mask is None else mask] = False

    def _is_ready(self) -> bool:
        is_ready, ended = super()._is_ready(), self._ended()
        if is_ready and self.mode == "Disabled" and ended.any():
            self._do_reset(
                None, {"reset_mask": ended}, Given(seeds=(None,) * self.num_envs), ended
            )
        return not self.needs_reset

    def seen(self, made: Any) -> Iterator[Seen]:
        """See `FacadeSession`."""
        observations, rewards, ends, cuts, infos = made
        lost = infos.get("interrupted", np.zeros(self.num_envs, bool))
        was_reset, self.resets_next = (
            self.resets_next,
            (ends | cuts) & (self.mode == "NextStep"),
        )
        for i, row in enumerate(map(Row.of, observations)):
            values = rewards[i], ends[i], cuts[i], lost[i]
            if was_reset[i]:
                yield Seen(None, *values, root=row)
            elif self.mode == "SameStep" and (ends[i] or cuts[i]):
                yield Seen(Row.of(infos["final_obs"][i]), *values, root=row)
            else:
                yield Seen(row, *values)


class PettingZooSession(GymnasiumSession):
    """A session of `facades.pettingzoo.ParallelVectorEnv`."""

    def vector_env(self, make: list[Any], options: ExecutorOptions) -> Any:
        """Make the vector env."""
        from tests.oracles.fuzz_pettingzoo import PettingZooFuzzEnv, PilotsEnv

        make = [functools.partial(PettingZooFuzzEnv, *one.args) for one in make]
        return PilotsEnv(make, self.mode, self.setting.num_workers, options)


class Sb3Session(FacadeSession):
    """A session of `facades.sb3.SubprocVecEnv`."""

    def make(self, make: list[Any], options: ExecutorOptions) -> Any:
        """Open the facade."""
        from envherd.sb3 import SubprocVecEnv

        return SubprocVecEnv(
            make, num_workers=self.setting.num_workers, options=options
        )

    def ask_all(self, name: str, *args: Any) -> list[Any]:
        """See `FacadeSession`."""
        return list(self.env.env_method(name, *args))

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

    def seen(self, made: Any) -> Iterator[Seen]:
        """See `FacadeSession`."""
        observations, rewards, dones, infos = made
        for reward, done, info, row in zip(
            rewards, dones, infos, map(Row.of, observations), strict=True
        ):
            is_cut = info["TimeLimit.truncated"]
            values = reward, done and not is_cut, is_cut, info.get("interrupted", False)
            last = Row.of(info["terminal_observation"]) if done else row
            yield Seen(last, *values, root=row if done else None)


def _wrapped(*arguments: Any) -> Any:
    """Build the env as a TorchRL env."""
    from torchrl.envs.libs.gym import GymWrapper

    return GymWrapper(GymnasiumFuzzEnv(*arguments), categorical_action_encoding=True)


class TorchRLSession(FacadeSession):
    """A session of `facades.torchrl.ParallelEnv`, whose workers import torchrl: it takes seconds to open."""

    WEIGHTS: ClassVar[dict[str, int]] = {
        **FacadeSession.WEIGHTS,
        "fused": 20,
        "rollout": 8,
        "reset_some": 4,
    }

    last: Any = None

    def make(self, make: list[Any], options: ExecutorOptions) -> Any:
        """Open the facade."""
        from envherd.torchrl import ParallelEnv

        make = [functools.partial(_wrapped, *one.args) for one in make]
        env = ParallelEnv(
            self.num_envs, make, num_processes=self.setting.num_workers, options=options
        )
        env.start()
        return env

    @property
    def executor(self) -> Any:
        """What sessions ask of an executor, over the engine of the facade."""
        engine = self.env._crew_at_work()._engine
        return SimpleNamespace(
            engine=engine,
            statistics=lambda: count(
                engine.pool, engine.memory, engine.ready_at, **engine.counts()
            ),
        )

    def close(self) -> None:
        """See `Session.close`."""
        self.env.close(raise_if_closed=False)
        self.traps.close()

    def ask_all(self, name: str, *args: Any) -> list[Any]:
        """See `FacadeSession`."""
        return list(getattr(self.env, name)(*args))

    def _reset(self) -> None:
        td = self.attempt("reset", self.env.reset)
        if td is not None:
            self.take_reset(
                td["observation"].tolist(), Given(seeds=(None,) * self.num_envs)
            )

    def _reset_some(self) -> None:
        if self.needs_reset:
            return
        mask = torch.tensor([[self.rng.random() < 0.5] for _ in range(self.num_envs)])
        if mask.any():
            self._reset_masked(mask)

    def _reset_masked(self, mask: torch.Tensor) -> None:
        root = self.last.clone().set("_reset", mask)
        td = self.attempt(
            f"reset {mask.flatten().tolist()}", lambda: self.env.reset(root)
        )
        if td is not None:
            self.take_reset(
                td["observation"].tolist(),
                Given(seeds=(None,) * self.num_envs),
                mask.flatten().tolist(),
            )
            self.last = td

    def take_reset(self, observations: Any, given: Given, mask: Any = None) -> None:
        """See `FacadeSession`."""
        super().take_reset(observations, given, mask)
        shape = (self.num_envs, 1)
        flags = {
            key: torch.zeros(shape, dtype=torch.bool)
            for key in ("done", "terminated", "truncated")
        }
        self.last = TensorDict(
            {"observation": torch.tensor(observations), **flags}, [self.num_envs]
        )

    def _is_ready(self) -> bool:
        is_ready, ended = super()._is_ready(), self._ended()
        if is_ready and ended.any():
            self._reset_masked(torch.tensor(ended)[:, None])
        return not self.needs_reset

    def _step(self) -> None:
        self._advance(lambda td: (self.env.step(td), None))

    def _fused(self) -> None:
        self._advance(self.env.step_and_maybe_reset)

    def _advance(self, call: Any) -> None:
        """Make a step, which returns its data and the roots after it (None for the last observations)."""
        if not self._is_ready():
            return
        td = self.last.clone().set("action", torch.tensor(self._drawn()))
        made = self.attempt("step", lambda: call(td))
        if made is None:
            return
        data, root = made
        self.take(data["action"], self.seen(data))
        if root is not None:
            self.take_following(root, self.everyone)
        self.last = data["next"].exclude("reward") if root is None else root

    def seen(self, made: Any) -> Iterator[Seen]:
        """See `FacadeSession`."""
        after = made["next"]
        for i, row in enumerate(map(Row.of, after["observation"].tolist())):
            # TorchRL has no key for it.
            lost = row == self.oracle.at[i, 0] and self._has_lost()
            yield Seen(
                row,
                after["reward"][i],
                after["terminated"][i],
                after["truncated"][i],
                lost,
            )

    def _rollout(self) -> None:
        num_steps = self.rng.randint(1, 8)
        data = self.attempt(
            f"rollout {num_steps}",
            lambda: self.env.rollout(num_steps, break_when_any_done=False),
            None,
        )
        if data is None:
            return
        for t in range(num_steps):
            td = data[:, t]
            for place, row in zip(
                self.places, map(Row.of, td["observation"].tolist()), strict=True
            ):
                if t == 0 or self.oracle.ended[place]:
                    self.oracle.begin(place, row)
            self.take(td["action"], self.seen(td))
        self.needs_reset = False
        self.doubt.clear()
        self.last = data[:, -1]["next"].exclude("reward")


SESSIONS: dict[str, type[Session]] = {
    "collector": CollectorSession,
    "gymnasium": GymnasiumSession,
    "pettingzoo": PettingZooSession,
    "sb3": Sb3Session,
    "torchrl": TorchRLSession,
}
