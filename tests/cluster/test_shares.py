"""What needs no cluster: envs are spread over nodes, arguments and factories are refused."""

from typing import Any

import pytest
from tensordict import TensorDict

from tests.extras import skip_without

skip_without("ray")

from envherd import ClusterError, FactoryError, RayRollouts
from envherd.executor.cluster.shares import bundles_for, spread
from envherd.workers.testing import CountingEnv


@pytest.mark.parametrize(
    ("num_envs", "weights", "counts"),
    [
        (4, [2, 2], [2, 2]),
        (5, [2, 2], [3, 2]),
        (12, [1, 2, 3], [2, 4, 6]),
        (3, [1, 1, 100], [1, 1, 1]),
        (10, [1, 1, 100], [1, 1, 8]),
        (1, [7], [1]),
    ],
)
def test_envs_are_divided_by_weight_with_one_each(num_envs, weights, counts):
    blocks = spread(num_envs, weights)
    assert [len(block) for block in blocks] == counts
    assert [env_id for block in blocks for env_id in block] == [*range(num_envs)]


FREE = [
    {"CPU": 0.0},
    {"CPU": 4.0, "node:1": 1.0},
    {"CPU": 16.0, "GPU": 2.0, "memory": 1e9},
]


@pytest.mark.parametrize(
    ("num_envs", "num_nodes", "per_node", "bundles"),
    [
        (99, None, None, [{"CPU": 16.0}, {"CPU": 4.0}]),
        (99, 1, None, [{"CPU": 16.0}]),
        (1, None, None, [{"CPU": 16.0}]),
        (99, None, {"GPU": 1}, [{"GPU": 1}]),
        (99, 3, {"CPU": 2}, [{"CPU": 2}] * 3),
    ],
)
def test_each_share_is_asked_for(num_envs, num_nodes, per_node, bundles):
    assert bundles_for(FREE, num_envs, num_nodes, per_node) == bundles


@pytest.mark.parametrize(("num_nodes", "per_node"), [(3, None), (None, {"TPU": 1})])
def test_resources_that_no_node_has_are_refused(num_nodes, per_node):
    with pytest.raises(ClusterError, match="16 CPU, 2 GPU"):
        bundles_for(FREE, 99, num_nodes, per_node)


any_rollouts: Any = RayRollouts  # with keywords that it has not
WRONG = {
    "max_steps": (
        lambda one: one.rollout(1.5),
        ValueError,
        "rollout failed: expected max_steps",
    ),
    "a policy": (
        lambda one: one.rollout(3, "act"),
        TypeError,
        "rollout failed: expected policy to be a callable",
    ),
    "auto_reset": (
        lambda one: one.rollout(3, auto_reset=1),
        ValueError,
        "expected auto_reset to be True or False",
    ),
    "a break": (
        lambda one: one.rollout(3, break_when_any_done=True),
        ValueError,
        "nodes act separately",
    ),
    "a callback": (
        lambda one: one.rollout(3, callback=print),
        ValueError,
        "nodes act separately",
    ),
    "a state": (
        lambda one: one.rollout(3, tensordict=3),
        TypeError,
        "expected tensordict as a TensorDict",
    ),
    "a primer": (
        lambda one: one.rollout(3, primer=TensorDict({}, [3])),
        ValueError,
        "expected primer with a row for",
    ),
    "a keyword": (
        lambda one: one.rollout(steps=3),
        TypeError,
        "Did you mean max_steps?",
    ),
    "steps of a stream": (
        lambda one: next(one.stream(0)),
        ValueError,
        "stream failed: expected max_steps",
    ),
    "a factory": (
        lambda _: any_rollouts(1, CountingEnv, policy_factory=3),
        TypeError,
        "expected policy_factory to be",
    ),
    "workers": (
        lambda _: RayRollouts(1, CountingEnv, num_workers=0),
        ValueError,
        "expected num_workers as an int",
    ),
    "an argument": (
        lambda _: any_rollouts(1, CountingEnv, nodes=2),
        TypeError,
        "Did you mean num_nodes?",
    ),
    "an option": (
        lambda _: any_rollouts(1, CountingEnv, poison=True),
        TypeError,
        r"ExecutorOptions\(poison=...\)",
    ),
    "the old name": (
        lambda _: exec("from envherd import RayParallelEnv"),
        ImportError,
        "Instead: RayRollouts",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_named_before_anything_starts(name):
    call, error, text = WRONG[name]
    one = RayRollouts.__new__(RayRollouts)
    one.num_envs = 2
    with pytest.raises(error, match=text):
        call(one)


def test_a_factory_that_cannot_be_pickled_is_named_before_anything_starts():
    held = (number for number in range(3))
    with pytest.raises(FactoryError, match="captured the variable `held`"):
        RayRollouts(2, lambda: held)
