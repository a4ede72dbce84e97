"""The environment variables of each worker: `ExecutorOptions.env_vars` and those that select its GPU."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from envherd.executor.options import ExecutorOptions, are_texts

#: Variables that restrict a process to one GPU, where the GPUs of `CUDA_VISIBLE_DEVICES` are NVIDIA's, and AMD's.
_CUDA = "CUDA_VISIBLE_DEVICES"
_ROCM = "HIP_VISIBLE_DEVICES"
#: Variables that select the GPU of a renderer by number: MuJoCo, dm_control and robosuite read the first.
_EGL = ("MUJOCO_EGL_DEVICE_ID", "EGL_VISIBLE_DEVICES")


def common_variables(options: ExecutorOptions) -> dict[str, str]:
    """Return the variables that all workers have, and the helper that imports modules for them."""
    if options.differ_by_worker:
        return {}
    return dict(options.env_vars)  # type: ignore[arg-type]  # one mapping, or pairs


def variables_of(
    options: ExecutorOptions,
    gpus: Sequence[str | None],
) -> list[dict[str, str]]:
    """Return the variables of each worker.

    Args:
        options: of the executor.
        gpus: of each worker, what `gpus_of` returns.

    Raises:
        ValueError: a list of another length, or a function that returned something else.
    """
    num_workers = len(gpus)
    given: Any = options.env_vars
    if callable(given):
        each = [given(worker_id) for worker_id in range(num_workers)]
        for worker_id, one in enumerate(each):
            if not are_texts(one):
                raise ValueError(
                    f"env_vars failed: expected a dict of texts from the function for worker {worker_id}, got {one!r}."
                )
    elif options.has_list:
        if len(given) != num_workers:
            raise ValueError(
                f"env_vars failed: expected {num_workers} dicts, one per worker, got {len(given)}. Set num_workers, or "
                f"give a function of the worker's id."
            )
        each = list(given)
    else:
        each = [dict(given)] * num_workers
    # The user's own variables win over those that select a GPU.
    return [{**select(gpu), **dict(own)} for own, gpu in zip(each, gpus, strict=True)]


def gpus_of(options: ExecutorOptions, num_workers: int) -> list[str | None]:
    """Return the GPU of each worker, as `CUDA_VISIBLE_DEVICES` names it: worker i gets `gpus[i % len(gpus)]`.

    Raises:
        ValueError: this process sees no such GPU.
    """
    if options.gpus is None:
        return [None] * num_workers
    # Numbers count those that this process sees, as CUDA counts them.
    visible = visible_gpus(os.environ)
    numbers: Sequence[int] = (
        range(len(visible)) if options.gpus == "all" else options.gpus
    )
    if not visible or max(numbers) >= len(visible):
        names = f"{len(visible)} ({', '.join(visible)})" if visible else "none"
        raise ValueError(
            f"ExecutorOptions failed: expected gpus among those that this process sees, got {options.gpus!r}; it sees "
            f"{names}. {_CUDA}={os.environ.get(_CUDA)!r} restricts them."
        )
    return [
        visible[numbers[worker_id % len(numbers)]] for worker_id in range(num_workers)
    ]


def visible_gpus(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the GPUs that a process with these variables may use, as those variables name them; starts no driver."""
    for name in (_CUDA, _ROCM):
        if name in environment:
            names = [one.strip() for one in environment[name].split(",")]
            # As the drivers read it: what follows the first name that is none does not count.
            end = next(
                (i for i, one in enumerate(names) if one in ("", "-1")),
                len(names),
            )
            return tuple(names[:end])
    # A container may have the devices without the driver's folder.
    count = (
        len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
        or len(list(Path("/dev").glob("nvidia[0-9]*")))
        # AMD's: nodes of the driver's topology that have SIMD units.
        or sum(
            int(dict(map(str.split, node.read_text().splitlines()))["simd_count"]) > 0
            for node in Path("/sys/class/kfd/kfd/topology/nodes").glob("*/properties")
        )
    )
    return tuple(map(str, range(count)))


def select(gpu: str | None) -> dict[str, str]:
    """Return the variables that make a process use one GPU.

    A renderer numbers the GPUs itself, so a GPU that is named by its UUID is left to the renderer's own choice.
    """
    if gpu is None:
        return {}
    variables = {_CUDA: gpu}
    if _ROCM in os.environ or Path("/dev/kfd").exists():
        variables[_ROCM] = gpu
    if gpu.isdigit():
        variables |= dict.fromkeys(_EGL, gpu)
    return variables
