"""How shares whose host is gone are recovered: another place is looked for, and a new host begins to build there.

Guarantees: no call waits for a place: the other shares continue, and what is meant for a share that is being moved is
kept until it has one. A search is bounded; if it finds nothing, that is the share's loss. A host that is lost again and
again is replaced later each time, and then no more, as a worker is.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Protocol

from envherd.executor.cluster.fleet import Fleet
from envherd.executor.cluster.host import versions
from envherd.executor.cluster.post import Handler, Post
from envherd.executor.cluster.ray_cluster import check_versions
from envherd.executor.cluster.remote_share import RemoteShare
from envherd.executor.options import ExecutorOptions
from envherd.executor.pools.restarts import Restarts
from envherd.shm.specs import EnvSpec
from envherd.workers.errors import EnvherdError, InternalError

#: Seconds between questions to Ray whether it has found a place.
_ASK_S = 0.1


class ShareOwner(Protocol):
    """What a `Recovery` uses of the pool whose shares it moves; see `ClusterPool`."""

    options: ExecutorOptions
    lost: dict[int, EnvherdError]
    specs: list[EnvSpec]
    post: Post

    def send(self, share: RemoteShare, group: str, method: str, args: tuple[Any, ...], handler: Handler) -> None:
        """Call a method of a share's host, and let a handler take the answer."""
        ...

    def lose_share(self, share: RemoteShare, error: EnvherdError) -> None:
        """Count a share's host as lost."""
        ...

    def take_out(self, share: RemoteShare, error: EnvherdError) -> None:
        """Count a share that has found no place as lost for good."""
        ...


@dataclass
class _Move:
    """A share that is being moved.

    Attributes:
        share: which.
        loss: of its host.
        since: monotonic seconds from when on a place is looked for.
        is_searching: whether one is.
        held: what is to be sent to its next host: thread, method, arguments, and what takes the answer.
    """

    share: RemoteShare
    loss: EnvherdError
    since: float
    is_searching: bool = False
    held: list[tuple[str, str, tuple[Any, ...], Handler]] = field(default_factory=list)


class Recovery:
    """See the module.

    Args:
        pool: whose shares they are.
        fleet: finds places and starts hosts.
    """

    def __init__(self, pool: ShareOwner, fleet: Fleet) -> None:
        self._pool = pool
        self._fleet = fleet
        self._restarts = Restarts(pool.options)
        self._moves: dict[int, _Move] = {}
        self._refused: dict[int, EnvherdError] = {}  # searches that found nothing, which have not been raised yet
        self._asked_at = 0.0

    def begin(self, share: RemoteShare, loss: EnvherdError) -> None:
        """Begin to look for another place for a share whose host is gone.

        Args:
            share: which.
            loss: of its host.

        Raises:
            WorkerLost, WorkerTimeout: too many restarts within the window, no living node is large enough, or a search
                has ended without a place since it was last begun.
        """
        refused = self._refused.pop(share.share_id, None)
        if refused is not None:
            raise refused
        delay_s = self._restarts.next_delay_s(share.share_id)
        if delay_s is None:
            raise loss
        move = _Move(share, loss, time.monotonic() + delay_s)
        if not delay_s:
            move.is_searching = self._fleet.begin_move(share)
            if not move.is_searching:
                raise share.no_room(loss)
        share.is_moving = True
        self._moves[share.share_id] = move
        for worker_id in share.worker_ids:
            self._pool.lost.pop(worker_id, None)
        self.advance()

    def advance(self) -> float | None:
        """See whether places have been found, and start hosts there; never waits.

        Returns:
            Seconds after which to call it again; None if nothing is looked for.
        """
        if not self._moves:
            return None
        now = time.monotonic()
        if now - self._asked_at < _ASK_S:
            return _ASK_S
        self._asked_at = now
        for share_id, move in list(self._moves.items()):
            is_found = self._look(move, now)
            if is_found is None:
                continue
            del self._moves[share_id]
            share = move.share
            share.is_moving = False
            if not is_found:
                share.is_collecting = False
                self._refused[share_id] = error = share.no_room(move.loss)
                self._pool.take_out(share, error)
                continue
            self._pool.post.expect(share, share.built_ref, self._take_rebuilt)
            for group, method, args, handler in move.held:
                self._pool.send(share, group, method, args, handler)
        return _ASK_S

    def _look(self, move: _Move, now: float) -> bool | None:
        """Return whether a share has a new host; None while that is not known."""
        if not move.is_searching:
            if now < move.since:
                return None
            move.is_searching = self._fleet.begin_move(move.share)
            if not move.is_searching:
                return False
        return self._fleet.finish_move(move.share)

    def await_place(self, share: RemoteShare) -> None:
        """Wait until a share that is being moved has a host, which may still have to come up.

        Raises:
            WorkerLost: there is no place.
        """
        while share.is_moving:
            time.sleep(self.advance() or 0.0)
        if share.is_gone:
            raise self._pool.lost[share.worker_ids[0]]

    def hold(self, share: RemoteShare, *call: Any) -> None:
        """Send something as soon as a share that is being moved has a host; see `ClusterPool.send`."""
        self._moves[share.share_id].held.append(call)

    def drop_held(self, share: RemoteShare) -> None:
        """Forget what was to be sent to a share that is being moved."""
        if share.share_id in self._moves:
            self._moves[share.share_id].held.clear()
            share.is_collecting = False

    def _take_rebuilt(self, share: RemoteShare, built: Any) -> None:
        pool = self._pool
        if isinstance(built, EnvherdError):
            pool.lose_share(share, built)
            return
        try:
            check_versions(versions(), [built.report])
        except EnvherdError as error:
            pool.lose_share(share, error)
            return
        share.take_built(built)
        for env_id, spec in zip(share.env_ids.tolist(), built.specs, strict=True):
            if spec != pool.specs[env_id]:
                difference = pool.specs[env_id].difference(spec)
                message = f"restart failed: env {env_id} came back with another spec: {difference}."
                pool.lose_share(share, InternalError(message))
                return
