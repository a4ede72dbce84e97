"""The factory's options and refusals, and the copy of the Lua tree."""

import os
import pickle
import subprocess
import sys
import weakref
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from tests.extras import skip_without

skip_without("meltingpot")

import cloudpickle
import dmlab2d
import numpy as np
import pytest
from dmlab2d import runfiles_helper

from envherd.executor import doctor
from envherd.workers.adapters.meltingpot import lua_edits
from envherd.workers.adapters.meltingpot import lua_tree as meltingpot_lua
from envherd.workers.adapters.meltingpot.adapter import MeltingPotAdapter
from envherd.workers.adapters.meltingpot.factory import (
    MeltingPotFactory,
    must_rebuild,
    scenario_names,
    substrate_names,
)
from envherd.workers.errors import FactoryError
from tests.workers.test_meltingpot import _PRISONERS, _made, _play, _same

#: Testing all of them takes a quarter of an hour.
_RESTARTABLE = tuple(name for name in substrate_names() if not must_rebuild(name))


def _keys(adapter: MeltingPotAdapter) -> set[str]:
    return {"/".join(leaf.key) for leaf in adapter.spec.observation}


def test_positions_are_observed_and_change_nothing_else() -> None:
    """They match the players' positions in the picture of the world, and the episode is the same, byte for byte."""
    with (
        closing(_made(deterministic=True)) as plain,
        closing(_made(deterministic=True, positions=True)) as placed,
    ):
        added = {"agents/observation/POSITION", "agents/observation/ORIENTATION"}
        assert _keys(placed) - _keys(plain) == added
        names = ["/".join(leaf.key) for leaf in placed.spec.observation]
        kept = [i for i, name in enumerate(names) if name not in added]
        place, turn = (
            names.index("agents/observation/POSITION"),
            names.index("agents/observation/ORIENTATION"),
        )
        before, seen = plain.reset(7), placed.reset(7)
        assert seen[place].dtype == np.int32
        forward, steps = {0: (0, -1), 1: (1, 0), 2: (0, 1), 3: (-1, 0)}, 0
        for _ in range(30):
            assert all(
                np.array_equal(seen[i], one)
                for i, one in zip(kept, before, strict=True)
            )
            at, ways = seen[place].copy(), seen[turn][:, 0].copy()
            action = [np.array([1, 1])]  # both go forward
            before, seen = plain.step(action)[0], placed.step(action)[0]
            moved = seen[place] - at
            assert all(
                tuple(by) in (forward[way], (0, 0))
                for by, way in zip(moved.tolist(), ways, strict=True)
            )
            steps += int(np.abs(moved).sum())
        assert steps > 0


def test_a_scenario_without_its_bots_has_all_its_players_and_their_roles() -> None:
    with closing(
        _made(
            f"{_PRISONERS}_0",
            bots=False,
            max_steps=2,
            keys=("INVENTORY",),
            world_rgb=False,
        )
    ) as adapter:
        assert adapter.spec.metadata["agent_count"] == 2
        assert adapter.spec.metadata["is_focal"] == [True, False]
        assert adapter.spec.metadata["agent_roles"] == ["default", "default"]
        assert adapter.reset(1)[0].shape == (2, 2)


