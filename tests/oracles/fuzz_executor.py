"""Random operations on executors whose workers die, hang and raise, and whose calls are broken off, at random.

See `tests.oracles.fuzzing` for the checks, and `tests.oracles.fuzz_session` for the operations. Interrupts are real:
SIGINT to the process (which has several threads), `_thread.interrupt_main`, a SIGALRM whose handler raises, a SIGTERM
whose handler exits. After an interrupt, data must be correct or calls refused; nothing may hang.
"""

import _thread
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from envherd.executor import EnvError
from tests.oracles.fuzz_session import DEADLY, Session, Setting, Stopped
from tests.oracles.fuzzing import Watch

STEP_TIMEOUT_S = 0.5
LATE = {"step_timeout_s": STEP_TIMEOUT_S, "on_worker_loss": "restart"}
COLLECTOR = {**LATE, "facade": "collector", "num_workers": "few"}

#: Option set -> its fixed options; the others are drawn.
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"num_workers": "each", "on_worker_loss": "restart"},
    "shared": {"num_workers": "few", "on_worker_loss": "restart"},
    "raise": {"on_worker_loss": "raise"},
    "raise views": {"copy": False, "on_worker_loss": "raise"},
    "recycle": {"recycle_after": 2, "on_worker_loss": "restart"},
    "threads": {"env_threads": True, "num_workers": "few", "on_worker_loss": "restart"},
    "infos": {"infos": "plain", "on_worker_loss": "restart"},
    "views": {"copy": False, "on_worker_loss": "restart"},
    "pairs": {"lanes": 2, "on_worker_loss": "restart"},
    "tasks": {"kinds": "mixed", "on_worker_loss": "restart"},
    "text": {"kinds": "text", "on_worker_loss": "restart"},
    "late": LATE,
    "portable": {
        "start_method": "portable",
        "num_workers": "few",
        "on_worker_loss": "restart",
    },
    "serial": {"is_serial": True},
    "mends": {
        "num_workers": "few",
        "on_env_error": "interrupt",
        "on_worker_loss": "restart",
    },
    "mends alone": {"on_env_error": "interrupt", "infos": "plain"},
    "mends text": {
        "kinds": "text",
        "on_env_error": "interrupt",
        "on_worker_loss": "restart",
    },
    "mends tasks": {"kinds": "mixed", "on_env_error": "interrupt", "copy": False},
    "mends threads": {
        "env_threads": True,
        "num_workers": "few",
        "on_env_error": "interrupt",
    },
    "mends serial": {"is_serial": True, "on_env_error": "interrupt"},
    "mends gymnasium": {
        "facade": "gymnasium",
        "on_env_error": "interrupt",
        "on_worker_loss": "restart",
    },
    "mends pettingzoo": {
        "facade": "pettingzoo",
        "on_env_error": "interrupt",
        "on_worker_loss": "restart",
    },
    "mends sb3": {
        "facade": "sb3",
        "on_env_error": "interrupt",
        "on_worker_loss": "restart",
    },
    "mends torchrl": {
        "facade": "torchrl",
        "on_env_error": "interrupt",
        "on_worker_loss": "restart",
    },
    "gymnasium": {"facade": "gymnasium", "on_worker_loss": "restart"},
    "pettingzoo": {"facade": "pettingzoo", "on_worker_loss": "restart"},
    "sb3": {"facade": "sb3", "on_worker_loss": "restart"},
    "torchrl": {"facade": "torchrl", "on_worker_loss": "restart"},
    "collector": {**COLLECTOR, "in_background": 0},
    "collector of rows": {**COLLECTOR, "layout": "rows"},
    "collector, flat": {**COLLECTOR, "layout": "flat"},
    "collector of sizes": {**COLLECTOR, "batch_sizes": (2, 5)},
    "collector of threads": {**COLLECTOR, "env_threads": True},
    "collector in the background": {**COLLECTOR, "in_background": 2},
}
#: Those whose calls are also broken off; there, only "interrupted deaths" and collectors lose workers.
INTERRUPTED = (
    *(
        "plain",
        "shared",
        "infos",
        "threads",
        "recycle",
        "serial",
        "raise",
        "raise views",
        "pairs",
        "tasks",
    ),
    "portable",
    *(
        "views",
        "gymnasium",
        "pettingzoo",
        "sb3",
        "mends",
        "mends alone",
        "mends serial",
    ),
    *("collector", "collector in the background"),
)
VARIANTS |= {f"interrupted {name}": VARIANTS[name] for name in INTERRUPTED}
VARIANTS["interrupted deaths"] = VARIANTS["shared"]


