"""The words of commands: what a number announces is stored before it, and read after it."""

from types import SimpleNamespace

import numpy as np
import pytest

from envherd.executor.pools import commands
from envherd.executor.pools.commands import CommandWords, Outcome
from envherd.shm.slab import WORDS
from tests.gates import is_interrupted


@pytest.fixture
def words(monkeypatch):
    arrays = {
        name: np.zeros(6 if name == "info_ids" else 3, np.int64) for name in WORDS
    }
    made = CommandWords(SimpleNamespace(words=arrays))
    made.seen = []
    monkeypatch.setattr(
        commands,
        "keep_order",
        lambda: made.seen.append((made.command.tolist(), made.command_seq.tolist())),
    )
    return made


def test_a_number_is_stored_after_its_commands(words):
    words.write(np.array([1]), np.array([7]))
    words.write(
        np.arange(len(words.command)),
        np.where(np.arange(len(words.command)) == 2, 9, 8),
    )
    assert words.seen == [([0, 7, 0], [0, 0, 0]), ([8, 8, 9], [0, 1, 0])]
    assert words.command_seq.tolist() == [2, 2, 2]


def test_rows_are_read_after_the_numbers_of_answers(words):
    assert words.has_answered().all()
    assert words.ready(np.array([0, 2])).tolist() == [0, 2]
    assert len(words.seen) == 2


def test_interrupted_loss_leaves_no_invented_answer(words):
    """Workers have answered env 1 only. The loss is interrupted before each of its bytecodes, then not at all."""
    number, was_interrupted = 0, True
    while was_interrupted:
        number += 1
        words.command_seq[:], words.reply_seq[:], words.answers_lost[:] = (
            5,
            [4, 5, 4],
            False,
        )
        was_interrupted = is_interrupted(
            lambda: words.lose_answers(np.array([0, 1, 2]), Outcome()),
            number,
            commands.__file__,
        )
        has_answered = words.command_seq == words.reply_seq
        assert (words.answers_lost | ~has_answered).tolist()[::2] == [True, True], (
            number
        )
        assert not words.answers_lost[1]
    assert number > 20
    assert has_answered.all()
