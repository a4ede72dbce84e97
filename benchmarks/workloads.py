"""The workloads: envs, their number, the contenders, and the duration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from benchmarks import bounds, ours, peers
from benchmarks.pools import Contender, Job
from benchmarks.rounds import Plan
from benchmarks.work import NamedFactory, SteadyFactory

ALL = {
    one.name: one for one in (*bounds.CONTENDERS, *ours.CONTENDERS, *peers.CONTENDERS)
}
PEERS = tuple(dict.fromkeys(one.peer for one in peers.CONTENDERS))

_PROCESSES = (
    peers.GYMNASIUM_ASYNC,
    peers.SB3_SUBPROC,
    peers.TORCHRL_PARALLEL,
    peers.TIANSHOU,
    peers.PUFFERLIB,
)
_IN_PROCESS = (peers.GYMNASIUM_SYNC, peers.SB3_DUMMY, peers.TORCHRL_SERIAL)
_USUAL = (bounds.IDEAL, bounds.SERIAL, ours.OURS, *_PROCESSES)
_QUICK_LEFT_OUT = (
    peers.TORCHRL_ASYNC,
    peers.TORCHRL_SERIAL,
    peers.SB3_DUMMY,
    ours.WIDE,
)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One table.

    Attributes:
        name: for `--only`, and in the JSON.
        title: of its table.
        contenders: names, in the order of the table.
        reference: our contender in the ratios.
        make_job: calibration (iterations per microsecond) -> what to run; the number of workers is filled in.
        slot_s: seconds of a slot, long enough for episode ends.
        num_rounds: of a full run.
        limit_s: seconds for all in a full run.
        judged_by: "rounds" takes the median over rounds, "totals" all rounds together, for unevenly spread work.
        minutes: that a full run takes on a quiet machine with two cores.
    """

    name: str
    title: str
    contenders: tuple[str, ...]
    make_job: Callable[[float], Job]
    reference: str = ours.OURS
    slot_s: float = 0.25
    num_rounds: int = 12
    limit_s: float = 420.0
    judged_by: Literal["rounds", "totals"] = "rounds"
    minutes: float = 2.0

    def plan(self, num_rounds: int | None, *, is_quick: bool) -> Plan:
        """Return the plan of the measurement."""
        if is_quick:
            return Plan(num_rounds or 3, min(0.15, self.slot_s), 1, 25.0)
        return Plan(num_rounds or self.num_rounds, self.slot_s, 4, self.limit_s)

    def job(self, calibration: float, num_workers: int) -> Job:
        """Return the job for a number of workers."""
        return replace(self.make_job(calibration), num_workers=num_workers)

    def chosen(self, only_peers: tuple[str, ...], *, is_quick: bool) -> list[Contender]:
        """Return its contenders without unrequested peers; a quick run has only the main ones."""
        peers_wanted = only_peers or (QUICK_PEERS if is_quick else PEERS)
        left_out = _QUICK_LEFT_OUT if is_quick and not only_peers else ()
        found = [ALL[name] for name in self.contenders if name not in left_out]
        return [one for one in found if one.kind != "peer" or one.peer in peers_wanted]


def _steady(
    num_envs: int = 8, us: float = 0.0, **kwargs: Any
) -> Callable[[float], Job]:
    def make(calibration: float) -> Job:
        factory = SteadyFactory(mean=us * calibration, **kwargs)
        return Job(make_env=factory, num_envs=num_envs)

    return make


def _cartpole(_calibration: float) -> Job:
    from envherd.workers.adapters.named import NamedFactory

    return Job(make_env=NamedFactory("gymnasium", "CartPole-v1"), has_ends=True)


def _with_infos(
    name: str, wrapper: str = "", num_envs: int = 8
) -> Callable[[float], Job]:
    return lambda _: Job(
        make_env=NamedFactory(name, wrapper),
        num_envs=num_envs,
        has_ends="CartPole" in name,
    )


