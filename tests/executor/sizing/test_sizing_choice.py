"""Sizing without processes: the rule, limits, the choice, predictions and reasons."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from envherd.executor.machine.cgroups import Cgroup
from envherd.executor.machine.gpus import Gpu, parse_apps
from envherd.executor.machine.room import FILES_FIXED, FILES_PER_WORKER
from envherd.executor.sizing.confirming import choose, speeds
from envherd.executor.sizing.limits import DoesNotFit, Limits
from envherd.executor.sizing.measurement import share_of_ends, without_pause
from envherd.executor.sizing.probe import step_figures
from envherd.executor.sizing.recommending import decide, plan
from envherd.executor.sizing.rule import settings_for
from envherd.executor.sizing.settings import WORKERS_ONLY, Goal, Refusal, Run, Setting
from envherd.shm.slab import NUM_BINS, bin_of
from tests.executor.sizing.sizing_figures import GIB, MIB, machine_of, measured_of, run_of

SERIAL, ONE, TWO = (Setting(num_envs=8, num_workers=count) for count in range(3))
FIRST_K = replace(TWO, mode="first-k")
WAITING = {"cpu_per_step_s": 0.1e-3}
COSTLY = {"end_share": 0.02, "reset_median_s": 0.2}
UNEVEN = {"step_p99_s": 20e-3}
CHEAP = measured_of(1e-5)


# ---- the rule --------------------------------------------------------------------------------------


def ruled(measured=None, cores=8.0, **goal):
    """Return `(workers, how)` of each setting, the rule's choice first."""
    return [(one.num_workers, one.mode) for one in settings_for(measured or measured_of(), cores, Goal(**goal))]


RULE = {
    "one processor": (measured_of(), 1.0, {}, [(0, "sync")]),
    "half a processor": (CHEAP, 0.5, {"num_envs": 8}, [(0, "sync")]),
    "one env": (measured_of(), 8.0, {"num_envs": 1}, [(0, "sync")]),
    "one processor, workers only": (measured_of(), 1.0, {"workers_only": True}, [(1, "sync")]),
    "one processor, workers fixed": (measured_of(), 1.0, {"num_workers": 3}, [(3, "sync")]),
    "one processor, envs that wait": (measured_of(**WAITING), 1.0, {"num_envs": 6}, [(6, "sync"), (3, "sync")]),
    "one processor, short steps that wait": (
        measured_of(3e-6, cpu_per_step_s=1e-6), 1.0, {"num_envs": 4}, [(0, "sync")],
    ),
    "envs that wait": (measured_of(**WAITING), 2.0, {}, [(20, "sync"), (10, "sync")]),
    "envs that wait almost always": (measured_of(cpu_per_step_s=1e-6), 2.0, {}, [(32, "sync"), (16, "sync")]),
    "short batch": (CHEAP, 8.0, {"num_envs": 8}, [(1, "sync"), (8, "sync")]),
    "short steps, many envs": (CHEAP, 8.0, {"num_envs": 64}, [(8, "sync"), (4, "sync")]),
    "short steps, envs free": (CHEAP, 2.0, {}, [(2, "sync"), (1, "sync")]),
    "envs that compute": (measured_of(), 8.0, {}, [(8, "sync"), (4, "sync")]),
    "fewer envs than processors": (measured_of(), 8.0, {"num_envs": 6}, [(6, "sync"), (3, "sync")]),
    "a quota": (measured_of(), 2.5, {"num_envs": 8}, [(3, "sync"), (2, "sync")]),
    "workers fixed": (CHEAP, 8.0, {"num_envs": 8, "num_workers": 3}, [(3, "sync")]),
    "envs apart": (replace(CHEAP, why_alone="one at a time"), 2.0, {"num_envs": 2}, [(2, "sync")]),
    "uneven steps": (measured_of(**UNEVEN), 2.0, {}, [(2, "first-k"), (2, "sync"), (1, "first-k")]),
    "uneven short steps": (measured_of(1e-5, step_p99_s=1e-4), 2.0, {"num_envs": 8}, [(1, "sync"), (2, "sync")]),
    "uneven steps, workers only": (measured_of(**UNEVEN), 2.0, {"workers_only": True}, [(2, "sync"), (1, "sync")]),
    "resets": (measured_of(**COSTLY), 8.0, {"num_envs": 16}, [(8, "first-k"), (8, "sync"), (4, "first-k")]),
    "resets, few envs": (measured_of(**COSTLY), 8.0, {"num_envs": 4}, [(4, "first-k"), (4, "sync"), (2, "first-k")]),
    "resets together": (
        measured_of(**COSTLY, episode_steps=50), 8.0, {"num_envs": 16}, [(8, "sync"), (4, "sync")],
    ),
    "short resets": (measured_of(1e-6, end_share=0.05, reset_median_s=1e-4), 2.0, {}, [(2, "sync"), (1, "sync")]),
    "a target": (measured_of(), 8.0, {"target_steps_per_s": 2900.0}, [(3, "sync"), (8, "sync")]),
}  # fmt: skip


