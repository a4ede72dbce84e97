"""The hosts of one executor, as the driver sees them: calls and answers, losses, and successors.

Guarantees:
- Every wait ends at the latest when a host is found to be gone or silent.
- Answers are taken in the thread of the caller, one at a time. An answer whose handling was interrupted is handled
  again.
- With `on_worker_loss="restart"` a successor of a lost host, where Ray finds room, gets the calls that were not
  answered. No call waits for the search: the other hosts continue. A search is bounded. A host that is lost
  repeatedly is replaced after increasing delays, and finally not at all.
"""

from __future__ import annotations

import dataclasses
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import ray

from envherd.executor.cluster.host import versions
from envherd.executor.cluster.messages import Built, Report, Share
from envherd.executor.cluster.ray_cluster import (
    COME_UP_S,
    Connection,
    Place,
    check_versions,
    living_nodes,
    reserve,
    start_hosts,
)
from envherd.executor.cluster.shares import bundles_for, divide
from envherd.executor.options import ExecutorOptions
from envherd.executor.pools.crew import Blueprint
from envherd.executor.pools.error_messages import another_spec, merge_answers, not_replaced
from envherd.executor.pools.restarts import Restarts
from envherd.shm.slab import Slab, plan_slab
from envherd.shm.specs import EnvSpec
from envherd.workers import messages, registries
from envherd.workers.errors import EnvherdError, WorkerLost

log = logging.getLogger("envherd")

#: Seconds between checks of hosts that owe an answer, and of a search.
_LOOK_S, _SEARCH_S = 1.0, 0.1
#: Seconds without an answer after which the driver pings a host.
_PATIENCE_S = 2.0
#: Characters of Ray's error texts that are kept.
_MAX_LENGTH = 800
_COLORS = re.compile(r"\x1b\[[0-9;]*m")


class Call:
    """A call of a host's method.

    Args:
        host: of which host.
        method: its name.
        args: for it.
        take: called with this call and its answer, which may be an error.
        env_ids: of the batch, which the call steps, resets or rolls: a successor of the host gets it again.
        is_parked: a `send`, which `recv` waits for.

    Attributes:
        ref: Ray's reference of the answer; None while the host has no place.
        answer: kept for `Hosts.get`.
        is_answered: the answer was taken.
        is_dropped: the call of the user that made it was interrupted.
    """

    ref: Any = None
    answer: Any = None
    is_answered = is_dropped = False

    def __init__(
        self,
        host: Host,
        method: str,
        args: tuple[Any, ...],
        take: Callable[[Call, Any], None],
        env_ids: np.ndarray | None = None,
        *,
        is_parked: bool = False,
    ) -> None:
        self.host, self.method, self.args, self.take = host, method, args, take
        self.env_ids, self.is_parked = env_ids, is_parked


