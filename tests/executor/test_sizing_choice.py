"""Sizing without processes: compared settings, limits, the choice, and scaling."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from envherd.executor.machine.cgroups import Cgroup
from envherd.executor.machine.gpus import Gpu, parse_apps
from envherd.executor.sizing.choosing import choose, corrected, is_sure, share_of_ends, speeds, survivors
from envherd.executor.sizing.driving import Figures, Turn
from envherd.executor.sizing.limits import DoesNotFit, Limits, Refusal
from envherd.executor.sizing.measurement import share_of_ends as share_in_probe
from envherd.executor.sizing.measurement import slab_bytes
from envherd.executor.sizing.recommending import decide
from envherd.executor.sizing.scaling import Scale
from envherd.executor.sizing.search import Found
from envherd.executor.sizing.settings import WORKERS_ONLY, Goal, Setting, ladder, smaller
from envherd.shm.slab import plan_slab
from tests.executor.sizing_figures import GIB, MIB, SPEC, machine_of, measured_of, run_of

SERIAL, ONE, TWO = (Setting(num_envs=8, num_workers=count) for count in range(3))
FIRST_K = replace(TWO, mode="first-k")
WAITING = {"cpu_per_step_s": 0.1e-3}
COSTLY = {"end_share": 0.02, "reset_median_s": 0.2}


# ---- which settings are compared -------------------------------------------------------------------


def compared(measured=None, cores=8.0, **goal):
    return [
        (one.num_workers, "ahead" if one.reset_ahead else one.mode)
        for one in ladder(measured or measured_of(), cores, Goal(**goal))
    ]


@pytest.mark.parametrize(
    ("measured", "cores", "goal", "expected"),
    [
        (measured_of(), 8.0, {}, [(1, "sync"), (4, "sync"), (8, "sync"), (8, "first-k")]),
        (measured_of(1e-5), 2.0, {}, [(0, "sync"), (1, "sync"), (2, "sync"), (2, "first-k")]),
        (measured_of(), 0.5, {}, [(0, "sync"), (1, "sync"), (1, "first-k")]),
        (measured_of(), 8.0, {"num_envs": 1}, [(0, "sync"), (1, "sync")]),
        (measured_of(), 8.0, {"num_envs": 6, "modes": ("sync",)}, [(1, "sync"), (4, "sync"), (6, "sync")]),
        (measured_of(1e-5), 8.0, {"num_envs": 8, "num_workers": 3}, [(3, "sync"), (3, "first-k")]),
        (measured_of(1e-5), 2.0, {"has_serial": False, "modes": ("sync",)}, [(1, "sync"), (2, "sync")]),
        (measured_of(1e-5, is_alone=True), 2.0, {"num_envs": 2}, [(2, "sync"), (2, "first-k")]),
    ],
)
def test_the_ladder(measured, cores, goal, expected):
    assert compared(measured, cores, **goal) == expected


def test_envs_that_wait_are_tried_on_more_workers_than_cores():
    counts = {count for count, _ in compared(measured_of(**WAITING), 2.0)}
    assert counts == {1, 2, 4, 8, 16, 32}
    assert max(count for count, _ in compared(measured_of(cpu_per_step_s=0.7e-3), 2.0)) == 4
    assert max(count for count, _ in compared(measured_of(**WAITING), 2.0, num_envs=6)) == 6


def test_costly_resets_are_tried_ahead_with_a_worker_for_each_env():
    assert (4, "ahead") in compared(measured_of(**COSTLY), 8.0, num_envs=4)
    assert (8, "ahead") in compared(measured_of(**COSTLY), 8.0)
    for measured, goal in (
        (measured_of(), {}),
        (measured_of(1e-6, end_share=0.05, reset_median_s=1e-4), {}),  # many, but short
        (measured_of(**COSTLY, spec=replace(SPEC, batch_shape=(1,))), {}),
        (measured_of(**COSTLY), {"num_envs": 4, "num_workers": 2}),
        (measured_of(**COSTLY), {"has_reset_ahead": False}),
    ):
        assert "ahead" not in {how for _, how in compared(measured, **goal)}


def test_more_envs_hide_what_a_batch_costs_where_steps_are_short():
    def most(step_s, **changes):
        return max(one.most_per_worker for one in ladder(measured_of(step_s, **changes), 2.0, Goal()))

    assert [most(step_s) for step_s in (1e-6, 1e-4, 1e-2)] == [64, 16, 4]
    assert most(1e-6, is_alone=True) == 1
    assert [one.num_envs for one in smaller(Setting(num_envs=128, num_workers=2))] == [32, 8]
    assert [one.num_envs for one in smaller(Setting(num_envs=8, num_workers=2, mode="first-k"))] == [2]
    assert list(smaller(Setting(num_envs=2, num_workers=2))) == []


# ---- what does not fit -----------------------------------------------------------------------------


def refusal(setting=TWO, measured=None, **machine):
    return Limits(measured or measured_of(), machine_of(**machine), Goal()).refusal(setting)


def test_what_does_not_fit_says_why():
    assert refusal() is None
    assert refusal(memory=140 * MIB) == Refusal("memory", "takes 140 MiB of memory, 112 may be used")
    assert refusal(limits={"nofile": 20}, open_files=10) == Refusal("open files", "takes 12 open files, 10 are left")
    threads = refusal(measured=measured_of(num_threads=4), cgroup=Cgroup(version=2, pids_room=10))
    assert threads == Refusal("processes", "takes 11 processes and threads, 10 are left")
    gpu = refusal(measured=measured_of(gpu_bytes=3 * GIB), gpus=(Gpu("x", 4 * GIB, None),))
    assert gpu == Refusal("GPU memory", "takes 6,144 MiB of GPU memory, 4,096 are free")


def test_resets_ahead_need_a_processor_for_each_env_unless_it_waits():
    ahead = Setting(num_envs=4, num_workers=4, reset_ahead=True)
    text = "has a process and a spare for each env, on 2 processors: first-K keeps them busy"
    assert refusal(ahead, num_cpus=2) == Refusal("processors", text)
    assert refusal(ahead, num_cpus=4) is None
    assert refusal(ahead, num_cpus=2, measured=measured_of(step_mean_s=0.1)) is None


def test_resets_ahead_take_twice_the_processes_and_envs():
    limits = Limits(measured_of(), machine_of(), Goal())
    plain, ahead = Setting(num_envs=4, num_workers=4), Setting(num_envs=4, num_workers=4, reset_ahead=True)
    assert ahead.num_processes == 8
    assert limits.memory_bytes(ahead) - limits.memory_bytes(plain) == pytest.approx(4 * 25 * MIB, rel=0.01)


def test_the_largest_setting_that_fits_is_tried_instead():
    limits = Limits(measured_of(first_env_bytes=100 * MIB), machine_of(memory=500 * MIB), Goal())
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
    assert fitting.num_workers == (20_000 - 10 - 6) // 3
    assert limits.refusal(replace(fitting, num_workers=fitting.num_workers + 1)).kind == "open files"


def test_bytes_of_many_envs_grow_evenly():
    for count in (1, 600, 1024, 1500, 5000):
        assert slab_bytes(SPEC, count, 3, 4) == pytest.approx(plan_slab([SPEC] * count, 3, 4).nbytes, rel=1e-2)


def test_gpu_memory_of_processes():
    assert parse_apps("11, 300\n12, 100\n13, [N/A]\n", {11, 13}) == 300 * MIB


# ---- the choice ------------------------------------------------------------------------------------


def rounds_of(speeds, *, machine=(1.0, 0.5, 2.0, 1.0), noise=0.0, seed=0):
    """Return rounds in which the machine is at these speeds."""
    rng = np.random.default_rng(seed)
    return [{one: value * at * np.exp(rng.normal(0, noise)) for one, value in speeds.items()} for at in machine]


@pytest.mark.parametrize(
    ("speeds", "chosen"),
    [
        ({SERIAL: 100.0, ONE: 90.0, TWO: 99.0}, SERIAL),
        ({SERIAL: 96.0, ONE: 100.0, TWO: 103.0}, ONE),  # serial is more than 5 % slower than the best
        ({ONE: 100.0, TWO: 110.0, FIRST_K: 112.0}, TWO),
        ({TWO: 100.0, FIRST_K: 120.0}, FIRST_K),
        ({TWO: 100.0, replace(TWO, num_envs=2): 97.0}, replace(TWO, num_envs=2)),
    ],
)
def test_the_smallest_within_five_percent_of_the_best_is_taken(speeds, chosen):
    assert choose(rounds_of(speeds)) == chosen


def test_settings_are_compared_within_rounds():
    rounds = [{ONE: 50.0, TWO: 60.0}, {ONE: 500.0, TWO: 600.0}, {ONE: 110.0, TWO: 130.0}]
    assert choose(rounds) == TWO
    assert choose([*rounds, {ONE: 900.0, TWO: 300.0}]) == TWO  # disturbed once


def test_the_smallest_that_reaches_a_target_is_taken():
    speeds = {SERIAL: 50.0, ONE: 60.0, TWO: 100.0}
    assert choose(rounds_of(speeds), target=55.0) == ONE
    assert choose(rounds_of(speeds), target=1e6) == TWO


def test_a_setting_that_had_no_round_with_the_others_has_its_own_speed():
    rounds = [{ONE: 100.0, TWO: 300.0}, {FIRST_K: 50.0}]
    assert speeds(rounds) == {ONE: 100.0, TWO: 300.0, FIRST_K: 50.0}
    assert choose(rounds) == FIRST_K


def test_speeds_are_those_of_one_machine():
    rounds = [{ONE: 100.0, TWO: 200.0}, {ONE: 10.0, TWO: 20.0}, {TWO: 200.0}]
    assert speeds(rounds) == pytest.approx({ONE: 100.0, TWO: 200.0})


def test_what_was_dropped_is_not_chosen():
    rounds = [{ONE: 100.0, TWO: 50.0}, {ONE: 10.0, TWO: 50.0}, {TWO: 50.0}]
    assert choose(rounds) == TWO


def test_clearly_slower_settings_are_dropped():
    speeds = {SERIAL: 30.0, ONE: 60.0, TWO: 100.0, FIRST_K: 99.0}
    assert survivors(rounds_of(speeds, machine=(1.0,))) == {*speeds}
    assert survivors(rounds_of(speeds)) == {TWO, FIRST_K}
    assert survivors(rounds_of(speeds), target=55.0) == {ONE, TWO, FIRST_K}


def test_no_setting_is_dropped_by_noise():
    speeds = {ONE: 97.0, TWO: 100.0, FIRST_K: 40.0}
    kept = [survivors(rounds_of(speeds, machine=(1.0,) * 3, noise=0.3, seed=seed)) for seed in range(200)]
    assert sum(ONE in one for one in kept) > 180
    assert sum(FIRST_K in one for one in kept) < 60


def test_a_clear_choice_needs_few_rounds_and_a_close_one_more():
    clear, close = {ONE: 100.0, TWO: 150.0}, {ONE: 95.0, TWO: 100.0}
    assert not is_sure(rounds_of(clear, machine=(1.0, 1.0)))
    assert is_sure(rounds_of(clear))
    assert not is_sure(rounds_of(close))
    assert is_sure(rounds_of(close, machine=(1.0,) * 12))


# ---- resets ----------------------------------------------------------------------------------------


def speed_of(turn, setting, measured, end_share=0.01, own_turns=(), cores=2):
    return corrected(turn, setting, measured, end_share, own_turns or [turn], cores)


def test_a_turn_counts_as_if_it_had_as_many_resets_as_usual():
    measured = measured_of(end_share=0.01, reset_median_s=0.1)
    few, usual, many = (Turn(steps=100, seconds=0.1 + 0.1 * count, resets=count) for count in (0, 1, 3))
    rates = [speed_of(turn, TWO, measured) for turn in (few, usual, many)]
    assert rates == pytest.approx([usual.rate] * 3)
    # First-K: the other worker goes on, if it has a processor.
    assert speed_of(few, FIRST_K, measured) == pytest.approx(100 / 0.15)
    assert speed_of(few, FIRST_K, measured, cores=1) == pytest.approx(100 / 0.2)
    # Envs that end together are reset together.
    assert speed_of(few, TWO, replace(measured, episode_steps=100)) == pytest.approx(100 / 0.15)
    assert speed_of(few, TWO, measured, 0.0) == few.rate


def test_resets_that_a_batch_waited_for_count_as_long_as_the_setting_s_own_took():
    measured = measured_of(end_share=0.01, reset_median_s=0.1)
    num_envs = TWO.num_envs
    without = Turn(steps=100, seconds=0.1)
    lump = Turn(steps=100, seconds=0.1 + 0.06 * num_envs, resets=num_envs, reset_wait_s=0.06 * num_envs)
    for turn in (without, lump):  # one reset in 100 steps, which keeps all waiting for 0.06 s
        assert speed_of(turn, TWO, measured, own_turns=[without, lump]) == pytest.approx(100 / 0.16)
    # A step that takes long is no reset: a reset alone took 0.1 s.
    slow = Turn(steps=100, seconds=9.1, resets=num_envs, reset_wait_s=9.0)
    assert speed_of(slow, TWO, measured) == pytest.approx(100 / (9.1 - 0.2 * num_envs + 0.2))


def test_resets_ahead_need_the_processors_that_steps_need():
    ahead, turn = replace(TWO, reset_ahead=True), Turn(steps=100, seconds=0.1)
    measured = measured_of(end_share=0.01, reset_median_s=0.1, cpu_per_step_s=0.002, step_mean_s=0.002)
    assert speed_of(turn, ahead, measured, cores=8) == turn.rate
    assert speed_of(turn, ahead, measured, cores=2) == pytest.approx(100 / (0.3 / 2))
    waiting = replace(measured, step_mean_s=1.0, step_median_s=1.0)
    assert speed_of(turn, ahead, waiting, cores=2) == pytest.approx(100 / ((100 * 0.002 + 0.1 * 0.002) / 2))


def test_whole_episodes_count_by_the_work_that_was_done():
    measured = measured_of(step_mean_s=0.001, reset_median_s=0.1, end_share=0.01)  # 2 ms a step, resets included
    assert measured.whole_steps(100, 1) == pytest.approx(100)
    assert measured.whole_steps(100, 0) == pytest.approx(50)
    assert measured.whole_steps(100, 3) == pytest.approx(200)
    assert replace(measured, end_share=0.0, reset_median_s=0.0).whole_steps(100, 0) == pytest.approx(100)


def test_how_often_episodes_end_is_what_most_ends_say():
    few, many = [Turn(steps=100, seconds=1.0, resets=5)], [Turn(steps=100, seconds=1.0, resets=5)] * 10
    assert share_of_ends(many, measured_of(end_share=0.5)) == 0.5  # 500 ends in the probe
    rare = measured_of(end_share=0.002)
    assert share_of_ends(few, rare) == 0.002
    assert share_of_ends(many, rare) == 0.05
    # Ends of episodes of one length may fall between turns.
    assert share_of_ends(many, replace(rare, episode_steps=500)) == 0.002
    # The probe's 1,000 steps were too few to see one end.
    assert share_of_ends([Turn(steps=200, seconds=1.0, resets=1)] * 5, measured_of(end_share=0.0)) == 5 / 2000


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
    shares = [share_in_probe(*seen(draw, int(rng.integers(450, 600)))) for _ in range(1000)]
    # Ends over steps are 10 % too few where episodes vary little.
    assert np.mean(shares) == pytest.approx(1 / 150, rel=0.07 if kind == "geometric" else 0.03)
    assert share_in_probe(np.array([], int), 90) == 0
    assert 1 / 190 < share_in_probe(np.array([100]), 90) < 1 / 100


# ---- other numbers, other machines -----------------------------------------------------------------


def scale_to(machine, *runs, here=None, **changes):
    measured = measured_of(**changes)
    return Scale(measured, runs, here or machine_of(2), Limits(measured, machine, Goal()))


def test_what_was_run_is_predicted_as_it_was():
    made = scale_to(machine_of(2), run_of(2, 1000.0)).predict(TWO)
    assert (made.steps_per_s, made.batch_s, made.is_scaled) == (1000.0, 8e-3, False)


def test_the_workers_part_is_divided_among_cores_and_the_callers_is_not():
    there, setting = machine_of(64), Setting(num_envs=256, num_workers=64)
    assert scale_to(there, run_of(2, 1000.0)).predict(setting).steps_per_s == pytest.approx(32_000)
    half = scale_to(there, run_of(2, 1000.0, busy=0.5)).predict(setting)
    assert half.steps_per_s == pytest.approx(1000 / (0.5 + 0.5 / 32))
    assert half.is_scaled
    # More workers than cores gain nothing, unless envs wait.
    more = Setting(num_envs=8, num_workers=8)
    assert scale_to(machine_of(2), run_of(2, 1000.0)).predict(more).steps_per_s == pytest.approx(1000)
    assert scale_to(machine_of(2), run_of(2, 1000.0), **WAITING).predict(more).steps_per_s == pytest.approx(4000)


def test_what_was_not_run_is_not_predicted():
    assert scale_to(machine_of(64), run_of(2, 1000.0)).predict(SERIAL) is None
    assert scale_to(machine_of(64), run_of(0, 700.0)).predict(SERIAL).steps_per_s == 700.0


def decided(*runs, measured=None, machine=None, here=None, goal=None, times=(None, None)):
    here = here or machine_of(2)
    best = max((one for one in runs if one.refusal is None), key=lambda one: one.steps_per_s)
    found = Found(runs, best.setting, Figures(step_p50_s=times[0], step_p99_s=times[1]))
    return decide(measured or measured_of(), here, found, goal or Goal(num_envs=8), machine or here)


def test_another_machine_is_planned_for_and_that_is_said():
    runs = (run_of(1, 500.0), run_of(2, 1000.0), run_of(0, 480.0))
    done = decided(*runs, machine=machine_of(64), goal=Goal())
    assert done.advice.setting.num_workers == 64
    assert done.advice.predicted.steps_per_s == pytest.approx(32_000)
    assert done.advice.predicted.is_scaled
    assert any("nothing was run on that machine: the speed is scaled from 1,000" in line for line in done.advice.why)
    fixed = decided(*runs, machine=machine_of(64), goal=Goal(num_envs=8))
    assert fixed.advice.setting == Setting(num_envs=8, num_workers=8)
    small = decided(*runs, machine=machine_of(64, memory=300 * MIB), goal=Goal())
    assert small.advice.predicted.memory_bytes <= 240 * MIB
    with pytest.raises(DoesNotFit, match=r"room for 1 env, got too little \(memory\). 1 would take 55 MiB; 40 MiB are"):
        decided(*runs, machine=machine_of(64, memory=40 * MIB), goal=Goal())


def test_fewer_envs_of_a_worker_are_planned_for_only_where_they_were_run():
    cheap = measured_of(1e-5)
    runs = [run_of(1, 25_000.0, num_envs=64), run_of(2, 40_000.0, num_envs=128), run_of(2, 15_000.0, num_envs=32)]
    done = decided(*runs, measured=cheap, machine=machine_of(16), goal=Goal())
    assert done.advice.setting.most_per_worker == 64
    even = run_of(2, 39_500.0, num_envs=32)
    done = decided(*runs[:2], even, measured=cheap, machine=machine_of(16), goal=Goal())
    assert done.advice.setting == Setting(num_envs=256, num_workers=16)


def test_a_larger_machine_is_never_slower():
    runs = (run_of(1, 500.0), run_of(2, 950.0, busy=0.9))
    rates = [decided(*runs, machine=machine_of(n), goal=WORKERS_ONLY).advice.predicted.steps_per_s for n in (1, 4, 64)]
    assert rates == sorted(rates)


# ---- what binds ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("run", "given", "binding", "said"),
    [
        (run_of(2, 1000.0), {}, "cores", "cores bind: 2 may be used; workers are busy for 100%"),
        (run_of(2, 1000.0, busy=0.4), {}, "overhead", "the caller binds: workers are busy for 40%"),
        (run_of(2, 1000.0, busy=0.4), {"times": (1e-3, 9e-3)}, "step variance", "9.00 ms at the 99th"),
        (
            run_of(2, 1000.0),
            {"here": machine_of(8, cgroup=Cgroup(version=2, cpu_quota=1.5))},
            "quota",
            "allows 1.5 cores' worth of time, although 8 processors",
        ),
        (run_of(2, 1000.0), {"measured": measured_of(**WAITING)}, "waiting", "free for 90% of a step"),
        (run_of(8, 1000.0), {"here": machine_of(64)}, "num_envs", "8 envs cannot use 64 cores"),
        (run_of(2, 1000.0), {"goal": Goal(num_envs=8, policy_s=6e-3)}, "policy", "6.00 ms of a batch's 8.00"),
        (run_of(2, 1000.0), {"goal": Goal(num_envs=8, target_steps_per_s=900.0)}, "target", "900 env-steps/s are"),
        (run_of(0, 1000.0), {}, "env step", "one after the other in this process"),
        (replace(run_of(2, 1000.0), reset_share=0.7), {}, "resets", "resets bind: they take 70%"),
    ],
)
def test_what_binds(run, given, binding, said):
    advice = decided(run, **given).advice
    assert advice.binding == binding
    assert said in advice.why[0]


def test_a_limit_that_struck_out_more_workers_binds():
    refused = run_of(4, 0.0, refusal=Refusal("memory", "takes 900 MiB of memory, 800 may be used"))
    advice = decided(run_of(2, 1000.0), refused, here=machine_of(4)).advice
    assert advice.binding == "memory"
    assert advice.why[0] == "memory binds: 8 envs on 4 workers takes 900 MiB of memory, 800 may be used."


def test_what_a_reader_should_know_is_said():
    measured = measured_of(grown_per_1000_steps_bytes=9 * MIB, contention=0.5, num_threads=2, hidden_cpu_share=0.4)
    why = " ".join(decided(run_of(2, 1000.0), measured=measured).advice.why)
    assert "grows by 9.0 MiB per 1,000 steps" in why
    assert "other processes used the machine: the probe waited for a processor for 50% of its time" in why
    assert "computes in 2 threads besides the worker's" in why
    assert "--episode-steps" in " ".join(decided(run_of(2, 1.0), measured=measured_of(end_share=0.0)).advice.why)
    missed = decided(run_of(2, 1000.0), goal=Goal(num_envs=8, target_steps_per_s=3000.0)).advice
    assert missed.meets_target is False
    assert "out of reach here by a factor of 3.0" in " ".join(missed.why)


def test_the_other_kind_is_compared():
    serial = decided(run_of(0, 1000.0), run_of(2, 700.0)).advice
    assert "SerialEnv, in the caller's process, makes 1,000 env-steps/s; worker processes make 700" in serial.why[1]
    assert serial.parallel == TWO
    assert serial.to_plain()["executor"] == "SerialEnv"
    assert decided(run_of(2, 700.0)).advice.to_plain()["executor"] == "ParallelEnv"
