"""Sizing's decision as a table, without processes: which settings are run, which is chosen, and what is reported."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from envherd.executor.machine.machine import Cgroup, Machine
from envherd.executor.sizing.confirming import speeds
from envherd.executor.sizing.probe import step_figures
from envherd.executor.sizing.recommending import decide
from envherd.executor.sizing.rule import (
    DoesNotFit,
    Goal,
    Limits,
    Measurement,
    Setting,
    settings_for,
)
from envherd.shm.slab import NUM_BINS, bin_of

GIB, MIB = 2**30, 2**20
WORKERS_ONLY = Goal(workers_only=True)
ONE, TWO = (Setting(num_envs=8, num_workers=count) for count in (1, 2))


def machine_of(num_cpus=8, *, memory=64 * GIB, **changes):
    cpus = tuple(range(num_cpus))
    plain = Machine(
        cpus=cpus, num_cpus=num_cpus, physical_cores=num_cpus, cgroup=Cgroup(),
        memory_total=memory, memory_free=memory, shm_total=None, shm_free=None,
        files_left=1014, processes_left=None, address_space=None, load=0.0, cpu_pressure=0.0,
    )  # fmt: skip
    return replace(plain, **changes)


def measured_of(step_s=1e-3, **changes):
    plain = Measurement(
        row_bytes=200, is_batch=False, build_s=0.1, build_further_s=0.1,
        first_reset_s=10 * step_s, reset_mean_s=10 * step_s,
        step_median_s=step_s, step_p99_s=step_s, step_mean_s=step_s, cpu_per_step_s=step_s,
        hidden_cpu_share=0.0, num_threads=0, steps_measured=1000, end_share=0.001, contention=0.0,
        worker_bytes=25 * MIB, further_env_bytes=10 * MIB, shared_bytes=30 * MIB, grown_per_1000_steps_bytes=0,
    )  # fmt: skip
    return replace(plain, **changes)


PLAIN, CHEAP = measured_of(), measured_of(1e-5)
WAITING = measured_of(cpu_per_step_s=0.1e-3)
UNEVEN = measured_of(step_p99_s=20e-3, step_mean_s=1.2e-3)
COSTLY = measured_of(end_share=0.02, reset_mean_s=0.2)
ALONE = replace(CHEAP, why_alone="one at a time")
TWO_CPUS, EIGHT_ENVS = machine_of(2), Goal(num_envs=8)
#: Speeds of all settings for eight envs on two processors, the rule's choice first.
SPEEDS = {
    "8 envs on 2 workers": 1000.0,
    "SerialEnv of 8 envs": 500.0,
    "8 envs on 1 worker": 500.0,
}


def two(speed, *, busy=1.0, **others):
    """Return the speeds, with another one of two workers."""
    return {
        **SPEEDS,
        "8 envs on 2 workers": (speed, busy),
        **{name.replace("_", " "): x for name, x in others.items()},
    }


#: Name -> (env, machine, goal, {setting: its speed, or (speed, busy share), or None if it does not fit}, the chosen
#: one, what binds, a part of the sentences). The settings are all that are run, in this order.
DECISIONS = {
    # ---- the rule ----
    "one processor": (
        PLAIN, machine_of(1), Goal(), {"SerialEnv of 4 envs": 900.0, "4 envs on 1 worker": 1000.0},
        "4 envs on 1 worker", "cores", "cores bind: 1 may be used",
    ),
    "half a processor": (
        CHEAP, machine_of(1, cgroup=Cgroup(cpu_quota=0.5)), EIGHT_ENVS,
        {"SerialEnv of 8 envs": 100.0, "8 envs on 1 worker": 80.0},
        "SerialEnv of 8 envs", "quota", "allows 0.5 cores' worth of time, although 1 processor can be seen",
    ),
    "one env": (
        PLAIN, machine_of(), Goal(num_envs=1), {"SerialEnv of 1 env": 900.0, "1 env on 1 worker": 800.0},
        "SerialEnv of 1 env", "env step", "makes 900 env-steps/s, 1 env on 1 worker 800. An env that crashes",
    ),
    "one processor, workers only": (
        PLAIN, machine_of(1), WORKERS_ONLY, {"4 envs on 1 worker": 1.0}, "4 envs on 1 worker", "cores", "",
    ),
    "one processor, workers fixed": (
        PLAIN, machine_of(1), Goal(num_workers=3), {"12 envs on 3 workers": 1.0}, "12 envs on 3 workers", "cores", "",
    ),
    "one processor, envs that wait": (
        WAITING, machine_of(1), Goal(num_envs=6),
        {"6 envs on 6 workers": 600.0, "SerialEnv of 6 envs": 100.0, "6 envs on 3 workers": 300.0},
        "6 envs on 6 workers", "waiting", "free for 90% of a step",
    ),
    "one processor, short steps that wait": (
        measured_of(3e-6, cpu_per_step_s=1e-6), machine_of(1), Goal(num_envs=4),
        {"SerialEnv of 4 envs": 10.0, "4 envs on 1 worker": 5.0, "4 envs on 3 workers": 5.0},
        "SerialEnv of 4 envs", "env step", "",
    ),
    "envs that wait": (
        WAITING, TWO_CPUS, Goal(),
        {"80 envs on 20 workers": 9.0, "SerialEnv of 4 envs": 1.0, "40 envs on 10 workers": 5.0},
        "80 envs on 20 workers", "waiting", "more workers than cores pay",
    ),
    "envs that wait almost always": (
        measured_of(cpu_per_step_s=1e-6), TWO_CPUS, WORKERS_ONLY,
        {"128 envs on 32 workers": 9.0, "64 envs on 16 workers": 8.8}, "64 envs on 16 workers", "waiting", "",
    ),
    "a short batch": (
        CHEAP, machine_of(), EIGHT_ENVS,
        {"8 envs on 1 worker": 900.0, "SerialEnv of 8 envs": 1000.0, "8 envs on 8 workers": 800.0},
        "SerialEnv of 8 envs", "env step", "",
    ),
    "short steps, many envs": (
        CHEAP, machine_of(), Goal(num_envs=64),
        {"64 envs on 8 workers": 9.0, "SerialEnv of 64 envs": 3.0, "64 envs on 4 workers": 8.0},
        "64 envs on 8 workers", "cores", "cores bind: 8 may be used; workers are busy for 100%",
    ),
    "short steps, envs free": (
        CHEAP, machine_of(2, physical_cores=1), Goal(),
        {"128 envs on 2 workers": 2.0, "SerialEnv of 64 envs": 1.0, "64 envs on 1 worker": 1.0},
        "128 envs on 2 workers", "cores", "2 may be used, 1 of them hyper-threads",
    ),
    "a quota": (
        PLAIN, machine_of(8, cgroup=Cgroup(cpu_quota=2.5)), EIGHT_ENVS,
        {"8 envs on 3 workers": 2.5, "SerialEnv of 8 envs": 1.0, "8 envs on 2 workers": 2.0},
        "8 envs on 3 workers", "quota", "allows 2.5 cores' worth of time, although 8 processors",
    ),
    "steps of 100 µs": (
        measured_of(1e-4), TWO_CPUS, WORKERS_ONLY, {"32 envs on 2 workers": 2.0, "16 envs on 1 worker": 1.0},
        "32 envs on 2 workers", "cores", "",
    ),
    "workers fixed": (
        CHEAP, machine_of(), Goal(num_envs=8, num_workers=3), {"8 envs on 3 workers": 1.0},
        "8 envs on 3 workers", "cores", "",
    ),
    "more workers fixed than envs": (
        PLAIN, machine_of(64), Goal(num_envs=8, num_workers=9), {"8 envs on 8 workers": 1.0},
        "8 envs on 8 workers", "num_envs", "8 envs cannot use 64 cores",
    ),
    "envs apart": (
        ALONE, TWO_CPUS, Goal(num_envs=4), {"4 envs on 4 workers": 1.0},
        "4 envs on 4 workers", "cores", "each env needs its own worker: one at a time",
    ),
    "envs apart and free": (ALONE, TWO_CPUS, Goal(), {"2 envs on 2 workers": 1.0}, "2 envs on 2 workers", "cores", ""),
    "uneven steps": (
        UNEVEN, TWO_CPUS, Goal(),
        {"8 envs on 2 workers, first-K": 1.1, "SerialEnv of 4 envs": 0.5, "8 envs on 2 workers": 1.0,
         "4 envs on 1 worker, first-K": 0.7},
        "8 envs on 2 workers, first-K", "cores", "first-K pays: use send() and recv(min_envs=num_envs // 2)",
    ),
    "steps of a worker that is stopped": (
        measured_of(step_p99_s=20e-3), TWO_CPUS, EIGHT_ENVS, two(1000.0), "8 envs on 2 workers", "cores", "",
    ),
    "uneven short steps": (
        measured_of(1e-5, step_p99_s=1e-4, step_mean_s=1.2e-5), TWO_CPUS, replace(WORKERS_ONLY, num_envs=8),
        {"8 envs on 1 worker": 1.0, "8 envs on 2 workers": 1.0}, "8 envs on 1 worker", "cores", "",
    ),
    "uneven steps, workers only": (
        UNEVEN, TWO_CPUS, WORKERS_ONLY, {"8 envs on 2 workers": (1.0, 0.4), "4 envs on 1 worker": 0.5},
        "8 envs on 2 workers", "step variance",
        "busy for 40% of the time and wait for the slowest; steps take 1.00 ms in the median, 20.00 ms at the 99th",
    ),
    "resets": (
        COSTLY, machine_of(), Goal(num_envs=4),
        {"4 envs on 4 workers, first-K": 1.04, "SerialEnv of 4 envs": 0.3, "4 envs on 4 workers": 1.0,
         "4 envs on 2 workers, first-K": 0.9},
        "4 envs on 4 workers", "resets", "resets bind: they take 80%",
    ),
    "short resets": (
        measured_of(1e-6, end_share=0.05, reset_mean_s=1e-4), TWO_CPUS, WORKERS_ONLY,
        {"128 envs on 2 workers": 1.0, "64 envs on 1 worker": 1.0}, "64 envs on 1 worker", "resets", "",
    ),
    # ---- the choice ----
    "within five per cent": (
        PLAIN, TWO_CPUS, EIGHT_ENVS, two(1000.0, SerialEnv_of_8_envs=951.0), "SerialEnv of 8 envs", "env step", "",
    ),
    "not within five per cent": (
        PLAIN, TWO_CPUS, EIGHT_ENVS, two(1000.0, SerialEnv_of_8_envs=949.0), "8 envs on 2 workers", "cores", "",
    ),
    "a target": (
        PLAIN, machine_of(), Goal(target_steps_per_s=2900.0),
        {"12 envs on 3 workers": 2950.0, "SerialEnv of 4 envs": 900.0, "32 envs on 8 workers": 8000.0},
        "12 envs on 3 workers", "target", "2,900 env-steps/s are wanted: this is the smallest that makes them",
    ),
    "a target out of reach": (
        PLAIN, TWO_CPUS, Goal(num_envs=8, target_steps_per_s=3000.0), two(1000.0),
        "8 envs on 2 workers", "cores", "3,000 env-steps/s is out of reach here by a factor of 3.0",
    ),
    "a slow policy": (
        PLAIN, TWO_CPUS, Goal(num_envs=8, policy_s=6e-3), two(1000.0),
        "8 envs on 2 workers", "policy", "6.00 ms of a batch's 8.00 ms",
    ),
    "idle workers": (
        PLAIN, TWO_CPUS, EIGHT_ENVS, two(1000.0, busy=0.4),
        "8 envs on 2 workers", "overhead", "the caller binds: workers are busy for 40%",
    ),
    # ---- what does not fit ----
    "little memory": (
        PLAIN, machine_of(4, memory=150 * MIB), WORKERS_ONLY,
        {"16 envs on 4 workers": None, "3 envs on 3 workers": 3.0, "8 envs on 2 workers": None,
         "4 envs on 2 workers": 2.0},
        "3 envs on 3 workers", "memory", "memory binds: 16 envs on 4 workers takes 250 MiB of memory, 120 may be used.",
    ),
    "little memory, envs fixed": (
        replace(PLAIN, worker_bytes=105 * MIB), machine_of(8, memory=500 * MIB), replace(WORKERS_ONLY, num_envs=8),
        {"8 envs on 8 workers": None, "8 envs on 3 workers": 3.0, "8 envs on 4 workers": None},
        "8 envs on 3 workers", "memory", "",
    ),
    "little memory, one processor": (
        PLAIN, machine_of(1, memory=100 * MIB), Goal(),
        {"SerialEnv of 4 envs": None, "SerialEnv of 2 envs": 1.0, "4 envs on 1 worker": None,
         "2 envs on 1 worker": 0.8},
        "SerialEnv of 2 envs", "memory", "",
    ),
    "few files": (
        PLAIN, machine_of(8, files_left=20), replace(WORKERS_ONLY, num_envs=8),
        {"8 envs on 8 workers": None, "8 envs on 2 workers": 2.0, "8 envs on 4 workers": None},
        "8 envs on 2 workers", "open files", "takes 36 open files, 20 are left",
    ),
    "few processes": (
        replace(PLAIN, num_threads=4), machine_of(2, processes_left=10), EIGHT_ENVS,
        {"8 envs on 2 workers": None, "8 envs on 1 worker": 1.0, "SerialEnv of 8 envs": 0.9},
        "8 envs on 1 worker", "processes", "takes 11 processes and threads, 10 are left",
    ),
    # ---- what else is reported ----
    "an env that grows": (
        replace(CHEAP, grown_per_1000_steps_bytes=9 * MIB), machine_of(), EIGHT_ENVS,
        {"8 envs on 1 worker": 900.0, "8 envs on 8 workers": 800.0},
        "8 envs on 1 worker", "cores", "memory=...) replaces workers that have grown; SerialEnv cannot.",
    ),
    "an env with threads": (
        replace(PLAIN, num_threads=2, hidden_cpu_share=0.4), TWO_CPUS, EIGHT_ENVS, two(1000.0),
        "8 envs on 2 workers", "cores", "computes in 2 threads besides the worker's, 40% of its processor time",
    ),
    "some resets": (
        replace(PLAIN, end_share=0.03), TWO_CPUS, WORKERS_ONLY,
        {"8 envs on 2 workers": 1.0, "4 envs on 1 worker": 0.5},
        "8 envs on 2 workers", "cores", "resets take 23% of an env's time (10.00 ms each)",
    ),
    "no episode ended": (
        replace(PLAIN, end_share=0.0), TWO_CPUS, EIGHT_ENVS, two(1000.0),
        "8 envs on 2 workers", "cores", "no episode ended in 1,000 steps, so resets (10.00 ms each) are not in",
    ),
    "a probe that waited": (
        replace(PLAIN, contention=0.5), TWO_CPUS, EIGHT_ENVS, two(1000.0),
        "8 envs on 2 workers", "cores", "took 0% of the processors' time, and the probe waited for a processor for 50%",
    ),
}  # fmt: skip


def decided(measured, machine, goal, rates, others_share=0.0):
    """Return the decision, from settings that are run with these speeds."""
    limits = Limits(measured, machine, goal)
    runs = limits.fitting(settings_for(measured, machine.cores, goal))
    assert {str(one.setting): one.refusal is None for one in runs} == {
        name: rate is not None for name, rate in rates.items()
    }
    assert [str(one.setting) for one in runs] == list(rates)
    for one in runs:
        rate = rates[str(one.setting)] or 0.0
        one.steps_per_s, one.busy_share = (
            rate if isinstance(rate, tuple) else (rate, 1.0)
        )
    return decide(limits, runs, others_share)


@pytest.mark.parametrize("case", DECISIONS)
def test_the_decision(case):
    measured, machine, goal, rates, chosen, binding, reported = DECISIONS[case]
    done = decided(measured, machine, goal, rates)
    assert (str(done.chosen.setting), done.binding) == (chosen, binding)
    assert reported in " ".join(done.why)


def test_other_programs_are_reported():
    busy, quiet = (
        " ".join(decided(PLAIN, TWO_CPUS, EIGHT_ENVS, SPEEDS, share).why)
        for share in (0.6, 0.1)
    )
    assert (
        "other programs used the machine: they took 60% of the processors' time" in busy
    )
    assert "other programs" not in quiet


def test_one_env_that_does_not_fit_is_refused():
    limits = Limits(PLAIN, machine_of(2, memory=40 * MIB), Goal())
    with pytest.raises(
        DoesNotFit,
        match=r"room for 1 env, got too little \(memory\). 1 would take 55.0 MiB; 40.0 MiB",
    ):
        limits.fitting(settings_for(PLAIN, 2, Goal()))


RESULTS = json.loads(
    (Path(__file__).parents[3] / "benchmarks/results/sizing.json").read_text()
)


@pytest.mark.parametrize("row", RESULTS, ids=lambda row: row["env"])
def test_the_rule_makes_the_published_choices_possible(row):
    """Each row of docs/reports/sizing.md has the figures of a probe."""
    settings = settings_for(measured_of(**row["probe"]), row["cores"], EIGHT_ENVS)
    assert row["chosen"] in map(str, settings)
    assert "SerialEnv of 8 envs" in map(str, settings)


# ---- speeds ----------------------------------------------------------------------------------------


def test_settings_are_compared_within_rounds():
    rounds = [
        {ONE: 50.0, TWO: 60.0},
        {ONE: 500.0, TWO: 600.0},
        {ONE: 110.0, TWO: 132.0},
    ]
    assert speeds(rounds) == pytest.approx({ONE: 110.0, TWO: 132.0})
    # Disturbed once.
    assert speeds([*rounds, {ONE: 110.0, TWO: 1.0}])[TWO] == pytest.approx(132.0)


def test_steps_and_resets_count_by_their_work():
    # 2 ms a step, resets included.
    measured = measured_of(step_mean_s=0.001, reset_mean_s=0.1, end_share=0.01)
    assert [measured.whole_steps(100, resets) for resets in range(4)] == pytest.approx(
        [50, 100, 150, 200]
    )
    assert replace(measured, end_share=0.0, reset_mean_s=0.0).whole_steps(
        100, 0
    ) == pytest.approx(100)


def figures(steps, sampled_s=(), **seconds):
    """Return what steps took, from their number, the duration of each, and seconds of the worker."""
    bins = np.zeros(NUM_BINS, np.int64)
    for second in sampled_s:
        bins[bin_of(int(second * 1e9))] += 1
    plain = {
        "ends": 0,
        "busy_s": 0.0,
        "reset_s": 0.0,
        "cpu_s": 0.0,
        "delay_s": 0.0,
        "hidden_s": 0.0,
    }
    return step_figures({**plain, "steps": steps, "bins": bins, **seconds})


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        # A worker that waited for a processor, or has not counted its steps yet: the kernel may know no time.
        (figures(200), {"step_mean_s": 1e-8, "contention": 0.0}),
        (
            figures(200, cpu_s=1e-3, delay_s=1.0),
            {"step_mean_s": 1e-8, "contention": 0.0},
        ),
        (figures(1, busy_s=-5e-9, delay_s=9.0), {"step_mean_s": 1e-8}),
        (
            figures(10, busy_s=0.02, cpu_s=0.01, delay_s=0.01),
            {"step_mean_s": 1e-3, "contention": 0.5},
        ),
        (
            figures(10, busy_s=0.03, reset_s=0.01, cpu_s=0.03),
            {"step_mean_s": 2e-3, "cpu_per_step_s": 2e-3},
        ),
        (
            figures(10, busy_s=0.02, cpu_s=0.002),
            {"step_mean_s": 2e-3, "cpu_per_step_s": 2e-4},
        ),
        (
            figures(10, busy_s=0.02, cpu_s=0.01, hidden_s=0.01),
            {"hidden_cpu_share": 0.5, "cpu_per_step_s": 2e-3},
        ),
        (
            figures(10, busy_s=0.02, cpu_s=0.02, hidden_s=1e-4),
            {"hidden_cpu_share": 0.0},
        ),
        # The machine has paused.
        (figures(2000, [4e-6] * 1999 + [0.05], busy_s=0.058), {"step_mean_s": 8e-6}),
        (
            figures(1200, [2e-4] * 1100 + [0.03] * 100, busy_s=3.2),
            {"step_mean_s": 3.2 / 1200, "step_p99_s": 0.03},
        ),
        (figures(1000, ends=4), {"end_share": 4.25e-3}),
    ],
)
def test_the_figures_of_steps(made, expected):
    assert {key: made[key] for key in expected} == pytest.approx(expected, rel=0.1)
    assert all(np.isfinite(value) and value >= 0 for value in made.values())
