"""`DeferredInterrupt`: when a Ctrl-C raises KeyboardInterrupt."""

from __future__ import annotations

import signal
import threading

import pytest

from envherd.executor.cli.interrupts import DeferredInterrupt


def press_ctrl_c() -> None:
    """Send this process SIGINT, as a terminal does. The handler runs before this returns."""
    signal.raise_signal(signal.SIGINT)


def test_ctrl_c_between_two_steps_interrupts_at_once():
    with DeferredInterrupt(), pytest.raises(KeyboardInterrupt):
        press_ctrl_c()


def test_ctrl_c_while_held_waits_for_the_release():
    with DeferredInterrupt() as interrupts:
        interrupts.hold()
        press_ctrl_c()
        with pytest.raises(KeyboardInterrupt):
            interrupts.release()
        interrupts.hold()
        interrupts.release()


def test_a_second_ctrl_c_does_not_wait():
    with DeferredInterrupt() as interrupts:
        interrupts.hold()
        press_ctrl_c()
        with pytest.raises(KeyboardInterrupt):
            press_ctrl_c()


def test_the_handler_of_before_is_put_back():
    before = signal.getsignal(signal.SIGINT)
    with DeferredInterrupt():
        assert signal.getsignal(signal.SIGINT) != before
    assert signal.getsignal(signal.SIGINT) == before


def test_other_threads_are_left_alone():
    failures = []

    def use() -> None:
        try:
            with DeferredInterrupt() as interrupts:
                interrupts.hold()
                interrupts.release()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert failures == []
