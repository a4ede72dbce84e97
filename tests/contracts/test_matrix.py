"""The matrix family x check of `docs/reports/families.md`: `make matrix` runs it in full and writes that page.

An ordinary run makes the same checks with fewer steps, in this process.
"""

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from envherd.executor import ExecutorOptions, ParallelEnv, SerialEnv
from envherd.executor.batches.actions import ActionSampler
from envherd.executor.testing import Contract
from tests.contracts.executor_batch import BATCHES, PORTABLE, batch_apart
from tests.contracts.families import FAMILIES
from tests.contracts.family import IS_FULL, Family
from tests.extras import skip_without
from tests.oracles.driving import Driven
from tools.families_page import COLUMNS, read_page

NUM_ENVS = 2
#: Envs, or rows of envs that are batches.
NUM_COUNTED_AT_ONCE = 10
ROOT_SEED = 11
#: Numbers of transitions: of the plain-loop and async checks, and of the check for invented transitions.
NUM_COMPARED, NUM_COUNTED = (400, 10_000) if IS_FULL else (48, 0)
PAGE = Path(__file__).parents[2] / "docs" / "reports" / "families.md"

Cell = Callable[[str, str], None]


def opened(
    family: Family,
    *,
    seed: int = ROOT_SEED,
    num_workers: int = 2,
    num_envs: int = NUM_ENVS,
    options: ExecutorOptions | None = None,
) -> contextlib.AbstractContextManager[Any]:
    in_workers = IS_FULL or family.needs_worker or options is not None
    if family.is_alone:  # one worker per env, and one env in this process
        num_envs = num_workers = min(num_envs, num_workers) if in_workers else 1
    kind: Any = (
        partial(ParallelEnv, num_workers=num_workers) if in_workers else SerialEnv
    )
    return kind(num_envs, family.make_env, seed=seed, options=options)


def driven(family: Family, env: Any) -> contextlib.closing[Driven]:
    return contextlib.closing(Driven(family, env, ROOT_SEED))


def check_contract(family: Family) -> str:
    everywhere = (
        [BATCHES["parallel"], BATCHES["portable"]]
        if family.needs_worker
        else BATCHES.values()
    )
    for make_batch in [batch_apart] if family.is_alone else everywhere:
        report = Contract(
            family.make_env, num_steps=family.num_steps, make_batch=make_batch
        ).check_all()
        assert report.num_ends > 1
    return f"{len(report.rules)} rules"


