"""For any operations in any order on any number of workers, the data equal those of `SerialEnv`, bit for bit."""

import functools
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from envherd.executor import ExecutorOptions, ParallelEnv, SerialEnv
from envherd.workers.testing import CountingEnv
from tests.envs.counting_envs import AgentsEnv, TextEnv
from tests.executor.protocol.test_fast_calls import EXCHANGES, NUMBERS, STEPS, Pair
from tests.scale import scaled

pytestmark = pytest.mark.slow

NUM_ENVS = 5
ENVS: dict[str, Any] = {
    "numbers": CountingEnv,
    "pixels in reused buffers": functools.partial(
        CountingEnv, size=6, reuses_buffers=True
    ),
    "agents": AgentsEnv,
    "different tasks": [
        CountingEnv,
        functools.partial(CountingEnv, size=4),
        TextEnv,
        CountingEnv,
        TextEnv,
    ],
    "episodes of one step": [functools.partial(CountingEnv, 1), CountingEnv] * 2
    + [functools.partial(CountingEnv, 1)],
}
#: Workers (0: a `SerialEnv`), `copy`, `ring_frames`, and other options.
SETTINGS: list[tuple[int, bool, int, dict[str, Any]]] = [
    *(
        (0, True, 2, {"isolate_rng": True}),
        (1, True, 4, {}),
        (2, True, 2, {}),
        (3, True, 3, {}),
    ),
    *((2, False, 2, {}), (0, False, 3, {}), (2, True, 2, {"env_threads": True})),
]
CALLS = sorted(
    {*STEPS, *EXCHANGES, "seed", "load"}
    - {"step_oddly", "send_oddly", "step_in_a_rollout"}
)
#: Each call at least once, and some calls in a row.
ALL = [*enumerate([*CALLS, "seed", "load", "send", "recv", "rollout", "fused", *CALLS])]


def ended(env: Any) -> list[int]:
    """Return how many episodes of each env have ended, and in which state it is."""
    return [*env._pool.slab.words["ends"].tolist(), *env._engine.states.values.tolist()]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ENVS)
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_all_executors_give_the_same_data(name, setting):
    num_workers, copy, ring_frames, others = setting
    options = ExecutorOptions(poison=not copy, ring_frames=ring_frames, **others)
    kind = (
        functools.partial(ParallelEnv, num_workers=num_workers)
        if num_workers
        else SerialEnv
    )
    with (
        SerialEnv(NUM_ENVS, ENVS[name]) as serial,
        kind(NUM_ENVS, ENVS[name], copy=copy, options=options) as env,
    ):
        pair = Pair(serial, env, ended)
        pair.play(11, [(call, number) for number, call in ALL])
        assert 0 < sum(ended(serial)[:NUM_ENVS]) < serial.statistics().env_steps

        @settings(
            max_examples=scaled(3, full=30),
            suppress_health_check=[HealthCheck.too_slow],
            deadline=None,
        )
        @given(
            seed=st.integers(0, 2**31),
            deeds=st.lists(st.tuples(st.sampled_from(CALLS), NUMBERS), max_size=12),
        )
        def all_agree(seed, deeds):
            pair.play(seed, deeds)

        all_agree()
