"""IsaacLab's own env classes in the executor, over stubs of only the simulator's modules."""

import warnings

import pytest

from tests.oracles import isaacsim_stub

if not isaacsim_stub.is_there():
    pytest.skip("needs IsaacLab 2.3: make test-isaaclab", allow_module_level=True)

import torch

from envherd.executor import SerialEnv
from envherd.executor.testing import Contract
from tests.contracts.executor_batch import batch_apart

with warnings.catch_warnings():
    from tests.oracles import isaaclab_own as own

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
MAKERS = {
    "direct": own.make_direct,
    "managed": own.make_managed,
}


@pytest.fixture(autouse=True)
def _one_simulator_after_another():
    yield
    isaacsim_stub.SimulationContext.clear_instance()


@pytest.mark.parametrize("name", MAKERS)
def test_keeps_the_contract(name):
    report = Contract(MAKERS[name], num_steps=40, make_batch=batch_apart).check_all()
    assert report.num_ends > 1


@pytest.mark.parametrize("name", MAKERS)
def test_last_observations_are_true_and_rows_reset_alone(name):
    built = []

    def make_env():
        built.append(MAKERS[name]())
        return built[-1]

    with SerialEnv(1, make_env, seed=0) as env:
        assert env.specs[0].family == "isaaclab"
        env.reset()
        (simulator,) = built
        line = simulator.line
        num_ends = 0
        for _ in range(20):
            td, root = env.step_and_maybe_reset(env.rand_action(env.current()))
            following = td["next"]
            after = line.steps[-1]
            assert torch.equal(following["policy"][0], after)
            assert torch.equal(
                following["terminated"][0, :, 0], after[:, 0].abs() > own.LIMIT
            )
            done = following["done"][0, :, 0]
            assert torch.equal(root["policy"][0, ~done], after[~done])
            if done.any():
                num_ends += 1
                assert line.resets[-1] == done.nonzero().flatten().tolist()
        assert num_ends > 1