def check_plain_loop(family: Family) -> str:
    count, num_compared = 0, NUM_COMPARED // family.shortening
    with opened(family) as env, driven(family, env) as batch:
        for part in (3, 4):  # alternate a rollout and single steps in the same envs
            num_made, num_invalid = batch.roll(num_compared // (part * NUM_ENVS))
            assert num_invalid == 0
            count += num_made + batch.step_fused(num_compared // (part * NUM_ENVS))
    return f"{count:,} equal transitions"


def check_masks(family: Family) -> str:
    rng = np.random.default_rng(ROOT_SEED)
    with opened(family) as env, driven(family, env) as batch:
        num_resets = batch.step_and_reset_at_random(
            NUM_COMPARED // family.shortening // NUM_ENVS, rng
        )
    assert num_resets > NUM_ENVS * family.num_rows
    return f"{num_resets} resets"


def check_invalid(family: Family) -> str:
    made, invalid, num_counted = 0, 0, NUM_COUNTED // family.shortening
    with (
        opened(family, num_envs=NUM_COUNTED_AT_ONCE // family.num_rows) as env,
        driven(family, env) as batch,
    ):
        while made < num_counted:
            counts = batch.roll(num_counted // (2 * NUM_COUNTED_AT_ONCE))
            made, invalid = made + counts[0], invalid + counts[1]
    assert invalid == 0
    return f"{invalid} of {made:,}"


def alike(env: Any, seed: int) -> Callable[[Any], Any]:
    """Return a policy that gives every env the same random actions, for any number of envs."""
    sampler = ActionSampler([env.spec], seed)
    return lambda td: td.update(
        sampler.fill(None, torch.Size([1, *td.batch_size[1:]]), None).expand(
            td.batch_size
        )
    )


def check_seeds(family: Family) -> str:
    seen = []
    for seed, num_workers in ((ROOT_SEED, 1), (ROOT_SEED, 2), (ROOT_SEED + 1, 1)):
        with opened(family, seed=seed, num_workers=num_workers) as env:
            policy = alike(env, seed) if family.is_alone else None
            data = env.rollout(
                NUM_COMPARED // family.shortening // 4,
                policy,
                break_when_any_done=False,
            )
            keys = [
                leaf.key
                for leaf in (*env.spec.observation, *env.spec.reward)
                if not leaf.is_side
            ]
            # if each env needs its own worker, there is one env on one worker
            seen.append(
                [data[:1]["next", *key].contiguous().view(torch.uint8) for key in keys]
            )
    assert all(map(torch.equal, seen[0], seen[1]))
    assert not all(map(torch.equal, seen[0], seen[2]))
    return "same data"


def check_rendering(family: Family) -> str:
    with opened(family) as env:
        env.rollout(2)
        pictures = env.render()
    if family.draws is False or (family.draws == "OpenGL" and pictures[0] is None):
        assert pictures == [None] * env.num_envs
        return "with OpenGL" if family.draws else "no pictures"
    assert all(
        picture.dtype == np.uint8 and picture.ndim == 3 and picture.shape[2] == 3
        for picture in pictures
    )
    assert all(picture.std() > 0 for picture in pictures)
    return "x".join(map(str, pictures[0].shape[:2]))


def check_async(family: Family) -> str:
    with opened(family) as env, driven(family, env) as batch:
        return (
            f"{batch.exchange(NUM_COMPARED // family.shortening):,} equal transitions"
        )


def check_portable(family: Family) -> str:
    batches: list[list[Any]] = []
    for options in (None, PORTABLE):
        with opened(family, options=options) as env:
            torch.manual_seed(ROOT_SEED)
            num_steps = NUM_COMPARED // family.shortening // NUM_ENVS // 2
            rollout = env.rollout(num_steps, break_when_any_done=False)
            root = env.reset()
            steps = []
            for _ in range(num_steps):
                batch, root = env.step_and_maybe_reset(env.rand_action(root))
                steps.append(batch)
            env.send(env.rand_action(root))
            batches.append([rollout, *steps, env.recv()])
    for mine, its in zip(*batches, strict=True):
        assert (mine == its).all()
    return f"{sum(batch.numel() for batch in batches[0]):,} equal transitions"


#: Column -> its check. Rendering runs in workers, because a failing driver may kill its process.
CHECKS: dict[str, Callable[[Family], str]] = {
    "contract": check_contract,
    "rendering": check_rendering,
    "seeds": check_seeds,
    "plain loop": check_plain_loop,
    "partial resets": check_masks,
    "invalid transitions": check_invalid,
    "async": check_async,
    "portable": check_portable,
}
NEEDS_PLAIN = {"plain loop", "partial resets", "invalid transitions", "async"}
#: The contract is in `test_families`, too, `test_portable` compares some families, and the plain loop counts fewer
#: transitions.
ONLY_IN_FULL = {"contract", "rendering", "invalid transitions", "portable"}


def columns_for(family: Family) -> list[str]:
    """Return the checks to be made in this run."""
    if IS_FULL:
        return list(CHECKS)
    return (
        ["partial resets"]
        if family.is_slow
        else [column for column in CHECKS if column not in ONLY_IN_FULL]
    )


@pytest.mark.sampled(2)
@pytest.mark.long
@pytest.mark.timeout(6000)
# Warnings of the envs.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", FAMILIES)
def test_family(name: str, record_property: Cell) -> None:
    family = FAMILIES[name]
    skip_without(family.extra)
    if family.is_only_in_full and not IS_FULL:
        pytest.skip("its envs, or their processes, take long to start: make matrix")
    for column in columns_for(family):
        if (column in ("seeds", "portable") and not family.is_seeded) or (
            column in NEEDS_PLAIN and family.plain is None
        ):
            record_property(column, "-")
            continue
        record_property(column, "FAILED")
        record_property(column, CHECKS[column](family))


def test_every_column_is_checked() -> None:
    assert set(COLUMNS) == set(CHECKS)


def test_the_page_has_every_family_and_nothing_failed() -> None:
    """`make matrix` writes the page; run it again after a change of the families."""
    rows = read_page(PAGE)
    assert [row[0] for row in rows] == [family.title for family in FAMILIES.values()]
    assert not any("FAILED" in cell for row in rows for cell in row)
    invalid = {
        row[0]: row[1 + list(COLUMNS).index("invalid transitions")] for row in rows
    }
    counted = {f"0 of {10_000 // family.shortening:,}" for family in FAMILIES.values()}
    assert set(invalid.values()) <= {*counted, "-", "not run"}
    missing = [title for title, cell in invalid.items() if cell == "not run"]
    if missing:
        pytest.skip(
            f"make matrix FAMILY=NAME has yet to be run for {', '.join(missing)}"
        )
