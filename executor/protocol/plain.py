"""Decide which calls of an executor are made in C, once, when it is created; with the reasons against the others.

A call is *plain* if all that it needs are commands, and rows of one kind in the slab: then C gives the commands, waits
and takes the rows. `Engine` and `Exchange` handle every other call, in Python. What may differ from call to call (the
class of a batch, the envs' states, a loss) is not decided here.
"""

import reprlib
from collections.abc import Mapping
from typing import NamedTuple, Self

import tensordict
import torch

from envherd.executor.batches.actions import PlainIntake
from envherd.executor.batches.fast_tensordict import IS_AS_EXPECTED
from envherd.executor.options import ExecutorOptions
from envherd.executor.pools.base import Pool

#: Reasons in words for users, which docs/sizing.md explains; empty if there is none.
Why = tuple[str, ...]


class Plain(NamedTuple):
    """Why calls are made in Python; nothing for those that are made in C. Its `str` is for users.

    Attributes:
        rows: why the rows of all envs are more than the arrays of one group.
        step: of `step`, `step_and_maybe_reset` and rollouts.
        send: of `send`.
        recv: of `recv` and `current`.
        envs: why the loop that calls the envs, in a worker or in this process, is the one in Python.
    """

    rows: Why
    step: Why
    send: Why
    recv: Why
    envs: Why = ()

    @classmethod
    def never(cls, why: str) -> Self:
        """Return the decision for an engine without commands in C."""
        return cls(
            (why,),
            (why,),
            (why,),
            (why,),
        )

    @property
    def brief(self) -> str:
        """How steps of all envs are made."""
        if not self.step:
            return "steps in C"
        return f"steps in Python: {_listed(self.step)}"

    def __str__(self) -> str:
        calls = {
            "steps": self.step,
            "calls of the envs": tuple(
                one for one in self.envs if one not in self.step
            ),
        }
        if not self.step:
            calls |= {"send and recv": self.recv} if self.recv else {"send": self.send}
        parts = [
            f"{what} in Python, because {_listed(why)}"
            for what, why in calls.items()
            if why
        ]
        return "; ".join(parts if self.step else ["steps in C", *parts])


def what_is_plain(
    pool: Pool,
    options: ExecutorOptions,
    device: torch.device | None,
    intake: PlainIntake | None,
) -> Plain:
    """Return which calls of an executor are plain.

    Args:
        pool: with its slab.
        options: of the executor.
        device: of the batches.
        intake: of all envs' actions; None if they are not one leaf of one group.
    """
    num_groups = len(pool.slab.groups)
    spec = pool.specs[0]
    side = {
        leaf.key: None for one in pool.specs for leaf in one.observation if leaf.is_side
    }
    recycles = pool.is_recyclable
    rows = _those(
        {
            f"the envs have {num_groups} different specs": num_groups > 1,
            f"device={str(device)!r}": device is not None and device.type != "cpu",
            f"values without a fixed shape: {reprlib.repr([*side])}": bool(side),
        }
    )
    interrupts = _those(
        {
            "on_worker_loss='restart'": options.on_worker_loss == "restart",
            "on_env_error='interrupt'": options.on_env_error == "interrupt",
        }
    )
    odd = _those(
        {
            f"tensordict {tensordict.__version__} is not known": not IS_AS_EXPECTED,
            f"recycle_after={options.recycle_after}": recycles
            and options.recycle_after is not None,
            f"max_worker_memory={options.max_worker_memory}": recycles
            and options.max_worker_memory is not None,
        }
    )
    step = (*pool.why_python, *rows, *odd)
    exchange = _those(
        {
            # C's sends leave the commands to workers.
            "the envs run in this process": not pool.num_workers,
            "each env is a batch of rows": bool(spec.batch_shape),
        }
    )
    recv = (*step, *interrupts, *exchange)
    inputs = reprlib.repr([leaf.key for leaf in (*spec.action, *spec.state)])
    sends = _those(
        {
            f"the inputs are not one array: {inputs}": intake is None,
            f"check_actions={options.check_actions!r}": intake is not None
            and intake.legal is None,
        }
    )
    send = (*recv, *sends)
    return Plain(
        rows,
        step,
        send,
        recv,
        tuple(pool.envs_in_python),
    )


def _those(reasons: Mapping[str, bool]) -> Why:
    """Return the reasons that apply."""
    return tuple(why for why, applies in reasons.items() if applies)


def _listed(why: Why) -> str:
    return " and ".join(why)