@pytest.mark.parametrize("case", RULE)
def test_the_rule(case):
    measured, cores, goal, expected = RULE[case]
    assert ruled(measured, cores, **goal) == expected


def test_more_envs_hide_what_a_batch_costs_where_steps_are_short():
    def most(step_s, **changes):
        return settings_for(measured_of(step_s, **changes), 2.0, Goal())[0].most_per_worker

    assert [most(step_s) for step_s in (1e-6, 1e-4, 1e-2)] == [64, 16, 4]
    assert most(1e-6, why_alone="one at a time") == 1


RESULTS = json.loads((Path(__file__).parents[3] / "benchmarks/results/sizing.json").read_text())
ROWS = {f"{row['env']}, {where}": row for where, rows in RESULTS.items() for row in rows}


@pytest.mark.parametrize("name", ROWS)
def test_the_rule_makes_the_published_choices(name):
    """Each row of docs/reports/sizing.md has the figures of a probe; by the sweep its choice is the fastest."""
    row, probe = ROWS[name], dict(ROWS[name]["probe"])
    cores = probe.pop("cores")
    assert str(settings_for(measured_of(**probe), cores, Goal(num_envs=8))[0]) == row["chosen"]


def test_there_are_24_published_choices():
    assert len(ROWS) == 24


# ---- what does not fit -----------------------------------------------------------------------------


def refusal(setting=TWO, measured=None, **machine):
    return Limits(measured or measured_of(), machine_of(**machine), Goal()).refusal(setting)


@pytest.mark.parametrize(
    "counts", [(200, 0, 0, 0, 0), (200, 0, 0, 10**9, 0), (200, 10**6, 0, 10**9, 0), (1, -5, 0, 9, 0)]
)
@pytest.mark.parametrize("sampled", [0, 200])
def test_steps_without_a_time_still_have_a_speed(counts, sampled):
    """Of a worker that waited for a processor, or has not counted its steps yet, the kernel may know no time."""
    bins = np.zeros(NUM_BINS, np.int64)
    bins[0] = sampled
    figures = step_figures(np.array(counts), bins)
    measured = measured_of(**figures, end_share=0.0)
    speed = speeds([{TWO: measured.whole_steps(200, 0) / 0.1}])[TWO]
    run = run_of(2, speed)
    assert choose([run]) is run
    predicted = Limits(measured, machine_of(), Goal()).predict(TWO)
    assert np.isfinite([speed, predicted.steps_per_s]).all()
    assert min(speed, predicted.steps_per_s, measured.step_mean_s) > 0
    assert 0 <= measured.contention <= 1


def test_what_does_not_fit_says_why():
    assert refusal() is None
    assert refusal(memory=140 * MIB) == Refusal("memory", "takes 140 MiB of memory, 112 may be used")
    assert refusal(limits={"nofile": 20}, open_files=10) == Refusal("open files", "takes 18 open files, 10 are left")
    threads = refusal(measured=measured_of(num_threads=4), cgroup=Cgroup(pids_room=10))
    assert threads == Refusal("processes", "takes 11 processes and threads, 10 are left")
    gpu = refusal(measured=measured_of(gpu_bytes=3 * GIB), gpus=(Gpu("x", 4 * GIB, None),))
    assert gpu == Refusal("GPU memory", "takes 6,144 MiB of GPU memory, 4,096 are free")


def test_the_largest_setting_that_fits_is_tried_instead():
    limits = Limits(measured_of(worker_bytes=105 * MIB), machine_of(memory=500 * MIB), Goal())
    assert limits.fitted(Setting(num_envs=8, num_workers=8)) == Setting(num_envs=3, num_workers=3)
    assert limits.fitted(Setting(num_envs=8, num_workers=2)) == Setting(num_envs=8, num_workers=2)
    fixed = Limits(limits.measured, limits.machine, Goal(num_envs=8))
    assert fixed.fitted(Setting(num_envs=8, num_workers=8)) == Setting(num_envs=8, num_workers=3)
    both = Limits(limits.measured, limits.machine, Goal(num_envs=8, num_workers=8))
    assert both.fitted(Setting(num_envs=8, num_workers=8)) is None
    assert limits.most_envs(2) == 17


