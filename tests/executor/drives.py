"""All ways to drive an executor up to and beyond the ends of episodes; each returns batches for comparison."""

from typing import Any

from envherd.workers.protocol import Op


def act(td: Any) -> Any:
    """Set actions that depend on the observations, for test envs with one agent or several."""
    key = ("agents",) if "agents" in td.keys() else ()  # noqa: SIM118  # a batch is no dict
    observed = td[*key, "observation"]
    return td.set((*key, "action"), (observed[..., 0] + observed[..., 1]).long() % 5)


def fused(env: Any, num_steps: int) -> list[Any]:
    root, rows = env.reset(), []
    for _ in range(num_steps):
        td, root = env.step_and_maybe_reset(act(root))
        rows += [td["next"].clone(), root.clone()]
    return rows


def reset_by_hand(env: Any, num_steps: int) -> list[Any]:
    root, rows = env.reset(), []
    for _ in range(num_steps):
        td = env.step(act(root))
        root = env.reset(td.select().set("_reset", td["next", "done"]))
        rows += [td["next"].clone(), root.clone()]
    return rows


def rolled(env: Any, num_steps: int) -> list[Any]:
    return [
        env.rollout(num_steps, act, break_when_any_done=False),
        env.rollout(3, act, auto_reset=False),
    ]


def sent(env: Any, num_steps: int) -> list[Any]:
    env.send(act(env.reset()))
    rows: dict[int, list[Any]] = {i: [] for i in range(env.num_envs)}
    left = [num_steps] * env.num_envs
    while any(left):
        td = env.recv(1)
        env_id = int(td["env_ids"])
        now = env.current([env_id])
        rows[env_id] += [td["next"].clone(), now.clone()]
        left[env_id] -= 1
        if left[env_id]:
            env.send(act(now), [env_id])
    return [row for env_id in rows for row in rows[env_id]]


def commanded(env: Any, num_steps: int, op: Op = Op.STEP_RESET) -> list[Any]:
    """As the facades do it. A STEP resets what the one before it has ended, as in Gymnasium's mode NEXT_STEP."""
    engine, rows = env.engine, []
    flight = engine.flights.begin_resets(engine.all_ids, is_parked=True).land()
    for _ in range(num_steps):
        engine.write_inputs(act(env.current()))
        flight = engine.flights.begin(
            op, resets=flight.ended if op == Op.STEP else None, is_parked=True
        ).land()
        rows.append(env.current())
    return rows


DRIVES = (
    fused,
    reset_by_hand,
    rolled,
    sent,
    commanded,
    lambda env, num_steps: commanded(env, num_steps, Op.STEP),
)