def draw_setting(rng: random.Random, variant: str) -> Setting:
    """Draw an option set of a variant."""
    asked = VARIANTS[variant]
    num_envs = rng.randint(1, 5)
    workers = asked.get("num_workers", rng.choice(["each", "few"]))
    lanes = asked.get("lanes", 0)
    kinds = asked.get("kinds", "plain")
    if workers == "each":
        num_workers = num_envs
    else:
        num_envs = max(2, num_envs)
        num_workers = rng.randint(1, num_envs - 1)
    if kinds == "mixed":
        num_envs = max(2, num_envs)
        kind_of = (
            "plain",
            "other",
            *(rng.choice(["plain", "other"]) for _ in range(num_envs - 2)),
        )
    else:
        kind_of = (kinds,) * num_envs
    options: dict[str, Any] = {
        "stall_log_s": 5.0,
        "close_timeout_s": 2.0,
        "max_restarts": 10_000,
    }
    options["restart_window_s"] = 0.001  # no waits between restarts
    names = (
        *(
            "on_worker_loss",
            "on_env_error",
            "start_method",
            "env_threads",
            "recycle_after",
            "infos",
        ),
        "step_timeout_s",
    )
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
        asked=asked,
    )


#: Seconds within which a sent interrupt must arrive.
_ARRIVAL_S = 2.0


class Late(Exception):
    """Raised by the handler of SIGALRM, like a caller's time limit."""


STOPS = (KeyboardInterrupt, SystemExit, Late)


class Interrupter:
    """Breaks calls off.

    Attributes:
        num_sent: interrupts.
        num_dropped: interrupts that did not break off a call.
    """

    HOWS = (
        "SIGINT",
        "SIGINT",
        "SIGINT",
        "own SIGINT",
        "interrupt_main",
        "SIGALRM",
        "SIGTERM",
        "twice",
    )

    def __init__(self) -> None:
        self.num_sent = self.num_dropped = 0
        self._has_arrived = self._is_sent = False
        signal.signal(signal.SIGALRM, self._raising(Late))
        signal.signal(signal.SIGTERM, self._raising(SystemExit))

    def _raising(self, error: type[BaseException]) -> Callable[..., NoReturn]:
        def handle(*_: Any) -> NoReturn:
            self._has_arrived = True
            raise error

        return handle

    def _send(self, how: str, delay_s: float) -> None:
        time.sleep(delay_s)
        if how == "interrupt_main":
            _thread.interrupt_main()
        else:
            os.kill(os.getpid(), getattr(signal, how, signal.SIGINT))
        if how == "twice":
            time.sleep(delay_s / 3)
            os.kill(os.getpid(), signal.SIGINT)
        self._is_sent = True

    def call(
        self, call: Callable[[], Any], how: str, delay_s: float
    ) -> tuple[bool, Any]:
        """Call something and interrupt it; return whether it was broken off, and what it returned."""
        handler = (
            self._raising(KeyboardInterrupt)
            if how == "own SIGINT"
            else signal.default_int_handler
        )
        signal.signal(signal.SIGINT, handler)
        self._has_arrived = self._is_sent = False
        self.num_sent += 1
        sender = threading.Thread(target=self._send, args=(how, delay_s), daemon=True)
        result, is_done = None, False
        error: Exception | None = None
        try:  # one for each interrupt: deferred ones arrive here
            try:
                try:
                    sender.start()
                    result = call()
                    is_done = True
                except STOPS:
                    self._has_arrived = True
                except Exception as raised:
                    error = raised  # of the call itself; the interrupt is still to come
                self._await_arrival(how)
            except STOPS:
                self._has_arrived = True
                self._await_arrival(how)
        except STOPS:
            self._has_arrived = True
        sender.join()
        self.num_dropped += not self._has_arrived
        if error is not None:
            raise error
        return not is_done, result

    def _await_arrival(self, how: str) -> None:
        """Wait until the interrupt was sent and has come: here at the latest."""
        # A `join` that is interrupted would take the thread for ended.
        while not self._is_sent:
            time.sleep(0.001)
        end = time.monotonic() + _ARRIVAL_S
        while not self._has_arrived and time.monotonic() < end:
            time.sleep(0.001)
        if how == "twice":
            time.sleep(0.005)


