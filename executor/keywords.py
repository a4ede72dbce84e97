"""Refuse unknown keyword arguments and attributes with a message that suggests the right one."""

import difflib
import functools
import inspect
from collections.abc import Callable, Container, Mapping
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

#: Name of an argument in other libraries -> name here.
_NAMES_ELSEWHERE = {
    "n_envs": "num_envs",
    "nenvs": "num_envs",
    "n_workers": "num_workers",
    "nworkers": "num_workers",
    "workers": "num_workers",
    "processes": "num_workers",
    "num_procs": "num_workers",
    "n_procs": "num_workers",
    "nprocs": "num_workers",
    "n_jobs": "num_workers",
    "num_processes": "num_workers",
    "env_fn": "make_env",
    "env_fns": "make_env",
    "env_makers": "make_env",
    "create_env_fn": "make_env",
    "break_when_done": "break_when_any_done",
    "n_processes": "num_workers",
    "num_cpus": "num_workers",
    "create_env_kwargs": "env_kwargs",
    "env_args": "env_kwargs",
    "min_envs": "min_batch",
    "max_envs": "max_batch",
    "batch_size": "frames_per_batch",
    "num_steps": "frames_per_batch",
    "n_steps": "frames_per_batch",
    "env_fn_kwargs": "env_kwargs",
}
_SPACES = "Spaces are attributes of AsyncVectorEnv of envherd.gymnasium."
_ACTION_SPEC = f"Use action_spec. {_SPACES}"
_OBSERVATION_SPEC = f"Use observation_spec. {_SPACES}"
#: Attribute of envs of Gymnasium, SB3, TorchRL and PufferLib -> what to use instead.
_ATTRIBUTES_ELSEWHERE = {
    "action_space": _ACTION_SPEC,
    "single_action_space": _ACTION_SPEC,
    "full_action_spec": "Use action_spec.",
    "observation_space": _OBSERVATION_SPEC,
    "single_observation_space": _OBSERVATION_SPEC,
    "full_observation_spec": "Use observation_spec.",
    "get_attr": "Use get(name).",
    "get_wrapper_attr": "Use get(name).",
    "set_attr": "Use set(name, value).",
    "env_method": "Use call(name, ...).",
    "envs": "Envs are reached by get(name), set(name, value) and call(name, ...).",
    "unwrapped": 'Use get("unwrapped.NAME") or call("unwrapped.NAME", ...).',
    "step_async": "Use send(td).",
    "step_wait": "Use recv().",
    "async_reset": "Use reset(): its batch is what the first send(td) acts on.",
    "driver_env": "No env is built in this process: observation_spec and action_spec describe them.",
    "rand_step": "Use step(rand_action(td)).",
    "get_images": "Use render().",
    "n_envs": "Use num_envs.",
    "branch": "It is a method of ParallelEnv, whose workers it forks.",
    "to": "Pass device= to the constructor: batches are then on that device.",
}


def no_attribute(owner: object, name: str) -> AttributeError:
    """Return the error for a missing attribute; names the equivalent of another library's attribute, or a similar one.

    It has no `name`: with one, Python's own tracebacks would append a second suggestion.
    """
    similar = (
        [] if name.startswith("_") else difflib.get_close_matches(name, dir(owner), 1)
    )
    advice = _ATTRIBUTES_ELSEWHERE.get(name) or (
        f"Did you mean {similar[0]}?" if similar else ""
    )
    text = f"{type(owner).__name__!r} object has no attribute {name!r}"
    return AttributeError(f"{text}. {advice}" if advice else text, obj=owner)


def names_right_keyword(
    call: Callable[P, T],
    instead_of: Mapping[str, str] | None = None,
) -> Callable[P, T]:
    """Make a constructor or method refuse an unknown keyword with a message that suggests the right one.

    Args:
        call: the constructor or method.
        instead_of: keyword that it had in earlier versions -> advice; a ValueError, with any value.
    """
    names = [name for name in inspect.signature(call).parameters if name != "self"]

    @functools.wraps(call)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        for name in kwargs:
            if name not in names:
                what = (
                    type(args[0]).__name__
                    if call.__name__ == "__init__"
                    else call.__name__
                )
                options = (
                    getattr(call, "__globals__", {}).get("ExecutorOptions")
                    if "options" in names
                    else None
                )
                refusal = f"{what} failed: it has no argument {name!r}."
                if advice := (instead_of or {}).get(name):
                    raise ValueError(f"{refusal} {advice}")
                raise TypeError(
                    f"{refusal} {_advice(name, names, getattr(options, '__dataclass_fields__', ()))}"
                )
        return call(*args, **kwargs)

    return checked


def refuses_keywords(
    **instead_of: str,
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return `names_right_keyword` for a call that had these keywords in earlier versions; the values are advice."""
    return functools.partial(names_right_keyword, instead_of=instead_of)


def _advice(name: str, names: list[str], options: Container[str]) -> str:
    """Return what to write instead of a keyword that a call with these names and options does not have."""
    if name in options:
        return f"It is an option: options=ExecutorOptions({name}=...)."
    known = _NAMES_ELSEWHERE.get(name)
    meant = (
        known
        if known in names
        else next(iter(difflib.get_close_matches(name, names)), None)
    )
    return (
        f"Did you mean {meant}?" if meant in names else f"It takes {', '.join(names)}."
    )
