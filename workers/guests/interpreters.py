"""Factories of envs that run in another Python interpreter, whose packages this one does not have.

A worker of such an env executes that interpreter. It imports this package's worker side from where the caller has it,
and everything else from its own site-packages. It needs numpy and cloudpickle, and neither torch nor tensordict.
"""

import importlib
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from envherd.workers import plain
from envherd.workers.errors import FactoryError

#: The oldest version that the worker side runs on.
OLDEST = (3, 10)

#: The interpreter that executes this process, if it was started for `InPython`.
_here: str | None = None


class InPython:
    """Build an env in another Python interpreter, such as that of a virtual environment with other packages.

        ParallelEnv(8, InPython("/venvs/sim/bin/python", "my_envs:make", {"level": 3}))

        ParallelEnv(8, InPython(["uv", "run", "--with", "gymnasium<1", "python"], "my_envs:make"))

    A list of factories may have envs of several interpreters in one batch; a worker has envs of one. The interpreter
    must be CPython 3.10 or newer, with numpy and cloudpickle. `ParallelEnv` accepts it, and so do the facades of
    Gymnasium, SB3, PettingZoo and CleanRL.

    The worker finds the target's module in the packages of that interpreter, then in the folders of this process's
    import path that hold no installed packages (as the script's folder). `PYTHONPATH` is not passed on.

    Args:
        python: path of the interpreter, or its name on the PATH. Or a command as a list of words, which runs Python
            with the arguments that follow and the descriptors that it has. Its first word is a program, the last one
            usually `python`. docs/custom_envs.md lists programs that can.
        target: `MODULE:CALLABLE`, where CALLABLE builds the env; it is imported in the worker.
        kwargs: arguments of the callable: plain data (numbers, texts, lists, dicts, numpy arrays). `env_kwargs=` of the
            executor adds others.

    Raises:
        FactoryError: no such program, a malformed target, or arguments that are not plain data.
    """

    def __init__(
        self,
        python: str | os.PathLike[str] | Sequence[str],
        target: str,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        program, *words = (
            [python] if isinstance(python, (str, os.PathLike)) else [*python] or [""]
        )
        found = shutil.which(os.path.expanduser(program))  # `Path` has no `which`
        if found is None:
            advice = (
                f" Did you mean {os.path.join(program, 'bin', 'python')}?"
                if os.path.isdir(program)
                else ""
            )
            raise FactoryError(
                f"InPython failed: expected a Python interpreter, got {os.fspath(program)!r}: no such program.{advice}"
            )
        module, _, name = (
            target.partition(":") if isinstance(target, str) else ("", "", "")
        )
        if not all(
            part.isidentifier() for part in (*module.split("."), *name.split("."))
        ):
            raise FactoryError(
                f"InPython failed: expected a target 'MODULE:CALLABLE', got {target!r}."
            )
        try:
            self._kwargs = plain.encode(dict(kwargs or {}))
        except Exception as error:
            raise FactoryError(
                f"InPython failed: expected kwargs of plain data (numbers, texts, lists, dicts, numpy arrays), got "
                f"{kwargs!r} ({error}). Build other objects in {target}."
            ) from None
        # The path is not resolved, because the python of a virtual environment is a link.
        self.interpreter = shlex.join([os.path.abspath(found), *words])
        self.target = target
        # For messages.
        self.__qualname__ = f"InPython({self.interpreter!r}, {target!r})"

    def __call__(self, **_: Any) -> Any:
        """Refuse to build the env in this process.

        Raises:
            FactoryError: always.
        """
        raise _wrong_place(self.interpreter, self.target)

    def __reduce__(self) -> Any:
        return Target, (self.interpreter, self.target, self._kwargs)


class Target:
    """What `InPython` is in its worker."""

    def __init__(self, interpreter: str, target: str, kwargs: bytes) -> None:
        self.interpreter = interpreter
        self.target = target
        self._kwargs = kwargs
        self.__qualname__ = target

    def __call__(self, **env_kwargs: Any) -> Any:
        """Import the target and return the env that it builds."""
        if _here != self.interpreter:
            raise _wrong_place(self.interpreter, self.target)
        name, _, path = self.target.partition(":")
        made: Any = importlib.import_module(name)
        for part in path.split("."):
            made = getattr(made, part)
        return made(**{**plain.decode(self._kwargs), **env_kwargs})


def enter(interpreter: str) -> None:
    """Note which interpreter executes this process, and let it read arrays that the caller has pickled."""
    global _here  # noqa: PLW0603
    _here = interpreter
    # Numpy 2 pickles arrays as results of a function of this module.
    if np.__version__.startswith("1."):
        sys.modules.setdefault(
            "numpy._core.numeric",
            importlib.import_module("numpy.core.numeric"),
        )


def _wrong_place(interpreter: str, target: str) -> FactoryError:
    return FactoryError(
        f"make_env failed: expected {target} to be built by {interpreter}, got a call in another interpreter. Pass the "
        f"InPython itself to ParallelEnv, or to the facade of Gymnasium, SB3 or PettingZoo: other factories must not "
        f"call it, and other executors cannot run it."
    )
