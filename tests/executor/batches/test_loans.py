"""Frames on loan: a large batch is the frame that the workers wrote, without a copy; see `batches.memory`."""

import copy
import functools
import gc
import io
import os
import pickle
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDict, TensorDictBase

from envherd import AsyncCollector, EnvError, ExecutorOptions, ParallelEnv, SerialEnv
from envherd.shm.segment import HAS_MEMFD, PrivateView, Segment, open_view
from envherd.workers.testing import CountingEnv

pytestmark = pytest.mark.skipif(not HAS_MEMFD, reason="without memfd nothing is lent")

SIDE = 64  # of a picture: two envs need more than 32 KiB
NUM_ENVS = 4


class Pictures(gymnasium.Env[Any, Any]):
    """Observes its seed and step everywhere in a picture; ends after `length` steps, and may fail at action 9."""

    action_space = gymnasium.spaces.Discrete(10)

    def __init__(self, length: int = 7, *, fails: bool = False) -> None:
        spaces = gymnasium.spaces
        self.observation_space = spaces.Dict(
            {
                "picture": spaces.Box(0, 255, (SIDE, SIDE, 3), np.uint8),
                "depth": spaces.Box(-np.inf, np.inf, (SIDE, SIDE), np.float32),
                "place": spaces.Box(0, 1 << 30, (2,), np.int64),
            }
        )
        self.length, self.fails, self.episode, self.t = length, fails, 0, 0

    def _observe(self) -> dict[str, np.ndarray]:
        value = self.episode * 16 + self.t
        return {
            "picture": np.full((SIDE, SIDE, 3), value % 256, np.uint8),
            "depth": np.full((SIDE, SIDE), value, np.float32),
            "place": np.array([self.episode, self.t]),
        }

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.episode, self.t = int(self.np_random.integers(1000)), 0
        return self._observe(), {}

    def step(self, action: int) -> Any:
        if action == 9 and self.fails:
            raise ValueError("action 9")
        self.t += 1
        return self._observe(), float(self.t), self.t >= self.length, False, {}


MAKERS: dict[str, Callable[..., Any]] = {
    "2 workers": functools.partial(ParallelEnv, num_workers=2),
    "serial": SerialEnv,
    "general path": functools.partial(
        ParallelEnv, num_workers=2, options=ExecutorOptions(infos="plain")
    ),
    "restart": functools.partial(
        ParallelEnv, num_workers=2, options=ExecutorOptions(on_worker_loss="restart")
    ),
}


@pytest.fixture(params=MAKERS)
def env(request: pytest.FixtureRequest) -> Iterator[Any]:
    with MAKERS[request.param](NUM_ENVS, Pictures, seed=0) as env:
        yield env


def loans_of(env: Any) -> Any:
    loans = env.engine.positions.loans
    assert loans is not None
    return loans


def act(env: Any, root: Any, value: int = 1) -> Any:
    return root.select().set("action", torch.full((NUM_ENVS,), value))


def values_of(td: TensorDictBase) -> dict[Any, np.ndarray]:
    return {
        key: leaf.numpy().copy()
        for key, leaf in td.items(include_nested=True, leaves_only=True)
        if isinstance(leaf, torch.Tensor)
    }


def assert_same(one: dict[Any, np.ndarray], other: dict[Any, np.ndarray]) -> None:
    assert one.keys() == other.keys()
    for key, value in one.items():
        np.testing.assert_array_equal(value, other[key], err_msg=str(key))


def test_a_batch_is_the_frame_and_is_not_copied(env):
    env.reset()
    td = env.step(act(env, env.current()))
    batch, column = env.engine.batches.groups[0], env.engine.positions.column
    assert column >= loans_of(env).first
    picture = td["next", "picture"]
    batch.slab.columns["next", "picture"][column][0, 0, 0, 0] = 99  # as a worker would
    assert picture[0, 0, 0, 0] == 99
    assert env.statistics().frames_lent == 1
    del td, picture
    gc.collect()
    assert env.statistics().frames_lent == 0


def test_batches_that_are_kept_never_change(env):
    """More batches than there are frames: the rest are copies."""
    kept = []
    root = env.reset()
    for _ in range(3 * 7 + 4):
        td, root = env.step_and_maybe_reset(act(env, root))
        kept.append((td, values_of(td), root, values_of(root)))
    assert env.statistics().frames_lent == env._pool.plan.num_lendable
    for td, before, root_then, root_before in kept:
        assert_same(values_of(td), before)
        assert_same(values_of(root_then), root_before)