def test_names() -> None:
    assert len(substrate_names()) == 49
    assert len(scenario_names()) > 300
    assert list(substrate_names()) == sorted(substrate_names())


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("clean_upp", {}, r"got 'clean_upp'\. Did you mean clean_up or"),
        ("xyzzy", {}, r"got 'xyzzy'\. substrate_names\(\)"),
        ("clean_up", {"keys": "RGB"}, r"Write keys=\('RGB',\)"),
        ("clean_up", {"drop": None}, r"expected drop to be a tuple of names, got None"),
        (
            "clean_up",
            {"max_steps": 0},
            r"expected max_steps to be a positive integer, got 0",
        ),
        ("clean_up", {"max_steps": True}, r"got True"),
        ("clean_up_0", {"roles": ("default",)}, r"expected no roles for a scenario"),
        (
            "clean_up_0",
            {"positions": True},
            r"expected positions=False for a scenario with bots",
        ),
        ("clean_up", {"fast_reset": True}, r"expected fast_reset=False for clean_up"),
        (
            "commons_harvest__closed",
            {"fast_reset": True},
            r"Rebuilding is the only safe reset",
        ),
        (
            "hidden_agenda_0",
            {"fast_reset": True},
            r"expected fast_reset=False for hidden_agenda",
        ),
    ],
)
def test_refused_at_once(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(FactoryError, match=message):
        MeltingPotFactory(name, **options)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            _PRISONERS,
            {"keys": ("RGBA",)},
            r"expected keys and drop among \['COLLECTIVE_REWARD', .*got 'RGBA'",
        ),
        (
            _PRISONERS,
            {"keys": ("RGB",), "drop": ("RGB",)},
            r"expected keys to keep some of",
        ),
        (
            _PRISONERS,
            {"roles": ("chef", "default")},
            r"expected roles among \['default'\].*got \['chef'\]",
        ),
        (_PRISONERS, {"roles": ()}, r"got none\. roles=None takes the 2 default ones"),
    ],
)
def test_refused_where_it_is_built(
    name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(FactoryError, match=message):
        MeltingPotFactory(name, **options)()


def test_a_scenario_without_its_bots_says_what_is_missing() -> None:
    from meltingpot.configs import bots

    if Path(bots.MODELS_ROOT).exists():
        pytest.skip("the bots' models are installed")
    with pytest.raises(
        FactoryError,
        match=r"got none for clean_up__cleaner_0, .*pip install --force-reinstall",
    ):
        MeltingPotFactory("clean_up_0")()


@pytest.mark.slow
def test_describing_an_env_imports_nothing_heavy() -> None:
    program = (
        "import sys; from envherd.workers.adapters.meltingpot.factory import MeltingPotFactory, scenario_names\n"
        "factory = MeltingPotFactory('clean_up'); scenario_names(); MeltingPotFactory('clean_up_0').preload\n"
        "assert not {'meltingpot', 'dmlab2d', 'chex', 'jax', 'tensorflow', 'torch'} & sys.modules.keys()\n"
        "assert 'meltingpot.configs.substrates.clean_up' in factory.preload\n"
        "import importlib\n"
        "for name in factory.preload: importlib.import_module(name)\n"
        "assert not {'jax', 'tensorflow', 'torch'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_factory_survives_pickling() -> None:
    factory = MeltingPotFactory("clean_up", keys=["RGB"], max_steps=3)  # type: ignore[arg-type]  # a list will do
    assert factory.keys == ("RGB",)
    assert (
        pickle.loads(pickle.dumps(factory))
        == factory
        == cloudpickle.loads(cloudpickle.dumps(factory))
    )
    assert hash(factory) == hash(
        MeltingPotFactory("clean_up", keys=("RGB",), max_steps=3)
    )


def test_keys_and_drop_choose_what_is_read() -> None:
    adapter = _made(
        keys=("RGB", "INVENTORY", "COLLECTIVE_REWARD"),
        drop=("INVENTORY",),
        world_rgb=False,
    )
    assert _keys(adapter) == {
        "agents/observation/RGB",
        "agents/observation/COLLECTIVE_REWARD",
    }
    adapter.reset(1)
    # Nothing else was read at all.
    assert sorted(adapter.env.observation()[0]) == ["RGB"]
    adapter.step([np.zeros(2, np.int64)])
    assert adapter.render().shape == (120, 184, 3)  # drawn on demand


@pytest.mark.slow
def test_roles_set_the_number_of_players() -> None:
    adapter = _made(
        "stag_hunt_in_the_matrix__arena", roles=("default",) * 3, keys=("RGB",)
    )
    assert adapter.spec.metadata["agent_count"] == 3
    assert [value.shape for value in adapter.reset(1)] == [
        (192, 200, 3),
        (3, 88, 88, 3),
    ]


@pytest.mark.slow
def test_fast_reset_starts_the_same_build_anew() -> None:
    adapter = _made(fast_reset=True, deterministic=True)

    first = _play(adapter, 1, 30)
    built = adapter._episodes.wrapper._env
    second = _play(adapter, 2, 30)
    assert adapter._episodes.wrapper._env is built
    assert _same(_play(adapter, 1, 30), first)
    assert _same(_play(adapter, 2, 30), second)
    assert not _same(first, second)


@pytest.mark.full
@pytest.mark.parametrize("name", _RESTARTABLE)
def test_fast_reset_forgets_the_last_episode(name: str) -> None:
    adapter = _made(name, fast_reset=True, deterministic=True)
    first = _play(adapter, 1, 60)
    _play(adapter, 2, 300)
    assert _same(_play(adapter, 1, 60), first)


def test_a_finished_episode_is_freed_before_the_next_is_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import dmlab2d

    adapter = _made()
    adapter.reset(1)
    adapter.step([np.zeros(2, np.int64)])
    finished = weakref.ref(adapter._episodes.wrapper._env)
    alive = []
    build = dmlab2d.Lab2d

    def watch(*args: Any) -> Any:
        alive.append(finished())
        return build(*args)

    monkeypatch.setattr(dmlab2d, "Lab2d", watch)
    adapter.reset(2)
    assert alive == [None]


def test_nothing_is_built_before_the_first_reset() -> None:
    with closing(_made()) as adapter:
        episodes = adapter._episodes.wrapper
        assert "_env" not in vars(episodes)
        adapter.reset(11)
        assert episodes._env._rng.get_state()[1][0] != 0
        assert "_env" in vars(episodes)
    assert "_env" not in vars(episodes)
    with pytest.raises(AttributeError, match="closed"):
        adapter.env.observation()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    meltingpot_lua.lua_root.cache_clear()
    yield tmp_path / "envherd"
    meltingpot_lua.lua_root.cache_clear()


@pytest.mark.parametrize("is_ordered", [True, False])
@pytest.mark.parametrize(
    "reason",
    ["", "dmlab2d 1.0.2, made for 1.0.9", "modules/game_object.lua was changed"],
)
def test_the_copy_differs_in_its_edits_and_lacks_logs(
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    reason: str,
    is_ordered: bool,  # noqa: FBT001
) -> None:
    """Each file has as many lines as before. A source that the edits do not fit only loses its logs."""
    installed = meltingpot_lua._installed_lua()
    files = meltingpot_lua._read(installed)
    if "1.0.9" in reason:
        monkeypatch.setitem(lua_edits.VERSIONS, "dmlab2d", "1.0.9")
    elif reason:
        files[lua_edits.OBJECT] = files[lua_edits.OBJECT].replace(
            b"component.gameObject = self", b"-- mine"
        )
        monkeypatch.setattr(meltingpot_lua, "_read", lambda _: dict(files))
    assert meltingpot_lua.why_not_edited() == reason
    findings = {finding.name: finding for finding in doctor._meltingpot()}
    assert findings["meltingpot's Lua"].level == ("warn" if reason else "ok")
    assert reason in findings["meltingpot's Lua"].found
    root = Path(meltingpot_lua.lua_root(is_ordered=is_ordered) or "")
    assert root.parent == cache
    copied = {
        name: (root / "meltingpot" / "lua" / name).read_text().splitlines()
        for name in files
    }
    lost, edited = [], set()
    for name, after in copied.items():
        before = files[name].decode().splitlines()
        if name == "modules/api_factory.lua":
            assert after[0].endswith(before[0])
            assert ("ordered" in after[0], "TileSet" in after[0]) == (
                is_ordered,
                not reason,
            )
            before[0] = after[0]
        different = [
            (was, now) for was, now in zip(before, after, strict=True) if was != now
        ]
        edited |= {name} if any(now for _, now in different) else set()
        lost += [
            was.strip() for was, now in different if was.strip().startswith("log.v(")
        ]
    assert edited == (set() if reason else {edit.file for edit in lua_edits.EDITS})
    assert "log.v(1, 'World Config: ' .. helpers.tostring(config))" in lost


#: Code to run before -> what must hold after it, in Lua. A tile set that counts what is drawn stands for dmlab2d's.
_LUA = {
    lua_edits.COLLECT_SELDOM: """
        local most = collectgarbage()
        for i = 1, 2e6 do last, most = {i}, math.max(most, collectgarbage('count')) end
        assert(most < 2e4 and collectgarbage('count') > 0, most)
        collectgarbage()
        local weak = setmetatable({{}}, {__mode = 'v'})
        collectgarbage()
        assert(weak[1], 'memory had not doubled')
        collectgarbage('stop')
        local many = {} for i = 1, 2e6 do many[i] = {} end
        collectgarbage()
        assert(not weak[1], 'memory had doubled')
    """,
    f"""
        local settings = require('common.read_settings')
        local plain = require('common.args').default
        {lua_edits.COPY_LESS}
    """: """
        local tables, args = require('common.tables'), require('common.args')
        local source = settings.any()
        source.a.b[1], source.c = 'x', false
        local copy = tables.deepCopy(source)
        assert(copy.a.b[1] == 'x' and copy.c == false and copy.a ~= source.a and copy.a.b ~= source.a.b)
        copy.missing.entry = 1
        assert(rawget(source, 'missing') == nil and getmetatable(copy.a) == getmetatable(source.a))
        local defaults = tables.deepCopy(settings.default({1}))
        assert(defaults[7][1] == 1 and defaults[7] ~= defaults[8], 'each missing entry is a copy')
        local class = {__index = {}, __call = function() return 2 end}
        local instance = tables.deepCopy(setmetatable({}, class))
        assert(getmetatable(instance) ~= class and getmetatable(instance).__index ~= class.__index and instance() == 2)
        for _, meta in ipairs({{__index = {}}, setmetatable({__index = function() end}, {})}) do
            assert(getmetatable(tables.deepCopy(setmetatable({}, meta))) ~= meta)
        end
        assert(tables.deepCopy(source, 1).a == source.a and tables.deepCopy('x') == 'x' and tables.deepCopy() == nil)
        for _, value in ipairs({0, '', true, false, 0 / 0, {}}) do
            local made = args.default(value)
            local got = args.parse({}, {{'name', made}}).name
            assert(got == value or value ~= value and got ~= got, tostring(value))
            assert((args.default(value) == made) == (type(value) ~= 'table' and value == value), tostring(value))
        end
        assert(args.default(1) ~= args.default('1') and args.default() ~= args.default())
        assert(tostring(args.default(1)) == tostring(plain(1)))
    """,
    f"""
        local drawn = ''
        local TileSet = {{
            setSprite = function(self, name) drawn = drawn .. name .. ' ' end,
            addColor = function(self, name) drawn = drawn .. name .. ' ' end,
            addShape = function(self, name, shape) self:setSprite(name) end}}
        package.loaded['common.tile_set'] = {{TileSet = TileSet}}
        {lua_edits.DRAW_ONCE}
    """: """
        local set, red = setmetatable({}, {__index = TileSet}), {['*'] = {255, 0, 0}}
        local function draws(expected, name, text, palette, noRotate, override)
            drawn = ''
            set:addShape(name, {text = text, palette = palette, noRotate = noRotate}, override)
            assert(drawn == expected, name .. ' drew ' .. drawn .. ' not ' .. expected)
        end
        draws('a ', 'a', '*', red) draws('', 'a', '*', {['*'] = {255, 0, 0}}) draws('ab ', 'ab', '*', red)
        draws('', 'a', '*', red) draws('a ', 'a', '**', red) draws('a ', 'a', '**', red, true)
        draws('', 'a', '**', red, true) draws('a ', 'a', '**', red, true, {}) draws('a ', 'a', '**', red, true)
        draws('a ', 'a', '*', {['*'] = {255, 0, 1}}) draws('a ', 'a', '*', red)
        draws('a ', 'a', '*', {['*'] = red['*'], x = {1, 2, 3}}) draws('a ', 'a', '*', red)
        draws('a.N ', 'a.N', '*', red) draws('a.S ', 'a.S', '*', red) draws('', 'a.N', '*', red)
        draws('a ', 'a', '*', red) draws('a.N ', 'a.N', '*', red) draws('', 'ab', '*', red)
        set:addColor('a.N', {1, 1, 1}) draws('a.N ', 'a.N', '*', red) draws('a.S ', 'a.S', '*', red)
        red['*'][1] = 254 draws('ab ', 'ab', '*', red)
        set:setSprite('ab') draws('ab ', 'ab', '*', red)
        set = setmetatable({}, {__index = TileSet}) draws('ab ', 'ab', '*', red)
    """,
}


@pytest.mark.parametrize("before", _LUA)
def test_lua_draws_collects_and_copies_what_is_new(tmp_path: Path, before: str) -> None:
    (tmp_path / "level").mkdir()
    (tmp_path / "level" / "init.lua").write_text(
        f"{before}{_LUA[before]}error('all held')"
    )
    settings = {"levelName": "level", "levelDirectory": str(tmp_path)}
    with pytest.raises(ValueError, match="all held"):
        dmlab2d.Lab2d(runfiles_helper.find(), settings)


def test_without_a_cache_the_installed_code_is_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    program = (
        "from envherd.workers.adapters.meltingpot import adapter, factory, lua_tree\n"
        "env = adapter.MeltingPotAdapter(factory.MeltingPotFactory('coins')())\n"
        "assert lua_tree.lua_root(is_ordered=False) is None\n"
        "directory = env._episodes.wrapper.settings['levelDirectory']\n"
        "assert str(lua_tree._installed_lua()).startswith(directory), directory"
    )
    environ = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "file")}
    subprocess.run(
        [sys.executable, "-c", program], env=environ, check=True, timeout=100
    )


