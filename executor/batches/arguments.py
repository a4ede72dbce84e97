"""Checks of arguments, made before a call starts or changes anything; the errors name the call and the argument."""

import contextlib
import operator
from typing import Any

from tensordict import TensorDict, TensorDictBase

MASK_ADVICE = (
    "A mask of what to reset goes into a batch: "
    "TensorDict({'_reset': mask}, env.batch_size), a bool for each env or row."
)
#: Call -> advice for one that got no TensorDict.
_ADVICE = {
    "reset": f" {MASK_ADVICE}",
    **dict.fromkeys(
        ("step", "step_and_maybe_reset", "send"),
        " Put actions into one: env.current().set('action', torch.as_tensor(actions)). For plain arrays use "
        "AsyncVectorEnv of envherd.gymnasium.",
    ),
}
WRAP = (
    "Wrap it: TensorDictModule(policy, in_keys=['observation'], out_keys=['action'])."
)
WRAP_MODEL = (
    "Wrap a model of Stable-Baselines3: "
    "lambda td: td.set('action', torch.as_tensor(model.predict(td['observation'].numpy())[0]))."
)


def as_count(
    call: str,
    name: str,
    value: Any,
    *,
    least: int = 1,
    or_none: bool = False,
) -> Any:
    """Return an integer of at least `least` as `int`, or None if that is allowed.

    Raises:
        ValueError: anything else.
    """
    if value is None and or_none:
        return None
    found = least - 1
    # True is an int, but a caller who passes it means something else.
    if not isinstance(value, bool):
        with contextlib.suppress(TypeError):
            found = operator.index(value)
    if found < least:
        others = " or None" if or_none else ""
        kind = "" if type(value) is int else f"{type(value).__name__} "
        raise ValueError(
            f"{call} failed: expected {name} as an int of at least {least}{others}, got {kind}{value!r}."
        )
    return found


def need_seconds(call: str, name: str, value: Any) -> None:
    """Refuse anything but None and numbers of at least 0."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value is not None and not (is_number and value >= 0):
        raise ValueError(
            f"{call} failed: expected {name} as seconds of at least 0 or None, got {value!r}."
        )


def need_bools(call: str, **switches: Any) -> None:
    """Refuse anything but True and False."""
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise ValueError(  # noqa: TRY004
                f"{call} failed: expected {name} to be True or False, got {value!r}."
            )


def need_callables(call: str, **functions: Any) -> None:
    """Refuse anything but None and callables."""
    for name, value in functions.items():
        if value is not None and not callable(value):
            advice = f" {WRAP_MODEL}" if hasattr(value, "predict") else ""
            raise TypeError(
                f"{call} failed: expected {name} to be a callable or None, got {value!r}.{advice}"
            )


def need_batch(call: str, td: Any, name: str = "a batch") -> None:
    """Refuse anything but a TensorDict."""
    # The class alone settles the usual case, in a tenth of the time.
    if td.__class__ is not TensorDict and not isinstance(td, TensorDictBase):
        advice = _ADVICE.get(call, "")
        if isinstance(td, tuple) and any(isinstance(one, TensorDictBase) for one in td):
            advice = " step_and_maybe_reset returns two batches: td, root = env.step_and_maybe_reset(td)."
        raise TypeError(
            f"{call} failed: expected {name} as a TensorDict, got {_named(td)}.{advice}"
        )


def need_state(call: str, name: str, td: Any, num_envs: int) -> None:
    """Refuse anything but None and a TensorDict with one row for each env."""
    if td is None:
        return
    need_batch(call, td, name)
    if td.batch_size[:1] != (num_envs,):
        raise wrong_rows(
            call,
            num_envs,
            td,
            name,
        )


def check_rollout(  # noqa: PLR0913  # the arguments of a rollout
    max_steps: Any,
    policy: Any,
    callback: Any,
    tensordict: Any,
    primer: Any,
    num_envs: int,
    *,
    auto_reset: Any,
    break_when_any_done: Any,
    set_truncated: Any = False,
    call: str = "rollout",
) -> int:
    """Refuse wrong arguments of a rollout; return its number of steps."""
    if callable(max_steps):
        raise TypeError(
            f"{call} failed: expected the number of steps first, got a callable. Write (200, policy)."
        )
    need_callables(call, policy=policy, callback=callback)
    need_bools(call, auto_reset=auto_reset, set_truncated=set_truncated)
    if break_when_any_done is not None:
        need_bools(call, break_when_any_done=break_when_any_done)
    need_state(call, "primer", primer, num_envs)
    need_state(call, "tensordict", tensordict, num_envs)
    num_steps: int = as_count(call, "max_steps", max_steps)
    if auto_reset and tensordict is not None:
        raise ValueError(
            f"{call} failed: expected auto_reset=False with tensordict, got True, which begins new episodes. Pass "
            "auto_reset=False, or leave tensordict out."
        )
    return num_steps


def wrong_rows(
    call: str,
    num_envs: int,
    td: TensorDictBase,
    name: str = "a batch",
) -> ValueError:
    """Return the error for a batch without a row for each env."""
    advice = ""
    if not td.batch_size:
        advice = " It is one row: reset() and step() return one TensorDict, which is not unpacked."
    return ValueError(
        f"{call} failed: expected {name} with a row for each of {num_envs} envs, got batch size {[*td.batch_size]}."
        f"{advice}"
    )


def _named(value: Any) -> str:
    kind = type(value)
    name = f"{kind.__module__}.{kind.__name__}"
    return f"a {name.removeprefix('builtins.')}"