def test_if_all_frames_are_held_they_are_looked_through_once_a_step(env, monkeypatch):
    loans, kept, calls = loans_of(env), [], []
    root = env.reset()
    for _ in range(env._pool.plan.num_lendable + 2):
        td, root = env.step_and_maybe_reset(act(env, root))
        kept.append(td)
    find = loans._find
    monkeypatch.setattr(
        loans, "_find", lambda present: (calls.append(present), find(present))[1]
    )
    for _ in range(5):
        td, root = env.step_and_maybe_reset(act(env, root))
        kept.append(td)
    assert len(calls) == 5
    del kept[:3]  # the root of the next batch is one of them
    for _ in range(2):
        td, root = env.step_and_maybe_reset(act(env, root))
    assert env.engine.positions.column >= loans.first, (
        "what was given back is lent again"
    )


def test_a_loop_that_keeps_two_batches_uses_few_frames(env):
    root = env.reset()
    columns, older = set(), None
    for _ in range(20):
        latest = env.step_and_maybe_reset(act(env, root))
        root, older, _ = latest[1], latest, older
        columns.add(env.engine.positions.column)
    assert len(columns) <= 5
    assert min(columns) >= loans_of(env).first


WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "torch": lambda leaf: leaf.fill_(1),
    "numpy": lambda leaf: leaf.numpy().fill(1),
    "dlpack": lambda leaf: (
        np.from_dlpack(leaf).fill(1)
        if leaf.dtype != torch.bool
        else leaf.numpy().fill(1)
    ),
    "view": lambda leaf: leaf.reshape(-1)[::2].fill_(1),
    "data": lambda leaf: leaf.data.fill_(1),
}


def test_callers_writes_to_a_batch_are_in_no_later_batch(env):
    """A twin whose batches are not written to has the same data in every call."""
    rng = random.Random(0)

    def spoil(td: Any) -> None:
        for key, leaf in td.items(include_nested=True, leaves_only=True):
            if isinstance(leaf, torch.Tensor) and key != "env_ids":
                WRITES[rng.choice([*WRITES])](leaf)

    with SerialEnv(NUM_ENVS, Pictures, seed=0, options=env.options, copy=False) as twin:
        root, twin_root = env.reset(), twin.reset()
        keeps: list[Any] = []
        for _ in range(100):
            assert_same(values_of(root), values_of(twin_root))
            what = rng.choice(
                ["step", "fused", "fused", "fused", "reset", "current", "rollout"]
            )
            if what == "rollout":
                torch.manual_seed(0)
                pair = [
                    one.rollout(3, lambda td: td.set("action", torch.ones(NUM_ENVS, dtype=torch.int64)),
                                auto_reset=False, break_when_any_done=False)
                    for one in (env, twin)
                ]  # fmt: skip
                assert_same(*map(values_of, pair))
                reset = TensorDict({"_reset": env.current()["done"]}, [NUM_ENVS])
                root, twin_root = env.reset(reset), twin.reset(reset)
            elif what == "current":
                root, twin_root = env.current(), twin.current()
            elif what == "reset":
                mask = torch.tensor([rng.random() < 0.3 for _ in range(NUM_ENVS)])
                reset = TensorDict({"_reset": mask}, [NUM_ENVS])
                spoil(root)
                root, twin_root = env.reset(reset), twin.reset(reset)
            elif what == "step":
                td, twin_td = env.step(act(env, root)), twin.step(act(twin, twin_root))
                assert_same(values_of(td), values_of(twin_td))
                ended = td["next", "done"].clone()
                spoil(td)
                keeps.append(td)
                reset = TensorDict({"_reset": ended}, [NUM_ENVS])
                root, twin_root = env.reset(reset), twin.reset(reset)
            else:
                (td, root), (twin_td, twin_root) = (
                    one.step_and_maybe_reset(act(one, own))
                    for one, own in ((env, root), (twin, twin_root))
                )
                assert_same(values_of(td), values_of(twin_td))
                assert_same(values_of(root), values_of(twin_root))
                spoil(td)
                spoil(root)
                root = env.current()
                keeps.append(td)
            del keeps[: rng.choice([0, 0, 1, 3])]


HOLDS: dict[str, Callable[[torch.Tensor], Any]] = {
    "the leaf": lambda leaf: leaf,
    "a slice": lambda leaf: leaf[1:2],
    "a detached leaf": lambda leaf: leaf.detach(),
    "a transposed one": lambda leaf: leaf.T if leaf.ndim == 2 else leaf.transpose(0, 1),
    "its storage": lambda leaf: leaf.untyped_storage(),
    "an array": lambda leaf: leaf.numpy(),
    "an array's part": lambda leaf: leaf.numpy()[1:],
    "a memoryview": lambda leaf: leaf.numpy().data,
    "dlpack": lambda leaf: leaf.__dlpack__(),
    "an array by dlpack": np.from_dlpack,
    "autograd": lambda leaf: leaf * torch.ones((), requires_grad=True),
}