def test_machines_with_very_many_processors_are_planned_for_in_a_moment():
    limits = Limits(measured_of(), machine_of(100_000, memory=1024 * GIB, limits={"nofile": 20_000}), Goal())
    asked = Setting(num_envs=12_800_000, num_workers=100_000)
    assert limits.refusal(asked).kind == "memory"
    fitting = limits.fitted(asked)
    assert fitting.num_workers == (20_000 - 10 - FILES_FIXED) // FILES_PER_WORKER
    assert limits.refusal(replace(fitting, num_workers=fitting.num_workers + 1)).kind == "open files"


def test_gpu_memory_of_processes():
    assert parse_apps("11, 300\n12, 100\n13, [N/A]\n", {11, 13}) == 300 * MIB


# ---- the choice ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("speeds", "chosen"),
    [
        ({ONE: 96.0, TWO: 100.0}, ONE),
        ({ONE: 94.0, TWO: 100.0}, TWO),
        ({TWO: 110.0, FIRST_K: 112.0}, TWO),
        ({TWO: 100.0, FIRST_K: 120.0}, FIRST_K),
        ({TWO: 100.0, replace(TWO, num_envs=2): 97.0}, replace(TWO, num_envs=2)),
    ],
)
def test_the_smallest_within_five_percent_of_the_best_is_taken(speeds, chosen):
    assert choose(runs_of(speeds)).setting == chosen


def test_the_smallest_that_reaches_a_target_is_taken():
    rates = {ONE: 60.0, TWO: 100.0}
    assert choose(runs_of(rates), target=55.0).setting == ONE
    assert choose(runs_of(rates), target=1e6).setting == TWO


def runs_of(rates):
    return [Run(setting=setting, steps_per_s=rate) for setting, rate in rates.items()]


def test_settings_are_compared_within_rounds():
    rounds = [{ONE: 50.0, TWO: 60.0}, {ONE: 500.0, TWO: 600.0}, {ONE: 110.0, TWO: 132.0}]
    assert speeds(rounds) == pytest.approx({ONE: 110.0, TWO: 132.0})
    assert speeds([*rounds, {ONE: 110.0, TWO: 1.0}])[TWO] == pytest.approx(132.0)  # disturbed once


# ---- resets ----------------------------------------------------------------------------------------


def test_steps_and_resets_count_by_their_work():
    measured = measured_of(step_mean_s=0.001, reset_median_s=0.1, end_share=0.01)  # 2 ms a step, resets included
    assert measured.whole_steps(100, 1) == pytest.approx(100)
    assert measured.whole_steps(100, 0) == pytest.approx(50)
    assert measured.whole_steps(100, 3) == pytest.approx(200)
    assert replace(measured, end_share=0.0, reset_median_s=0.0).whole_steps(100, 0) == pytest.approx(100)


def seen(draw, steps):
    """Return the lengths of the episodes that end within `steps` steps, and the next one's length by then."""
    ends = np.cumsum([draw() for _ in range(steps)])
    ends = ends[ends <= steps]
    return np.diff([0, *ends]), steps - (ends[-1] if len(ends) else 0)


@pytest.mark.parametrize("kind", ["even", "geometric", "one length"])
def test_an_episode_under_way_counts_for_what_it_is_worth(kind):
    rng = np.random.default_rng(0)
    draw = {
        "even": lambda: rng.integers(100, 201),
        "geometric": lambda: rng.geometric(1 / 150),
        "one length": lambda: 150,
    }[kind]
    shares = [share_of_ends(*seen(draw, int(rng.integers(450, 600)))) for _ in range(1000)]
    # Ends over steps are 10 % too few where episodes vary little.
    assert np.mean(shares) == pytest.approx(1 / 150, rel=0.07 if kind == "geometric" else 0.03)
    assert share_of_ends(np.array([], int), 90) == 0
    assert 1 / 190 < share_of_ends(np.array([100]), 90) < 1 / 100


