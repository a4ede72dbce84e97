"""A copy of the installed Melting Pot's Lua code that is faster and, on request, walks tables in a fixed order.

Faster: `base_simulation.lua` formats its whole world for a log that is not printed, by concatenation in quadratic time.
That is half to nine tenths of a reset. The copy lacks such lines. LuaJIT's garbage collector,
which takes a fifth of a step, is off while a level is built, and after that waits for more garbage. The copy of a
release that `lua_edits` knows also has its edits, which halve what is left of a reset.

Fixed order: Lua's `pairs` walks string keys in an order that differs from one Lua state to the next, and Melting Pot
deals spawn points and random draws along such walks. So equal seeds give unequal episodes. In an ordered copy, `pairs`
yields numbers in ascending order, then strings in ascending order, then other keys in Lua's order.

Guarantees: the copy is made from the files that are installed (nothing is shipped here). All lines keep their
numbers, so Lua's error messages keep theirs. Observations, rewards and ends are those of the installed code. A copy
is found by the hash of its content: another version, or an edited install, gets another copy. Any number of processes
may request a copy at once; a copy is complete or absent, and a damaged one is replaced.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import os
import re
import shutil
import tempfile
from pathlib import Path

from envherd.shm import platforms
from envherd.workers.adapters.meltingpot.factory import installed
from envherd.workers.adapters.meltingpot.lua_edits import (
    COLLECT_SELDOM,
    COPY_LESS,
    DRAW_ONCE,
    VERSIONS,
    edited,
    misfit,
)
from envherd.workers.errors import FactoryError

#: Runs first in every Lua state, before any of Melting Pot's own code walks a table.
_PREFIXED_FILE = "modules/api_factory.lua"

#: Processes that find the same damaged copy take turns at replacing it; each turn is one rename.
_PLACE_ATTEMPTS = 5

#: Lines that do nothing but log a table, or the grid, as text; `log.v` prints nothing at the level of Melting Pot.
_LOGS_A_TEXT = re.compile(
    rb"""^[ \t]*log\.v\(\d, (?:"[^"\n]*"|'[^'\n]*') \.\. (?:helpers\.)?tostring\(\w+\)\)[ \t]*$""",
    re.MULTILINE,
)

# For code without the edits. dmlab2d makes two full collections when it has built a level, which turn the collector on
# again. The next one then begins at 4 times the memory that is in use, in place of 2: steps are 5 to 10 % faster, and
# the memory of a process is below what the texts took (commons_harvest__open 86 in place of 172 MiB, clean_up 140 of
# 142; 2026-11).
_COLLECT_LATER = "collectgarbage('setpause', 400) collectgarbage('stop')"

# A table whose keys are numbers in ascending order (nearly all that a step walks) keeps the native walk. The sorted
# keys of another table are kept, and used again while it has the same keys. `follow` skips keys removed during the
# walk, as the native one does. The three functions at the end walk natively: they copy or check each entry by itself,
# so the order has no effect. They make three quarters of a reset's walks over string keys.
_ORDERED_PAIRS = """
do
  local raw, sort, kind, fetch, after = pairs, table.sort, type, rawget, next
  local orders = setmetatable({}, {__mode = 'k'})
  local function follow(walk)
    local i, n, keys, t = walk.i, walk.n, walk.keys, walk.t
    while i < n do
      i = i + 1
      local k = keys[i]
      local v = fetch(t, k)
      if v ~= nil then walk.i = i return k, v end
    end
  end
  local function is_ascending(t)
    local last = -math.huge
    for k in raw(t) do
      if kind(k) ~= 'number' or k < last then return false end
      last = k
    end
    return true
  end
  local function is_before(a, b)
    local kind_of_a = kind(a)
    if kind_of_a == kind(b) then return a < b end
    return kind_of_a == 'number'
  end
  local function in_order(t)
    local keys, n, first, others, is_mixed = {}, 0, false, false, false
    for k in raw(t) do
      local kind_of_k = kind(k)
      if kind_of_k == 'string' or kind_of_k == 'number' then
        first = first or kind_of_k
        is_mixed = is_mixed or kind_of_k ~= first
        n = n + 1
        keys[n] = k
      else
        others = others or {}
        others[#others + 1] = k
      end
    end
    if is_mixed then sort(keys, is_before) elseif n > 1 then sort(keys) end
    if others then for i = 1, #others do n = n + 1 keys[n] = others[i] end end
    return keys
  end
  local function has_exactly(t, keys)
    local n = #keys
    for _ in raw(t) do n = n - 1 end
    if n ~= 0 then return false end
    for i = 1, #keys do if fetch(t, keys[i]) == nil then return false end end
    return true
  end
  local function ordered(t)
    if kind(t) ~= 'table' then return raw(t) end
    local length = #t
    if length > 0 and after(t) == 1 and after(t, length) == nil or is_ascending(t) then return raw(t) end
    local keys = orders[t]
    if not keys or not has_exactly(t, keys) then
      keys = in_order(t)
      orders[t] = keys
    end
    return follow, {i = 0, n = #keys, keys = keys, t = t}
  end
  if not fetch(_G, '__envherd_ordered_pairs') then
    rawset(_G, '__envherd_ordered_pairs', true)
    pairs = ordered
    local native = setmetatable({pairs = raw}, {__index = _G})
    local function upvalue(f, name)
      for i = 1, debug.getinfo(f, 'u').nups do
        local found, value = debug.getupvalue(f, i)
        if found == name then return value end
      end
    end
    local function walk_natively(file, name, inner)
      local is_there, module = pcall(require, 'common.' .. file)
      local f = is_there and module[name]
      if f and inner then f = upvalue(f, inner) end
      if f then setfenv(f, native) end
    end
    walk_natively('tables', 'deepCopy')
    walk_natively('args', 'parse', 'parseInto')
    walk_natively('image_helpers', 'textToSprite')
  end
end
"""


