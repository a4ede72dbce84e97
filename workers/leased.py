"""The worker's half of a lease: calls any method of any object, and packs what it returns or raises.

Guarantees: an exception of the env leaves the worker as data, with its text, and so does `sys.exit` as
another kind of answer. A result that cannot be packed is named.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import pickle
from collections.abc import Callable
from typing import Any, Literal

from envherd.shm.specs import EnvSpec
from envherd.workers import plain
from envherd.workers.adapters.base import Adapter
from envherd.workers.adapters.registry import register
from envherd.workers.build import Factory, describe, modules_of, pickle_factory
from envherd.workers.interpreters import interpreter_of
from envherd.workers.pickling import captures
from envherd.workers.reply import Fault

#: How results and exceptions leave a worker: as any object that can be pickled, or as plain data only.
Results = Literal["pickle", "plain"]
#: The functions that write and read them.
CODECS: dict[Results, tuple[Callable[[Any], bytes], Callable[[Any], Any]]] = {
    "pickle": (functools.partial(pickle.dumps, protocol=pickle.HIGHEST_PROTOCOL), pickle.loads),
    "plain": (plain.encode, plain.decode),
}


class LeasedFactory:
    """Builds an env of any class, with or without spaces.

    Args:
        make_env: the user's factory.

    Raises:
        FactoryError: no factory, or one that cannot be pickled.
    """

    def __init__(self, make_env: Factory) -> None:
        self._pickled = pickle_factory(make_env)
        self.preload = tuple(modules_of(make_env))
        self.interpreter = interpreter_of(make_env)
        self.__qualname__ = describe(make_env)

    def __call__(self, **kwargs: Any) -> Any:
        """Return the env; from now on its class has `LeasedAdapter`."""
        factory = pickle.loads(self._pickled)
        vars(self).update(captures(factory))  # an env among them is refused by the caller, as one of this object
        env = factory(**kwargs)
        if env is not None:  # which the caller refuses
            register(type(env), LeasedAdapter)
        return env


class LeasedAdapter(Adapter):
    """An env that is only called; see the module. Its caller asks for `run` alone."""

    family = "lease"
    reset = step = NotImplemented  # it has no batch

    def __init__(self, env: Any) -> None:
        self.env = self
        self._leased = env
        self.spec = EnvSpec(observation=(), action=(), family=self.family)

    def run(self, payload: bytes, results: Results, max_bytes: int) -> dict[str, Any]:
        """Make one call.

        Args:
            payload: pickled: name of a method, or a function that gets the env first; arguments; keyword arguments.
            results: see `Results`.
            max_bytes: of the packed result.

        Returns:
            `{"value": bytes}`, or `{"raised": a Fault, "error": bytes or None}`.

        Raises:
            TypeError: the result cannot be packed.
            SystemExit, ...: what the env raises that is no `Exception`.
        """
        encode, _ = CODECS[results]
        try:
            method, args, kwargs = pickle.loads(payload)
            call = getattr(self._leased, method) if isinstance(method, str) else functools.partial(method, self._leased)
            value = self._awaited(call(*args, **kwargs))
        except Exception as error:
            packed = None
            with contextlib.suppress(Exception):  # of `__reduce__`; the text remains
                packed = encode(error)
            return {"raised": Fault.from_exception(0, "", error).to_plain(), "error": packed}
        try:
            packed = encode(value)
        except Exception as error:
            raise TypeError(f"expected a result that can be sent, got a {type(value).__qualname__} ({error})") from None
        if len(packed) > max_bytes:
            raise TypeError(f"expected a result of at most {max_bytes:,} bytes, got {len(packed):,}")
        return {"value": packed}

    @functools.cached_property
    def _loop(self) -> asyncio.AbstractEventLoop:
        """Of the env's asynchronous methods; tasks that they leave behind continue in the next call."""
        return asyncio.new_event_loop()

    def _awaited(self, value: Any) -> Any:
        """Return what a method has returned; of an asynchronous one, what it returns in the end."""
        return self._loop.run_until_complete(value) if inspect.isawaitable(value) else value

    def close(self) -> None:
        self._awaited(getattr(self._leased, "close", lambda: None)())
