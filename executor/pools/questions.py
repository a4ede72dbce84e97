"""Requests to envs other than commands: calls, attributes, states.

Guarantees: an answer belongs to its request: answers to interrupted requests are dropped. A worker that dies or is late
with its answer is lost; by then the others have answered.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from envherd.executor.options import ExecutorOptions
from envherd.executor.pools.crew import Crew
from envherd.executor.pools.error_messages import env_error, merge_answers
from envherd.executor.pools.supervisor import Supervisor
from envherd.workers import messages
from envherd.workers.errors import EnvherdError


class Questions:
    """Sends requests to workers and reads their answers.

    Args:
        crew: the workers.
        supervisor: of the workers.
        worker_of: int `[N]`, the worker of each env.
        options: of the executor.
    """

    def __init__(self, crew: Crew, supervisor: Supervisor, worker_of: np.ndarray, options: ExecutorOptions) -> None:
        self._crew, self._supervisor, self._worker_of = crew, supervisor, worker_of
        self._timeout_s = options.reset_timeout_s
        self._number = 0

    def ask(self, what: str, env_ids: list[int], **question: Any) -> dict[int, list[int]]:
        """Send a request without waiting; return worker id -> its envs in the request. See `Pool.question`."""
        by_worker: dict[int, list[int]] = {}
        for env_id in env_ids:
            by_worker.setdefault(int(self._worker_of[env_id]), []).append(env_id)
        self._supervisor.revive(by_worker)
        lost = self._supervisor.lost
        if gone := [worker_id for worker_id in by_worker if worker_id in lost]:
            raise lost[gone[0]]
        args = question.pop("args", ())
        self._number += 1
        for worker_id, ids in by_worker.items():
            own = tuple(args[env_ids.index(i)] for i in ids) if what in messages.PER_ENV else args
            ask = messages.Ask(what=what, env_ids=tuple(ids), args=own, number=self._number, **question)
            self._crew.mail(worker_id, ask)
        return by_worker

    def answers(self, by_worker: dict[int, list[int]], what: str) -> dict[int, Any]:
        """Wait for the answers to the latest request."""
        return merge_answers(by_worker, lambda worker_id: self._answer(worker_id, by_worker[worker_id], what))

    def _answer(self, worker_id: int, env_ids: list[int], what: str) -> dict[int, Any]:
        try:
            frame = self._crew.await_frame(worker_id, what, self._timeout_s, self._number)
        except EnvherdError as error:
            self._supervisor.declare_lost(worker_id, error)
            raise
        if frame["kind"] == "fault":
            worker = self._crew.workers[worker_id]
            raise env_error([frame], worker_id, worker.pid, worker.gpu)
        return dict(zip(env_ids, frame["values"], strict=True))
