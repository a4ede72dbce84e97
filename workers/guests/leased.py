"""The worker's half of a lease: calls any method of any object, and packs what it returns or raises.

Guarantees: an exception of the env leaves the worker as data, with its text. A result that cannot be packed is named.
"""

import functools
import inspect
import pickle
from typing import Any

from envherd.shm.specs import EnvSpec
from envherd.workers.adapters import is_env_like
from envherd.workers.adapters.base import Adapter
from envherd.workers.build import describe
from envherd.workers.reply import Fault
from envherd.workers.sending.pickling import captures


class LeasedFactory:
    """Builds an env of any class, with or without spaces.

    Args:
        pickled: the user's factory.
    """

    def __init__(self, pickled: bytes) -> None:
        self._pickled = pickled

    def __call__(self, **kwargs: Any) -> Any:
        """Return the adapter of the env, or what the factory has returned, if the caller must refuse that."""
        factory = pickle.loads(self._pickled)
        # The caller names them, and refuses an env among them, as if this object were the user's factory.
        vars(self).update(captures(factory), __qualname__=describe(factory))
        env = factory(**kwargs)
        if (
            env is None
            or (is_env_like(env) and any(value is env for value in vars(self).values()))
            or inspect.isroutine(env)
            or isinstance(env, type)
        ):
            return env
        return LeasedAdapter(env)


class LeasedAdapter(Adapter):
    """An env that is only called; see the module. Its caller asks for `run` alone."""

    reset = step = NotImplemented  # it has no batch

    def __init__(self, env: Any) -> None:
        self.env = self
        self._leased = env
        self.spec = EnvSpec(observation=(), action=(), family="lease")

    def run(self, payload: bytes, max_bytes: int) -> tuple[bytes, str]:
        """Make one call.

        Args:
            payload: pickled: name of a method, or a function that gets the env first; arguments; keyword arguments.
            max_bytes: of the packed result.

        Returns:
            The packed result and an empty text, or the packed exception and its traceback. An exception that cannot
            be packed has no bytes.

        Raises:
            TypeError: the result cannot be packed, or is too large.
            SystemExit, ...: what the env raises that is no `Exception`.
        """
        text = ""
        try:
            method, args, kwargs = pickle.loads(payload)
            call = (
                getattr(self._leased, method)
                if isinstance(method, str)
                else functools.partial(method, self._leased)
            )
            value = call(*args, **kwargs)
        except Exception as error:
            value = error
            text = Fault.from_exception(0, "", error).traceback
        try:
            packed = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            if not text:
                raise TypeError(
                    f"expected a result that can be sent, got a {type(value).__qualname__} ({error})"
                ) from None
            packed = b""
        if len(packed) > max_bytes:
            raise TypeError(
                f"expected a result of at most {max_bytes:,} bytes, got {len(packed):,}"
            )
        return packed, text

    def close(self) -> None:
        getattr(self._leased, "close", lambda: None)()
