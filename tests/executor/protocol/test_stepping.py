"""Steps, partial resets, copies and views, actions, and asynchronous stepping."""

import dataclasses
import functools
import threading
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from envherd.executor import (
    ActionError,
    ExecutorOptions,
    ParallelEnv,
    ResetNeeded,
    SerialEnv,
    SpecError,
)
from envherd.shm.specs import Discrete, LeafSpec
from envherd.workers.testing import CountingEnv
from tests.envs.counting_envs import AgentsEnv, PairEnv
from tests.executor.calls import begun, both, counters, ones

long_env = functools.partial(CountingEnv, 1_000)
NUM_ENVS = 3


def act(td, *actions):
    return td.set("action", torch.tensor(actions or [1] * len(td)))


@both
def test_a_step_gives_all_keys(make):
    with make(NUM_ENVS, long_env, seed=0) as env:
        td = env.step(act(env.reset()))
    next_td = td["next"]
    assert sorted(next_td.keys()) == [
        "done",
        "observation",
        "reward",
        "terminated",
        "truncated",
    ]
    assert next_td["reward"].dtype == torch.float32
    for key in ("reward", "done", "terminated", "truncated"):
        assert next_td[key].shape == (NUM_ENVS, 1)


@both
def test_the_end_of_one_of_different_tasks_is_noted(make):
    with make(
        2,
        [functools.partial(CountingEnv, 2), functools.partial(long_env, size=3)],
        seed=0,
    ) as env:
        actions = TensorDict({"action": torch.ones(2, dtype=torch.int64)}, [2])
        env.reset()
        env.step_and_maybe_reset(actions)
        td, root = env.step_and_maybe_reset(actions)
        assert (counters(td["next"]), counters(root)) == ([2, 2], [0, 2])
        env.step(actions)
        env.step(actions)
        with pytest.raises(ResetNeeded) as caught:
            env.step(actions)
        assert caught.value.env_ids == (0,)


@both
@pytest.mark.parametrize("shape", [(NUM_ENVS,), (NUM_ENVS, 1)])
@pytest.mark.parametrize("key", ["_reset", ("agents", "_reset")])
def test_a_reset_touches_the_rows_in_the_mask(make, shape, key):
    with make(NUM_ENVS, long_env, seed=0) as env:
        root = env.step(act(env.reset()))["next"]
        mask = torch.tensor([True, False, True]).reshape(shape)
        asked = TensorDict({key: mask}, [NUM_ENVS])
        before = asked.clone()
        root = env.reset(asked)
        assert counters(root) == [0, 1, 0]
        assert (asked == before).all()
        assert counters(env.step(act(root))["next"]) == [1, 2, 1]


@both
def test_roots_show_which_envs_were_never_reset(make):
    with make(NUM_ENVS, long_env, seed=0) as env:
        assert env.current()["done"].all()
        assert not env.current()["terminated"].any()
        root = env.reset(
            TensorDict({"_reset": torch.tensor([False, True, False])}, [NUM_ENVS])
        )
        assert root["done"].flatten().tolist() == [True, False, True]
        root = env.reset(root.set("_reset", root["done"]))
        assert not root["done"].any()
        assert counters(env.step(act(root))["next"]) == [1, 1, 1]


class UnlikePairEnv(PairEnv):
    """Has one action more."""

    def __init__(self):
        super().__init__()
        self.spec = dataclasses.replace(
            self.spec, action=(LeafSpec(("action",), (2,), "int64", Discrete(9)),)
        )


