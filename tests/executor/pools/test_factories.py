"""Anything but a factory is refused at once, by name, with the fix."""

import errno
import functools
import threading

import gymnasium
import numpy as np
import pytest

from envherd.executor import (
    ExecutorOptions,
    FactoryError,
    ParallelEnv,
    SerialEnv,
    SpecError,
    WorkerLost,
)
from envherd.workers.testing import CountingEnv
from tests.extras import needs

PARALLEL = pytest.param(
    functools.partial(ParallelEnv, num_workers=1), id="parallel", marks=pytest.mark.slow
)
both = pytest.mark.parametrize("make", [PARALLEL, pytest.param(SerialEnv, id="serial")])


def cartpole():
    return gymnasium.make("CartPole-v1")


def message_of(make, make_env, num_envs=2):
    with pytest.raises(FactoryError) as caught:
        make(num_envs, make_env)
    return str(caught.value)


def the_same_env():
    """Return a factory that returns one env, twice."""
    kept = []

    def make_env():
        kept.append(kept[0] if kept else cartpole())
        return kept[-1]

    return make_env


def a_captured_env():
    env = cartpole()
    return lambda: env


@both
@pytest.mark.parametrize("name", ["CartPole-v1", "gymnasium:CartPole"])
def test_names_of_the_command_line_are_factories(make, name):
    with (
        make(2, name, seed=1) as env,
        make([name, name], seed=1) as listed,
        make(2, cartpole, seed=1) as plain,
    ):
        expected = plain.rollout(5)["observation"]
        assert (env.rollout(5)["observation"] == expected).all()
        assert (listed.rollout(5)["observation"] == expected).all()


@both
@pytest.mark.parametrize(
    "num_envs",
    [10**9, 10**23, np.int64(10**12), 10**5000],
    ids=["many", "huge", "numpy", "vast"],
)
def test_more_envs_than_the_machine_can_hold_are_refused(make, num_envs):
    with pytest.raises(
        ValueError,
        match=r"num_envs failed: expected at most [\d,]+, because .* MiB of memory",
    ):
        make(num_envs, cartpole)


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_envs": 10**5, "num_workers": 10**5},
        {"num_envs": 10**5, "options": ExecutorOptions(alone=True)},
        {"num_envs": "auto", "num_workers": np.int64(10**12)},
    ],
)
def test_more_workers_than_the_machine_can_hold_are_refused(arguments):
    with pytest.raises(
        (ValueError, OSError),
        match=r"num_workers failed: expected at most|more open files",
    ):
        ParallelEnv(make_env=cartpole, **arguments)


AN_ENV = "expected a callable that builds an env, got an env: "
MADE = r"gymnasium\.make\('CartPole-v1'\)"
#: What is given, as a function that returns it -> what the error says.
NO_FACTORIES = {
    "an env": (
        cartpole,
        f"{AN_ENV}gymnasium.wrappers.common.TimeLimit(.|\n)*make_env=lambda: {MADE}",
    ),
    "an env without an id": (
        CountingEnv,
        "make_env=lambda: CountingEnv\\(\\.\\.\\.\\)",
    ),
    "an env in a list": (lambda: [cartpole, cartpole()], "got an env"),
    "a number": (lambda: 3, "got builtins.int"),
    "nothing": (lambda: None, "got builtins.NoneType"),
    "a text": (
        lambda: "CartPol-v1",
        "'CartPol-v1' failed: expected one of .*Did you mean CartPole-v1",
    ),
    "a dict": (lambda: {"env": 1}, "got builtins.dict"),
    "what returns nothing": (lambda: lambda: None, "returned None"),
    "what returns a number": (lambda: lambda: 42, "got builtins.int"),
    "what returns a factory": (lambda: lambda: cartpole, "returned"),
    "what returns one env twice": (
        the_same_env,
        f"returned the same gymnasium.wrappers.common.TimeLimit twice(.|\n)*{MADE}",
    ),
    "what captured an env": (
        a_captured_env,
        "returned the captured variable `env`|returned the same",
    ),
}


@both
@pytest.mark.parametrize("name", NO_FACTORIES)
def test_values_that_are_no_factory_are_refused_by_name(make, name):
    build, text = NO_FACTORIES[name]
    with pytest.raises(FactoryError, match=text):
        make(1 if name == "what captured an env" else 2, build())


@needs("torchrl")
@pytest.mark.slow
def test_a_torchrl_env_is_callable_and_still_no_factory():
    from torchrl.envs.custom import PendulumEnv

    with pytest.raises(
        FactoryError,
        match=rf"{AN_ENV}torchrl\.\S+\.PendulumEnv(.|\n)*lambda: PendulumEnv",
    ):
        SerialEnv(2, PendulumEnv())


def test_an_env_among_the_keyword_arguments():
    with pytest.raises(FactoryError, match="got an env \\(TimeLimit\\) as 'base'"):
        ParallelEnv(2, cartpole, env_kwargs={"base": cartpole()})


@needs("meltingpot")
@pytest.mark.slow
def test_a_captured_substrate_is_named():
    from envherd.workers.adapters.meltingpot.light_import import install_lazy_import

    install_lazy_import()
    from meltingpot import substrate

    built = substrate.build("collaborative_cooking__cramped", roles=["default"] * 2)
    message = message_of(ParallelEnv, lambda: built)
    built.close()
    assert (
        "captured the variable `built`, a meltingpot.utils.substrates.substrate.Substrate, which holds a"
        in message
    )
    assert "dmlab2d.dmlab2d_pybind.Lab2d that cannot be pickled" in message
    assert "Build it inside the factory" in message


