"""What each worker gets: environment variables, a GPU, and who it is."""

import importlib
import os
import signal

import pytest
import torch

import envherd
from envherd import ExecutorOptions, ParallelEnv, SerialEnv
from envherd.executor.guests.monitor import Watch, plates
from envherd.executor.sending.blueprint import draw
from envherd.executor.sending.variables import visible_gpus
from envherd.workers.testing import CountingEnv
from tests.envs.breaking_envs import FaultyEnv


class Place(CountingEnv):
    """Records what it sees while it is built."""

    def __init__(self):
        super().__init__()
        self.worker = envherd.worker().__dict__.copy()
        self.variables = dict(os.environ)

    def ask(self):
        return envherd.worker().__dict__.copy()


def seen(env, *names):
    return [
        tuple(variables.get(name) for name in names)
        for variables in env.get("variables")
    ]


@pytest.mark.broken_pool
@pytest.mark.parametrize(
    "env_vars",
    [[{"PORT": "70"}, {"PORT": "71"}], lambda worker_id: {"PORT": str(70 + worker_id)}],
)
def test_each_worker_has_the_variables_of_its_id_also_after_a_restart(env_vars):
    options = ExecutorOptions(
        env_vars=env_vars, on_worker_loss="restart", infos="plain"
    )
    with ParallelEnv(4, Place, num_workers=2, options=options) as env:
        assert seen(env, "PORT") == [("70",), ("70",), ("71",), ("71",)]
        os.kill(env.statistics().workers[1].pid, signal.SIGKILL)
        env.reset()
        env.reset()
        assert [one["generation"] for one in env.call("ask")] == [0, 0, 1, 1]
        assert seen(env, "PORT") == [("70",), ("70",), ("71",), ("71",)]