@both
def test_different_tasks_that_are_batches_are_reset_by_row(make):
    with make(3, [PairEnv, UnlikePairEnv, PairEnv], seed=0) as env:
        root = env.step(ones(env.reset()))["next"]
        assert env.batch_size == root.batch_size == (3, 2)
        mask = torch.tensor([[True, False], [False, True], [False, False]])
        root = env.reset(TensorDict({"_reset": mask}, [3, 2]))
        assert root["observation"][..., 1].tolist() == [[0, 1], [1, 0], [1, 1]]
        assert env.call("state") == [[0, 1], [1, 0], [1, 1]]
        for _ in range(20):  # rows that have ended are reset
            data = env.rollout(1, ones, break_when_any_done=False, auto_reset=False)
            follows = (
                data["next", "observation"][..., 1] == data["observation"][..., 1] + 1
            ).all()
            assert follows
            assert not data["done"].any()
        assert sum(env.statistics().resets_per_env) > 6


class RawFlagsEnv(PairEnv):
    """Gives flags whose True is the byte 255."""

    def step(self, action):
        *values, terminated, truncated = super().step(action)
        return *values, *(
            (flag.astype(np.uint8) * 255).view(bool) for flag in (terminated, truncated)
        )


@both
def test_flags_of_any_true_byte_end_an_episode(make):
    mask = torch.tensor([255, 0], dtype=torch.uint8).view(torch.bool)
    with make(2, RawFlagsEnv, seed=0) as env, make(2, PairEnv, seed=0) as other:
        one, two = (
            executor.rollout(12, ones, break_when_any_done=False)
            for executor in (env, other)
        )
        assert one["next", "done"].any()
        for key in (("next", "done"), ("next", "truncated"), "observation"):
            assert torch.equal(one[key], two[key])
        env.reset()
        env.step(ones(env.current()))
        root = env.reset(
            TensorDict({"_reset": mask[:, None].expand(2, 2).clone()}, [2, 2])
        )
        assert root["observation"][..., 1].tolist() == [[0, 0], [1, 1]]
        assert env.current(mask)["env_ids"].flatten().tolist() == [0, 0]


@both
@pytest.mark.parametrize(
    ("one", "other"), [(PairEnv, CountingEnv), (long_env, PairEnv)]
)
def test_batches_of_different_shapes_are_refused(make, one, other):
    with pytest.raises(
        SpecError,
        match=r"expected envs of one batch shape, got .* for env 0 and .* for env 1",
    ):
        make(2, [one, other])


@both
def test_empty_reset_mask_wakes_no_worker(make):
    with make(NUM_ENVS, long_env, seed=0) as env:
        env.step(act(env.reset()))
        numbers = env._pool.slab.words["command_seq"].copy()
        root = env.reset(
            TensorDict({"_reset": torch.zeros(NUM_ENVS, dtype=torch.bool)}, [NUM_ENVS])
        )
        assert counters(root) == [1, 1, 1]
        assert np.array_equal(env._pool.slab.words["command_seq"], numbers)


@both
def test_keyword_arguments_reach_the_envs_reset_unchanged(make):
    options = {"level": [1, 2]}
    per_env = [{"k": i} for i in range(NUM_ENVS)]
    with make(NUM_ENVS, long_env, seed=0) as env:
        env.reset(list_of_kwargs=per_env, options=options)
        assert env.get("options") == [
            {"options": {"level": [1, 2]}, "k": i} for i in range(NUM_ENVS)
        ]
        env.reset()
        assert env.get("options") == [None] * NUM_ENVS
    assert options == {"level": [1, 2]}
    assert per_env == [{"k": i} for i in range(NUM_ENVS)]


REFUSED_RESETS: list[tuple[dict[str, Any], str]] = [
    (
        {"list_of_kwargs": [{"level": 1}, None, {}]},
        r"expected a dict in list_of_kwargs, got None \(env 1\)",
    ),
    (
        {"seed": [123, "x", 3]},
        r"expected an integer or None as seed, got 'x' \(env 1\)",
    ),
    ({"seed": [123]}, "expected 3 items in seed, got 1"),
    ({"seed": 9, "list_of_kwargs": [{}]}, "expected 3 items in list_of_kwargs, got 1"),
    (
        {"seed": -3, "level": 1},
        "reset failed: expected seed as an int of at least 0, a list of them or None, got -3",
    ),
]


