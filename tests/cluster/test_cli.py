"""The option `--ray` of `rollout`, with a cluster on this machine and without one."""

import json
import socket

from tests.extras import needs, skip_without

skip_without("cli")

import pytest
from typer.testing import CliRunner

from envherd.executor.cli.app import app

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("one_torch_thread"),
]

ENV = "python:envherd.workers.testing:CountingEnv"


def run(*arguments):
    result = CliRunner().invoke(app, [*arguments, "--json", "-"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout), result.stderr


def test_a_rollout_on_a_cluster_is_that_of_one_machine(cluster):
    arguments = (
        "rollout",
        ENV,
        "--envs",
        "2",
        "--steps",
        "30",
        "--seed",
        "4",
        "--workers",
        "1",
    )
    ours, printed = run(*arguments, "--ray", cluster.address)
    theirs, _ = run(*arguments)
    assert ours["num_workers"] == 2, "one on each of two nodes"
    for name in ("env_steps", "seed"):
        assert ours[name] == theirs[name], name
    assert ours["episodes"] > 3
    assert (ours["workers"], ours["worker_losses"]) == ([], 0)
    assert "env-steps/s" in printed


SCRIPT = """
import sys
from typer.testing import CliRunner
from envherd.executor.cli.app import app
for address in (sys.argv[1], None):
    if address is None:
        sys.modules["ray"] = None
        del sys.modules["envherd.executor.cluster.rollouts"]
    asked = ["rollout", "python:envherd.workers.testing:CountingEnv", "--ray", address or "auto"]
    result = CliRunner().invoke(app, asked)
    print(result.exit_code, result.stderr.replace("\\n", " "))
"""


@needs("ray")
def test_a_missing_cluster_or_ray_is_reported(script_host, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with socket.socket() as listener:  # bound and not listening: nothing answers there
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        done = script_host.run(script, address, folder=tmp_path, output=tmp_path)
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["2", "2"], done.stdout
    assert (
        f"expected a Ray cluster at {address}, got ConnectionRefusedError" in lines[0]
    )
    assert "RayRollouts failed: expected Ray, which is not installed" in lines[1]
    assert "pip install 'envherd[ray]'" in lines[1]
