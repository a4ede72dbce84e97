"""Damage nested plain data at random, in ways that respect its structure."""

import copy
import random
from typing import Any

#: Values that files have where they should not.
ODD: list[Any] = [
    *(
        None,
        True,
        -1,
        0,
        1,
        3,
        624,
        625,
        10**6,
        2**31,
        2**63,
        -(2**63),
        2**70,
        10**400,
        0.5,
        float("nan"),
        float("inf"),
    ),
    *(
        "",
        "x",
        "numpy:memmap",
        "posix:system",
        "subprocess:Popen",
        "builtins:eval",
        "|O",
        "<f8",
        "step",
        "__class__",
    ),
    *(
        ".unwrapped",
        "\x1b[2J",
        b"",
        b"x" * 9,
        [],
        {},
        [0],
        [1],
        [[0]],
        [10**9],
        {"x": [0]},
        [None],
        [2**40],
    ),
]


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Return all containers and keys in plain data."""
    found: list[tuple[Any, Any]] = []
    queue = [value]
    for one in queue:
        keys = list(one) if isinstance(one, dict) else list(range(len(one)))
        found += [(one, key) for key in keys]
        queue += [one[key] for key in keys if isinstance(one[key], (dict, list))]
    return found


def damaged(value: Any, rng: random.Random) -> Any:
    """Return a copy of plain data with up to three entries that are replaced, removed, added, swapped or changed."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 2, 3))):
        places = _places(value)
        if not places:
            return value
        (holder, key), (other, another) = rng.choice(places), rng.choice(places)
        way = rng.randrange(6)
        if way == 0 and isinstance(holder, dict):
            del holder[key]
        elif way == 1:
            holder[key] = copy.deepcopy(other[another])
        elif way == 2 and isinstance(holder, list):
            holder.insert(key, rng.choice(ODD))
        elif way == 3 and isinstance(holder[key], int):
            holder[key] += rng.choice((-1, 1, 7, 2**32))
        elif way == 4 and isinstance(holder[key], (bytes, str)) and holder[key]:
            cut = rng.randrange(len(holder[key]))
            holder[key] = holder[key][:cut] + holder[key][cut + 1 :]
        else:
            holder[key] = copy.deepcopy(rng.choice(ODD))
    return value