def test_without_a_home_folder_the_installed_code_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    meltingpot_lua.lua_root.cache_clear()
    assert meltingpot_lua.lua_root(is_ordered=False) is None
    meltingpot_lua.lua_root.cache_clear()


def test_a_damaged_copy_is_replaced(cache: Path) -> None:
    root = meltingpot_lua.lua_root(is_ordered=True)
    assert root is not None
    victim = Path(root, "meltingpot", "lua", "modules", "game_object.lua")
    victim.write_text("nonsense")
    meltingpot_lua.lua_root.cache_clear()
    assert meltingpot_lua.lua_root(is_ordered=True) == root
    assert victim.read_text() != "nonsense"
    # Nothing else is left behind.
    assert [path.name for path in cache.iterdir()] == [Path(root).name]


@pytest.mark.slow
def test_many_processes_may_make_the_copy_at_once(cache: Path) -> None:
    program = "from envherd.workers.adapters.meltingpot.lua_tree import lua_root; print(lua_root(is_ordered=True))"
    started = [
        subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    roots = {process.communicate(timeout=60)[0].strip() for process in started}
    assert [process.returncode for process in started] == [0] * 4
    assert os.listdir(cache) == [Path(*roots).name]


def test_an_unwritable_cache_says_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    meltingpot_lua.lua_root.cache_clear()
    with pytest.raises(FactoryError, match="Set XDG_CACHE_HOME"):
        meltingpot_lua.lua_root(is_ordered=True)