@pytest.mark.parametrize("hold", HOLDS)
@pytest.mark.parametrize("key", ["picture", "depth", "place", "reward"])
def test_any_reference_to_its_memory_holds_a_frame(hold, key):
    with SerialEnv(NUM_ENVS, Pictures, seed=0) as env:
        root = env.reset()
        td, root = env.step_and_maybe_reset(act(env, root))
        leaf = td["next", key]
        held, before = HOLDS[hold](leaf), leaf.numpy().copy()
        del td, leaf, root
        address = env.engine.positions.column
        for _ in range(20):
            env.step_and_maybe_reset(act(env, env.current()))
            assert env.engine.positions.column != address
        assert env.statistics().frames_lent == 1
        slab = env.engine.batches.groups[0].slab.columns["next", key]
        np.testing.assert_array_equal(slab[address], before)
        del held
        gc.collect()
        assert env.statistics().frames_lent == 0


def test_shared_batches_are_copies():
    with SerialEnv(NUM_ENVS, Pictures, seed=0) as env:
        root = env.reset()
        td, root = env.step_and_maybe_reset(act(env, root))
        before = values_of(td)
        td["next"].share_memory_()
        kept = [td]
        for _ in range(10):
            td, root = env.step_and_maybe_reset(act(env, root))
            kept.append(td)
        assert_same(values_of(kept[0]), before)


def test_batches_outlive_the_executor(env):
    root = env.reset()
    td, root = env.step_and_maybe_reset(act(env, root))
    before = values_of(td)
    env.close()
    gc.collect()
    assert_same(values_of(td), before)
    td["next", "picture"].fill_(3)
    assert (td["next", "picture"] == 3).all()


def test_a_batch_that_is_held_survives_sends_and_failures():
    with ParallelEnv(
        NUM_ENVS, functools.partial(Pictures, fails=True), num_workers=2, seed=0
    ) as env:
        root = env.reset()
        kept = []
        for i in range(30):
            td, root = env.step_and_maybe_reset(act(env, root))
            kept.append((td, values_of(td)))
            if i % 3 == 0:
                env.send(act(env, root)[:2].set("env_ids", torch.tensor([0, 1])))
                sent = env.recv()
                kept.append((sent, values_of(sent)))
                env.reset(TensorDict({"_reset": env.current()["done"]}, [NUM_ENVS]))
            if i % 5 == 4:
                actions = act(env, root)
                actions["action"][2] = 9
                with pytest.raises(EnvError) as caught:
                    env.step(actions)
                kept.append((caught.value.partial, values_of(caught.value.partial)))
                env.reset()
            root = env.current()
            del kept[:-8]
            for td, before in kept:
                assert_same(values_of(td), before)


def test_no_frame_is_lent_where_batches_are_views_or_small_or_mixed():
    for executor in (
        SerialEnv(NUM_ENVS, Pictures, copy=False),
        SerialEnv(NUM_ENVS, Pictures, options=ExecutorOptions(poison=True)),
        SerialEnv(NUM_ENVS, CountingEnv),
        SerialEnv(2, [Pictures, CountingEnv]),
    ):
        with executor as env:
            assert env.engine.positions.loans is None
            assert env.statistics().frames_lent == 0


def test_without_pagemap_batches_are_copied(monkeypatch):
    # As if /proc were another system's.
    monkeypatch.setattr(PrivateView, "has_copies", lambda *_: False)
    with SerialEnv(NUM_ENVS, Pictures) as env:
        assert env.engine.positions.loans is None
        env.step(act(env, env.reset()))


def test_a_private_view_follows_until_it_is_written_to():
    page = os.sysconf("SC_PAGESIZE")
    segment = Segment.create(4 * page)
    shared, view = segment.array(), segment.private_view(page)
    assert view is not None
    shared[:] = 1
    assert (view.array == 1).all()
    assert not view.has_copies(0, 3 * page)
    view.array[page + 5] = 9
    shared[:] = 2
    assert view.has_copies(0, 3 * page)
    assert view.has_copies(page, 1)
    assert not view.has_copies(0, page)
    assert view.array[0] == 2
    assert view.array[page] == 1  # the copy does not follow
    assert shared[2 * page + 5] == 2
    view.follow(page, page)
    assert (view.array == 2).all()
    assert not view.has_copies(0, 3 * page)
    array = view.array
    # Writing to a shared mapping copies no page.
    assert open_view(shared[: 2 * page]) is None
    segment.close()
    del view, segment, shared
    gc.collect()
    assert (array[1:] == 2).all()