@pytest.mark.parametrize(
    ("steps", "kept"),
    [
        ({4e-6: 2000, 0.05: 1}, {4e-6: 2000}),  # the machine has paused
        ({4e-6: 2000, 0.05: 2}, {4e-6: 2000, 0.05: 2}),  # the env has such steps
        ({4e-6: 50, 0.05: 1}, {4e-6: 50, 0.05: 1}),  # too few to know
        ({2e-4: 1100, 0.03: 100}, {2e-4: 1100, 0.03: 100}),
        ({}, {}),
    ],
)
def test_a_lone_step_that_takes_much_of_the_time_is_left_out(steps, kept):
    def histogram(counts):
        bins = np.zeros(NUM_BINS, np.int64)
        for seconds, count in counts.items():
            bins[bin_of(int(seconds * 1e9))] += count
        return bins, sum(seconds * count for seconds, count in counts.items())

    (bins, busy_s), (expected, expected_s) = without_pause(*histogram(steps)), histogram(kept)
    assert bins.tolist() == expected.tolist()
    assert busy_s == pytest.approx(expected_s, rel=0.2)


# ---- predictions -----------------------------------------------------------------------------------


def predicted(setting, *, machine=None, **changes):
    measured = measured_of(end_share=0.0, **changes)
    return Limits(measured, machine or machine_of(2), Goal(), is_here=machine is None).predict(setting)


def test_the_envs_part_of_a_batch_is_divided_among_processors_and_the_callers_is_not():
    many = Setting(num_envs=256, num_workers=64)
    made = predicted(many, machine=machine_of(64))
    assert made.is_scaled
    assert made.batch_s == pytest.approx(4e-3 + 286e-6)
    assert predicted(many).batch_s == pytest.approx(128e-3 + 286e-6)
    # More workers than cores gain nothing, unless envs wait.
    apart = Setting(num_envs=8, num_workers=8)
    assert predicted(apart).steps_per_s == pytest.approx(predicted(TWO).steps_per_s, rel=0.01)
    assert predicted(apart, **WAITING).batch_s == pytest.approx(1e-3, rel=0.05)
    # Envs with threads compete for processors earlier.
    assert predicted(TWO, cpu_per_step_s=2e-3).batch_s == pytest.approx(8e-3, rel=0.02)
    # The caller's own envs run one after the other, and other programs take their part of this machine.
    assert predicted(SERIAL).batch_s == pytest.approx(8e-3, rel=0.02)
    assert predicted(SERIAL, contention=0.5).batch_s == pytest.approx(16e-3, rel=0.02)
    assert predicted(SERIAL, contention=0.5, machine=machine_of(64)).batch_s == pytest.approx(8e-3, rel=0.02)


def decided(*runs, measured=None, machine=None, here=None, goal=None):
    """Return the decision from runs here, or for a machine on which nothing is run."""
    where = machine or here or machine_of(2)
    limits = Limits(measured or measured_of(), where, goal or Goal(num_envs=8), is_here=machine is None)
    return decide(limits, runs or plan(limits, settings_for(limits.measured, where.cores, limits.goal)[0]))


def test_another_machine_is_planned_for_and_that_is_said():
    done = decided(machine=machine_of(64), goal=Goal())
    assert done.advice.setting == Setting(num_envs=256, num_workers=64)
    assert done.advice.predicted.is_scaled
    assert any("nothing was run on that machine: the speed is scaled from the probe" in why for why in done.advice.why)
    fixed = decided(machine=machine_of(64), goal=Goal(num_envs=8))
    assert fixed.advice.setting == Setting(num_envs=8, num_workers=8)
    small = decided(machine=machine_of(64, memory=300 * MIB), goal=Goal())
    assert small.advice.predicted.memory_bytes <= 240 * MIB
    assert small.advice.binding == "memory"
    with pytest.raises(DoesNotFit, match=r"room for 1 env, got too little \(memory\). 1 would take 55 MiB; 40 MiB are"):
        decided(machine=machine_of(64, memory=40 * MIB), goal=Goal())


def test_a_larger_machine_is_never_slower():
    rates = [decided(machine=machine_of(n), goal=WORKERS_ONLY).advice.predicted.steps_per_s for n in (1, 4, 64)]
    assert rates == sorted(rates)


