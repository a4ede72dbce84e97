"""Check that envs of one factory have equal specs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from envherd.shm.specs import EnvSpec
from envherd.workers.build import Factory, are_equal, describe
from envherd.workers.errors import SpecError


def check_agreement(specs: Sequence[EnvSpec], factories: Sequence[Factory], kwargs: Sequence[dict[str, Any]]) -> None:
    """Refuse envs of one factory, called with the same arguments, that have different specs.

    Different factories or arguments may build different tasks; their batches are lazy stacks, whose members must have
    one batch shape.

    Raises:
        SpecError: with the first difference.
    """
    first: dict[int, int] = {}
    for env_id, (spec, factory) in enumerate(zip(specs, factories, strict=True)):
        other = first.setdefault(id(factory), env_id)
        if spec != specs[other] and are_equal(kwargs[env_id], kwargs[other]):
            raise SpecError(
                f"make_env failed: the factory {describe(factory)} gave different specs for envs {other} and {env_id}: "
                f"{specs[other].difference(spec)}. Give a list of factories if the tasks are meant to differ.",
                env_ids=(other, env_id),
            )
        if spec.batch_shape != specs[0].batch_shape:
            raise SpecError(
                f"make_env failed: expected envs of one batch shape, got {specs[0].batch_shape} for env 0 and "
                f"{spec.batch_shape} for env {env_id}: their rows cannot be stacked. Make one executor for each shape.",
                env_ids=(0, env_id),
            )