class Host:
    """A host, and its envs.

    Args:
        index: among the hosts.
        share: for the host.
        place: where it runs.
        report: of the host.

    Attributes:
        env_ids: int64 `[n]`, of the batch.
        worker_ids: of the batch.
        loss: the error that describes its loss, if it has no successor.
        is_searching: a place for its successor is being searched, from `search_at` (monotonic seconds) on, after the
            loss `reason`.
        calls: those without an answer, in their order.
        words, tally: see `Answer`, of the latest one.
        num_predecessors: hosts of the same envs that were lost.
    """

    loss: EnvherdError | None = None
    is_searching = False
    search_at = 0.0
    reason: EnvherdError
    tally: Any = 0

    def __init__(self, index: int, share: Share, place: Place, report: Report) -> None:
        self.index, self.share, self.place, self.report = index, share, place, report
        self.env_ids = np.arange(share.first_env_id, share.first_env_id + len(share.factories))
        self.worker_ids = range(share.first_worker_id, share.first_worker_id + share.num_workers)
        self.calls: list[Call] = []
        self.words: np.ndarray | None = None
        self.num_predecessors = 0
        self.is_building = True
        self.listen()

    def listen(self) -> None:
        """Begin to expect signs of life."""
        self.heard_at = time.monotonic()
        self._ping: Any = None
        self._pinged_at = 0.0

    def send(self, call: Call) -> None:
        """Send a call to the host; it carries out calls in this order."""
        call.ref = self.place.call(call.method, *call.args)

    def silence(self, timeout_s: float) -> WorkerLost | None:
        """Return the loss of a host that has been silent for too long; ping a silent one."""
        now = time.monotonic()
        if self._ping is not None:
            if ray.wait([self._ping], num_returns=1, timeout=0)[0]:
                ping, self._ping = self._ping, None
                try:
                    ray.get(ping)
                except ray.exceptions.RayError as error:
                    return self.gone(error)
                self.heard_at = now
            elif now - self._pinged_at > (limit := COME_UP_S if self.is_building else timeout_s):
                return self.lost(f"it gave no sign of life for {limit:g} s")
        if self._ping is None and now - self.heard_at > _PATIENCE_S:
            self._ping, self._pinged_at = self.place.call("ping"), now
        return None

    def gone(self, error: BaseException) -> WorkerLost:
        """Return the loss of a host that Ray says is gone."""
        lines = [line.strip() for line in _COLORS.sub("", str(error)).splitlines() if line.strip()]
        text = " ".join(lines)
        text = text if len(text) < _MAX_LENGTH else f"{text[: _MAX_LENGTH // 2]} ... {text[-_MAX_LENGTH // 2 :]}"
        return self.lost(f"{type(error).__name__}: {text}")

    def lost(self, why: str) -> WorkerLost:
        """Return the error for a lost host."""
        first, last = self.worker_ids[0], self.worker_ids[-1]
        advice = " ExecutorOptions(on_worker_loss='restart') moves a lost node's envs to another."
        return WorkerLost(
            f"the call failed: {self.report.place} is lost with workers {first}-{last} (envs {self.env_ids[0]}-"
            f"{self.env_ids[-1]}): {why}." + ("" if self.share.options.on_worker_loss == "restart" else advice),
            env_ids=tuple(self.env_ids.tolist()),
            worker_id=first,
            node_id=self.report.node_id,
            phase="call",
        )


