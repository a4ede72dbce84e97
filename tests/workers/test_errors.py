"""Every exception survives pickling as its own type, with its context and its remote traceback."""

import pickle

import pytest

from envherd.workers import errors

ALL = [
    value
    for value in vars(errors).values()
    if isinstance(value, type)
    and issubclass(value, errors.EnvherdError)
    and value is not errors.EnvherdError
]
BUILTIN = {
    "FactoryError": TypeError,
    "SpecError": ValueError,
    "ActionError": ValueError,
    "WorkerTimeout": TimeoutError,
}


@pytest.mark.parametrize("cls", ALL, ids=lambda c: c.__name__)
def test_pickling_keeps_everything(cls):
    error = cls("it failed", remote_traceback="line 1\nline 2", env_ids=(1, 2), pid=7)
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is cls
    assert str(back) == "it failed"
    assert back.env_ids == (1, 2)
    assert back.context["pid"] == 7
    assert "line 2" in str(back.__cause__)


@pytest.mark.parametrize("cls", ALL, ids=lambda c: c.__name__)
def test_they_are_caught_by_what_python_calls_them(cls):
    assert issubclass(cls, BUILTIN.get(cls.__name__, RuntimeError))


def test_without_a_remote_traceback_there_is_no_cause():
    error = errors.Closed("closed")
    assert error.__cause__ is None
    assert error.env_ids == ()


def test_the_tree_in_the_docstring_is_complete():
    for cls in ALL:
        assert f"+-- {cls.__name__} " in errors.__doc__
