"""Random operations on executors whose workers die, hang and raise at random: `python -m tests.faults.fuzz_restart 7`.

See `tests.faults.fuzzing` for the checks, and `tests.faults.fuzz_session` for the operations.
"""

from __future__ import annotations

import random
from typing import Any

from tests.faults import fuzzing
from tests.faults.fuzz_session import Session, Setting
from tests.faults.fuzzing import Watch

STEP_TIMEOUT_S = 0.5

#: Option set -> its fixed options; the others are drawn.
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"num_workers": "each", "on_worker_loss": "restart"},
    "shared": {"num_workers": "few", "on_worker_loss": "restart"},
    "raise": {"on_worker_loss": "raise"},
    "raise views": {"copy": False, "on_worker_loss": "raise"},
    "ahead": {"reset_ahead": True, "on_worker_loss": "restart"},
    "recycle": {"recycle_after": 2, "on_worker_loss": "restart"},
    "ahead recycle": {"reset_ahead": True, "recycle_after": 2, "on_worker_loss": "restart"},
    "threads": {"env_threads": True, "num_workers": "few", "on_worker_loss": "restart"},
    "infos": {"infos": "plain", "on_worker_loss": "restart"},
    "views": {"copy": False, "on_worker_loss": "restart"},
    "pairs": {"lanes": 2, "on_worker_loss": "restart"},
    "tasks": {"kinds": "mixed", "on_worker_loss": "restart"},
    "text": {"kinds": "text", "on_worker_loss": "restart"},
    "late": {"step_timeout_s": STEP_TIMEOUT_S, "on_worker_loss": "restart"},
    "serial": {"is_serial": True},
    "gymnasium": {"facade": "gymnasium", "on_worker_loss": "restart"},
    "pettingzoo": {"facade": "pettingzoo", "on_worker_loss": "restart"},
    "sb3": {"facade": "sb3", "on_worker_loss": "restart"},
    "torchrl": {"facade": "torchrl", "on_worker_loss": "restart"},
}


def draw_setting(rng: random.Random, variant: str) -> Setting:
    """Draw an option set of a variant."""
    asked = VARIANTS[variant]
    num_envs = rng.randint(1, 5)
    workers = asked.get("num_workers", rng.choice(["each", "few"]))
    lanes = asked.get("lanes", 0)
    is_ahead = asked.get("reset_ahead", False)
    kinds = asked.get("kinds", "plain")
    if is_ahead or workers == "each":
        num_workers = num_envs
    else:
        num_envs = max(2, num_envs)
        num_workers = rng.randint(1, num_envs - 1)
    if kinds == "mixed":
        num_envs = max(2, num_envs)
        kind_of = ("plain", "other", *(rng.choice(["plain", "other"]) for _ in range(num_envs - 2)))
    else:
        kind_of = (kinds,) * num_envs
    options: dict[str, Any] = {"stall_log_s": 5.0, "close_timeout_s": 2.0, "max_restarts": 10_000}
    options["restart_window_s"] = 0.001  # no waits between restarts
    names = ("on_worker_loss", "reset_ahead", "env_threads", "recycle_after", "infos", "step_timeout_s")
    options |= {name: asked[name] for name in names if name in asked}
    if "step_timeout_s" in asked:
        options |= {"reset_timeout_s": 2 * STEP_TIMEOUT_S, "build_timeout_s": 8.0}
    if not asked.get("copy", True):
        options["poison"] = True
    return Setting(
        num_envs=num_envs,
        num_workers=num_workers,
        kinds=kind_of,
        lanes=lanes,
        lengths=tuple(rng.choice([None, None, None, 3, 1000]) for _ in range(num_envs)),
        is_serial=asked.get("is_serial", False),
        copy=asked.get("copy", True),
        root_seed=rng.randrange(1000),
        options=options,
        facade=asked.get("facade", ""),
    )


def run(seed: int, variant: str, watch: Watch, num_operations: int) -> None:
    """Run one case."""
    rng = random.Random(seed)
    left = num_operations
    while left > 0:
        count = min(left, rng.randint(20, 60))
        left -= count
        _run_session(rng, variant, watch, count)
        watch.check_leftovers()


def session_class(setting: Setting) -> type[Session]:
    """Return the session class of a setting; facades are imported on demand."""
    if not setting.facade:
        return Session
    from tests.faults.fuzz_facades import SESSIONS

    return SESSIONS[setting.facade]


def _run_session(rng: random.Random, variant: str, watch: Watch, num_operations: int) -> None:
    with fuzzing.new_folder() as folder:
        setting = draw_setting(rng, variant)
        session = session_class(setting)(rng, setting, folder, watch)
        try:
            session.play(num_operations)
        except BaseException:
            watch.stop()
            session.close()
            raise
        watch.begin("leftovers")


if __name__ == "__main__":
    raise SystemExit(fuzzing.main("fuzz_restart", run, list(VARIANTS)))
