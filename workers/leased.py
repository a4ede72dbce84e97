"""The worker's half of a lease: calls any method of any object, and packs what it returns or raises.

Guarantees: an exception of the env leaves the worker as data, with its text. A result that cannot be packed is named.
"""

from __future__ import annotations

import functools
import inspect
import pickle
from typing import Any

from envherd.shm.specs import EnvSpec
from envherd.workers.adapters import is_env_like
from envherd.workers.adapters.base import Adapter
from envherd.workers.build import Factory, describe, modules_of, pickle_factory
from envherd.workers.interpreters import interpreter_of
from envherd.workers.pickling import captures
from envherd.workers.reply import Fault


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
        """Return the adapter of the env, or what the factory has returned, if the caller must refuse that."""
        factory = pickle.loads(self._pickled)
        vars(self).update(captures(factory))  # an env among them is refused by the caller, as one of this object
        env = factory(**kwargs)
        is_captured = is_env_like(env) and any(value is env for value in vars(self).values())
        if env is None or is_captured or inspect.isroutine(env) or isinstance(env, type):
            return env
        return LeasedAdapter(env)


class LeasedAdapter(Adapter):
    """An env that is only called; see the module. Its caller asks for `run` alone."""

    reset = step = NotImplemented  # it has no batch

    def __init__(self, env: Any) -> None:
        self.env = self
        self._leased = env
        self.spec = EnvSpec(observation=(), action=(), family="lease")

    def run(self, payload: bytes, max_bytes: int) -> dict[str, Any]:
        """Make one call.

        Args:
            payload: pickled: name of a method, or a function that gets the env first; arguments; keyword arguments.
            max_bytes: of the packed result.

        Returns:
            `packed`: the result, or the exception; empty if the exception cannot be packed. `text`: its traceback.

        Raises:
            TypeError: the result cannot be packed, or is too large.
            SystemExit, ...: what the env raises that is no `Exception`.
        """
        text, packed = "", b""
        try:
            method, args, kwargs = pickle.loads(payload)
            call = getattr(self._leased, method) if isinstance(method, str) else functools.partial(method, self._leased)
            value = call(*args, **kwargs)
        except Exception as error:
            value = error
            text = Fault.from_exception(0, "", error).traceback
        try:
            packed = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            if not text:
                kind = type(value).__qualname__
                raise TypeError(f"expected a result that can be sent, got a {kind} ({error})") from None
        if len(packed) > max_bytes:
            raise TypeError(f"expected a result of at most {max_bytes:,} bytes, got {len(packed):,}")
        return {"packed": packed, "text": text}

    def close(self) -> None:
        getattr(self._leased, "close", lambda: None)()
