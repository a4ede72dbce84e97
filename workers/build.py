"""Factories: check them in the parent, pickle them by value, call them in the worker.

In the parent, `pickle_factory` refuses an env instance and whatever cannot be pickled, naming the
captured variable and the object. In the worker, a `Builder` calls the factory and refuses a result that is no env, or
an env that the factory did not build itself.
"""

import contextlib
import inspect
import pickle
import re
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from envherd.workers.adapters import Adapter, find_adapter, is_env_like
from envherd.workers.errors import FactoryError
from envherd.workers.options import BlockOptions
from envherd.workers.sending import importing
from envherd.workers.sending.pickling import (
    Link,
    captures,
    dumps,
    find_culprit,
)
from envherd.workers.sending.sharing import is_meant_to_be_shared
from envherd.workers.wrappers.leaves import (
    EpisodeLeaves,
    InfoLeaves,
    Wrapping,
)

Factory = Callable[..., Any]

_UNKNOWN_NAMES = {"gymnasium.error.UnregisteredEnv", "gym.error.UnregisteredEnv"}
#: What Gymnasium writes where a package is missing -> the extra that has it.
_EXTRAS = {
    "Namespace ALE not found": "atari",
    "gymnasium[atari]": "atari",
    "gymnasium[box2d]": "box2d",
    "gymnasium[mujoco]": "mujoco",
    "gymnasium[classic-control]": "gymnasium",
    "gymnasium[classic_control]": "gymnasium",
    "gymnasium[toy-text]": "gymnasium",
    "gymnasium[toy_text]": "gymnasium",
}


def describe(factory: Any) -> str:
    """Name a factory for messages: its qualified name and where it was defined."""
    code = getattr(factory, "__code__", None)
    name = getattr(factory, "__qualname__", None) or type(factory).__qualname__
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code else str(name)


def check_factory(factory: Any, example: str = "gymnasium.make('CartPole-v1')") -> None:
    """Refuse what is not a factory.

    Args:
        factory: what the user has passed.
        example: an expression that builds an env of the kind that the caller takes, for the message.

    Raises:
        FactoryError: an env instance (callable or not), or something that cannot be called.
    """
    if is_env_like(factory):
        raise FactoryError(
            f"make_env failed: expected a callable that builds an env, got an env: {_type_name(factory)}. Envs are "
            f"built inside their worker, so pass a function, e.g. make_env=lambda: {_how_to_build(factory)}."
        )
    if not callable(factory):
        raise FactoryError(
            f"make_env failed: expected a callable that builds an env, got {_type_name(factory)}. "
            f"Pass a function, e.g. make_env=lambda: {example}."
        )


def _how_to_build(env: Any) -> str:
    """Return an expression that builds an env like this one, for messages."""
    env_id = getattr(getattr(env, "spec", None), "id", None)  # of Gymnasium's registry
    return (
        f"gymnasium.make({env_id!r})"
        if isinstance(env_id, str)
        else f"{type(env).__name__}(...)"
    )


def pickle_factory(factory: Factory) -> bytes:
    """Return a factory as bytes; definitions from `__main__` are pickled by value.

    Raises:
        FactoryError: it cannot be pickled; the message names the captured variable and the object.
    """
    check_factory(factory)
    importing.places.clear()
    try:
        return dumps(factory, shares=True)
    except Exception as error:
        raise FactoryError(_pickle_message(factory, error)) from error


def _pickle_message(factory: Factory, error: Exception) -> str:
    way = find_culprit(factory)
    # A function or a cache of the script is no cause, but what it captures.
    links = [
        link
        for link in way
        if not isinstance(
            link.value,
            (types.FunctionType, staticmethod, classmethod, property),
        )
    ]
    if not links:
        what = f"cannot be pickled: {error}"
    else:
        variable, value = links[0]
        cause = links[-1].value
        found = re.search(r"'([\w.]+)' object", str(error))
        inside = found.group(1) if found and len(links) == 1 else _type_name(cause)
        holder = (
            ""
            if inside == _type_name(value)
            else f" {_type_name(value)}, which holds a"
        )
        what = f"captured the variable `{variable}`, a{holder} {inside} that cannot be pickled"
        if isinstance(value, type):
            inner = (
                f": {_name_way(way)} is a {inside}" if len(links) > 1 else f" ({error})"
            )
            what = f"uses the class {value.__name__}, which was defined here and cannot be pickled{inner}"
        elif len(way) > 1:
            what += f" ({_name_way(way)})"
    return f"make_env failed: the factory {describe(factory)} {what}. {_advice(links)}"


