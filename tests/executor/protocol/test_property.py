"""For any operations in any order on any number of workers, the data equal those of `SerialEnv`, bit for bit."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from envherd.executor import ExecutorOptions, ParallelEnv, SerialEnv
from envherd.workers.testing import AgentsEnv, CountingEnv, TextEnv
from tests.scale import scaled

pytestmark = pytest.mark.slow

NUM_ENVS = 5
ENVS: dict[str, Any] = {
    "numbers": CountingEnv,
    "pixels in reused buffers": functools.partial(CountingEnv, size=6, reuses_buffers=True),
    "agents": AgentsEnv,
    "different tasks": [CountingEnv, functools.partial(CountingEnv, size=4)] * 2 + [TextEnv],
    "episodes of one step": [functools.partial(CountingEnv, 1), CountingEnv] * 2 + [functools.partial(CountingEnv, 1)],
}
#: Workers (0: a `SerialEnv`), `copy`, `ring_frames`, and other options.
SETTINGS: list[tuple[int, bool, int, dict[str, Any]]] = [
    *((0, True, 2, {"isolate_rng": True}), (1, True, 4, {}), (2, True, 2, {}), (3, True, 3, {})),
    *((2, False, 2, {}), (0, False, 3, {}), (2, True, 2, {"env_threads": True})),
]

#: One operation, and a number from which masks, actions and counts are drawn.
DEEDS = st.tuples(
    st.sampled_from(
        ["step", "fused", "reset", "reset", "exchange", "groups", "rollout", "breaking rollout", "seed", "load"]
    ),
    st.integers(0, 2**32 - 1),
)


class Tape:
    """Applies operations to one executor, and keeps every row by env."""

    def __init__(self, env: Any) -> None:
        self.env = env
        self.rows: list[tuple[int, Any]] = []

    def play(self, seed: int, deeds: list[tuple[str, int]]) -> None:
        self.rows.clear()
        self._keep(self.env.reset(seed=seed))
        for deed, number in deeds:
            getattr(self, "_" + deed.replace(" ", "_"))(np.random.default_rng(number))

    def of_env(self, env_id: int) -> list[Any]:
        return [row for owner, row in self.rows if owner == env_id]

    def _keep(self, td: Any, env_ids: Any = None) -> None:
        ids = range(NUM_ENVS) if env_ids is None else env_ids.tolist()
        self.rows += [(env_id, td[position].clone()) for position, env_id in enumerate(ids)]

    def _act(self, td: Any, rng: np.random.Generator, env_ids: Any = None) -> Any:
        """Set actions that depend only on the env, not on the order of answers."""
        base = int(rng.integers(1000))
        ids = range(NUM_ENVS) if env_ids is None else env_ids.tolist()
        leaf = self.env.action_spec[0]
        draws = [np.random.default_rng((base, env_id)).integers(0, leaf.domain.n, leaf.shape) for env_id in ids]
        return td.set(leaf.key, torch.from_numpy(np.stack(draws)))

    def _actions(self, rng: np.random.Generator, env_ids: Any = None) -> Any:
        count = NUM_ENVS if env_ids is None else len(env_ids)
        row = self.env.rand_action()[0]
        return self._act(torch.stack([row.clone() for _ in range(count)]), rng, env_ids)

    def _masked(self, masks: Any) -> Any:
        """Return the rows that a reset takes, with a mask of each env."""
        rows = self.env.rand_action()
        return torch.stack([rows[i].set("_reset", masks[i]) for i in range(NUM_ENVS)])

    def _revive(self) -> Any:
        """Reset ended envs, so that all can be stepped."""
        root = self.env.current()
        return self.env.reset(self._masked([root[i]["done"] for i in range(NUM_ENVS)]))

    def _step(self, rng: np.random.Generator) -> None:
        self._revive()
        self._keep(self.env.step(self._actions(rng)))

    def _fused(self, rng: np.random.Generator) -> None:
        self._revive()
        td, root = self.env.step_and_maybe_reset(self._actions(rng))
        self._keep(td)
        self._keep(root)

    def _reset(self, rng: np.random.Generator) -> None:
        mask = torch.from_numpy(rng.random(NUM_ENVS) < 0.4)
        self._keep(self.env.reset(self._masked(mask[:, None])))

    def _exchange(self, rng: np.random.Generator) -> None:
        """Send all, receive a few at a time in any order; send those again for two more rounds."""
        self._revive()
        few = int(rng.integers(1, NUM_ENVS + 1))
        base = int(rng.integers(1000))
        self.env.send(self._actions(np.random.default_rng(base)))
        left = np.full(NUM_ENVS, 2)
        num_sent = NUM_ENVS
        while num_sent:
            td = self.env.recv(min(few, num_sent))
            ids = td["env_ids"]
            self._keep(td, ids)
            self._keep(self.env.current(ids), ids)
            again = ids[torch.from_numpy(left[ids.numpy()] > 0)]
            left[ids.numpy()] -= 1
            num_sent -= len(ids)
            for env_id in again.tolist():
                one = torch.tensor([env_id])
                actions = self._actions(np.random.default_rng(base + int(left[env_id])), one)
                self.env.send(actions, one)
            num_sent += len(again)

    def _groups(self, rng: np.random.Generator) -> None:
        """Send all, receive a group and then the others, each in its own order; twice."""
        self._revive()
        order = torch.from_numpy(rng.permutation(NUM_ENVS))
        cut = int(rng.integers(1, NUM_ENVS))
        base = int(rng.integers(1000))
        self.env.send(self._actions(np.random.default_rng(base)))
        for turn, ids in enumerate([order[:cut], order[cut:]] * 2):
            td = self.env.recv(env_ids=ids, with_root=turn % 2 == 0)
            assert td["env_ids"].tolist() == ids.tolist()
            self._keep(td, ids)
            self._keep(self.env.current(ids), ids)
            if turn < 2:
                self.env.send(self._actions(np.random.default_rng(base + turn), ids), ids)

    def _rollout(self, rng: np.random.Generator) -> None:
        policy = functools.partial(self._act, rng=rng)
        data = self.env.rollout(int(rng.integers(1, 12)), policy, break_when_any_done=False)
        self._keep(data)

    def _breaking_rollout(self, rng: np.random.Generator) -> None:
        self._keep(self.env.rollout(int(rng.integers(1, 12)), functools.partial(self._act, rng=rng)))

    def _load(self, _: np.random.Generator) -> None:
        self.env.load_state_dict(self.env.state_dict())
        self._keep(self.env.current())

    def _seed(self, rng: np.random.Generator) -> None:
        self.env.set_seed(int(rng.integers(2**31)))


@contextlib.contextmanager
def tapes_of(name: str) -> Iterator[list[Tape]]:
    """Make executors of one kind of env, the serial one first, kept for all examples."""
    make = ENVS[name]
    tapes = [Tape(SerialEnv(NUM_ENVS, make, seed=0))]
    for num_workers, copy, ring_frames, others in SETTINGS:
        options = ExecutorOptions(poison=not copy, ring_frames=ring_frames, **others)
        kind = functools.partial(ParallelEnv, num_workers=num_workers) if num_workers else SerialEnv
        tapes.append(Tape(kind(NUM_ENVS, make, copy=copy, options=options)))
    yield tapes
    for tape in tapes:
        tape.env.close()


def compare(tapes: list[Tape], seed: int, deeds: list[tuple[str, int]]) -> None:
    serial, *others = tapes
    serial.play(seed, deeds)
    for tape in others:
        tape.play(seed, deeds)
        for env_id in range(NUM_ENVS):
            expected, got = serial.of_env(env_id), tape.of_env(env_id)
            assert len(expected) == len(got)
            for one, other in zip(expected, got, strict=True):
                assert (one == other).all(), f"env {env_id} differs"


@pytest.mark.parametrize("name", ENVS)
def test_all_executors_give_the_same_data(name):
    with tapes_of(name) as tapes:

        @settings(max_examples=scaled(8, full=100), suppress_health_check=[HealthCheck.too_slow])
        @given(seed=st.integers(0, 2**31), deeds=st.lists(DEEDS, min_size=1, max_size=6))
        def all_agree(seed, deeds):
            compare(tapes, seed, deeds)

        all_agree()
        compare(tapes, 11, [("exchange", 5), ("load", 0), ("exchange", 5), ("reset", 3), ("reset", 3), ("groups", 2)])
        compare(tapes, 11, [("rollout", 3), ("exchange", 5), ("groups", 2), ("fused", 7)])
        rows = [row for _, row in tapes[-1].rows if "next" in row.keys()]  # noqa: SIM118  # a TensorDict's keys
        ends = [bool(row["next", "done"].any()) for row in rows]
        assert any(ends)
        assert not all(ends)
