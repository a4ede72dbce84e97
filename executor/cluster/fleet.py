"""The hosts of one executor: connect to the cluster, start hosts, build envs, exchange messages, and end all of it.

Guarantees:
- Every wait ends at the latest when a host is found to be gone or silent. An answer whose handling was interrupted is
  handled again.
- No call waits for a place: during a search the other shares continue, and messages for the share without a host are
  kept until it has one. A search is bounded; if it finds no place, the share is lost.
- As with workers, a host that is lost repeatedly is replaced after increasing delays, and finally not at all.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from envherd.executor.cluster.errors import ClusterError
from envherd.executor.cluster.host import versions
from envherd.executor.cluster.orders import Built, Report, Share, Survey
from envherd.executor.cluster.ray_cluster import Connection, Place, check_versions, living_nodes, reserve, start_hosts
from envherd.executor.cluster.remote_share import Handler, RemoteShare, State
from envherd.executor.cluster.shares import Resources, divide
from envherd.executor.options import ExecutorOptions
from envherd.executor.pools.blueprint import spread
from envherd.executor.pools.crew import Blueprint
from envherd.executor.pools.error_messages import another_spec, not_replaced
from envherd.executor.pools.restarts import Restarts
from envherd.executor.sizing.probing import ProbeLimits, Subject
from envherd.workers import registries
from envherd.workers.errors import EnvherdError, WorkerLost

#: Seconds between checks of hosts that owe an answer.
_LOOK_S = 1.0
#: Seconds to wait if no call is under way whose answer could end the wait.
_PAUSE_S = 0.01
#: Seconds between queries whether Ray has found a place.
_ASK_S = 0.1


def processors_of(reports: Sequence[Report], bundles: Sequence[Resources]) -> list[int]:
    """Return how many processors each share may use."""
    return [
        max(1, min(report.cores, int(bundle.get("CPU", report.cores)) or report.cores))
        for report, bundle in zip(reports, bundles, strict=True)
    ]


def weights_of(reports: Sequence[Report], bundles: Sequence[Resources]) -> list[float]:
    """Return the weights by which envs are spread over shares."""
    return [bundle.get("CPU", 0) or report.cores for report, bundle in zip(reports, bundles, strict=True)]


class Fleet:
    """The hosts of one executor.

    Args:
        address: of the cluster.
        node_timeout_s: seconds without a sign of life after which a host counts as lost.
        options: of the executor.

    Attributes:
        places: one per host.
        bundles: resources that each has reserved.
        shares: one per host, once envs have been built.
        on_loss: called with a share that has lost its host or found no place, and the error.
        on_quiet: called when no answer has arrived for some time.
    """

    def __init__(self, address: str | None, node_timeout_s: float, options: ExecutorOptions) -> None:
        self.places: list[Place] = []
        self.bundles: list[Resources] = []
        self.shares: list[RemoteShare] = []
        self.on_loss: Callable[[RemoteShare, EnvherdError], None] = lambda *_: None
        self.on_quiet: Callable[[], None] = lambda: None
        self._node_timeout_s = node_timeout_s
        self._options = options
        self._restarts = Restarts(options)
        self._under_way: dict[Any, tuple[RemoteShare, Handler]] = {}
        self._asked_at = 0.0
        self._connection = Connection(address)

    # ---- from nodes to envs ------------------------------------------------------------------

    def reserve(
        self,
        ask: Callable[[Sequence[Resources]], list[Resources]],
        where: tuple[str, float, Mapping[str, Any] | None],
    ) -> None:
        """Reserve a place for every share.

        Args:
            ask: resources of the living nodes -> resources of each share.
            where: strategy, seconds to wait for room, and runtime environment; see `ray_cluster.reserve`.

        Raises:
            ClusterError: there is no room.
        """
        self.bundles = ask(living_nodes())
        self.places = reserve(self.bundles, *where)

    def start(self) -> list[Report]:
        """Start the hosts; return their reports.

        Raises:
            ClusterError: a host did not start, or has different versions than this process.
        """
        return start_hosts(self.places)

    def build(self, blueprint: Blueprint, num_workers: int | None) -> Blueprint:
        """Start the hosts and make them build their envs; return the blueprint with the blocks of all hosts' workers.

        Args:
            blueprint: of the whole batch; its blocks are not used.
            num_workers: on each node; None for one per processor of its share.

        Raises:
            ClusterError, FactoryError, WorkerLost, WorkerTimeout: the caller must close the fleet.
        """
        options = self._options
        reports = self.start()
        processors = processors_of(reports, self.bundles)
        counts = divide(len(blueprint.factories), weights_of(reports, self.bundles))
        first_env = first_worker = 0
        registered = registries.collect()
        for index, (count, report) in enumerate(zip(counts, reports, strict=True)):
            workers = min(count, num_workers or processors[index])
            span = slice(first_env, first_env + count)
            plan = Share(
                first_env_id=first_env,
                first_worker_id=first_worker,
                factories=blueprint.factories[span],
                env_kwargs=blueprint.env_kwargs[span],
                num_workers=workers,
                root_seed=blueprint.root_seed,
                preload=blueprint.preload,
                registered=registered,
                options=dataclasses.replace(options, poison=False, first_env_id=options.first_env_id + first_env),
            )
            self.shares.append(RemoteShare(index, plan, self.places[index], report, self._node_timeout_s))
            first_env, first_worker = first_env + count, first_worker + workers
        built = [(share, share.build()) for share in self.shares]
        for share, ref in built:
            share.take_built(self.get(share, ref))
        blocks = tuple(
            tuple(env_id + share.first_env_id for env_id in block)
            for share in self.shares
            for block in spread(share.num_envs, len(share.worker_ids))
        )
        return dataclasses.replace(blueprint, blocks=blocks)

    def survey(self, indices: Sequence[int], subject: Subject, limits: ProbeLimits) -> list[Survey]:
        """Make started hosts measure an env, all at the same time; return the results.

        Raises:
            ClusterError: a host was lost. FactoryError, EnvError, ProbeFailed: the env could not be measured.
        """
        try:
            found = ray.get([self.places[index].call("survey", subject, limits) for index in indices])
        except ray.exceptions.RayError as error:
            raise ClusterError(f"sizing failed: a node was lost meanwhile: {type(error).__name__}: {error}") from error
        for one in found:
            if isinstance(one, EnvherdError):
                raise one
        return list(found)

    def give_back(self) -> None:
        """End the hosts and release their places and the connection. Idempotent."""
        for share in self.shares:
            share.state = State.LOST
        if not ray.is_initialized():
            return
        for place in self.places:
            place.end_host()
        for place in self.places:
            place.close()
        self._connection.close()

    # ---- mail --------------------------------------------------------------------------------

    def send(self, share: RemoteShare, method: str, args: tuple[Any, ...], handler: Handler) -> None:
        """Call a method of a share's host, now or as soon as it has one; a handler gets the answer."""
        if share.is_moving:
            share.held.append((method, args, handler))
        else:
            self._under_way[share.call(method, *args)] = (share, handler)

    def request(self, share: RemoteShare, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of a share's host and wait for its answer; see `get`."""
        self.await_host(share)
        return self.get(share, share.call(method, *args, **kwargs))

    def get(self, share: RemoteShare, ref: Any) -> Any:
        """Wait for an answer of a share's host.

        Raises:
            WorkerLost: the host is gone, or silent.
            EnvherdError: the error that the host returned.
        """
        while not ray.wait([ref], timeout=_LOOK_S)[0]:
            silence = share.silence()
            if silence is not None:
                self.lose(share, silence)
                raise silence
        answer = self._open(share, ref)
        if isinstance(answer, EnvherdError):
            raise answer
        return answer

    def take(self, timeout_s: float | None) -> None:
        """Handle answers that have arrived; without any, wait up to `timeout_s` or until the next check of hosts."""
        soon = self.advance()
        refs = list(self._under_way)
        limit = _LOOK_S if timeout_s is None else min(_LOOK_S, max(0.0, timeout_s))
        limit = limit if soon is None else min(limit, soon)
        if not refs:
            if limit:
                time.sleep(_PAUSE_S)
                self.on_quiet()
            return
        ready, _ = ray.wait(refs, num_returns=1, timeout=limit)
        if ready and len(refs) > 1:
            ready, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
        for ref in ready:
            if ref in self._under_way:  # otherwise its host has just been lost
                share, handler = self._under_way[ref]
                try:
                    answer = self._open(share, ref)
                except WorkerLost:
                    continue
                handler(share, answer)  # before the ref is removed: after an interrupt here, it must be handled again
                self._under_way.pop(ref, None)
        if limit and not ready:
            self._look_around()

    def _open(self, share: RemoteShare, ref: Any) -> Any:
        """Return an answer, which may be an error; raise if its host is lost."""
        try:
            answer = ray.get(ref)
        except ray.exceptions.RayError as error:
            loss = share.gone(error)
            self._under_way.pop(ref, None)
            self.lose(share, loss)
            raise loss from None
        share.heard_at = time.monotonic()
        return answer

    def _look_around(self) -> None:
        """Check whether hosts that owe an answer still live."""
        for share in {share.share_id: share for share, _ in self._under_way.values()}.values():
            silence = share.silence()
            if silence is not None:
                self.lose(share, silence)
        self.on_quiet()

    # ---- losses and other places -------------------------------------------------------------

    def lose(self, share: RemoteShare, loss: EnvherdError) -> None:
        """Take a share's host out of service, and drop its pending answers."""
        if share.has_host:
            share.end_host(loss)
            self._under_way = {ref: entry for ref, entry in self._under_way.items() if entry[0] is not share}
            self.on_loss(share, loss)

    def begin_move(self, share: RemoteShare) -> None:
        """Begin to search another place for a share whose host is gone.

        Raises:
            EnvherdError: the share's loss, if there were too many restarts within the window, no living node is large
                enough, or the latest search found no place.
        """
        if share.state is State.REFUSED:
            share.state = State.LOST
            raise share.loss
        delay_s = self._restarts.next_delay_s(share.share_id)
        if delay_s is None:
            raise not_replaced(share.loss, self._options)
        if not delay_s and not share.home.begin_move():
            raise share.no_room()
        share.state = State.PAUSED if delay_s else State.SEARCHING
        share.search_at = time.monotonic() + delay_s

    def advance(self) -> float | None:
        """Check whether places have been found, and start hosts there; never waits.

        Returns:
            Seconds after which to call it again; None if there is no search.
        """
        moving = [share for share in self.shares if share.is_moving]
        if not moving:
            return None
        now = time.monotonic()
        if now - self._asked_at >= _ASK_S:
            self._asked_at = now
            for share in moving:
                self._look_for_place(share, now)
        return _ASK_S

    def _look_for_place(self, share: RemoteShare, now: float) -> None:
        is_found: bool | None = None
        if share.state is State.PAUSED and now >= share.search_at:
            if share.home.begin_move():
                share.state = State.SEARCHING
            else:
                is_found = False
        if share.state is State.SEARCHING:
            is_found = share.home.finish_move()
        if is_found:
            share.home.start_host()
            self._under_way[share.build()] = (share, self._take_rebuilt)
            held, share.held = share.held, []
            for call in held:
                self.send(share, *call)
        elif is_found is False:
            share.refuse()
            self.on_loss(share, share.loss)

    def await_host(self, share: RemoteShare) -> None:
        """Wait until a share that is being moved has a host, which may still be starting.

        Raises:
            WorkerLost: there is no place.
        """
        while share.is_moving:
            time.sleep(self.advance() or 0.0)
        if not share.has_host:
            raise share.loss

    def _take_rebuilt(self, share: RemoteShare, built: Built | EnvherdError) -> None:
        try:
            if isinstance(built, EnvherdError):
                raise built
            check_versions(versions(), [built.report])
            for env_id, before, now in zip(share.env_ids.tolist(), share.specs, built.specs, strict=True):
                if before != now:
                    difference = before.difference(now)
                    raise another_spec(env_id, difference)
        except EnvherdError as error:
            self.lose(share, error)
        else:
            share.take_built(built)
