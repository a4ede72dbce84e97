"""Choose a setting from a table of speeds in rounds; pure.

In a round every remaining setting has one turn, so a disturbance of some seconds affects all of them. Settings are
therefore compared within rounds, and the median over rounds counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from envherd.executor.sizing.driving import Turn
from envherd.executor.sizing.measurement import Measurement
from envherd.executor.sizing.settings import Setting

#: A smaller setting is chosen if it reaches this share of the best one's speed.
GOOD_ENOUGH = 0.95
#: Least standard deviation of the logarithm of a relative speed between rounds.
_LEAST_SPREAD = 0.06
#: Number of standard errors by which a setting is too slow to be continued, and by which the choice is clear.
_DROP_ERRORS, _CLEAR_ERRORS = 2.0, 1.0
#: Least rounds before a setting is dropped, least rounds before the choice is accepted, and rounds after which it is
#: always accepted.
_BEFORE_DROP, _BEFORE_CHOICE, MOST_ROUNDS = 2, 4, 6
#: Number of episode ends, in the probe or in all turns, that is enough to estimate their rate.
_MANY_RESETS = 20
#: Least share of a turn's seconds that remains after the correction for resets.
_LEAST_PART = 0.2
#: Largest wait of a batch for one of several simultaneous resets, relative to a single reset in the probe.
_MOST_OF_RESET = 2.0

#: The speeds of one round, env-steps per second.
Round = Mapping[Setting, float]


def choose(rounds: Sequence[Round], target: float | None = None) -> Setting:
    """Return the smallest setting within 5 % of the fastest, or the smallest one that reaches a target.

    Args:
        rounds: at least one. A setting that was dropped is missing from the latest, and is not chosen.
        target: env-steps per second. If no setting reaches it, the fastest counts.
    """
    rates = {one: rate for one, rate in speeds(rounds).items() if one in rounds[-1]}
    enough = GOOD_ENOUGH * max(rates.values())
    if target is not None and max(rates.values()) >= target:
        enough = target
    return min((one for one in rates if rates[one] >= enough), key=lambda one: one.rank)


def speeds(rounds: Sequence[Round]) -> dict[Setting, float]:
    """Return the speed of each setting, env-steps per second, comparable with one another.

    A speed is the median over rounds of its ratio to one setting's, the anchor's, times the anchor's median. A setting
    that had no round with the anchor has its own median.
    """
    anchor, own = _anchor(rounds), _by_setting(rounds)
    shared = {one: float(np.exp(np.median(values))) for one, values in _logs(rounds, anchor).items()}
    rate = float(np.median(own[anchor]))
    return {one: shared[one] * rate if one in shared else float(np.median(rates)) for one, rates in own.items()}


def survivors(rounds: Sequence[Round], target: float | None = None) -> set[Setting]:
    """Return the settings of the latest round that may still be chosen: not those that are clearly too slow."""
    logs, spread = _alive_logs(rounds)
    line = max(float(np.median(values)) for values in logs.values()) + np.log(GOOD_ENOUGH)
    rates = speeds(rounds)

    def may_be_chosen(one: Setting) -> bool:
        count = len(logs[one])
        if count < _BEFORE_DROP or (target is not None and rates[one] >= target):
            return True
        return bool(np.median(logs[one]) + _DROP_ERRORS * spread / count**0.5 >= line)

    return {one for one in logs if may_be_chosen(one)}


def is_sure(rounds: Sequence[Round]) -> bool:
    """Return whether more rounds are unlikely to change the choice."""
    logs, spread = _alive_logs(rounds)
    fewest = min(len(values) for values in logs.values())
    if fewest < _BEFORE_CHOICE or fewest >= MOST_ROUNDS:
        return fewest >= MOST_ROUNDS
    middles = {one: float(np.median(values)) for one, values in logs.items()}
    best = max(middles, key=middles.__getitem__)
    line = middles[best] + np.log(GOOD_ENOUGH)
    error = _CLEAR_ERRORS * spread / fewest**0.5
    return all(abs(middles[one] - line) > error for one in logs if one.rank < best.rank)


def corrected(
    turn: Turn, setting: Setting, measured: Measurement, end_share: float, own_turns: Sequence[Turn], cores: float
) -> float:
    """Return the speed of a turn, corrected to the average number of resets for its steps.

    With long episodes the number of ends in a turn is random, and envs whose episodes have one length are reset
    together. For synchronous batches, the setting's measured time of waiting for resets is spread over all steps.
    Without such a measurement, as with first-K, the probe's time of a reset is used: a reset delays all envs, or only
    its worker. Resets ahead delay no env, but take processor time from steps.

    Args:
        turn: as measured.
        setting: of the turn.
        measured: of the env; how long a reset takes.
        end_share: share of steps that end an episode.
        own_turns: all turns of the setting.
        cores: that may be used.
    """
    if end_share == 0:
        return turn.rate
    ends = end_share * turn.steps
    if setting.reset_ahead:
        computed_s = turn.steps * measured.cpu_per_step_s + ends * measured.reset_median_s * (1 - measured.waits_share)
        return turn.steps / max(turn.seconds, computed_s / cores)
    resets = sum(one.resets for one in own_turns)
    waited_s = sum(one.reset_wait_s for one in own_turns)
    if setting.mode == "sync" and resets >= setting.num_envs and waited_s > 0:
        cost_s = min(waited_s / resets, _MOST_OF_RESET * measured.reset_median_s)
        lost_s = min(turn.reset_wait_s, _MOST_OF_RESET * measured.reset_median_s * turn.resets)
    else:
        has_own_workers = setting.mode == "first-k" or measured.episode_steps > 0
        at_once = min(max(1, setting.num_workers), cores / max(1e-9, 1 - measured.waits_share))
        cost_s = measured.reset_median_s / (max(1.0, at_once) if has_own_workers else 1)
        lost_s = cost_s * turn.resets
    return turn.steps / max(turn.seconds - lost_s + cost_s * ends, _LEAST_PART * turn.seconds)


def share_of_ends(turns: Sequence[Turn], measured: Measurement) -> float:
    """Return the share of steps that end an episode, from the probe or from all turns, whichever saw enough ends.

    Turns are short: if all episodes have one length, their ends may fall between the turns. If the probe saw no end,
    its steps and those of all turns count together.
    """
    resets, steps = sum(turn.resets for turn in turns), sum(turn.steps for turn in turns)
    is_known = measured.episode_steps > 0 or measured.end_share * measured.steps_measured >= _MANY_RESETS
    if resets >= _MANY_RESETS and not is_known:
        return resets / steps
    return measured.end_share or resets / max(1, steps + measured.steps_measured)


def _by_setting(rounds: Sequence[Round]) -> dict[Setting, list[float]]:
    rates: dict[Setting, list[float]] = {}
    for one in rounds:
        for setting, rate in one.items():
            rates.setdefault(setting, []).append(rate)
    return rates


def _anchor(rounds: Sequence[Round]) -> Setting:
    """Return the setting of the latest round with the most rounds; of several, the fastest."""
    rates = _by_setting(rounds)
    return max(rounds[-1], key=lambda one: (len(rates[one]), np.median(rates[one])))


def _logs(rounds: Sequence[Round], anchor: Setting) -> dict[Setting, list[float]]:
    """Return the logarithms of each setting's speeds, relative to the anchor's in the same round."""
    logs: dict[Setting, list[float]] = {}
    for one in rounds:
        for setting, rate in one.items():
            if anchor in one:
                logs.setdefault(setting, []).append(float(np.log(rate / one[anchor])))
    return logs


def _alive_logs(rounds: Sequence[Round]) -> tuple[dict[Setting, list[float]], float]:
    """Return the logarithms of the settings in the latest round, and the standard deviation between rounds.

    The deviation is pooled over all settings, because a few values of one may agree by chance.
    """
    anchor = _anchor(rounds)
    logs = {one: values for one, values in _logs(rounds, anchor).items() if one in rounds[-1]}
    off = [value - np.median(values) for one, values in logs.items() if one != anchor for value in values]
    freedom = sum(len(values) - 1 for one, values in logs.items() if one != anchor)
    spread = float(np.sum(np.square(off)) / freedom) ** 0.5 if freedom else 0.0
    return logs, max(spread, _LEAST_SPREAD)