class Interrupting(Session):
    """A session whose calls are broken off at random; a base of each kind of session."""

    _interrupter: Interrupter

    def __init__(
        self, rng: random.Random, setting: Setting, folder: str, watch: Watch
    ) -> None:
        self._typical_s: dict[str, float] = {}
        self._share = rng.choice([0.2, 0.5, 0.8])
        super().__init__(rng, setting, folder, watch)

    def guard(self, what: str, call: Callable[[], Any]) -> Any:
        """Make a call; break off some calls, mostly within their usual time."""
        if self.rng.random() > self._share:
            began = time.monotonic()
            result = call()
            name = what.split(maxsplit=1)[0]
            self._typical_s[name] = 0.7 * self._typical_s.get(name, 0.003) + 0.3 * (
                time.monotonic() - began
            )
            return result
        how = self.rng.choice(Interrupter.HOWS)
        delay_s = self.rng.random() * min(
            0.2, 1.5 * self._typical_s.get(what.split(maxsplit=1)[0], 0.003)
        )
        self.watch.note(f"  {how} in {1000 * delay_s:.2f} ms")
        try:
            was_stopped, result = self._interrupter.call(call, how, delay_s)
        except EnvError as error:
            if not (self.setting.is_serial and how in ("SIGALRM", "SIGTERM")):
                raise
            raise Stopped from error  # a caller's handler raised in an env's own code
        if was_stopped:
            raise Stopped
        return result

    @property
    def max_errors(self) -> int:
        """See `Session.max_errors`; in this process an env may meet a handler that raises."""
        return super().max_errors + (
            self._interrupter.num_sent if self.setting.is_serial else 0
        )

    @property
    def slack(self) -> int:
        """See `Session.slack`."""
        return super().slack + (
            self._interrupter.num_sent if self.setting.is_serial else 0
        )


def session_class(setting: Setting) -> type[Session]:
    """Return the session class of a setting; facades are imported on demand."""
    if not setting.facade:
        return Session
    from tests.oracles.fuzz_facades import SESSIONS

    return SESSIONS[setting.facade]


def play(
    rng: random.Random,
    variant: str,
    watch: Watch,
    num_operations: int,
    interrupter: Interrupter | None = None,
) -> Session:
    """Play one session, and return it."""
    setting = draw_setting(rng, variant)
    kind = session_class(setting)
    if interrupter is not None:
        kind = type("Interrupted", (Interrupting, kind), {"_interrupter": interrupter})
    with tempfile.TemporaryDirectory(
        prefix="envherd-fuzz-", ignore_cleanup_errors=True
    ) as folder:
        session = kind(rng, setting, folder, watch)
        if (
            interrupter is not None
            and variant != "interrupted deaths"
            and setting.facade != "collector"
        ):
            session.weights = {
                name: one for name, one in session.WEIGHTS.items() if name not in DEADLY
            }
        try:
            session.play(num_operations)
        except BaseException:
            watch.stop()
            session.close()
            raise
        watch.begin("leftovers")
    return session


def run(seed: int, variant: str, watch: Watch, num_operations: int) -> None:
    """Run one case."""
    rng = random.Random(seed)
    interrupter = Interrupter() if variant.startswith("interrupted") else None
    left = num_operations
    while left > 0:
        count = min(left, rng.randint(20, 60))
        left -= count
        play(rng, variant, watch, count, interrupter)
        watch.check_leftovers()
    if interrupter is not None:
        watch.note(
            f"{interrupter.num_sent} interrupts, {interrupter.num_dropped} of them stopped nothing"
        )
