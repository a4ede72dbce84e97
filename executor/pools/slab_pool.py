"""The base of pools over one slab."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from envherd.executor.options import ExecutorOptions
from envherd.executor.pools.capsules import CapsuleWriter
from envherd.executor.pools.command_words import CommandWords
from envherd.executor.pools.crew import Blueprint
from envherd.executor.pools.fast_commands import FastCommands, NativeExchange
from envherd.executor.pools.replies import Outcome
from envherd.shm.private_view import PrivateView
from envherd.shm.specs import EnvSpec


def refuse_batches(specs: Sequence[EnvSpec], options: ExecutorOptions) -> None:
    """Raise ValueError if exceptions are to end episodes of envs that are batches: they would end those of all rows."""
    batched = next((spec for spec in specs if spec.batch_shape), None)
    if batched is not None:
        options.refuse_interrupts(f"making envs that are batches of rows ({batched.batch_shape})")


class SlabPool:
    """See `Pool` for the methods.

    Attributes:
        blueprint: see `Pool`.
        outcome, why_python, envs_in_python: see `Pool`.
        words, has_waited: see `Pool`.
        question, answers: see `Pool`.
        lendable, capsules: see `Pool`.
    """

    blueprint: Blueprint
    outcome: Outcome
    question: Callable[..., dict[int, Any]]
    answers: Callable[[dict[int, Any], str], dict[int, Any]]
    why_python: Sequence[str] = ()
    envs_in_python: Sequence[str] = ()
    words: CommandWords
    has_waited = False
    lendable: PrivateView | None = None
    capsules: CapsuleWriter | None = None

    def compile(self) -> FastCommands:
        """Refuse: `why_python` is not empty."""
        raise AssertionError(f"no commands in C: {self.why_python}")

    def compile_exchange(self, facts: Mapping[str, Any]) -> NativeExchange:  # noqa: ARG002  # as of `Pool`
        """Refuse, likewise."""
        raise AssertionError(f"no exchange in C: {self.why_python}")

    def show_path(self, path: str) -> None:
        """Do nothing: `envherd top` shows only the workers of one machine."""

    def was_given(self, env_ids: np.ndarray, since: int) -> np.ndarray:
        """Return which envs were given a command after that of number `since`, bool `[k]`."""
        return np.asarray(self.words.command_seq[env_ids] > since)

    def outstanding(self) -> np.ndarray:
        """Return the env ids that owe an answer, int `[k]`."""
        return np.flatnonzero(~self.words.has_answered())

    def gpu_of(self, worker_id: int) -> str | None:  # noqa: ARG002  # as of `Pool`
        """Return None: only worker processes are given GPUs."""
        return None

    def ask(self, what: str, env_ids: list[int], **question: Any) -> dict[int, Any]:
        return self.answers(self.question(what, env_ids, **question), what)
