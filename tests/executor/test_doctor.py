"""The doctor: every finding has a level, and a fix where it is needed."""

import ctypes.util
import json
from dataclasses import replace

import pytest

from envherd.executor import doctor
from envherd.executor.machine.gpus import Renderer, find_renderers
from envherd.executor.machine.machine import Cgroup, read_machine
from envherd.workers import native
from tests.extras import needs


def test_versions(monkeypatch):
    wanted = {
        "envherd": ["torch<3,>=2.6"],
        "torchrl": ['torch>=9; extra == "new"', "numpy"],
        "tensordict": [],
    }
    monkeypatch.setattr("importlib.metadata.requires", wanted.__getitem__)
    assert list(doctor.unmet("torch", "2.6.0+cpu")) == []
    assert list(doctor.unmet("torch", "2.5")) == ["envherd wants <3,>=2.6"]
    assert list(doctor.unmet("torch", "3.0.0")) == ["envherd wants <3,>=2.6"]


def levels(check, machine):
    return [finding.level for finding in check(machine)]


def test_limits_that_are_too_low_are_reported():
    machine = replace(
        read_machine(),
        cpu_pressure=0.0,
        files_left=90,
        processes_left=None,
        address_space=None,
        cgroup=Cgroup(),
    )
    assert levels(doctor.limits, machine) == ["fail", "ok"]
    finding = next(doctor.limits(machine))
    assert (finding.found, finding.fix) == (
        "90 left: enough for 26 workers",
        "ulimit -n 65536",
    )
    assert levels(
        doctor.limits, replace(machine, files_left=590, address_space=2**32)
    ) == ["warn", "ok", "warn"]
    starved = replace(
        machine,
        processes_left=5,
        cgroup=Cgroup(cpu_quota=0.5, oom_kills=2, memory_room=2**20),
    )
    assert levels(doctor.cores, starved) == ["warn", "ok"]
    assert levels(doctor.cores, replace(machine, cpu_pressure=0.9))[1] == "warn"
    assert levels(doctor.memory, starved) == ["warn", "warn"]
    assert levels(doctor.limits, starved) == ["fail", "warn"]
    assert levels(
        doctor.dev_shm, replace(machine, shm_total=64 * 2**20, shm_free=0)
    ) == ["warn"]


@pytest.mark.parametrize(
    ("threads", "load", "quota", "level"),
    [
        (4, 0.4, None, "ok"),
        (4, 1.0, None, "warn"),  # others use what one of the threads would
        (4, 0.0, 2.0, "warn"),
        (1, 9.0, 0.5, "ok"),  # there are no fewer
    ],
)
def test_more_torch_threads_than_free_processors_are_warned_of(
    monkeypatch, threads, load, quota, level
):
    monkeypatch.setattr("torch.get_num_threads", lambda: threads)
    machine = replace(
        read_machine(), cpus=(0, 1, 2, 3), load=load, cgroup=Cgroup(cpu_quota=quota)
    )
    (finding,) = doctor.torch_threads(machine)
    assert (finding.level, "OMP_NUM_THREADS=1" in finding.fix) == (
        level,
        level == "warn",
    )


@pytest.mark.parametrize(
    ("switch", "module", "level", "found"),
    [
        pytest.param(
            "1",
            native.MODULE,
            "ok",
            "C",
            marks=pytest.mark.skipif(native.load() is None, reason="not built"),
        ),
        ("0", native.MODULE, "ok", "Python (ENVHERD_NATIVE=0)"),
        (
            "1",
            "math",
            "warn",
            "Python (the C extension was built from other sources; run: python setup.py build_ext --inplace)",
        ),
        ("1", "_no_such_module", "warn", "Python (the C extension is not built)"),
    ],
)
def test_it_says_whether_plain_steps_run_in_c(
    monkeypatch, switch, module, level, found
):
    monkeypatch.setenv(native.SWITCH, switch)
    monkeypatch.setattr(native, "MODULE", module)
    native.find.cache_clear()
    try:
        (finding,) = doctor.plain_steps()
    finally:
        monkeypatch.undo()
        native.find.cache_clear()
    assert (finding.level, finding.found, bool(finding.fix)) == (
        level,
        found,
        level == "warn",
    )


@needs("cli")
@pytest.mark.slow
def test_doctor_as_json_starts_workers_in_every_way():
    from typer.testing import CliRunner

    from envherd.executor.cli.app import app

    done = CliRunner().invoke(app, ["doctor", "--json"])
    report = json.loads(done.stdout)
    findings = {finding["name"]: finding for finding in report["findings"]}
    for method in ("zygote", "spawn"):
        assert findings[f"start method {method}"]["level"] == "ok"
    assert findings["torch"]["level"] == "ok"
    for finding in findings.values():
        assert finding["level"] == "ok" or finding["fix"]
    assert done.exit_code == (0 if report["is_ok"] else 1)


def test_a_check_that_raises_is_a_finding(monkeypatch):
    def broken():
        raise OSError("no such place")
        yield

    monkeypatch.setattr(doctor, "_packages", broken)
    monkeypatch.setattr(doctor, "_start", lambda _: iter(()))
    monkeypatch.setattr(doctor, "_dmlab2d", lambda: iter(()))
    (finding,) = [one for one in doctor.examine() if one.name == "packages"]
    assert (finding.level, finding.found) == (
        "fail",
        "the check raised OSError: no such place",
    )


def test_files_of_mujoco_that_an_upgrade_removed_are_missed(tmp_path, monkeypatch):
    """The files of the packages are those that pip leaves; the lost one is MuJoCo's own."""
    package = tmp_path / "mujoco_core-4.0.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: mujoco-core\nVersion: 4.0.0\n"
    )
    (package / "RECORD").write_text(
        "mujoco/_specs.so,,\nmujoco_core-4.0.0.dist-info/METADATA,,\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    (finding,) = doctor._mujoco()
    assert finding.level == "fail"
    assert (
        finding.found == "4.0.0; 1 of its files are missing, such as mujoco/_specs.so"
    )
    assert (
        finding.fix
        == "pip install --force-reinstall --no-deps mujoco mujoco-core mujoco-studio"
    )
    (tmp_path / "mujoco").mkdir()
    (tmp_path / "mujoco/_specs.so").touch()
    (finding,) = doctor._mujoco()
    assert finding.level == "ok"


@pytest.mark.parametrize(
    ("renderer", "found", "level"),
    [
        (
            Renderer(0, "NVIDIA H100", cuda=1, file="/dev/dri/card2"),
            "NVIDIA H100 (CUDA GPU 1, /dev/dri/card2)",
            "ok",
        ),
        (
            Renderer(1, "llvmpipe (LLVM 15)"),
            "llvmpipe (LLVM 15) (on the processor)",
            "ok",
        ),
        (Renderer(2, problem="no OpenGL context"), "no OpenGL context", "warn"),
    ],
)
def test_each_device_of_egl_is_shown_with_what_drew(
    monkeypatch, renderer, found, level
):
    monkeypatch.setattr(doctor, "find_renderers", lambda: iter([renderer]))
    (finding,) = doctor._egl()
    assert (finding.name, finding.found, finding.level) == (
        f"EGL device {renderer.number}",
        found,
        level,
    )


@pytest.mark.skipif(ctypes.util.find_library("EGL") is None, reason="needs EGL")
def test_a_picture_is_drawn_on_each_device_of_egl():
    for number, renderer in enumerate(find_renderers()):
        assert renderer.number == number
        assert bool(renderer.name) != bool(renderer.problem)