@both
def test_refused_reset_leaves_no_seed_behind(make):
    with (
        begun(make(NUM_ENVS, long_env, seed=7)) as env,
        begun(make(NUM_ENVS, long_env, seed=7)) as other,
    ):
        for refused, message in REFUSED_RESETS:
            with pytest.raises((ValueError, TypeError), match=message):
                env.reset(**refused)
            assert env.seed == 7
            assert torch.equal(
                env.rollout(2, act)["observation"], other.rollout(2, act)["observation"]
            )
            assert env.get("options") == other.get("options")


@pytest.mark.slow
def test_reset_with_unpicklable_argument_leaves_no_seed_behind():
    with (
        begun(ParallelEnv(2, long_env, num_workers=2, seed=7)) as env,
        SerialEnv(2, long_env, seed=7) as other,
    ):
        # Raised after env 0's arguments were sent.
        with pytest.raises(TypeError, match="pickle"):
            env.reset(
                seed=[1, 2], list_of_kwargs=[{"level": 1}, {"level": threading.Lock()}]
            )
        other.reset()
        assert torch.equal(
            env.rollout(2, act)["observation"], other.rollout(2, act)["observation"]
        )
        assert env.get("options") == other.get("options") == [None] * 2


@both
def test_a_refused_root_seed_changes_nothing(make):
    with make(2, long_env, seed=5) as env, make(2, long_env, seed=5) as other:
        with pytest.raises(ValueError, match="at least 0, or None, got -3"):
            env.set_seed(-3)
        assert env.seed == 5
        assert torch.equal(env.reset()["observation"], other.reset()["observation"])
        assert torch.equal(env.rand_action()["action"], other.rand_action()["action"])


@both
def test_seeds_repeat(make):
    with make(NUM_ENVS, long_env, seed=3) as env:
        first = env.reset()["observation"][:, 0].tolist()
        second = env.reset()["observation"][:, 0].tolist()
        assert len({*first, *second}) == 2 * NUM_ENVS
        env.set_seed(3)
        assert env.reset()["observation"][:, 0].tolist() == first
        assert env.reset(seed=4)["observation"][:, 0].tolist() not in (first, second)
        assert env.seed == 4
        assert env.reset(seed=3)["observation"][:, 0].tolist() == first
        assert env.reset(seed=[7, 8, 9])["observation"][:, 0].tolist() == [7, 8, 9]


ILLEGAL = [
    (torch.tensor([0, 1, 99]), r"expected 0\.\.\d+, got 99 at \(2,\) \(env 2\)"),
    (torch.tensor([0, -1, 0]), r"got -1 at \(1,\) \(env 1\)"),
    (torch.tensor([0.0, 1.0, 0.5]), "expected int64, got float32"),
    (torch.tensor([float("nan")] * 3), "expected int64, got float32"),
    (torch.tensor([[0], [1], [0]]), r"expected shape \(3,\), got shape \(3, 1\)"),
]


@both
def test_an_illegal_action_steps_no_env(make):
    with make(NUM_ENVS, long_env, seed=0) as env:
        root = env.reset()
        for action, message in ILLEGAL:
            with pytest.raises(ActionError, match=message + ".*No env was stepped"):
                env.step(root.clone().set("action", action))
        with pytest.raises(
            ActionError, match=r"expected a key \('action',\), got none"
        ):
            env.step(root.clone())
        with pytest.raises(
            ValueError, match="expected a batch with a row for each of 3 envs"
        ):
            env.step(act(root[:2].clone()))
        assert env.statistics().env_steps == 0
        assert env.call("state_dict") == [
            {"seed": s, "num_steps": 0} for s in root["observation"][:, 0].tolist()
        ]


