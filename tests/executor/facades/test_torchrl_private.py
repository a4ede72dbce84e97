"""Uses of TorchRL's private API are in one module, and in the table of docs/private_apis.md with their versions."""

import ast
import functools
import re
from contextlib import closing
from pathlib import Path

from tests.extras import skip_without

skip_without("torchrl")

import pytest
import tensordict
import torchrl.envs
from torchrl.envs import Compose, Transform, TransformedEnv

from envherd.torchrl import ParallelEnv
from tests.envs import torchrl_own as own

ROOT = Path(__file__).parents[3]
ONE_MODULE = ROOT / "workers" / "adapters" / "torchrl" / "private_api.py"
OTHERS = sorted(
    {
        *(ROOT / "executor" / "facades" / "torchrl").rglob("*.py"),
        *(ROOT / "workers" / "adapters" / "torchrl").rglob("*.py"),
    }
    - {ONE_MODULE}
)
#: Private methods that TorchRL's documentation asks env authors to write.
FOR_AUTHORS = {"_step", "_reset", "_set_seed"}
#: Python's and torch's, not TorchRL's.
OF_TORCH = {"_modules"}
PRIVATE = re.compile(r"_[a-z]\w*")


def names_in(file: Path) -> set[str]:
    """Return the private names that a module uses: attributes, methods, imports, and strings that are just a name."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, (ast.ImportFrom, ast.Import)):
            found.update(part for alias in node.names for part in alias.name.split("."))
        elif isinstance(node, ast.keyword) and node.arg:
            found.add(node.arg)
        elif isinstance(node, ast.Assign):
            found.update(
                target.id for target in node.targets if isinstance(target, ast.Name)
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return {name for name in found if PRIVATE.fullmatch(name)}


@functools.cache
def names_of_torchrl() -> set[str]:
    """Return the private names of TorchRL's batched envs and wrappers, including those of their values."""
    with closing(torchrl.envs.SerialEnv(2, own.CountingEnv)) as env:
        env.reset()
        found = {
            *dir(torchrl.envs.ParallelEnv),
            *dir(torchrl.envs.SerialEnv),
            *dir(torchrl.envs.GymEnv),
            *vars(env),
        }
    return found - {"_modules"}


@pytest.mark.parametrize(
    "file", OTHERS, ids=lambda file: f"{file.parent.name}/{file.name}"
)
def test_no_other_module_uses_a_private_name_of_torchrl(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in (
            "torchrl",
            "tensordict",
        ):
            assert not [
                alias.name for alias in node.names if alias.name.startswith("_")
            ], ast.unparse(node)
    assert names_in(file) & names_of_torchrl() <= FOR_AUTHORS


def table() -> dict[str, tuple[str, str]]:
    """Return the rows of the documentation: name -> (first and last version that has it, its tests)."""
    rows = {}
    for line in (ROOT / "docs" / "private_apis.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `_"):
            for name in re.findall(r"`(_\w+)`", cells[0]):
                rows[name] = (cells[2], cells[4])
    return rows


def test_every_private_name_is_in_the_table() -> None:
    its_own = {
        "_fixed_shapes",
        "_one_task",
        "_start_method",
        "_with_missing",
        "_keys_without_tensors",
        "_worker_processes",
    }
    assert names_in(ONE_MODULE) - its_own - OF_TORCH <= table().keys()


def test_the_table_says_which_versions_have_a_name() -> None:
    texts = {}
    for library, files in ((tensordict, "*.py"), (torchrl, "envs/**/*.py")):
        folder = Path(library.__file__).parent
        texts[library] = "".join(file.read_text() for file in folder.glob(files))
    wrong = []
    for name, (versions, _) in table().items():
        library = (
            tensordict
            if name in ("_new_unsafe", "_set_str", "_td_dim_names")
            else torchrl
        )
        first, _, last = versions.partition(" to ")
        first_version, last_version = (
            tuple(map(int, version.split("."))) for version in (first, last or "0.99")
        )
        has_it = re.search(rf"\b{name}\b", texts[library]) is not None
        wrong += (
            [name] if has_it != (first_version <= own.VERSION <= last_version) else []
        )
    assert wrong == []


def test_the_tests_that_hold_a_name_exist() -> None:
    named = {
        name: re.findall(r"`(test_\w+)`", tests) for name, (_, tests) in table().items()
    }
    assert all(named.values())
    text = "".join(file.read_text() for file in (ROOT / "tests").rglob("test_*.py"))
    assert {test for tests in named.values() for test in tests} <= {
        *re.findall(r"def (test_\w+)\(", text)
    }


class Outside(Transform):
    """Must not live in a worker."""

    def _check_batched_worker_compat(self) -> None:
        raise RuntimeError("put this around the batched env")


@own.since((0, 13), "Transform._check_batched_worker_compat")
def test_transforms_say_whether_they_may_live_in_a_worker() -> None:
    with pytest.raises(RuntimeError, match="put this around"):
        ParallelEnv(2, lambda: TransformedEnv(own.CountingEnv(), Compose(Outside())))
    with closing(TransformedEnv(ParallelEnv(2, own.CountingEnv), Outside())) as env:
        assert env.rollout(2).shape == (2, 2)


@pytest.mark.slow
def test_attributes_of_torchrls_parallel_env_exist() -> None:
    with own.started(2, own.CountingEnv, num_processes=1) as env:
        assert (env._single_task, env._use_buffers, env._mp_start_method) == (
            True,
            True,
            None,
        )
        assert not env._has_dynamic_specs
        assert env._non_tensor_keys == []
        assert isinstance(env._supports_set_state, bool)
        assert [handle.is_alive() for handle in env._workers] == [True]
        assert bool(env.is_closed)
        assert not hasattr(ParallelEnv, "shared_tensordict_parent")
