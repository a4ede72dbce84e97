"""The post: what has been asked of hosts and is not answered yet, and waiting for it.

Guarantees: no wait lasts longer than it takes to find out that a host is gone or silent; an answer that was being taken
when an interrupt came is taken again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import ray

from envherd.executor.cluster.remote_share import LOOK_S, RemoteShare
from envherd.workers.errors import WorkerLost

#: Seconds to wait where nothing is under way that could end a wait.
_PAUSE_S = 0.01

#: Takes an answer of a host.
Handler = Callable[[RemoteShare, Any], None]


class Post:
    """See the module.

    Args:
        on_loss: called with a host that is gone or silent; must end it.
        on_quiet: called when nothing has come for a while.
        on_look: called before every wait; returns seconds after which it is to be called again at the latest, or None.
    """

    def __init__(
        self,
        on_loss: Callable[[RemoteShare, WorkerLost], None],
        on_quiet: Callable[[], None],
        on_look: Callable[[], float | None],
    ) -> None:
        self._on_loss = on_loss
        self._on_quiet = on_quiet
        self._on_look = on_look
        self._under_way: dict[Any, tuple[RemoteShare, Handler]] = {}

    def expect(self, share: RemoteShare, ref: Any, handler: Handler) -> None:
        """Have the answer at `ref` taken by a handler when it has come."""
        self._under_way[ref] = (share, handler)

    def forget(self, share: RemoteShare) -> None:
        """Expect nothing of a host any more."""
        self._under_way = {ref: entry for ref, entry in self._under_way.items() if entry[0] is not share}

    def take(self, timeout_s: float | None) -> None:
        """Take what has come; if nothing has, wait for it, up to `timeout_s` or until it is time to look around."""
        soon = self._on_look()
        refs = list(self._under_way)
        limit = LOOK_S if timeout_s is None else min(LOOK_S, max(0.0, timeout_s))
        limit = limit if soon is None else min(limit, soon)
        if not refs:
            if limit:
                time.sleep(_PAUSE_S)
                self._on_quiet()
            return
        ready, _ = ray.wait(refs, num_returns=1, timeout=limit)
        if not ready:
            if limit:
                self._look_around()
            return
        if len(refs) > 1:
            ready, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
        for ref in ready:
            self._take(ref)

    def _take(self, ref: Any) -> None:
        if ref not in self._under_way:  # its host was lost a moment ago
            return
        share, handler = self._under_way[ref]
        try:
            answer = ray.get(ref)
        except ray.exceptions.RayError as error:
            self._under_way.pop(ref, None)
            self._on_loss(share, share.gone(error))
            return
        share.heard_at = time.monotonic()
        handler(share, answer)  # before it is forgotten: an interrupt here must leave it to be taken again
        self._under_way.pop(ref, None)

    def _look_around(self) -> None:
        """Find out which of the hosts that owe an answer still live."""
        for share in {share.share_id: share for share, _ in self._under_way.values()}.values():
            silence = share.silence()
            if silence is not None:
                self._on_loss(share, silence)
        self._on_quiet()
