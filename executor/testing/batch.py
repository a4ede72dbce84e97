"""The batch of envs that the contract drives, N envs in an executor; and the comparison of their rows."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from envherd.executor.batched import BatchedEnv
from envherd.executor.batches.hand_out import non_tensor
from envherd.executor.options import ExecutorOptions
from envherd.executor.parallel import ParallelEnv
from envherd.executor.serial import SerialEnv
from envherd.shm.specs import DONE_KEYS, Box, EnvSpec, Key
from envherd.workers.errors import EnvError

#: One env's leaves: copies of arrays, and side-channel values.
Row = dict[Key, Any]
#: What a step has shown of all envs: the rows of the step, and the rows after it and after the resets that follow it.
Stepped = tuple[list[Row], list[Row]]

MakeEnv = Callable[[], Any]

_FINITE = (
    "Mend the env; in training, ExecutorOptions(check_finite=True) refuses such a step."
)


class Calls(NamedTuple):
    """How often native envs were stepped and reset."""

    steps: int
    resets: int


class ExecutorBatch:
    """The envs under test; the executor's counts stand for calls of the native envs, unless these are counted.

    Args:
        env: the executor.
        counts: what `count_native_calls` returned.

    Attributes:
        specs: one for each env.
    """

    def __init__(self, env: BatchedEnv, counts: Counter[str] | None = None) -> None:
        self.env = env
        self.specs: Sequence[EnvSpec] = env.specs
        self._counts = counts

    def reset(self, mask: np.ndarray | None) -> list[Row]:
        """Reset the envs in `mask` (bool `[N, *batch_shape, 1]`; None for all); return the roots of ALL envs."""
        td = (
            None
            if mask is None
            else TensorDict({"_reset": torch.from_numpy(mask)}, self.env.batch_size)
        )
        return self._rows(self.env.reset(td), "root")

    def step(
        self,
        actions: list[list[Any]],
        *,
        resets_ended: bool,
    ) -> Stepped:
        """Step all envs."""
        td: TensorDictBase = TensorDict({}, self.env.batch_size)
        for leaf, *values in zip(
            (*self.specs[0].action, *self.specs[0].state),
            *actions,
            strict=True,
        ):
            if leaf.is_side:
                td.set(leaf.key, non_tensor(values, td.batch_size))
            else:
                td.set(
                    leaf.key,
                    torch.from_numpy(
                        np.stack([np.asarray(value, leaf.dtype) for value in values])
                    ),
                )
        if resets_ended:
            td, root = self.env.step_and_maybe_reset(td)
        else:
            td = self.env.step(td)
            root = self.env.current()
        return self._rows(td["next"], "next"), self._rows(root, "root")

    def save(self) -> list[Any] | None:
        """Return the states of all envs, or None if they cannot be saved."""
        try:
            return self.env.save()
        except EnvError as error:
            if error.context["type_name"] != "NotImplementedError":
                raise
            return None

    def count_calls(self) -> Calls | None:
        """Return how often the native envs were stepped and reset so far.

        None if an env could not be watched, or its adapter calls it in other ways.
        """
        counts = self._counts
        if counts is None:
            words = self.env.engine.pool.slab.words
            return Calls(int(words["env_steps"].sum()), int(words["resets"].sum()))
        are_complete = counts["step"] and counts["reset"] and not counts["missed"]
        return Calls(counts["step"], counts["reset"]) if are_complete else None

    def close(self) -> None:
        """Close the envs."""
        self.env.close()

    def _rows(self, td: TensorDictBase, section: str) -> list[Row]:
        return [_row(td[i], spec, section) for i, spec in enumerate(self.specs)]


#: `(make_env, num_envs, num_workers, root seed) -> batch`
MakeBatch = Callable[[MakeEnv, int, int, int], ExecutorBatch]


def in_this_process(
    make_env: MakeEnv,
    num_envs: int,
    num_workers: int,  # noqa: ARG001  # there are no workers
    root_seed: int,
) -> ExecutorBatch:
    """Run envs in this process, and count the calls of the native ones."""
    env = SerialEnv(num_envs, make_env, seed=root_seed)
    return ExecutorBatch(env, count_native_calls(env))


def in_workers(
    make_env: MakeEnv,
    num_envs: int,
    num_workers: int,
    root_seed: int,
    options: ExecutorOptions | None = None,
) -> ExecutorBatch:
    """Run envs in worker processes."""
    return ExecutorBatch(
        ParallelEnv(
            num_envs,
            make_env,
            num_workers=num_workers,
            seed=root_seed,
            options=options,
        )
    )


def count_native_calls(env: SerialEnv) -> Counter[str]:
    """Count calls of the native envs from now on; return the counts of "step", "reset" and methods that are "missed".

    A method is missed if the env lets nothing replace it.
    """
    counts: Counter[str] = Counter()
    pool: Any = env.engine.pool
    for adapter in pool.adapters.values():
        for name in ("step", "reset"):
            try:
                method = getattr(adapter.env, name)
                setattr(adapter.env, name, _counted(counts, name, method))
            except (AttributeError, TypeError):
                counts["missed"] += 1
    return counts


def _counted(
    counts: Counter[str],
    name: str,
    method: Callable[..., Any],
) -> Callable[..., Any]:
    def counted(*args: Any, **kwargs: Any) -> Any:
        counts[name] += 1
        return method(*args, **kwargs)

    return counted


def _row(td: TensorDictBase, spec: EnvSpec, section: str) -> Row:
    return {
        leaf.key: td.get(leaf.key).tolist()
        if leaf.is_side
        else td.get(leaf.key).numpy().copy()
        for leaf in (
            *spec.observation,
            *spec.done,
            *(spec.reward if section == "next" else ()),
        )
    }


# ---- rows -----------------------------------------------------------------------------------------


class ContractViolation(AssertionError):
    """An env, or its executor, has broken a rule."""


def demand(rule: int, one: Row, other: Row, where: str, why: str) -> None:
    """Raise unless two rows are equal, bit for bit."""
    for key, value in one.items():
        if not equal(value, other[key]):
            raise ContractViolation(
                f"rule {rule} is broken: expected {show_key(key)} {show(value)}, got {show(other[key])} ({where}): "
                f"{why}"
            )


def check_done(row: Row, where: str) -> None:
    """Raise unless every `done` of a row is `terminated | truncated`."""
    for key in row:
        if key[-1] != "done" or not all(
            (*key[:-1], *last) in row for last in DONE_KEYS
        ):
            continue
        done = row[key]
        terminated = row[*key[:-1], "terminated"]
        truncated = row[*key[:-1], "truncated"]
        if not np.array_equal(done, terminated | truncated):
            raise ContractViolation(
                f"rule 5 is broken: expected {show_key(key)} to be terminated | truncated, got {show(done)} for "
                f"{show(terminated)} and {show(truncated)} ({where})."
            )


def check_values(row: Row, spec: EnvSpec, where: str) -> None:
    """Raise unless the observations of a row are within the bounds of their spaces, and its rewards are finite."""
    for leaf in spec.observation:
        if leaf.is_side:
            continue
        value = row[leaf.key]
        if (is_nan := np.not_equal(value, value)).any():
            raise _violation(leaf.key, "without NaN", value, is_nan, where, _FINITE)
        if not isinstance(leaf.domain, Box):
            continue
        outside = (value < leaf.domain.low) | (value > leaf.domain.high)
        if outside.any():
            raise _violation(
                leaf.key,
                f"in {leaf.domain}",
                value,
                outside,
                where,
                "Mend the env's observation_space, or clip its observations.",
            )
    for leaf in spec.reward:
        if leaf.key in row and (infinite := ~np.isfinite(row[leaf.key])).any():
            raise _violation(
                leaf.key,
                "finite",
                row[leaf.key],
                infinite,
                where,
                _FINITE,
            )


def _violation(
    key: Key,
    expected: str,
    value: Any,
    is_broken: Any,
    where: str,
    advice: str,
) -> ContractViolation:
    at = tuple(map(int, np.argwhere(is_broken)[0]))
    return ContractViolation(
        f"rule 8 is broken: expected {show_key(key)} {expected}, got {value[at]} at {at} ({where}). {advice}"
    )


def has_ended(row: Row) -> bool:
    """Return whether (part of) an env had ended."""
    return bool(row[("done",)].any())


def same(one: Row, other: Row, keys: list[Key]) -> bool:
    """Return whether two rows agree in some keys."""
    return all(equal(one[key], other[key]) for key in keys)


def equal(one: Any, other: Any) -> bool:
    """Return whether two values have the same bits; NaN equals NaN."""
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return (
            one.dtype == other.dtype
            and one.shape == other.shape
            and one.tobytes() == other.tobytes()
        )
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(
            equal(one[key], other[key]) for key in one
        )
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(np.all(one == other))


def show_key(key: Key) -> str:
    """Return a key for messages."""
    return "/".join(key)


def show(value: Any) -> str:
    """Return a value as a short text for messages."""
    text = " ".join(str(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."