@functools.cache
def lua_root(*, is_ordered: bool) -> str | None:
    """Return the folder to use as Melting Pot's root; it holds `meltingpot/lua`.

    Made on first use in the user's cache folder (`XDG_CACHE_HOME`, else `~/.cache`, on macOS
    `~/Library/Caches`), about 1 MB. Checked byte for byte once per process.

    Args:
        is_ordered: whether `pairs` has one order.

    Returns:
        The folder. None if the copy is not ordered and cannot be made; the installed code, which is slower, runs then.

    Raises:
        FactoryError: with `is_ordered`: Melting Pot is absent or has another layout, or the cache folder cannot be
            written.
    """
    try:
        return _placed(_copied_files(_installed_lua(), is_ordered=is_ordered))
    except (
        FactoryError,
        OSError,
        RuntimeError,
    ):  # RuntimeError: a user without a home folder
        if is_ordered:
            raise
        return None


def _placed(files: dict[str, bytes]) -> str:
    """Return the folder with these files, made if it is not there."""
    digest = hashlib.sha256()
    for name, content in sorted(files.items()):
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    target = (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / platforms.CACHES)
        / "envherd"
        / f"meltingpot-{_versions()['dm-meltingpot']}-{digest.hexdigest()[:16]}"
    )
    if not _holds(target, files):
        try:
            _place(target, files)
        except OSError as error:
            raise FactoryError(
                f"deterministic Melting Pot failed: expected a writable cache folder, got {error} ({target.parent}). "
                f"Set XDG_CACHE_HOME to a folder that this process may write."
            ) from error
    return str(target)


def _installed_lua() -> Path:
    root = installed()
    lua = None if root is None else root / "lua"
    if lua is None or not (lua / _PREFIXED_FILE).is_file():
        raise FactoryError(
            f"deterministic Melting Pot failed: expected an installed meltingpot with lua/{_PREFIXED_FILE}, "
            f"got {'no meltingpot' if lua is None else lua}. Install dm-meltingpot, or use deterministic=False."
        )
    return lua


def why_not_edited() -> str:
    """Return why the installed Lua code runs without the edits of `lua_edits`, or "" if it has them.

    Raises:
        FactoryError: Melting Pot is absent or has another layout.
    """
    return misfit(_read(_installed_lua()), _versions())


def _read(lua: Path) -> dict[str, bytes]:
    return {
        path.relative_to(lua).as_posix(): path.read_bytes()
        for path in lua.rglob("*")
        if path.is_file()
    }


def _copied_files(lua: Path, *, is_ordered: bool) -> dict[str, bytes]:
    files = _read(lua)
    prefix = [_ORDERED_PAIRS] if is_ordered else []
    if misfit(files, _versions()):
        prefix.insert(0, _COLLECT_LATER)
    else:
        files = edited(files)
        prefix = [COLLECT_SELDOM, *prefix, COPY_LESS, DRAW_ONCE]
    files = {name: _LOGS_A_TEXT.sub(b"", content) for name, content in files.items()}
    first = " ".join(" ".join(prefix).split())
    files[_PREFIXED_FILE] = f"{first} ".encode() + files[_PREFIXED_FILE]
    return {f"meltingpot/lua/{name}": content for name, content in files.items()}


def _versions() -> dict[str, str]:
    return {name: version_of(name) or "unversioned" for name in VERSIONS}


def version_of(package: str) -> str | None:
    """Return the installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _holds(root: Path, files: dict[str, bytes]) -> bool:
    try:
        return all(
            (root / name).read_bytes() == content for name, content in files.items()
        )
    except OSError:
        return False


def _place(target: Path, files: dict[str, bytes]) -> None:
    """Write the files next to the target and rename them into place; a second process uses the first one's."""
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=".making-", dir=target.parent))
    try:
        for name, content in files.items():
            path = made / "new" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        for attempt in range(_PLACE_ATTEMPTS):
            try:
                os.rename(made / "new", target)
                return
            except OSError:
                if _holds(target, files):  # another process came first
                    return
                if attempt == _PLACE_ATTEMPTS - 1:
                    raise
            # A damaged copy is in the way; another process may be moving it away at this moment.
            with contextlib.suppress(FileNotFoundError):
                os.rename(target, made / f"damaged-{attempt}")
    finally:
        shutil.rmtree(made, ignore_errors=True)
