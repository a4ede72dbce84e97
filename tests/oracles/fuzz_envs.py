"""Envs for the fuzzers: every row identifies its env and step, and a diary outside the process records all calls.

Workers import this module; it needs only numpy.
"""

import mmap
import os
import signal
import time
from collections.abc import Callable, Mapping
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import numpy as np

from envherd.shm.specs import Discrete, EnvSpec, LeafSpec, done_leaves
from envherd.workers.adapters.base import StepValues
from envherd.workers.adapters.registry import register
from envherd.workers.testing import PlainAdapter, PlainEnv

NUM_ACTIONS = 5
#: The values of a row, in this order; exact in float64.
FIELDS = (
    "env_id",
    "lane",
    "nonce",
    "episode",
    "t",
    "action",
    "seed",
    "level",
    "checksum",
)
WIDTH = len(FIELDS)
NO_SEED = -1


class Kind(IntEnum):
    """The event of a record of the diary."""

    BUILD = 1
    RESET = 2
    STEP = 3
    TERMINATED = 4  # a step that ended the episode
    TRUNCATED = 5
    WRONG = 6  # a step before any reset or after an end


RECORD = np.dtype(
    {
        "names": ["kind", "lane", "env_id", "episode", "t", "action", "nonce", "seed"],
        "formats": ["u1", "u1", "<u2", "<i4", "<i4", "<i4", "<i8", "<i8"],
    }
)


class When(IntEnum):
    """When a trap is sprung: before or after the work, which is not reported to the caller yet."""

    NEVER = 0
    BUILD = 1
    RESET = 2
    STEP = 3
    RESET_DONE = 4
    STEP_DONE = 5


class How(IntEnum):
    """The effect of a trap."""

    KILL = 0
    EXIT = 1
    RAISE = 2
    HANG = 3
    SLOW = 4
    STOP = 5


class EnvBroke(ValueError):
    """Raised by traps."""


class Traps:
    """The envs' traps: int64 `[num_envs, 4]` in a file: when, how, countdown, number sprung."""

    def __init__(self, folder: str, num_envs: int) -> None:
        path = Path(folder, "traps")
        if not path.exists():
            path.write_bytes(bytes(32 * num_envs))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 32 * num_envs)
        self.words = np.frombuffer(self._map, np.int64).reshape(num_envs, 4)

    def close(self) -> None:
        """Give back the memory, which holds a descriptor."""
        self.words = self.words.copy()
        self._map.close()

    def spring(self, env_id: int, when: When) -> None:
        """Spring the env's trap, if it is set for this moment."""
        words = self.words[env_id]
        if words[0] != when:
            return
        words[2] -= 1
        if words[2] > 0:
            return
        words[0] = When.NEVER
        words[3] += 1
        DEEDS[How(words[1])]()


def _raise() -> NoReturn:
    raise EnvBroke("the env broke on purpose")


DEEDS: dict[How, Callable[[], Any]] = {
    How.KILL: partial(signal.raise_signal, signal.SIGKILL),
    How.EXIT: partial(os._exit, 3),
    How.RAISE: _raise,
    How.HANG: partial(time.sleep, 1000),
    How.SLOW: partial(time.sleep, 0.05),
    How.STOP: partial(signal.raise_signal, signal.SIGSTOP),
}


class Life:
    """One instance of an env (or one row of an env that is a batch), and its diary.

    Args:
        folder: where diary and traps are.
        env_id, lane: which env, and which of its rows.
        length: steps of an episode; None for 1 to 7, as the seed says.
    """

    def __init__(self, folder: str, env_id: int, lane: int, length: int | None) -> None:
        self.env_id, self.lane = env_id, lane
        self._length = length
        self.nonce = self._own = int.from_bytes(os.urandom(5), "little")
        self._num_episodes = 0
        self.episode, self.t, self.seed, self.level, self.action = -1, 0, NO_SEED, 0, -1
        self.is_running = False
        self._diary = os.open(
            Path(folder, "diary"), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        )
        self._write(Kind.BUILD)

    def reset(self, seed: int | None, level: int) -> np.ndarray:
        """Begin an episode."""
        self.nonce, self.episode = self._own, self._num_episodes
        self._num_episodes += 1
        self.t, self.action, self.level = 0, -1, level
        self.seed = NO_SEED if seed is None else seed
        self.is_running = True
        self._write(Kind.RESET)
        return self.row()

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool]:
        """Make a step."""
        self.t += 1
        self.action = action
        kind = Kind.STEP
        if self.t >= self.length:
            kind = Kind.TERMINATED if self._mixed() % 2 == 0 else Kind.TRUNCATED
        self._write(kind if self.is_running else Kind.WRONG)
        self.is_running = self.is_running and kind == Kind.STEP
        return (
            self.row(),
            self.t + action / 8,
            kind == Kind.TERMINATED,
            kind == Kind.TRUNCATED,
        )

    def _mixed(self) -> int:
        return self.seed if self.seed != NO_SEED else self.nonce + 7 * self.episode

    @property
    def length(self) -> int:
        """Steps of this episode."""
        return 1 + self._mixed() % 7 if self._length is None else self._length

    def row(self) -> np.ndarray:
        """Return int64 `[WIDTH]`, see `FIELDS`."""
        values = (
            self.env_id,
            self.lane,
            self.nonce,
            self.episode,
            self.t,
            self.action,
            self.seed,
            self.level,
        )
        return np.array([*values, checksum(values)], np.int64)

    def where(self) -> list[int]:
        """Return nonce, episode and step."""
        return [self.nonce, self.episode, self.t]

    def state(self) -> list[int]:
        """Return its position and its state."""
        return [
            self.nonce,
            self.episode,
            self.t,
            self.seed,
            self.level,
            self.action,
            int(self.is_running),
        ]

    def load(self, state: list[int]) -> None:
        """Take over the position and the nonce of another instance."""
        (
            self.nonce,
            self.episode,
            self.t,
            self.seed,
            self.level,
            self.action,
            is_running,
        ) = state
        self.is_running = bool(is_running)

    def _write(self, kind: Kind) -> None:
        values = (
            kind,
            self.lane,
            self.env_id,
            self.episode,
            self.t,
            self.action,
            self.nonce,
            self.seed,
        )
        # O_APPEND: whole records, in one order.
        os.write(self._diary, np.array([values], RECORD).tobytes())

    def close(self) -> None:
        """Close the diary."""
        if self._diary >= 0:
            os.close(self._diary)
            self._diary = -1