class Hosts:
    """The hosts of one executor; takes the place of a `Pool`.

    Args:
        address: of the cluster.
        node_timeout_s: seconds without a sign of life after which a host counts as lost.
        options: of the executor.

    Attributes:
        all: every host, in the order of its envs.
        num_envs, num_workers, specs: of the whole batch.
        plan, slab: memory of the driver for envs with these specs; of its words, "episode" and "answered_ns" are kept.
        tally: see `Answer`, of lost hosts and their losses.
        on_loss: called with a host that was lost.
    """

    def __init__(self, address: str | None, node_timeout_s: float, options: ExecutorOptions) -> None:
        self.all: list[Host] = []
        self.places: list[Place] = []
        self.tally = np.zeros(4, np.int64)
        self.on_loss: Callable[[Host], None] = lambda _: None
        self.on_built: Callable[[Host, Built], None] = lambda *_: None
        self.options = options
        self._node_timeout_s = node_timeout_s
        self._restarts = Restarts(options)
        self._is_up = self._is_closed = False
        self._asked_at = 0.0
        self._connection = Connection(address)

    # ---- the start ---------------------------------------------------------------------------

    def start(  # where the hosts run, and what on each
        self,
        blueprint: Blueprint,
        num_nodes: int | None,
        resources_per_node: Mapping[str, float] | Sequence[Mapping[str, float]] | None,
        envs_per_node: Sequence[int] | None,
        num_workers: int | None,
        where: tuple[str, float, Mapping[str, Any] | None],
    ) -> list[Built]:
        """Start the hosts and make them build their envs; see `RayParallelEnv`.

        Args:
            blueprint: of the whole batch; its blocks are not used.
            num_nodes: of hosts; None for one on every node that has room.
            resources_per_node: to reserve.
            envs_per_node: of each host; None for a number in proportion to its processors.
            num_workers: of each host; None for one per processor.
            where: strategy, seconds to wait for room, and runtime environment; see `ray_cluster.reserve`.

        Raises:
            ClusterError, FactoryError, WorkerLost, WorkerTimeout: the caller must call `close`.
        """
        num_envs = len(blueprint.factories)
        bundles = bundles_for(living_nodes(), num_envs, num_nodes, resources_per_node)
        self.places = reserve(bundles, *where)
        reports = start_hosts(self.places)
        weights = [bundle.get("CPU", 0) or report.cores for report, bundle in zip(reports, bundles, strict=True)]
        counts = divide(num_envs, weights) if envs_per_node is None else list(envs_per_node)
        if len(counts) != len(reports) or sum(counts) != num_envs or min(counts) < 1:
            raise ValueError(
                f"RayParallelEnv failed: expected envs_per_node to spread {num_envs} envs over {len(reports)} nodes, "
                f"at least one each, got {counts}."
            )
        first_env = first_worker = 0
        for index, (count, report, weight) in enumerate(zip(counts, reports, weights, strict=True)):
            workers = min(count, num_workers or max(1, min(report.cores, int(weight) or report.cores)))
            span = slice(first_env, first_env + count)
            first_env_id = self.options.first_env_id + first_env
            share = Share(
                first_env_id=first_env,
                first_worker_id=first_worker,
                factories=blueprint.factories[span],
                env_kwargs=blueprint.env_kwargs[span],
                num_workers=workers,
                root_seed=blueprint.root_seed,
                preload=blueprint.preload,
                registered=registries.collect(),
                options=dataclasses.replace(self.options, poison=False, first_env_id=first_env_id),
            )
            self.all.append(Host(index, share, self.places[index], report))
            first_env, first_worker = first_env + count, first_worker + workers
        built: list[Built] = [self.get(call) for call in [self.call(host, "build", host.share) for host in self.all]]
        self.num_envs, self.num_workers = num_envs, first_worker
        self.host_of = np.repeat(np.arange(len(counts)), counts)
        self.specs: list[EnvSpec] = [spec for one in built for spec in one.specs]
        self.plan = plan_slab(self.specs, self.num_workers, 1)
        self.slab = Slab(self.plan, np.zeros(self.plan.nbytes, np.uint8))
        for host in self.all:
            host.is_building = False
        self._is_up = True
        return built

    # ---- calls -------------------------------------------------------------------------------

    def parts(self, env_ids: np.ndarray) -> list[tuple[Host, np.ndarray]]:
        """Return the hosts of some envs, and the positions in `env_ids` of each one's."""
        hosts = self.host_of[env_ids]
        return [(self.all[index], np.flatnonzero(hosts == index)) for index in np.unique(hosts).tolist()]

    def call(self, host: Host, method: str, *args: Any) -> Call:
        """Call a method of a host; `get` returns its answer."""
        return self.post(Call(host, method, args, _keep))

    def post(self, call: Call) -> Call:
        """Send a call to its host, now or as soon as it has a place."""
        host = call.host
        if not host.calls:
            host.heard_at = time.monotonic()
        host.calls.append(call)
        if host.loss is not None:
            self._answer(call, host.loss)
        elif not host.is_searching:
            host.send(call)
        return call

    def get(self, call: Call) -> Any:
        """Wait for the answer to a call.

        Raises:
            EnvherdError: the host returned it, or is lost.
        """
        self.wait_for([call])
        if isinstance(call.answer, EnvherdError):
            raise call.answer
        return call.answer

    def wait_for(self, calls: Sequence[Call]) -> None:
        """Wait until some calls are answered."""
        while missing := [call for call in calls if not call.is_answered]:
            self.wait(missing, len(missing), None)

    def wait(self, calls: Sequence[Call], count: int, timeout_s: float | None) -> None:
        """Take the answers to some calls; without any, wait until `count` of them, `timeout_s` or the next check."""
        self._search()
        builds = [host.calls[0] for host in self.all if host.is_building and host.calls]
        watched = [call for call in dict.fromkeys([*builds, *calls]) if call.ref is not None]
        limit = _LOOK_S if len(watched) >= len(calls) else _SEARCH_S
        limit = limit if timeout_s is None else min(limit, max(0.0, timeout_s))
        if not watched:
            time.sleep(limit)
            return
        refs = {call.ref: call for call in watched}
        count = 1 if builds else min(count, len(refs))
        ready, _ = ray.wait([*refs], num_returns=count, timeout=limit)
        if count < len(refs):
            ready, _ = ray.wait([*refs], num_returns=len(refs), timeout=0)
        for ref in ready:
            self._open(refs[ref], ref)
        if not ready and limit:
            for host in self.all:
                if host.calls and not host.is_searching and (loss := host.silence(self._node_timeout_s)):
                    self._lose(host, loss)

    def _open(self, call: Call, ref: Any) -> None:
        try:
            answer = ray.get(ref)
        except ray.exceptions.RayError as error:
            if call.ref is ref:
                self._lose(call.host, call.host.gone(error))
            return
        if call.ref is ref:  # otherwise its host has been lost since
            call.host.heard_at = time.monotonic()
            self._answer(call, answer)

    def _answer(self, call: Call, answer: Any) -> None:
        call.take(call, answer)
        call.is_answered = True
        if call in call.host.calls:
            call.host.calls.remove(call)

    # ---- losses ------------------------------------------------------------------------------

    def refuse_lost(self, env_ids: np.ndarray) -> None:
        """Raise if the host of some envs is lost, unless it can be replaced now; before any command is sent."""
        for index in np.unique(self.host_of[env_ids]).tolist():
            host = self.all[index]
            if host.loss is not None:
                if self.options.on_worker_loss != "restart":
                    raise host.loss
                self._replace(host, host.loss)
                host.loss = None

    def _lose(self, host: Host, loss: EnvherdError) -> None:
        """Take a host out of service, and replace it if that is allowed."""
        host.place.end_host()
        for call in host.calls:
            call.ref = None
        if not self._is_up:
            self._give_up(host, loss)
            return
        self.tally += host.tally
        self.tally[0] += len(host.worker_ids)
        host.tally = 0
        self.on_loss(host)
        for call in [call for call in host.calls if call.env_ids is None]:
            self._answer(call, loss)  # a question: its answer would be that of another env
        if self.options.on_worker_loss != "restart":
            self._give_up(host, loss)
            return
        try:
            self._replace(host, loss)
        except EnvherdError as error:
            self._give_up(host, error)

    def _give_up(self, host: Host, loss: EnvherdError) -> None:
        host.loss, host.is_searching = loss, False
        for call in list(host.calls):
            self._answer(call, loss)

    def _replace(self, host: Host, loss: EnvherdError) -> None:
        """Begin to search a place for a successor.

        Raises:
            EnvherdError: there were too many restarts within the window, or no living node is large enough.
        """
        delay_s = self._restarts.next_delay_s(host.index)
        if delay_s is None:
            raise not_replaced(loss, self.options)
        if not host.place.begin_move(delay_s):
            raise not_moved(loss)
        host.is_searching, host.search_at, host.reason = True, time.monotonic() + delay_s, loss
        self._search()

    def _search(self) -> None:
        """Check whether places have been found, and start hosts there; never waits."""
        now = time.monotonic()
        if now - self._asked_at < _SEARCH_S:
            return
        for host in self.all:
            if not host.is_searching or now < host.search_at:
                continue
            self._asked_at = now
            is_found = host.place.finish_move()
            if is_found:
                self._start_successor(host)
            elif is_found is False:
                self._give_up(host, not_moved(host.reason))

    def _start_successor(self, host: Host) -> None:
        host.place.start_host()
        host.is_searching, host.is_building = False, True
        host.num_predecessors += 1
        host.listen()
        build = Call(host, "build", (dataclasses.replace(host.share, words=host.words),), self._take_rebuilt)
        host.calls.insert(0, build)
        for call in host.calls:
            host.send(call)

    def _take_rebuilt(self, call: Call, built: Built | EnvherdError) -> None:
        host = call.host
        try:
            if isinstance(built, EnvherdError):
                raise built
            check_versions(versions(), [built.report])
            for env_id, now in zip(host.env_ids.tolist(), built.specs, strict=True):
                if self.specs[env_id] != now:
                    raise another_spec(env_id, self.specs[env_id].difference(now))
        except EnvherdError as error:
            host.calls.remove(call)
            self._lose(host, error)
        else:
            host.report, host.is_building = built.report, False
            self.on_built(host, built)

    # ---- what executors call of a pool -------------------------------------------------------

    def seed(self, root_seed: int, episodes: Sequence[int] | None = None) -> None:
        """Use a new root seed; see `Pool.seed`."""
        self.refuse_lost(np.arange(self.num_envs))
        self.slab.words["episode"][:] = 0 if episodes is None else episodes
        calls = []
        for host in self.all:
            host.share = dataclasses.replace(host.share, root_seed=root_seed)
            own = None if episodes is None else [episodes[i] for i in host.env_ids.tolist()]
            if host.words is not None:
                host.words[0] = 0 if own is None else own
            calls.append(self.call(host, "seed", root_seed, own))
        for call in calls:
            self.get(call)

    def ask(self, what: str, env_ids: list[int], **question: Any) -> dict[int, Any]:
        """Send envs a request other than a step; see `Pool.ask`."""
        self.refuse_lost(np.array(env_ids, np.int64))
        args = question.pop("args", ())
        asked = {}
        for host, positions in self.parts(np.array(env_ids, np.int64)):
            own = tuple(args[position] for position in positions) if what in messages.PER_ENV else args
            local = [env_ids[position] - host.share.first_env_id for position in positions]
            asked[host.index] = self.call(host, "ask", what, local, {**question, "args": own})

        def take(index: int) -> dict[int, Any]:
            first = self.all[index].share.first_env_id
            return {first + env_id: value for env_id, value in self.get(asked[index]).items()}

        return merge_answers(asked, take)

    def worker_output(self, worker_id: int) -> str:
        """Return the kept part of a worker's output."""
        for host in self.all:
            if worker_id in host.worker_ids:
                return str(self.get(self.call(host, "worker_output", worker_id - host.worker_ids[0])))
        raise IndexError(worker_id)

    def close(self, timeout_s: float | None = None) -> None:
        """Close the envs, end the hosts and release their places, within `timeout_s` in all. Never raises."""
        if self._is_closed:
            return
        self._is_closed = True
        limit = self.options.close_timeout_s if timeout_s is None else timeout_s
        try:
            if ray.is_initialized() and limit > 0:
                living = [host for host in self.all if host.loss is None and not host.is_searching]
                refs = [host.place.call("close", limit) for host in living]
                ray.wait(refs, num_returns=len(refs), timeout=limit) if refs else None
        except TimeoutError:  # of the program's signal handler: `ray.wait` raises none
            raise
        except Exception:
            log.debug("closing the hosts failed", exc_info=True)
        finally:
            self._release()

    def _release(self) -> None:
        if not ray.is_initialized():
            return
        for place in self.places:
            place.end_host()
        for place in self.places:
            place.close()
        self._connection.close()


def not_moved(loss: EnvherdError) -> WorkerLost:
    """Return the loss of a host for which Ray has found no place."""
    return WorkerLost(f"{loss} It was not replaced: no living node has room for its share.", **loss.context)


def _keep(call: Call, answer: Any) -> None:
    """Keep an answer for `Hosts.get`."""
    call.answer = answer
