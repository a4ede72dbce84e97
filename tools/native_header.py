"""The constants that C and Python share: `workers/native/constants.h` is written from those in Python.

    python -m tools.native_header --write    # after a change; then build the extension again

A test compares the file with what this writes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from envherd.executor.batches.actions import Legal
from envherd.shm.slab import ALIGNMENT
from envherd.workers import protocol, seeding
from envherd.workers.info_rows import TEXT_BYTES, Kind
from envherd.workers.protocol import Flag, Op, Status

HEADER = Path(__file__).parent.parent / "workers" / "native" / "constants.h"
#: Where they are -> name in C -> value.
CONSTANTS: dict[str, dict[str, int]] = {
    "workers.protocol": {
        "OP_BITS": protocol.OP_BITS,
        "FLAG_BITS": protocol.FLAG_BITS,
        "TARGET_BITS": protocol.TARGET_BITS,
        "RING": protocol.RING,
        **{f"OP_{op.name}": op for op in Op},
        **{f"FLAG_{flag.name}": flag for flag in Flag},
        "STATUS_OK": Status.OK,
        "LEAVE": protocol.LEAVE,
    },
    "shm.slab": {"ALIGNMENT": ALIGNMENT},
    "workers.seeding": {
        "SEED_POOL": seeding.POOL_SIZE,
        "SEED_SHIFT": seeding.SHIFT,
        "SEED_MULT_A": seeding.MULT_A,
        "SEED_INIT_B": seeding.INIT_B,
        "SEED_MULT_B": seeding.MULT_B,
        "SEED_MIX_L": seeding.MIX_L,
        "SEED_MIX_R": seeding.MIX_R,
    },
    "workers.info_rows": {
        "TEXT_BYTES": TEXT_BYTES,
        **{f"IS_{kind.name}": kind for kind in Kind},
        "NUM_KINDS": len(Kind),
    },
    "executor.batches.actions": {f"CHECK_{legal.name}": legal for legal in Legal},
}


def header() -> str:
    """Return the text of the file."""
    lines = [
        "/* Written from the constants in Python by `python -m tools.native_header --write`. */"
    ]
    for place, constants in CONSTANTS.items():
        lines += ["", f"/* {place} */"]
        lines += [
            f"#define {name} {literal(value, place)}"
            for name, value in constants.items()
        ]
    return "\n".join(lines) + "\n"


def literal(value: int, place: str) -> str:
    """Return a C literal: of 64 bits for what an int does not hold; those of seeds are unsigned, since these wrap."""
    if place == "workers.seeding":
        return f"0x{value:X}u"
    return str(int(value)) if value < 2**31 else f"{int(value)}LL"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--write", action="store_true", help="write the file instead of printing it"
    )
    if parser.parse_args().write:
        HEADER.write_text(header(), encoding="utf-8")
    else:
        print(header(), end="")
