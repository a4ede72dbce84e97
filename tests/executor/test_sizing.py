"""Sizing: the decision is pure and follows from what was measured; the probe measures, and survives what envs do."""

from __future__ import annotations

import functools
import io
import json
from dataclasses import replace

from tests.extras import needs, skip_without

skip_without("cli")

import numpy as np
import pytest
from typer.testing import CliRunner

from envherd.executor import EnvError, ExecutorOptions, FactoryError, ParallelEnv, SerialEnv
from envherd.executor.cli.app import app
from envherd.executor.cli.sizing import BadOption, Request, parse_size, planned
from envherd.executor.machine.cgroups import Cgroup
from envherd.executor.machine.gpus import Gpu, parse_apps
from envherd.executor.machine.machine import Machine
from envherd.executor.sizing.deciding import DoesNotFit, decide
from envherd.executor.sizing.limits import Goal, Limits
from envherd.executor.sizing.measurement import Measurement, tail_index
from envherd.executor.sizing.model import Model, Setting
from envherd.executor.sizing.overhead import Overhead, fit
from envherd.executor.sizing.probing import ProbeFailed, ProbeLimits, Subject, probe
from envherd.executor.sizing.recommending import with_episodes_of
from envherd.executor.sizing.verifying import Check, given_resets, span_with_resets, whole_episodes
from envherd.shm.specs import Discrete, EnvSpec, LeafSpec
from envherd.workers.build import pickle_factory
from envherd.workers.probing.echo import EchoFactory
from envherd.workers.testing import CountingEnv
from tests.executor import sized_envs

GIB, MIB = 2**30, 2**20
SPEC = EnvSpec((LeafSpec(("observation",), (4,)),), (LeafSpec(("action",), (), "int64", Discrete(2)),))
OVERHEAD = Overhead(
    fixed_s=20e-6, per_worker_s=15e-6, per_env_s=1e-6, serial_fixed_s=5e-6, serial_per_env_s=1e-6, exchange_factor=2.0
)