def _advice(links: list[Link]) -> str:
    """Return what to do about an object that cannot be pickled, at the end of these links."""
    if any(is_meant_to_be_shared(link.value) for link in links):
        return (
            "Workers are not forked from this process: make it with multiprocessing.get_context('spawn'), or take that "
            "of a multiprocessing.Manager(), such as Manager().Queue(), or send the values with env.call or env.set. A "
            "two-way Pipe can only be used by one process."
        )
    if links and isinstance(links[0].value, type):
        return f"Put {links[0].value.__name__} into a module that workers import: from my_module import ..."
    return (
        "Build it inside the factory instead, or import there the module that holds it: "
        "make_env=lambda: make_the_env(...), with only names and numbers captured."
    )


def kwargs_error(env_kwargs: Any, error: Exception) -> FactoryError:
    """Return the error for keyword arguments that cannot be pickled."""
    way = find_culprit(env_kwargs)
    found = f"a {_type_name(way[-1].value)} at {_name_way(way)}" if way else "others"
    return FactoryError(
        f"env_kwargs failed: expected arguments that can be pickled, got {found} ({error}). {_advice(way)}"
    )


def _name_way(way: list[Link]) -> str:
    """Return `Env -> step -> LOCK` for the way to an object."""
    return " -> ".join(link.name for link in way)


def modules_of(factory: Any) -> list[str]:
    """Return the modules that a factory refers to, so that a helper can import them before it forks."""
    modules: dict[str, None] = {}
    for _, value in [("", factory), *captures(factory)]:
        name = (
            value.__name__
            if isinstance(value, types.ModuleType)
            else getattr(value, "__module__", None)
        )
        if (
            isinstance(name, str)
            and name != "builtins"
            and importing.goes_by_name(name)
        ):
            modules[name] = None
    modules.update(dict.fromkeys(getattr(factory, "preload", ())))
    return list(modules)


def interpreter_of(factory: Any) -> str | None:
    """Return the interpreter in which a factory must be called; None for this one."""
    return getattr(factory, "interpreter", None)


@contextlib.contextmanager
def _hinting() -> Iterator[None]:
    """Add a note to an exception of a factory that may come from what the caller's process has and this one lacks."""
    try:
        yield
    except Exception as error:
        note = ""
        # The latter of dm_control.
        if any(
            f"{cls.__module__}.{cls.__qualname__}" in _UNKNOWN_NAMES
            for cls in type(error).__mro__
        ) or re.match(r"(Domain|Level) '.*' does not exist", str(error)):
            note = (
                "If an import registers the name, import that module in the script or in the factory, or name it: "
                "options=ExecutorOptions(preload=('my_envs',))."
            )
        elif isinstance(error, (AttributeError, KeyError)) and "__main__" in str(error):
            note = "Workers do not import the script. Put what is missing into a module that they import."
        for text, extra in _EXTRAS.items():
            if text in str(error):
                note = f'Install what it needs: pip install "envherd[{extra}]". {note}'.strip()
        # From Python 3.11: a worker may be older.
        if note and hasattr(error, "add_note"):
            error.add_note(note)
        raise