def test_variables_are_set_before_modules_of_envs_are_imported(tmp_path, monkeypatch):
    (tmp_path / "reads_at_import.py").write_text(
        "import os\nfrom envherd.workers.testing import CountingEnv\nSEEN = os.environ.get('DEVICE')\n"
        "class Reads(CountingEnv):\n    @property\n    def device(self):\n        return SEEN\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    reads_at_import = importlib.import_module("reads_at_import")

    options = ExecutorOptions(env_vars=lambda worker_id: {"DEVICE": str(worker_id)})
    with ParallelEnv(2, reads_at_import.Reads, num_workers=2, options=options) as env:
        assert env.get("device") == ["0", "1"]


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        ("all", ["2", "GPU-5", "2"]),
        ([1], ["GPU-5"] * 3),
        ([1, 0], ["GPU-5", "2", "GPU-5"]),
    ],
)
def test_workers_get_the_gpus_that_this_process_sees_in_turn(
    gpus, expected, monkeypatch
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-5")
    with ParallelEnv(
        3, Place, num_workers=3, options=ExecutorOptions(gpus=gpus, infos="plain")
    ) as env:
        names = "CUDA_VISIBLE_DEVICES", "MUJOCO_EGL_DEVICE_ID", "EGL_VISIBLE_DEVICES"
        # A renderer knows no UUID.
        renderers = [gpu if gpu.isdigit() else None for gpu in expected]
        assert seen(env, *names) == [
            (gpu, one, one) for gpu, one in zip(expected, renderers, strict=True)
        ]
        assert [worker.gpu for worker in env.statistics().workers] == expected
        (plate,) = [one for one in plates() if one.pid == os.getpid()]
        watch = Watch(plate)
        assert [worker.gpu for worker in watch.look().workers] == expected
        watch.close()


def test_the_users_variables_come_before_those_of_the_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    options = ExecutorOptions(
        gpus="all", env_vars={"MUJOCO_EGL_DEVICE_ID": "7"}, infos="plain"
    )
    with ParallelEnv(2, Place, num_workers=2, options=options) as env:
        assert seen(env, "CUDA_VISIBLE_DEVICES", "MUJOCO_EGL_DEVICE_ID") == [
            ("0", "7"),
            ("1", "7"),
        ]


def test_the_errors_of_envs_name_the_gpu_of_their_worker(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with ParallelEnv(
        2,
        FaultyEnv,
        num_workers=1,
        env_kwargs={"fault": "value_error", "step": 1},
        options=ExecutorOptions(gpus="all"),
    ) as env:
        env.reset()
        with pytest.raises(
            envherd.EnvError,
            match=r"ValueError: the env broke on purpose \(env 0, .*pid \d+, gpu 3\)",
        ):
            env.step(env.current().set("action", torch.zeros(2, dtype=torch.int64)))
        with pytest.raises(
            envherd.EnvError, match=r"no attribute 'ask' \(env 0, .*pid \d+, gpu 3\)"
        ):
            env.call("ask")
    with pytest.raises(envherd.FactoryError, match=r"pid \d+, gpu 3, phase build"):
        ParallelEnv(1, lambda: 1 / 0, options=ExecutorOptions(gpus=[0]))


@pytest.mark.broken_pool
def test_the_error_about_a_lost_worker_names_its_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3")
    with ParallelEnv(
        2, Place, num_workers=2, options=ExecutorOptions(gpus="all")
    ) as env:
        env.reset()
        os.kill(env.statistics().workers[1].pid, signal.SIGKILL)
        with pytest.raises(
            envherd.WorkerLost, match=r"worker 1 ended .*generation 0, gpu 3\)"
        ):
            env.reset()


@pytest.mark.parametrize(
    ("visible", "gpus", "expected"),
    [
        ("0,1", [2], r"got \[2\]; it sees 2 \(0, 1\)\. CUDA_VISIBLE_DEVICES='0,1'"),
        ("", "all", r"got 'all'; it sees none\. CUDA_VISIBLE_DEVICES=''"),
    ],
)
def test_gpus_that_this_process_does_not_see_are_refused(
    visible, gpus, expected, monkeypatch
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(ValueError, match=expected):
        ParallelEnv(2, Place, options=ExecutorOptions(gpus=gpus))


def test_the_variables_name_the_visible_gpus():
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "3, 1"}) == ("3", "1")
    # The driver stops there.
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0,-1,2"}) == ("0",)
    assert visible_gpus({"HIP_VISIBLE_DEVICES": "1"}) == ("1",)
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == ()


@pytest.mark.parametrize(
    ("env_vars", "expected"),
    [
        ([{"A": "1"}], "expected 2 dicts, one per worker, got 1"),
        (
            lambda worker_id: {"A": worker_id},
            "from the function for worker 0, got {'A': 0}",
        ),
    ],
)
def test_variables_that_do_not_fit_the_workers_are_refused(env_vars, expected):
    with pytest.raises(ValueError, match=f"env_vars failed: .*{expected}"):
        ParallelEnv(2, Place, num_workers=2, options=ExecutorOptions(env_vars=env_vars))


@pytest.mark.parametrize("env_threads", [False, True])
def test_factories_and_envs_know_which_worker_they_are_in(env_threads):
    options = ExecutorOptions(first_env_id=10, env_threads=env_threads, infos="plain")
    with ParallelEnv(3, Place, num_workers=2, options=options) as env:
        built = env.get("worker")
        assert [one["env_id"] for one in built] == [10, 11, 12]
        assert [one["worker_id"] for one in built] == [0, 0, 1]
        assert [one["env_ids"] for one in built] == [(10, 11), (10, 11), (12,)]
        assert {one["num_workers"] for one in built} == {2}
        # Known while an env is built, or alone.
        assert [one["env_id"] for one in env.call("ask")] == [None, None, 12]


def test_serial_env_has_worker_info_while_it_builds():
    with SerialEnv(2, Place) as env:
        assert [one["env_id"] for one in env.get("worker")] == [0, 1]
        assert env.get("worker")[0]["num_workers"] == 0
    assert envherd.worker() is None


@pytest.mark.long
def test_envs_that_must_be_alone_have_a_process_each():
    options = ExecutorOptions(alone=True, infos="plain")
    for num_workers in (None, 3, "auto"):
        with ParallelEnv(3, Place, num_workers=num_workers, options=options) as env:
            assert len(env.statistics().workers) == 3
    with ParallelEnv("auto", Place, options=options) as env:
        assert len(env.statistics().workers) == env.num_envs
    with pytest.raises(
        ValueError,
        match=r"num_workers failed: expected 3 \(one for each env\) .* with alone, got 2",
    ):
        ParallelEnv(3, Place, num_workers=2, options=options)
    with pytest.raises(
        ValueError, match=r"SerialEnv failed: expected one env with alone=True, got 2"
    ):
        SerialEnv(2, Place, options=options)


def test_every_executor_that_takes_alone_gives_each_env_a_process():
    # As the facades call it.
    blueprint = draw([Place] * 3, None, 1, 0, ExecutorOptions(alone=True))
    assert blueprint.blocks == ((0,), (1,), (2,))


class OnePerProcess(CountingEnv):
    """Refuses a second one in its process, as Playwright's sync API does."""

    num_built = 0

    def __init__(self, *, fails=False):
        super().__init__()
        OnePerProcess.num_built += 1
        if fails or OnePerProcess.num_built > 1:
            raise RuntimeError("this API is in use")


def test_failure_of_second_env_in_a_process_advises_one_per_worker():
    with pytest.raises(
        envherd.FactoryError,
        match=r"built env 0 in this process: .*ExecutorOptions\(alone=True\)",
    ):
        ParallelEnv(4, OnePerProcess, num_workers=2)
    with ParallelEnv(2, OnePerProcess, options=ExecutorOptions(alone=True)) as env:
        assert env.num_workers == 2
    # Another call.
    with pytest.raises(
        envherd.FactoryError, match=r"this API is in use \(env 1, .*phase build\)\.$"
    ):
        ParallelEnv(2, OnePerProcess, num_workers=1, env_kwargs=[{}, {"fails": True}])