def test_descriptors_are_closed_with_the_executor():
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    SerialEnv(NUM_ENVS, Pictures).close()
    before = count()
    kept = []
    for make in (SerialEnv, functools.partial(ParallelEnv, num_workers=1)):
        with make(NUM_ENVS, Pictures) as env:
            kept.append(env.step(act(env, env.reset())))
    assert count() == before


def test_a_collector_and_a_background_policy_keep_their_data():
    env = ParallelEnv(NUM_ENVS, Pictures, num_workers=2, seed=0)
    with (
        env,
        AsyncCollector(env, None, frames_per_batch=40, total_frames=200) as collector,
    ):
        kept = [(data, values_of(data)) for data in collector]
    for data, before in kept:
        assert_same(values_of(data), before)


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def assert_saved_as_held(leaves: Iterable[torch.Tensor]) -> None:
    """Assert that leaves can be saved together, and that the file of one has its own bytes."""
    assert saved([*leaves])
    for leaf in leaves:
        texts = (
            saved(leaf),
            saved(leaf[:1]),
            saved(copy.deepcopy(leaf)),
            pickle.dumps(leaf),
        )
        assert max(map(len, texts)) < leaf.nbytes + 3000


@pytest.mark.parametrize("env_type", [Pictures, CountingEnv])
@pytest.mark.parametrize("maker", ["2 workers", "serial", "general path"])
def test_saved_batch_has_only_its_own_bytes(maker, env_type):
    """Every batch can be saved, and a leaf of it takes the leaf's own bytes."""
    with MAKERS[maker](NUM_ENVS, env_type, seed=0) as env:
        root = env.reset()
        action = env.rand_action()
        td, after = env.step_and_maybe_reset(root.clone().update(action))
        env.send(action)
        received = env.recv()
        rollout = env.rollout(3, break_when_any_done=False)
        for batch in (
            root,
            td,
            after,
            received,
            env.current(received["env_ids"]),
            env.current(),
            rollout,
        ):
            before = values_of(batch)
            assert_same(
                values_of(torch.load(io.BytesIO(saved(batch)), weights_only=False)),
                before,
            )
            assert_saved_as_held([*batch.values(include_nested=True, leaves_only=True)])


def fork_of(check: Callable[[], None]) -> Callable[[], int]:
    """Run a check in a fork; return a function that returns its exit code."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            check()
            code = 0
        finally:
            os._exit(code)
    return lambda: os.waitpid(pid, 0)[1]


@pytest.mark.parametrize("hold", ["the leaf", "an array"])
def test_a_batch_that_only_a_fork_holds_stays_what_it_is(env, hold):
    root = env.reset()
    for _ in range(4):  # the latest frame is then the first one to be used again
        td, root = env.step_and_maybe_reset(act(env, root))
    kept, before = [HOLDS[hold](td["next", "depth"])], td["next", "depth"].clone()
    del td, root
    read, write = os.pipe()

    def check() -> None:
        os.read(read, 1)
        assert torch.equal(torch.as_tensor(kept[0]), before)

    waits = [fork_of(check) for _ in range(2)]
    kept.clear()
    for _ in range(4):
        env.step_and_maybe_reset(act(env, env.current()))
    os.write(write, b"go")
    assert [wait() for wait in waits] == [0, 0]
    os.close(read)
    os.close(write)
    assert env.statistics().frames_lent == 0
    follows_workers(env.step(act(env, env.current())))


def follows_workers(td: Any) -> None:
    """Check that a batch has the values of its step everywhere."""
    value = td["next", "place"] @ torch.tensor([16, 1])
    assert (td["next", "depth"] == value[:, None, None]).all()


class SlowPictures(Pictures):
    def step(self, action: int) -> Any:
        time.sleep(0.05)
        return super().step(action)


@pytest.mark.parametrize("maker", ["2 workers", "general path"])
def test_a_fork_copies_no_frame_that_workers_are_writing(maker):
    """Its rows would stay incomplete in this process."""

    def fork() -> None:
        assert fork_of(lambda: None)() == 0

    with MAKERS[maker](NUM_ENVS, SlowPictures, seed=0) as env:
        root = env.reset()
        for _ in range(3):
            forking = threading.Timer(0.03, fork)
            forking.start()
            td, root = env.step_and_maybe_reset(act(env, root))
            forking.join()
            follows_workers(td)
