"""Answer requests other than steps: attribute access, method calls, pictures, state."""

from collections.abc import Callable
from typing import Any

from envherd.workers import plain
from envherd.workers.adapters import Adapter
from envherd.workers.messages import Ask
from envherd.workers.reply import Fault
from envherd.workers.sending.pickling import dumps

#: Exceptions that reach the caller, as `passes` of `Block`.
Passes = tuple[type[BaseException], ...]


def answer(
    message: Ask,
    adapter_of: Callable[[int], Adapter],
    *,
    pickles: bool,
    passes: Passes = (),
) -> dict[str, Any]:
    """Return the answer: the number, and one value per env in the order of the request, or the first fault."""
    values = []
    for position, env_id in enumerate(message.env_ids):
        try:
            value = _answer_one(message, adapter_of(env_id), position)
            values.append(_cross(value, message, pickles=pickles))
        except passes:
            raise
        # An env's method may raise anything, also what is no `Exception`.
        except BaseException as error:
            phase = f"{message.what} {message.name}".strip()
            fault = Fault.from_exception(env_id, phase, error)
            return {**fault.to_plain(), "number": message.number}
    return {"kind": "values", "values": values, "number": message.number}


def _answer_one(message: Ask, adapter: Adapter, position: int) -> Any:
    if message.what == "call":
        return _find(adapter.env, message.name)(*message.args, **message.kwargs)
    if message.what == "each":
        return _find(adapter.env, message.name)(message.args[position])
    if message.what == "get":
        return _find(adapter.env, message.name)
    if message.what == "has":
        return _has(adapter.env, message.name)
    if message.what == "layers":
        return _layers(adapter.env)
    if message.what == "set":
        owner, _, name = message.name.rpartition(".")
        setattr(
            _find(adapter.env, owner) if owner else adapter.env,
            name,
            message.args[position],
        )
        return None
    if message.what == "render":
        return adapter.render()
    return _answer_about_state(message, adapter, position)


def _answer_about_state(message: Ask, adapter: Adapter, position: int) -> Any:
    if message.what == "save":
        if message.kwargs["is_whole"] and not adapter.has_whole_state:
            kind = type(getattr(adapter.env, "unwrapped", adapter.env)).__name__
            raise NotImplementedError(
                f"expected an env whose state_dict determines its next steps, got {kind}, whose state_dict has only "
                f"a part of its state ({adapter.family}). ParallelEnv.branch copies it in memory."
            )
        return adapter.state_dict()
    if message.what in ("allow_steps", "rebuild"):
        return None
    if message.what == "check":
        return _why_not(adapter, message.args[position]["env"])
    if message.what == "restore":
        return adapter.load_state_dict(message.args[position]["env"])
    raise ValueError(f"unknown question {message.what!r}")


def _why_not(adapter: Adapter, state: Any) -> str:
    """Return why an env cannot have a state, or an empty text."""
    try:
        adapter.read_state(state)
    except ValueError as error:
        return str(error)
    # Of an adapter that reads its state itself.
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _find(env: Any, name: str) -> Any:
    """Return an attribute by dotted name; Gymnasium wrappers are searched as Gymnasium does."""
    for part in name.split("."):
        look_through = getattr(env, "get_wrapper_attr", None)
        env = (
            look_through(part)
            if look_through is not None and not hasattr(env, part)
            else getattr(env, part)
        )
    return env


def _has(env: Any, name: str) -> bool:
    try:
        _find(env, name)
    except AttributeError:
        return False
    return True


def _layers(env: Any) -> list[list[str]]:
    """Return, from the outermost wrapper inwards, the `module.QualName` of each layer's class and its bases."""
    layers = []
    while True:
        layers.append(
            [f"{cls.__module__}.{cls.__qualname__}" for cls in type(env).__mro__]
        )
        inner = getattr(env, "__dict__", {}).get("env")
        if inner is None or inner is env:
            return layers
        env = inner


def _cross(value: Any, message: Ask, *, pickles: bool) -> Any:
    """Return a value in the form in which it is sent: unchanged if plain, else pickled if that is allowed."""
    try:
        plain.encode(value)
    except plain.NotPlain as error:
        if pickles:
            # By value where the class came so with the factory.
            return {"pickled": dumps(value)}
        raise TypeError(
            f"{message.what} {message.name!r} failed: {error}. Return numbers, text, arrays or lists and dicts of "
            'them, or allow pickles with ExecutorOptions(infos="pickle").'
        ) from None
    return {"plain": value}