# ---- what binds ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("run", "given", "binding", "said"),
    [
        (run_of(2, 1000.0), {}, "cores", "cores bind: 2 may be used; workers are busy for 100%"),
        (run_of(2, 1000.0, busy=0.4), {}, "overhead", "the caller binds: workers are busy for 40%"),
        (run_of(2, 1000.0, busy=0.4), {"measured": measured_of(**UNEVEN)}, "step variance", "20.00 ms at the 99th"),
        (
            run_of(2, 1000.0),
            {"here": machine_of(8, cgroup=Cgroup(cpu_quota=1.5))},
            "quota",
            "allows 1.5 cores' worth of time, although 8 processors",
        ),
        (run_of(2, 1000.0), {"measured": measured_of(**WAITING)}, "waiting", "free for 90% of a step"),
        (run_of(0, 1000.0), {"measured": measured_of(**WAITING)}, "env step", "one after the other in this process"),
        (run_of(8, 1000.0), {"here": machine_of(64)}, "num_envs", "8 envs cannot use 64 cores"),
        (run_of(2, 1000.0), {"goal": Goal(num_envs=8, policy_s=6e-3)}, "policy", "6.00 ms of a batch's 8.00"),
        (run_of(2, 1000.0), {"goal": Goal(num_envs=8, target_steps_per_s=900.0)}, "target", "900 env-steps/s are"),
        (run_of(2, 1000.0), {"measured": measured_of(**COSTLY)}, "resets", "resets bind: they take 80%"),
    ],
)
def test_what_binds(run, given, binding, said):
    advice = decided(run, **given).advice
    assert advice.binding == binding
    assert said in advice.why[0]


def test_serial_gets_as_many_envs_as_fit():
    advice = decided(here=machine_of(1, memory=120 * MIB), goal=Goal()).advice
    assert advice.setting == Setting(num_envs=4, num_workers=0)
    tight = decided(here=machine_of(1, memory=100 * MIB), goal=Goal()).advice
    assert (tight.setting, tight.binding) == (Setting(num_envs=2, num_workers=0), "memory")


def test_serial_is_said_to_be_right_and_why():
    advice = decided(here=machine_of(1)).advice
    assert (advice.binding, advice.setting, advice.parallel) == ("env step", SERIAL, None)
    assert "SerialEnv, in the caller's process, is the right executor: one processor may be used" in advice.why[1]
    assert advice.to_plain()["executor"] == "SerialEnv"


def test_a_limit_that_struck_out_more_workers_binds():
    refused = run_of(4, 0.0, refusal=Refusal("memory", "takes 900 MiB of memory, 800 may be used"))
    advice = decided(run_of(2, 1000.0), refused, here=machine_of(4)).advice
    assert advice.binding == "memory"
    assert advice.why[0] == "memory binds: 8 envs on 4 workers takes 900 MiB of memory, 800 may be used."


def test_what_a_reader_should_know_is_said():
    measured = measured_of(grown_per_1000_steps_bytes=9 * MIB, contention=0.5, num_threads=2, hidden_cpu_share=0.4)
    why = " ".join(decided(run_of(2, 1000.0), measured=measured).advice.why)
    assert "grows by 9.0 MiB per 1,000 steps" in why
    assert "other programs used the machine: they took 0% of the processors' time, and the probe waited" in why
    assert "computes in 2 threads besides the worker's" in why
    limits = Limits(measured_of(), machine_of(), Goal(num_envs=8))
    busy, quiet = (" ".join(decide(limits, (run_of(2, 1000.0),), share).advice.why) for share in (0.6, 0.1))
    assert "other programs used the machine: they took 60% of the processors' time" in busy
    assert "other programs" not in quiet
    assert "--episode-steps" in " ".join(decided(run_of(2, 1.0), measured=measured_of(end_share=0.0)).advice.why)
    alone = " ".join(decided(run_of(2, 1000.0), measured=measured_of(why_alone="one at a time")).advice.why)
    assert "each env needs its own worker: one at a time" in alone
    missed = decided(run_of(2, 1000.0), goal=Goal(num_envs=8, target_steps_per_s=3000.0)).advice
    assert missed.meets_target is False
    assert "out of reach here by a factor of 3.0" in " ".join(missed.why)


def test_workers_are_compared_with_serial_by_the_probe():
    slow, fast = decided(run_of(2, 700.0)), decided(run_of(2, 1900.0))
    assert slow.serial.steps_per_s == pytest.approx(1000, rel=0.02)
    assert "SerialEnv, in the caller's process, makes 1.4 times as many: 98" in slow.advice.why[1]
    assert max(one.relative for one in slow.runs) == 1.0
    assert "makes as many: 98" in decided(run_of(2, 970.0)).advice.why[1]
    busy = decided(run_of(2, 300.0), measured=measured_of(contention=0.5))
    assert not any("SerialEnv" in why for one in (fast, busy) for why in one.advice.why)
    assert fast.advice.to_plain()["executor"] == "ParallelEnv"
    assert decided(run_of(2, 700.0), goal=WORKERS_ONLY).serial is None
    assert decided(run_of(2, 700.0), measured=measured_of(why_alone="one at a time")).serial is None