class Holder:
    def __init__(self):
        self.lock = threading.Lock()


def capturing(what):
    lock = threading.Lock()
    holder = Holder()
    return {
        "closure": (lambda: lock, "lock"),
        "nested": (lambda: next(lock for _ in "x"), "lock"),
        "attribute": (lambda: holder, "holder"),
        "partial": (functools.partial(cartpole, lock), "argument 0"),
        "keyword": (functools.partial(cartpole, render=lock), "render"),
        "method": (holder.__init__, "self"),
    }[what]


@pytest.mark.parametrize(
    "what", ["closure", "nested", "attribute", "partial", "keyword", "method"]
)
def test_unpicklable_captures_are_named(what):
    factory, variable = capturing(what)
    message = message_of(ParallelEnv, factory)
    assert f"captured the variable `{variable}`" in message
    assert "_thread.lock" in message


@both
def test_a_factory_that_raises_shows_its_traceback(make):
    def make_env():
        raise RuntimeError("no licence")

    with pytest.raises(
        FactoryError, match=r"the factory raised RuntimeError: no licence \(env 0"
    ) as caught:
        make(2, make_env)
    cause = str(caught.value.__cause__)
    assert "no licence" in cause


@both
def test_one_factory_must_give_one_spec(make):
    widths = iter([3, 3, 4])

    def make_env():
        return CountingEnv(size=next(widths))

    with pytest.raises(
        SpecError,
        match=r"gave different specs for envs 0 and 2: .*pixels: uint8 \(3, 3\)",
    ):
        make(3, make_env)


@both
def test_keyword_arguments_reach_the_factory_and_are_not_changed(make):
    kwargs = [{"length": 3, "size": 2}, {"length": 4, "size": 3}]
    with make(2, CountingEnv, env_kwargs=kwargs) as env:
        assert env.get("length") == [3, 4]
        assert env.get("size") == [2, 3]
    assert kwargs == [{"length": 3, "size": 2}, {"length": 4, "size": 3}]


def test_a_class_that_cannot_travel_by_value_needs_a_module():
    """A ctypes structure that a script defines."""
    import ctypes

    class State(ctypes.Structure):
        _fields_ = (("x", ctypes.c_double),)

    def make():
        return State()

    with pytest.raises(
        FactoryError, match=r"uses the class State, .*CField.*Put State into a module"
    ):
        ParallelEnv(1, make, num_workers=1)


class Growing(CountingEnv):
    """Observes more with every instance; counts those that were closed."""

    sizes, num_closed = iter(()), 0

    def __init__(self):
        super().__init__(size=next(Growing.sizes))

    def close(self):
        Growing.num_closed += 1


@pytest.mark.parametrize(
    "fails", ["specs that disagree", "a later part of the constructor"]
)
def test_a_serial_executor_that_cannot_be_made_closes_its_envs(monkeypatch, fails):
    disagrees = fails == "specs that disagree"
    monkeypatch.setattr(Growing, "sizes", iter((4, 5) if disagrees else (4, 4)))
    monkeypatch.setattr(Growing, "num_closed", 0)
    if not disagrees:
        monkeypatch.setattr("envherd.executor.batched.RolloutRunner", None)
    with pytest.raises(SpecError if disagrees else TypeError):
        SerialEnv(2, Growing)
    assert Growing.num_closed == 2


SCRIPT = """
import multiprocessing
import gymnasium
from envherd import ParallelEnv

def make():
    return gymnasium.make("CartPole-v1")

def work(numbers):
    with ParallelEnv(2, make, num_workers=1, seed=0) as env:
        numbers.put(env.rollout(3).numel())

if __name__ == "__main__":
    spawn = multiprocessing.get_context("spawn")
    numbers = spawn.SimpleQueue()
    child = spawn.Process(target=work, args=(numbers,))
    child.start()
    child.join(60)
    print("collected", numbers.get() if child.exitcode == 0 else child.exitcode)
"""


@needs("gymnasium")
@pytest.mark.long
def test_a_factory_of_the_script_in_a_child_of_multiprocessing(script_host, tmp_path):
    done = script_host.run_text(SCRIPT, folder=tmp_path)
    assert done.stdout == "collected 6\n", done.stderr


class Raising:
    """Cannot be pickled."""

    def __init__(self, error):
        self.error = error

    def __reduce__(self):
        raise self.error


@pytest.mark.broken_pool
@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "expected", "message"),
    [
        (
            ValueError("no"),
            FactoryError,
            r"env_kwargs failed: .* got a \S*Raising at .* \(no\)",
        ),
        (
            OSError(errno.ENOENT, "no file"),
            FactoryError,
            r"env_kwargs failed: .* got a \S*Raising at .*no file",
        ),
        (
            OSError(errno.EMFILE, "too many"),
            WorkerLost,
            r"starting a worker failed: .*too many.*ulimit -n",
        ),
        (MemoryError("none"), MemoryError, "none"),
    ],
)
def test_arguments_that_cannot_be_pickled_are_no_limit_of_the_machine(
    error, expected, message
):
    with pytest.raises(expected, match=message):
        ParallelEnv(1, CountingEnv, env_kwargs={"length": Raising(error)})