def _melting_pot(
    name: str, num_envs: int = 8, episode: int = 0
) -> Callable[[float], Job]:
    def make(_calibration: float) -> Job:
        from envherd.executor import MeltingPotFactory

        factory = MeltingPotFactory(name, max_steps=episode or None)
        return Job(
            make_env=factory,
            num_envs=num_envs,
            family="meltingpot",
            has_ends=True,
            episode=episode,
        )

    return make


_IMAGE: dict[str, Any] = {"shape": (84, 84, 4), "dtype": "uint8"}
_ZERO_COST = (ours.AUTO, ours.VIEWS, ours.ROLLOUT, ours.SERIAL, ours.FIRST_K)
_MELTING_POT = (
    bounds.IDEAL,
    ours.OURS,
    ours.FIRST_K,
    peers.TORCHRL_PARALLEL,
)
_HOSTS = (
    bounds.IDEAL,
    bounds.SERIAL,
    ours.AS_GYMNASIUM_WIDE,
    peers.GYMNASIUM_ASYNC,
    peers.GYMNASIUM_SYNC,
    peers.PUFFERLIB,
)
_SB3 = (ours.AS_SB3_WIDE, peers.SB3_SUBPROC, peers.SB3_DUMMY)
_WHOLE_EPISODES = (
    bounds.INSTALLED,
    ours.SERIAL,
    ours.OURS,
    ours.AS_TORCHRL,
    peers.TORCHRL_PARALLEL,
)
#: Of Melting Pot: name, substrate, and minutes that a run takes.
_EPISODES = (
    ("commons_harvest", "commons_harvest__open", 3.0),
    ("clean_up", "clean_up", 3.0),
    ("coins", "coins", 2.0),
    ("territory", "territory__rooms", 5.0),
    ("prisoners_dilemma", "prisoners_dilemma_in_the_matrix__arena", 3.0),
)
_LUMPY: dict[str, Any] = {"judged_by": "totals", "slot_s": 0.3}

