"""What a script defines is the same in a process that never imports the script; what cannot be sent is named."""

import functools
import importlib.machinery
import json
import signal
import subprocess
import sys
import threading
from pathlib import Path

import cloudpickle
import pytest

from envherd.workers.build import pickle_factory
from envherd.workers.errors import FactoryError
from envherd.workers.sending import importing, pickling
from tests.extras import needs

SCRIPT = Path(__file__).with_name("script_definitions.py")


@needs("gymnasium")
@pytest.mark.slow
def test_definitions_of_a_script_are_equal_in_another_process():
    done = subprocess.run(
        [sys.executable, SCRIPT],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) > 10
    assert {name: there for name, (_, there) in found.items()} == {
        name: here for name, (here, _) in found.items()
    }


@pytest.fixture
def by_value():
    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)
    yield
    cloudpickle.unregister_pickle_by_value(module)


LOCK = threading.Lock()
NESTED = {"a": [1, LOCK]}


def helper():
    return LOCK


class Env:
    def step(self):
        return self.inner()

    @functools.lru_cache  # noqa: B019  # the env lives as long as its worker
    def inner(self):
        return helper()


class Child(Env):
    pass


def helper_factory():
    return helper()


def make():
    return Env()


def make_child():
    return Child()


class Holder:
    def __init__(self):
        self.inside = {"files": iter([])}
        self.generator = (x for x in "a")


HOLDER = Holder()


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (
            helper_factory,
            r"captured the variable `LOCK`, a _thread.lock that cannot be pickled \(helper -> LOCK\)",
        ),
        (
            lambda: NESTED,
            r"captured the variable `NESTED`, a builtins.dict, which holds a _thread.lock .*\['a'\] -> \[1\]",
        ),
        (
            make,
            "uses the class Env, .*: Env -> inner -> helper -> LOCK is a _thread.lock. Put Env into a module",
        ),
        (
            make_child,
            "uses the class Child, .*: Child -> Env -> inner -> helper -> LOCK is a _thread.lock",
        ),
        (
            lambda: HOLDER,
            r"the variable `HOLDER`, a tests.*Holder, which holds a .*generator .*HOLDER -> generator",
        ),
    ],
)
def test_the_way_to_what_cannot_be_pickled_is_named(by_value, factory, message):
    with pytest.raises(FactoryError, match=message):
        pickle_factory(factory)


def test_a_process_that_an_env_forks_has_by_name_what_cannot_be_pickled(by_value):
    def use():
        return LOCK

    use.__module__ = "__main__"
    assert pickling._reduce_for_children(None, use) is NotImplemented


def test_what_a_signal_handler_raises_is_not_taken_for_the_failure_of_a_finder(
    monkeypatch,
):
    class Interrupted(Exception):
        pass

    def interrupt(*_):
        raise Interrupted

    class Finder:
        def find_spec(self, name, path):
            signal.raise_signal(signal.SIGALRM)
            return importlib.machinery.PathFinder.find_spec(name, path)

    monkeypatch.setattr(sys, "meta_path", [Finder()])
    monkeypatch.setattr(importing, "places", {})
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(Interrupted):
            importing.can_import("json")
    finally:
        signal.signal(signal.SIGALRM, before)
    assert set(importing.places.values()) == {True}