class Builder:
    """Builds the envs of one worker, and remembers the envs that it has built.

    Args:
        options: what the envs take and return, and which leaves are added to theirs.
    """

    def __init__(self, options: BlockOptions) -> None:
        self._options = options
        self._alone: Any = None
        self._factories: dict[bytes, Factory] = {}
        #: Env id -> the pickled factory that has built it.
        self.in_use: dict[int, bytes] = {}
        self._built: list[Adapter] = []

    def build(
        self,
        env_id: int,
        pickled: bytes,
        kwargs: Mapping[str, Any],
    ) -> Adapter:
        """Call a pickled factory and return the adapter of the env of that id.

        Raises:
            FactoryError: it returned no env, an env that it had not built itself, or ended the process.
        """
        try:
            self.in_use[env_id] = pickled
            # Before another is loaded: a factory of a former task may hold as much memory as an env.
            self._factories = {
                one: factory
                for one, factory in self._factories.items()
                if one in self.in_use.values()
            }
            # Equal factories of a worker are one object, as in the caller's process.
            if pickled not in self._factories:
                with _hinting():
                    self._factories[pickled] = pickle.loads(pickled)
            return self.adopt(self._factories[pickled], kwargs)
        except SystemExit as error:
            raise FactoryError(
                f"make_env failed: the factory raised {importing.explain_exit(error)}."
            ) from error

    def adopt(self, factory: Factory, kwargs: Mapping[str, Any]) -> Adapter:
        """Call a factory and return its env's adapter, or the adapter that it returned. `SystemExit` passes."""
        adapter = self._adopt(factory, kwargs)
        if self._options.episode_statistics:
            adapter = EpisodeLeaves(adapter)
        if self._options.info_keys is not None:
            adapter = InfoLeaves(adapter, self._options.info_keys)
        return adapter

    def forget(self, closed: Adapter) -> None:
        """Forget an env that is closed, so that another one can take its place."""
        # The adapter that `_adopt` has recorded is inside those that `adopt` has put around it.
        own = closed
        while isinstance(own, Wrapping) and not any(
            own is built for built in self._built
        ):
            own = own.inner
        self._built = [built for built in self._built if built is not own]
        if own.is_alone:
            self._alone = None

    def _adopt(self, factory: Factory, kwargs: Mapping[str, Any]) -> Adapter:
        if self._alone is not None:
            raise FactoryError(
                f"make_env failed: expected one simulator in a process, got a second from the factory "
                f"{describe(factory)} in the process of a {_type_name(self._alone)}. Give each its own worker: "
                f"ParallelEnv(..., num_workers=) as many as num_envs; or let one simulator have more rows (IsaacLab: "
                f"cfg.scene.num_envs). SerialEnv can run one."
            )
        with _hinting():
            made = factory(**kwargs)
        env = made.env if isinstance(made, Adapter) else made
        self._refuse_shared(factory, env)
        if env is None or (inspect.isroutine(env) or isinstance(env, type)):
            raise FactoryError(
                f"make_env failed: the factory {describe(factory)} returned {f'{env!r}'[:80]}, expected an env. "
                f"Call what it returns, or return the env that it builds."
            )
        # The constructor of each family takes the env.
        adapter = (
            made
            if isinstance(made, Adapter)
            else find_adapter(env, self._options.env_type)(env)  # type: ignore[call-arg]
        )
        adapter.origin = describe(factory)
        adapter.returned = env
        self._built.append(adapter)
        if adapter.is_alone:
            self._alone = env
        return adapter

    def _refuse_shared(self, factory: Factory, env: Any) -> None:
        if any(env is one.returned for one in self._built) and is_env_like(env):
            raise FactoryError(
                f"make_env failed: the factory {describe(factory)} returned the same {_type_name(env)} twice. "
                f"Every call must build a new env: make_env=lambda: {_how_to_build(env)}."
            )
        captured = next(
            (variable for variable, value in captures(factory) if value is env),
            None,
        )
        if captured is not None and is_env_like(env):
            raise FactoryError(
                f"make_env failed: the factory {describe(factory)} returned the captured variable `{captured}`, "
                f"a {_type_name(env)} that was built elsewhere. Build it inside: lambda: {_how_to_build(env)}."
            )


def are_equal(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether the keyword arguments of two factory calls are known to be equal."""
    try:
        return bool(one == other)
    # Arrays cannot be compared as a whole, and are taken to differ.
    except ValueError:
        return False


def _type_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