@both
def test_a_batch_that_was_unpacked_is_refused_by_the_next_call(make):
    """As `observation, info = env.reset()` does: with two envs Python raises nothing."""
    with make(2, long_env, seed=0) as env:
        row, _ = env.reset()
        for call in (env.step, env.send, env.step_and_maybe_reset, env.rand_action):
            with pytest.raises(
                ValueError,
                match=r"row for each of 2 envs, got batch size \[\]. It is one row: reset",
            ):
                call(row)


@both
def test_random_actions_repeat_with_the_seed(make):
    with make(NUM_ENVS, AgentsEnv, seed=1) as env:
        leaf = env.action_spec[0]
        first = [env.rand_action()[leaf.key].clone() for _ in range(20)]
        env.set_seed(1)
        assert all(torch.equal(one, env.rand_action()[leaf.key]) for one in first)
        drawn = torch.stack(first)
        assert drawn.min() == 0
        assert drawn.max() == leaf.domain.n - 1


@both
@pytest.mark.parametrize("poison", [False, True])
def test_views_are_valid_for_ring_frames_steps(make, poison):
    options = ExecutorOptions(ring_frames=3, poison=poison)
    with make(NUM_ENVS, long_env, seed=0, copy=False, options=options) as env:
        td, kept = env.reset(), []
        for step in range(1, 10):
            td, root = env.step_and_maybe_reset(act(td))
            kept.append(td["next", "observation"])
            td = root
            for age, view in enumerate(reversed(kept[-3:])):
                assert view[:, 1].tolist() == [step - age] * NUM_ENVS
            if poison and step > 3:
                assert (kept[-4] == torch.iinfo(torch.int64).max).all()


@both
@pytest.mark.parametrize("between", ["reset of all", "reset of one", "rollout"])
def test_views_are_valid_for_ring_frames_steps_and_other_commands(make, between):
    options = ExecutorOptions(ring_frames=2)
    with begun(make(2, long_env, seed=0, copy=False, options=options)) as env:
        view = kept = env.step(act(env.current()))["next", "observation"]
        kept = kept.clone()
        for step in range(8):
            if between == "reset of all":
                env.reset()
            elif between == "reset of one":
                env.reset(TensorDict({"_reset": torch.tensor([True, False])}, [2]))
            else:
                env.rollout(1, act, auto_reset=False)
            shown = env.step(act(env.current()))["next", "observation"]
            assert torch.equal(view, kept), (
                f"step {step} has overwritten the view of the step before it"
            )
            view, kept = shown, shown.clone()


@both
def test_a_sent_env_that_ends_is_reset_by_default(make):
    with make(NUM_ENVS, functools.partial(CountingEnv, 1), seed=0) as env:
        env.send(act(env.reset()))
        td = env.recv()
        assert td["next", "done"].all()
        assert counters(td["next"]) == [1] * NUM_ENVS
        assert counters(env.current(td["env_ids"])) == [0] * NUM_ENVS
        env.send(act(env.current()), maybe_reset=False)
        td = env.recv()
        assert sorted(td["env_ids"].tolist()) == [0, 1, 2]
        assert counters(env.current()) == [1] * NUM_ENVS
        assert env.current()["done"].all()


@both
def test_counts_are_exact(make):
    with make(NUM_ENVS, functools.partial(CountingEnv, 4), seed=0) as env:
        env.rollout(10, act, break_when_any_done=False)
        td = env.reset()
        for _ in range(3):
            td = env.step_and_maybe_reset(act(td))[1]
        counted = env.statistics()
    assert counted.env_steps == 13 * NUM_ENVS
    assert counted.steps_per_env == (13,) * NUM_ENVS
    assert counted.episodes == 2 * NUM_ENVS
    assert counted.resets_per_env == (4,) * NUM_ENVS
    assert counted.worker_losses == counted.env_errors == counted.interrupted == 0
    assert all(worker.busy_s > 0 and worker.uss_bytes > 0 for worker in counted.workers)