def checksum(values: tuple[int, ...]) -> int:
    """Return the checksum of a row's other values, below 2**31."""
    total = 17
    for value in values:
        total = (total * 31 + value) % (2**31 - 1)
    return total


class FuzzEnv(PlainEnv):
    """One env: a single one, or a batch of `lanes`.

    Args:
        folder, num_envs, env_id: of the case.
        length: see `Life`.
        lanes: rows; 0 for a single env, which is no batch.
        kind: "plain"; "text" also observes a text, over the side channel; "other" has other keys and dtypes.
    """

    def __init__(
        self,
        folder: str,
        num_envs: int,
        env_id: int,
        length: int | None = None,
        lanes: int = 0,
        kind: str = "plain",
    ) -> None:
        self.env_id = env_id
        self._traps = Traps(folder, num_envs)
        self._traps.spring(env_id, When.BUILD)
        self.kind = kind
        self.lanes = lanes
        self.lives = [
            Life(folder, env_id, lane, length) for lane in range(max(1, lanes))
        ]
        self.info: dict[str, Any] = {}
        self.mark: Any = None
        self._buffer = np.zeros((max(1, lanes), WIDTH), np.int64)
        self.spec = spec_of(kind, lanes)

    def reset(
        self,
        seed: int | None,
        options: Mapping[str, Any] | None = None,
        mask: np.ndarray | None = None,
    ) -> list[Any]:
        """Begin an episode (of the rows in a mask)."""
        self._traps.spring(self.env_id, When.RESET)
        level = int((options or {}).get("level", 0))
        for lane, life in enumerate(self.lives):
            if mask is None or mask[lane, 0]:
                self._buffer[lane] = life.reset(
                    None if seed is None else seed + lane, level
                )
        self._traps.spring(self.env_id, When.RESET_DONE)
        return self._observe()

    def step(self, action: list[Any]) -> StepValues:
        """Make a step."""
        self._traps.spring(self.env_id, When.STEP)
        actions = np.atleast_1d(action[0]).tolist()
        steps = [
            life.step(int(act)) for life, act in zip(self.lives, actions, strict=True)
        ]
        for lane, values in enumerate(steps):
            self._buffer[lane] = values[0]
        self._traps.spring(self.env_id, When.STEP_DONE)
        if not self.lanes:
            _, reward, terminated, truncated = steps[0]
            return self._observe(), [reward], terminated, truncated
        rewards, ends, cuts = (np.array([[s[i]] for s in steps]) for i in (1, 2, 3))
        return self._observe(), [rewards.astype(np.float32)], ends, cuts

    def _observe(self) -> list[Any]:
        self.info = {"where": self.where(), "row": self._buffer.copy()}
        rows = self._buffer if self.lanes else self._buffer[0]
        if self.kind == "other":
            return [rows.astype(np.float64), np.full((4,), rows[4] % 256, np.uint8)]
        if self.kind == "text":
            return [rows, f"{rows[2]}:{rows[3]}:{rows[4]}"]
        return [rows]

    def where(self) -> list[int]:
        """Return nonce, episode and step of each row, one after the other."""
        return [value for life in self.lives for value in life.where()]

    def state_dict(self) -> dict[str, Any]:
        """Return where each row is."""
        return {"lives": [life.state() for life in self.lives]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put the rows back."""
        for lane, (life, one) in enumerate(
            zip(self.lives, state["lives"], strict=True)
        ):
            life.load(one)
            self._buffer[lane] = life.row()

    def close(self) -> None:
        """Close the diaries."""
        for life in self.lives:
            life.close()


def spec_of(kind: str, lanes: int) -> EnvSpec:
    """Return the spec of a kind of `FuzzEnv`."""
    lead = (lanes,) if lanes else ()
    if kind == "other":
        observation: tuple[LeafSpec, ...] = (
            LeafSpec(("place", "row"), (WIDTH,), "float64"),
            LeafSpec(("pixels",), (4,), "uint8"),
        )
    else:
        observation = (LeafSpec(("observation",), (*lead, WIDTH), "int64"),)
    if kind == "text":
        observation = (*observation, LeafSpec(("text",), dtype="", is_side=True))
    action = LeafSpec(("action",), lead, "int64", Discrete(NUM_ACTIONS))
    if not lanes:
        return EnvSpec(observation=observation, action=(action,), family="plain")
    return EnvSpec(
        observation=observation,
        action=(action,),
        reward=(LeafSpec(("reward",), (*lead, 1), "float32"),),
        done=done_leaves(lead),
        batch_shape=lead,
        family="plain",
    )


class FuzzAdapter(PlainAdapter):
    """Serves a `FuzzEnv`, and hands on its infos."""

    family: ClassVar[str] = "plain"

    @property
    def info(self) -> Mapping[str, Any]:  # type: ignore[override]
        """The env's info of its last reset or step."""
        info: Mapping[str, Any] = self.env.info
        return info


register(FuzzEnv, FuzzAdapter)