WORKLOADS = (
    Workload(
        name="tiny",
        title="8 envs that cost nothing, 4 floats",
        contenders=(*_USUAL, *_ZERO_COST, *_IN_PROCESS, peers.TORCHRL_ASYNC),
        reference=ours.AUTO,
        make_job=_steady(),
        minutes=3.0,
    ),
    Workload(
        name="tiny32",
        title="32 envs that cost nothing, 4 floats",
        contenders=(bounds.SERIAL, ours.OURS, ours.AUTO, *_PROCESSES),
        reference=ours.AUTO,
        make_job=_steady(32),
        minutes=2.5,
    ),
    Workload(
        name="image",
        title="8 envs that cost nothing, 84 x 84 x 4 bytes",
        contenders=(*_USUAL, *_ZERO_COST, *_IN_PROCESS),
        reference=ours.AUTO,
        make_job=_steady(**_IMAGE),
        minutes=2.5,
    ),
    Workload(
        name="w200",
        title="8 envs of 0.2 ms a step",
        contenders=(
            *_USUAL,
            ours.WIDE,
            ours.FIRST_K,
            *_IN_PROCESS,
            peers.TORCHRL_ASYNC,
        ),
        make_job=_steady(us=200.0),
        minutes=2.5,
    ),
    Workload(
        name="w1000",
        title="8 envs of 1 ms a step",
        contenders=(*_USUAL, ours.WIDE, ours.FIRST_K, peers.TORCHRL_ASYNC),
        make_job=_steady(us=1000.0),
        minutes=2.5,
    ),
    Workload(
        name="lognormal",
        title="8 envs of 0.2 ms on average, lognormal with sigma 1",
        contenders=(*_USUAL, ours.WIDE, ours.FIRST_K, peers.TORCHRL_ASYNC),
        reference=ours.FIRST_K,
        make_job=_steady(us=200.0, law="lognormal"),
        **_LUMPY,
    ),
    Workload(
        name="spikes",
        title="8 envs of 0.2 ms on average, 1 % of steps 100 times the others",
        contenders=(*_USUAL, ours.WIDE, ours.FIRST_K, peers.TORCHRL_ASYNC),
        reference=ours.FIRST_K,
        make_job=_steady(us=200.0, law="spikes"),
        **_LUMPY,
    ),
    Workload(
        name="sleep",
        title="8 envs that sleep for 1 ms",
        contenders=(bounds.SERIAL, ours.OURS, ours.WIDE, *_PROCESSES),
        reference=ours.WIDE,
        make_job=_steady(sleep_s=1e-3),
    ),
    Workload(
        name="cartpole",
        title="8 CartPoles, episodes of about nine steps",
        reference=ours.ONE,
        contenders=(
            *_USUAL,
            ours.ONE,
            ours.SERIAL,
            ours.AS_GYMNASIUM,
            ours.AS_SB3,
            ours.AS_GYMNASIUM_WIDE,
            ours.AS_SB3_WIDE,
            ours.AS_TORCHRL,
            *_IN_PROCESS,
            peers.TORCHRL_ASYNC,
            peers.ENVPOOL,
        ),
        make_job=_cartpole,
        minutes=3.0,
    ),
    Workload(
        name="halfcheetah",
        title="4 HalfCheetahs, infos in every step",
        contenders=(*_HOSTS, *_SB3),
        reference=ours.AS_GYMNASIUM_WIDE,
        make_job=_with_infos("HalfCheetah-v5", num_envs=4),
    ),
    Workload(
        name="halfcheetah_monitor",
        title="4 HalfCheetahs with SB3's Monitor",
        contenders=(bounds.IDEAL, bounds.SERIAL, *_SB3),
        reference=ours.AS_SB3_WIDE,
        make_job=_with_infos("HalfCheetah-v5", "monitor", num_envs=4),
    ),
    Workload(
        name="statistics",
        title="8 CartPoles with Gymnasium's RecordEpisodeStatistics",
        contenders=_HOSTS,
        reference=ours.AS_GYMNASIUM_WIDE,
        make_job=_with_infos("CartPole-v1", "statistics"),
    ),
    Workload(
        name="monitor",
        title="8 CartPoles with SB3's Monitor",
        contenders=(bounds.IDEAL, bounds.SERIAL, *_SB3),
        reference=ours.AS_SB3_WIDE,
        make_job=_with_infos("CartPole-v1", "monitor"),
    ),
    Workload(
        name="pong",
        title="8 Atari Pongs with preprocessing and frame stack, infos in every step",
        contenders=(*_HOSTS, *_SB3),
        reference=ours.AS_GYMNASIUM_WIDE,
        make_job=_with_infos("ale_py:ALE/Pong-v5", "atari"),
        slot_s=0.5,
    ),
    Workload(
        name="commons_harvest",
        title="Melting Pot commons_harvest__open, 8 envs, with resets",
        contenders=_MELTING_POT,
        reference=ours.FIRST_K,
        make_job=_melting_pot("commons_harvest__open"),
        slot_s=8.0,
        num_rounds=10,
        limit_s=900.0,
        judged_by="totals",
        minutes=9.0,
    ),
    Workload(
        name="clean_up",
        title="Melting Pot clean_up, 8 envs, with resets",
        contenders=_MELTING_POT,
        reference=ours.FIRST_K,
        make_job=_melting_pot("clean_up"),
        slot_s=10.0,
        num_rounds=10,
        limit_s=1200.0,
        judged_by="totals",
        minutes=11.0,
    ),
    *(
        Workload(
            name=f"whole_{name}",
            title=f"Melting Pot {substrate}, 2 envs, whole episodes of 1,000 steps",
            contenders=_WHOLE_EPISODES,
            make_job=_melting_pot(substrate, num_envs=2, episode=1000),
            num_rounds=3,
            limit_s=3600.0,
            judged_by="totals",
            minutes=minutes,
        )
        for name, substrate, minutes in _EPISODES
    ),
)
QUICK, QUICK_PEERS = ("tiny", "spikes", "cartpole"), ("gymnasium", "sb3", "torchrl")