@pytest.fixture(scope="module")
def _fonts():
    """Have matplotlib open its fonts, which it keeps open, before any test is asked what it leaves."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure()
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.set(xscale="log", xlim=(1e-5, 1e-1), title="x", xlabel="x")
    figure.savefig(io.BytesIO(), dpi=110)


def machine_of(num_cpus=8, *, memory=64 * GIB, **changes):
    cpus = tuple(range(num_cpus))
    plain = Machine(
        cpus=cpus, num_cpus=num_cpus, physical_cores=num_cpus, numa_nodes=(cpus,), cgroup=Cgroup(version=2),
        memory_total=memory, memory_free=memory, swap_free=0, shm_total=None, shm_free=None,
        limits={"nofile": 1024}, open_files=10, user_threads=10, load=0.0, cpu_pressure=0.0,
    )  # fmt: skip
    return replace(plain, **changes)


def measured_of(step_s=1e-3, **changes):
    samples = np.full(100, step_s)
    plain = Measurement(
        spec=SPEC, build_s=0.1, build_further_s=0.1, first_reset_s=0.01, reset_samples=np.full(5, 0.01),
        step_samples=samples, step_median_s=step_s, step_p99_s=step_s, tail_index=None, cpu_per_step_s=step_s,
        reset_cpu_s=0.01, hidden_cpu_share=0.0, num_threads=0, steps_measured=1000, end_share=0.001, contention=0.0,
        worker_bytes=5 * MIB, first_env_bytes=20 * MIB, further_env_bytes=10 * MIB, shared_bytes=30 * MIB,
        grown_per_reset_bytes=0, grown_per_1000_steps_bytes=0, row_bytes=100,
    )  # fmt: skip
    return replace(plain, **changes)


def advice_of(measured=None, machine=None, **goal):
    return decide(measured or measured_of(), OVERHEAD, machine or machine_of(), Goal(**goal))


# ---- the decision ----------------------------------------------------------------------------------


def test_a_worker_for_each_core_where_steps_compute():
    advice = advice_of()
    assert (advice.setting.num_workers, advice.setting.mode, advice.binding) == (8, "sync", "cores")
    assert advice.prediction.steps_per_s == pytest.approx(8 / 1.01e-3, rel=0.15)
    assert advice.why[0].startswith("cores bind: 8 may be used")


def test_one_worker_is_as_good_for_tiny_steps_on_two_cores():
    advice = advice_of(measured_of(2e-6, end_share=0.0), machine_of(2), num_envs=8)
    assert (advice.setting.num_workers, advice.binding) == (1, "overhead")
    assert any("SerialEnv" in line for line in advice.why)


@pytest.mark.parametrize("quota", [0.5, 2.0])
def test_a_quota_binds(quota):
    advice = advice_of(machine=machine_of(8, cgroup=Cgroup(version=2, cpu_quota=quota)))
    assert advice.binding == "quota"
    assert advice.setting.num_workers == max(1, int(quota))
    assert advice.prediction.steps_per_s == pytest.approx(quota / 1.01e-3, rel=0.12)


def test_memory_binds_and_is_kept():
    room = 500 * MIB
    advice = advice_of(measured_of(further_env_bytes=90 * MIB), machine_of(memory=room), num_workers=4)
    assert advice.prediction.memory_bytes <= 0.8 * room
    assert advice.most_envs_in_memory == 6
    advice = advice_of(measured_of(first_env_bytes=100 * MIB), machine_of(memory=room))
    assert (advice.binding, advice.setting.num_workers) == ("memory", 3)
    assert "500 MiB are available, 400 of them usable" in advice.why[0]


def test_open_files_bind():
    advice = advice_of(machine=machine_of(limits={"nofile": 26}, open_files=10))
    assert (advice.binding, advice.setting.num_workers) == ("open files", 3)


def test_processes_bind_threads_of_envs_count():
    cgroup = Cgroup(version=2, pids_room=11)
    advice = advice_of(measured_of(num_threads=4), machine_of(cgroup=cgroup))
    assert (advice.binding, advice.setting.num_workers) == ("processes", 2)


def test_gpu_memory_binds():
    advice = advice_of(measured_of(gpu_bytes=3 * GIB), machine_of(gpus=(Gpu("x", 10 * GIB, None),)))
    assert (advice.binding, advice.setting.num_workers) == ("GPU memory", 3)


def test_the_policy_binds():
    advice = advice_of(num_envs=8, policy_s=0.1)
    assert advice.binding == "policy"
    assert advice.prediction.steps_per_s < 80


def test_variance_binds_and_first_k_is_advised():
    samples = np.where(np.arange(1000) % 50 == 0, 40e-3, 1e-3)
    measured = measured_of(step_samples=samples, cpu_per_step_s=samples.mean())
    sync = Model(measured, OVERHEAD, machine_of()).predict(Setting(num_envs=8, num_workers=8))
    assert sync.slowest_s > 3 * sync.mean_s
    advice = advice_of(measured, num_envs=24)
    assert advice.setting.mode == "first-k"
    assert any("recv(min_envs=num_envs // 2)" in line for line in advice.why)


def test_two_groups_where_the_policy_is_as_long_as_the_steps():
    advice = advice_of(measured_of(10e-3), num_envs=64, policy_s=0.03)
    sync = Model(measured_of(10e-3), OVERHEAD, machine_of(), policy_s=0.03).predict(Setting(num_envs=64, num_workers=8))
    assert advice.setting.mode != "sync"
    assert advice.prediction.steps_per_s > 1.25 * sync.steps_per_s


def test_envs_that_wait_get_more_workers_than_cores():
    advice = advice_of(measured_of(cpu_per_step_s=0.1e-3, end_share=0.0), machine_of(2))
    assert advice.setting.num_workers > 10
    assert any("waits for 90% of a step" in line for line in advice.why)


def test_threads_of_envs_use_up_cores():
    measured = measured_of(cpu_per_step_s=4e-3, hidden_cpu_share=0.75, num_threads=4, end_share=0.0)
    assert advice_of(measured).prediction.steps_per_s == pytest.approx(8 / 4e-3, rel=0.1)


def test_hyper_threads_count_for_less():
    siblings = machine_of(8, physical_cores=4)
    assert advice_of(machine=siblings).prediction.steps_per_s < 0.7 * advice_of().prediction.steps_per_s


def test_the_smallest_setting_that_reaches_a_target():
    advice = advice_of(target_steps_per_s=2500.0)
    assert (advice.meets_target, advice.binding, advice.setting.num_workers) == (True, "target", 3)
    advice = advice_of(target_steps_per_s=1e6)
    assert advice.meets_target is False
    assert any("out of reach here by a factor of" in line for line in advice.why)


def test_what_is_fixed_is_kept():
    advice = advice_of(num_envs=5, num_workers=2)
    assert (advice.setting.num_envs, advice.setting.num_workers) == (5, 2)


def test_neighbours_are_next_to_the_choice_and_none_is_much_better():
    advice = advice_of(num_envs=16)
    for setting, one in advice.neighbours:
        assert (setting.num_envs == 16) + (setting.mode == advice.setting.mode) >= 1
        assert one.steps_per_s <= advice.prediction.steps_per_s * 1.25


def test_nothing_fits():
    with pytest.raises(DoesNotFit, match=r"room for 1 env, got too little \(memory\). 1 would take 55 MiB; 40 MiB are"):
        advice_of(machine=machine_of(memory=40 * MIB))


def test_growth_and_disturbance_are_said():
    why = " ".join(advice_of(measured_of(grown_per_1000_steps_bytes=9 * MIB, contention=0.5)).why)
    assert "grows by 9.0 MiB per 1,000 steps" in why
    assert "other processes used the machine: the probe waited for a processor for 50% of its time" in why
    half = machine_of(2, cgroup=Cgroup(version=2, cpu_quota=0.5))
    assert any(
        line.startswith("the CPU quota was used up") for line in advice_of(measured_of(contention=0.5), half).why
    )


def test_to_ask_whether_something_fits_is_not_a_refusal():
    limits = Limits(Model(measured_of(), OVERHEAD, machine_of(memory=100 * MIB)), Goal())
    assert not limits.fits(Setting(num_envs=64, num_workers=8))
    assert limits.refused_by == {}
    assert not limits.allow(Setting(num_envs=64, num_workers=8))
    assert limits.refused_by == {"memory": 1}


def test_more_of_a_machine_is_never_slower():
    rates = [advice_of(machine=machine_of(n)).prediction.steps_per_s for n in (1, 2, 4, 8, 16, 64)]
    assert rates == sorted(rates)
    assert rates[-1] > 30 * rates[0]


def test_the_slowest_of_more_workers_takes_longer():
    rng = np.random.default_rng(0)
    model = Model(measured_of(step_samples=rng.exponential(1e-3, 4000), end_share=0.0), OVERHEAD, machine_of())
    times = [model.slowest_s(count, count) for count in (1, 2, 8, 64)]
    harmonic = [sum(1 / i for i in range(1, count + 1)) * 1e-3 for count in (1, 2, 8, 64)]
    assert times == pytest.approx(harmonic, rel=0.15)


def test_resets_are_part_of_the_time():
    model = Model(with_episodes_of(measured_of(), 10), OVERHEAD, machine_of(1))
    assert model.predict(Setting(num_envs=64, num_workers=1)).steps_per_s == pytest.approx(1 / 2e-3, rel=0.1)


def test_steps_among_other_envs_of_a_worker_take_longer():
    model = Model(measured_of(together_factor=3.0, together_envs=3, end_share=0.0), OVERHEAD, machine_of(2))
    rates = {envs: model.predict(Setting(num_envs=envs, num_workers=1)).steps_per_s for envs in (1, 2, 3, 8)}
    assert rates == pytest.approx({1: 1 / 1e-3, 2: 1 / 2e-3, 3: 1 / 3e-3, 8: 1 / 3e-3}, rel=0.1)
    spread = [model.predict(Setting(num_envs=8, num_workers=2, mode=mode)).steps_per_s for mode in ("sync", "first-k")]
    assert spread == pytest.approx([2 / 3e-3] * 2, rel=0.1)
    assert model.predict(Setting(num_envs=8, num_workers=0)).steps_per_s == pytest.approx(1 / 3e-3, rel=0.1)


def test_steps_take_longer_after_a_pause():
    slowed = measured_of(paused_factor=2.0, together_factor=4.0, together_envs=3, end_share=0.0)
    model = Model(slowed, OVERHEAD, machine_of(2))
    rates = [model.predict(Setting(num_envs=envs, num_workers=1)).steps_per_s for envs in (1, 2, 3)]
    assert rates == pytest.approx([1 / 2e-3, 1 / 3e-3, 1 / 4e-3], rel=0.1)


def test_overhead_is_fitted_without_negative_parts():
    rows = np.array([[1, 1, 1], [1, 1, 16], [1, 2, 2], [1, 2, 32]], float)
    assert fit(rows, rows @ [3e-5, 2e-5, 1e-6]) == pytest.approx((3e-5, 2e-5, 1e-6))
    assert min(fit(rows, np.array([9e-5, 8e-5, 2e-5, 1e-5]))) >= 0


@pytest.mark.parametrize(("share", "least", "most"), [(0.0, 0, 0), (0.3, 70, 170)])
def test_what_stands_for_an_env_ends_as_often(share, least, most):
    with SerialEnv(4, EchoFactory(SPEC.to_plain(), 0, share), seed=0) as env:
        root, num_ends = env.reset(), 0
        for _ in range(100):
            td, root = env.step_and_maybe_reset(env.rand_action(root))
            num_ends += int(td["next", "done"].sum())
    assert least <= num_ends <= most


def test_tail_index():
    rng = np.random.default_rng(0)
    assert tail_index(rng.pareto(1.5, 20_000) + 1) == pytest.approx(1.5, rel=0.15)
    assert tail_index(np.ones(10)) is None


def test_gpu_memory_of_processes():
    assert parse_apps("11, 300\n12, 100\n13, [N/A]\n", {11, 13}) == 300 * MIB


@pytest.mark.parametrize(
    ("text", "size"), [("2GiB", 2 * GIB), ("1.5 g", 1_500_000_000), ("512MB", 512_000_000), ("7", 7), ("3ki", 3072)]
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "12XB", "-1G", "1e9"])
def test_sizes_that_are_none(text):
    with pytest.raises(BadOption, match="expected a number and a unit"):
        parse_size(text)


def test_another_machine_is_planned_for():
    here = machine_of(2, cgroup=Cgroup(version=2, cpu_quota=0.5, memory_limit=GIB, memory_room=GIB))
    there = planned(here, Request(env="x", cpus=64, memory="256GiB", gpu="24GiB"))
    assert (there.cores, there.memory_available, there.gpus[0].memory_bytes) == (64, 256 * GIB, 24 * GIB)
    assert planned(here, Request(env="x")) == here


# ---- the probe -------------------------------------------------------------------------------------


def probed(make_env, memory_bytes=None, budget_s=0.6):
    subject = Subject(factory=pickle_factory(make_env), env_kwargs={}, preload=(make_env.__module__,), seed=0)
    limits = ProbeLimits(budget_s=budget_s, memory_bytes=memory_bytes)
    return probe(subject, limits, ExecutorOptions(), lambda _stage, _share: None)


@pytest.mark.slow
def test_a_probe_measures_memory_and_growth():
    heavy = probed(sized_envs.HeavyMemoryEnv)
    assert 48 * MIB <= heavy.first_env_bytes < 52 * MIB
    assert 48 * MIB <= heavy.further_env_bytes < 52 * MIB
    assert heavy.grown_per_1000_steps_bytes < MIB
    leaking = probed(sized_envs.LeakingEnv)
    assert 5 * MIB < leaking.grown_per_1000_steps_bytes < 9 * MIB
    assert leaking.stopped_by == ""


@pytest.mark.slow
def test_memory_that_differs_between_episodes_is_taken_in_the_mean():
    breathing = probed(sized_envs.BreathingEnv, budget_s=5.0)  # time for some resets, also on a busy machine
    assert 12 * MIB < breathing.first_env_bytes < 38 * MIB  # after any one reset 8 or 40, and what it imports
    assert 12 * MIB < breathing.further_env_bytes < 38 * MIB


@pytest.mark.slow
def test_a_probe_steps_envs_in_turn():
    jealous = probed(sized_envs.JealousEnv, budget_s=3.0)
    assert jealous.together_envs == 3
    assert 1.7 < jealous.together_factor < 2.1
    assert 1.0 <= jealous.paused_factor < 1.3
    assert jealous.step_s == pytest.approx(1e-3, rel=0.2)


@pytest.mark.slow
def test_a_probe_tells_episodes_of_one_length():
    regular = probed(functools.partial(CountingEnv, 7))
    assert regular.episode_steps == 7
    assert regular.end_share == 1 / 7
    assert not probed(CountingEnv).has_one_length


def test_a_check_is_compared_with_what_as_many_resets_would_give():
    setting = Setting(num_envs=8, num_workers=8)
    model = Model(measured_of(end_share=0.001, reset_samples=np.full(5, 1.0)), OVERHEAD, machine_of())
    one = Check(
        setting=setting, predicted=model.predict(setting), steps=1000, resets=0, steps_per_s=7000.0,
        memory_bytes=1, start_s=1.0, others_share=0.0,
    )  # fmt: skip
    none, one_reset, two = (
        given_resets(replace(one, resets=count), model).predicted.steps_per_s for count in (0, 1, 2)
    )
    assert none > 6500
    assert one_reset == one.predicted.steps_per_s
    assert two < one_reset < none / 4


def test_settings_are_compared_over_whole_episodes_where_resets_matter():
    batch = advice_of().prediction
    assert whole_episodes(measured_of(end_share=0.005, episode_steps=200), batch) == 1  # 10 ms in 200 of 1 ms
    long_resets = measured_of(end_share=0.005, episode_steps=200, reset_samples=np.full(5, 0.5))
    assert whole_episodes(long_resets, batch) == 200
    assert whole_episodes(replace(long_resets, episode_steps=0), batch) == 1
    assert whole_episodes(long_resets, replace(batch, batch_s=1.0)) == 1  # 200 s


def test_checks_last_for_some_resets_where_those_matter():
    predicted = replace(advice_of().prediction, steps_per_s=1000.0)
    assert span_with_resets(measured_of(end_share=0.001), predicted, 3.0) == 3.0  # 10 ms in 1,000 steps of 1 ms
    slow = measured_of(end_share=0.002, reset_samples=np.full(5, 0.5))
    assert span_with_resets(slow, predicted, 3.0) == pytest.approx(5.0)
    assert span_with_resets(slow, replace(predicted, steps_per_s=1e5), 3.0) == 3.0
    assert span_with_resets(slow, replace(predicted, steps_per_s=1.0), 3.0) == 15.0


@pytest.mark.slow
def test_a_probe_tells_waiting_from_computing():
    sleeping, counting = (probed(make, budget_s=2.0) for make in (sized_envs.SleepingEnv, CountingEnv))
    assert sleeping.step_s > 3e-3
    assert sleeping.waits_share > 0.7
    assert sleeping.gil_free_share > 0.1
    assert counting.waits_share < 0.3
    assert 0 < counting.end_share < 1
    assert counting.num_threads == 0
    assert len(counting.reset_samples) > 1


@pytest.mark.slow
@pytest.mark.broken_pool
def test_a_probe_that_takes_too_much_is_ended_and_said_to_be():
    with pytest.raises(ProbeFailed, match=r"before it had made a step: it took \d+ MiB of the 200 MiB that it may"):
        probed(sized_envs.BottomlessEnv, memory_bytes=200 * MIB)


@pytest.mark.slow
@pytest.mark.broken_pool
def test_a_probe_that_dies_is_said_to_have():
    with pytest.raises(ProbeFailed, match="it ended with exit code 7"):
        probed(sized_envs.DyingEnv)


@pytest.mark.slow
def test_envs_that_fail_are_their_own_errors():
    with pytest.raises(FactoryError, match="the factory raised RuntimeError: no licence"):
        probed(sized_envs.make_failing)
    with pytest.raises(EnvError, match="the env raised ValueError: no such key"):
        probed(sized_envs.FailingEnv)


# ---- the command -----------------------------------------------------------------------------------


@needs("media")
@pytest.mark.slow
@pytest.mark.usefixtures("_fonts")
def test_size_as_a_table_a_picture_json_and_yaml(tmp_path, monkeypatch):
    monkeypatch.setattr("envherd.executor.cli.sizing._VERIFY_S", 0.1)
    name, json_path = "python:envherd.workers.testing:CountingEnv", tmp_path / "a" / "size.json"
    command = ["size", name, "--budget", "0.5", "--envs", "2", "--workers", "1", "--json", str(json_path), "--verify"]
    command += ["--plot", str(tmp_path / "size.png"), "--yaml", str(tmp_path / "size.yaml")]
    done = CliRunner().invoke(app, command, env={"COLUMNS": "80"}, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "2 envs on 1 worker" in done.output
    assert "measured" in done.output
    assert "…" not in done.output
    assert "why: " in done.output
    report = json.loads(json_path.read_text())
    assert report["schema"] == "envherd.size/1"
    assert (report["num_envs"], report["num_workers"]) == (2, 1)
    assert report["predicted"]["steps_per_s"] > 0
    assert report["verified"][0]["measured_steps_per_s"] > 0
    assert (tmp_path / "size.png").read_bytes()[:4] == b"\x89PNG"
    lines = [line for line in (tmp_path / "size.yaml").read_text().splitlines() if not line.startswith("#")]
    assert lines == ["num_envs: 2", "num_workers: 1", f"stepping: {report['mode']}"]


def test_what_cannot_be_sized_is_exit_code_2():
    runner = CliRunner()
    for arguments, said in (
        (["gymnasium:CartPol-v1"], "Did you mean CartPole-v1"),
        (["gymnasium:CartPole-v1", "--memory", "lots"], "expected a number and a unit"),
        (["gymnasium:CartPole-v1", "--verify", "--cpus", "8"], "for another"),
    ):
        done = runner.invoke(app, ["size", *arguments], env={"COLUMNS": "200"})
        assert done.exit_code == 2
        assert said in done.stderr


@pytest.mark.slow
def test_auto_measures_and_decides(monkeypatch):
    monkeypatch.setattr("envherd.executor.sizing.recommending.AUTO_BUDGET_S", 0.5)
    with ParallelEnv(4, CountingEnv, num_workers="auto", seed=0) as env:
        assert env.num_envs == 4
        assert 1 <= env.num_workers <= 4
    with pytest.raises(ValueError, match="num_envs failed: expected an int or 'auto', got 'many'"):
        ParallelEnv("many", CountingEnv, num_workers="auto")
