"""Grade answers of which some make the grader hang: each costs one deadline, and no other answer waits for it."""

from __future__ import annotations

import re

from envherd import LeasePool, WorkerTimeout


class Grader:
    """Accepts answers by a regular expression, which backtracks for years on some answers."""

    _PATTERN = re.compile(r"(a+)+b")

    def grade(self, answer: str) -> float:
        """Return 1.0 for a right answer. Python code can neither interrupt the match nor end a thread that is in it."""
        return float(self._PATTERN.fullmatch(answer) is not None)


def grade(grader: Grader, answer: str) -> float | None:
    """Return the grade of an answer, or None if there is none."""
    try:
        return grader.grade(answer)
    except WorkerTimeout:
        return None


def main() -> None:
    """Grade 24 answers, a quarter of which would never return."""
    answers = ["aaab", "b", "aaaa", "a" * 60] * 6
    with LeasePool(Grader, num_envs=4, timeout_s=1.0) as pool:
        grades = list(pool.map(grade, answers))
    print(
        f"{len(grades)} answers: {grades.count(1.0)} right, {grades.count(0.0)} wrong, {grades.count(None)} not graded"
    )


if __name__ == "__main__":
    main()
