"""The factory that Stable-Baselines3's vec envs send to a worker.

Guarantees: every function is unpickled separately for its env, so envs of one worker do not share objects that their
functions captured, just as envs in separate processes would not. Imports neither
Stable-Baselines3 nor, unless the env is one of Gymnasium's, Gymnasium.
"""

import importlib
import pickle
from typing import Any

from envherd.workers.adapters.registry import is_one_of
from envherd.workers.build import (
    Factory,
    describe,
    interpreter_of,
    modules_of,
    pickle_factory,
)

#: Keeps TensorBoard from importing TensorFlow in workers: 255 MB instead of 927 MB with SB3 loaded.
_LIGHT = "envherd.workers.adapters.light_tensorboard"


class Sb3Factory:
    """Builds one env and, if it is a Gymnasium env, puts it behind the adapter that gives SB3's values.

    Args:
        env_fn: the user's function.
        env_id: which env it builds.

    Raises:
        FactoryError: no function, or one that cannot be pickled.
    """

    def __init__(self, env_fn: Factory, env_id: int) -> None:
        self._pickled = pickle_factory(env_fn)
        self._env_id = env_id
        self.preload = (_LIGHT, *modules_of(env_fn))
        self.interpreter = interpreter_of(env_fn)
        self.__qualname__ = describe(env_fn)

    def __call__(self) -> Any:
        """Return the env, or its adapter."""
        importlib.import_module(_LIGHT)  # before the function imports anything
        env = pickle.loads(self._pickled)()
        if not is_one_of(env, "gymnasium.core.Env"):
            return env
        # Other families do without.
        from envherd.executor.facades.sb3.worker import Sb3Adapter

        return Sb3Adapter(env)
