"""Edits of Melting Pot's Lua code, as data, and Lua that runs before it: faster, with the same result.

Guarantees: observations, rewards, events, ends and random draws are those of the code without the edits
(`python -m tests.workers.meltingpot_equality` compares them byte for byte). Either all edits are made or none: they
rely on each other, and on code around them that only the releases in `VERSIONS` are known to have. An edited line
stays one line, so Lua's error messages keep their line numbers.
"""

from collections.abc import Mapping
from typing import NamedTuple

#: Package -> the release whose Lua code the edits, and the Lua that runs before it, were compared with.
VERSIONS = {"dm-meltingpot": "2.4.1", "dmlab2d": "1.0.2"}

# dmlab2d makes two full collections before each episode: a quarter of a reset. A new game skips them, because little
# of it is garbage, and the collector works from twice the memory of the new game on. Restarts of the game make one
# when memory has doubled since. A cycle then begins at 4 times the memory in use, in place of 2: steps are 5 to 10 %
# faster (2026-11).
COLLECT_SELDOM = """
do
  local collect, bound = collectgarbage, nil
  collect('stop')
  rawset(_G, 'collectgarbage', function(what, ...)
    if what ~= nil then return collect(what, ...) end
    if not bound then
      collect('setpause', 200)
      collect('restart', -1)
      collect('setpause', 400)
    elseif collect('count') > bound then
      collect()
    else
      return 0
    end
    bound = 2 * collect('count')
    return 0
  end)
end
"""

# Every object draws the sprites of all its states. One that has the text, the colors and the rotation of the last
# sprite of that name is there already. A name also stands for the names that continue it after a dot, so drawing one
# forgets those that begin with it, or that it begins with.
DRAW_ONCE = """
do
  local TileSet = require('common.tile_set').TileSet
  local addShape, setSprite, addColor = TileSet.addShape, TileSet.setSprite, TileSet.addColor
  local families = {}
  local function drawn_like(self, name)
    local drawn = rawget(self, '_drawn')
    if not drawn then
      drawn = {}
      self._drawn = drawn
    end
    local family = families[name]
    if not family then
      family = name:match('^[^.]*')
      families[name] = family
    end
    if not drawn[family] then drawn[family] = {} end
    return drawn[family]
  end
  local function forget(self, name)
    local drawn = drawn_like(self, name)
    for other in next, drawn do
      if other:sub(1, #name) == name or name:sub(1, #other) == other then drawn[other] = nil end
    end
  end
  local function copied(palette)
    local copy = {}
    for char, color in next, palette do
      copy[char] = {unpack(color)}
    end
    return copy
  end
  local function is_same(copy, palette)
    local left = 0
    for char, color in next, palette do
      local before = copy[char]
      if not before or #before ~= #color then return false end
      for i = 1, #color do
        if before[i] ~= color[i] then return false end
      end
      left = left + 1
    end
    for _ in next, copy do left = left - 1 end
    return left == 0
  end
  function TileSet:addShape(name, shape, override)
    local text, palette, noRotate = shape.text, shape.palette, shape.noRotate
    local before = drawn_like(self, name)[name]
    if before and not override and before.text == text and before.noRotate == noRotate
        and is_same(before.palette, palette) then
      return
    end
    addShape(self, name, shape, override)
    if not override and type(text) == 'string' then
      drawn_like(self, name)[name] = {text = text, noRotate = noRotate, palette = copied(palette)}
    end
  end
  function TileSet:setSprite(name, ...)
    forget(self, name)
    return setSprite(self, name, ...)
  end
  function TileSet:addColor(name, ...)
    forget(self, name)
    return addColor(self, name, ...)
  end
end
"""

# Each object copies the settings of its kind, and parses its arguments. Tables of settings share the metatable that
# makes missing entries, in place of a copy for each, and an argument's plain default is described once.
COPY_LESS = """
do
  local tables, args = require('common.tables'), require('common.args')
  local deepCopy, default = tables.deepCopy, args.default
  local function makes_entries(meta)
    local key, value = next(meta)
    return key == '__index' and type(value) == 'function' and next(meta, key) == nil and not getmetatable(meta)
  end
  local function copied(input)
    local output = {}
    for key, value in next, input do
      if type(value) == 'table' then value = copied(value) end
      output[key] = value
    end
    local meta = getmetatable(input)
    if meta then setmetatable(output, makes_entries(meta) and meta or copied(meta)) end
    return output
  end
  function tables.deepCopy(input, depth)
    if depth or type(input) ~= 'table' then return deepCopy(input, depth) end
    return copied(input)
  end
  local defaults = {}
  function args.default(value)
    local kind = type(value)
    if kind ~= 'string' and kind ~= 'boolean' and (kind ~= 'number' or value ~= value) then return default(value) end
    local made = defaults[value]
    if not made then
      made = default(value)
      defaults[value] = made
    end
    return made
  end
end
"""


class Edit(NamedTuple):
    """What is replaced in one file, by what; both are lines of Lua."""

    file: str
    old: str
    new: str


LIBRARY = "modules/component_library.lua"
OBJECT = "modules/game_object.lua"

#: Reads of the state that a game object keeps; a test proves each read that it serves against `grid:state`.
CACHED_STATE = "if state ~= nil then return state end"

EDITS = (
    # The names of an object's states are joined and cut once.
    Edit(
        LIBRARY,
        """
  self._config.uniqueStatePrefix = 'PTID_' .. self.gameObject._id .. '_'
""",
        """
  self._config.uniqueStatePrefix = 'PTID_' .. self.gameObject._id .. '_'
  self._uniqueOf, self._plainOf = {}, {}
""",
    ),
    Edit(
        LIBRARY,
        """
    return self._config.uniqueStatePrefix .. state
  else
""",
        """
    local unique = self._uniqueOf[state]
    if not unique then
      unique = self._config.uniqueStatePrefix .. state
      self._uniqueOf[state] = unique
    end
    return unique
  else
""",
    ),
    Edit(
        LIBRARY,
        """
  return unique:sub(#self._config.uniqueStatePrefix + 1)
""",
        """
  local state = self._plainOf[unique]
  if not state then
    state = unique:sub(#self._config.uniqueStatePrefix + 1)
    self._plainOf[unique] = state
  end
  return state
""",
    ),
    # The message is made only where it is needed.
    Edit(
        LIBRARY,
        """
  assert(self._config.stateToConfigIndex[state] ~= nil,
         'The state "' .. state .. '" is not available.')
""",
        """
  if self._config.stateToConfigIndex[state] == nil then
    assert(false, 'The state "' .. state .. '" is not available.')
  end
""",
    ),
    Edit(
        OBJECT,
        """
  assert(
    self._components,
    'Missing self._components. ' ..
    'Did you mistakenly call hasComponent using a `.` instead of a `:`?')
  return self._components[name] ~= nil
""",
        """
  if self._components then return self._components[name] ~= nil end
  assert(false, 'Missing self._components. Did you mistakenly call hasComponent using a `.` instead of a `:`?')
""",
    ),
    Edit(
        OBJECT,
        """
  assert(
    self._components,
    'Missing self._components. ' ..
    'Did you mistakenly call getComponent using a `.` instead of a `:`?')
  assert(self._components[name], 'Component does not exist: ' .. name)
  return self._components[name][1]
""",
        """
  local components = self._components
  if components and components[name] then return components[name][1] end
  assert(components, 'Missing self._components. Did you mistakenly call getComponent using a `.` instead of a `:`?')
  assert(false, 'Component does not exist: ' .. name)
""",
    ),
    # An object that others touch, or that follows its changes, knows its state from the first read of an episode on:
    # the grid calls `onAdd` at each change. Its states share their callbacks, and have only those that are called.
    Edit(
        LIBRARY,
        """
  if self.gameObject:started() and self.gameObject:getPiece() then
    return self:_deuniquifyState(
        self.gameObject._grid:state(self.gameObject:getPiece()))
  end
""",
        f"""
  local state = self._current
  {CACHED_STATE}
  if self.gameObject:started() and self.gameObject:getPiece() then
    state = self:_deuniquifyState(
        self.gameObject._grid:state(self.gameObject:getPiece()))
    if self._isKept then self._current = state end
    return state
  end
""",
    ),
    Edit(
        OBJECT,
        """
  self:_doOnAllStates(
    function(uState)
      if not callbacks[uState] then
        callbacks[uState] = {onUpdate = {},
                             onHit = {},
                             onContact = {['avatar'] = {}}}
      end
      callbacks[uState] = {
          onAdd = function (grid, piece) self:_onAdd(uState) end,
          onRemove = function (grid, piece) self:_onRemove(uState) end,
          -- onBlocked is executed when a piece tries (and fails) to move to an
          -- occupied location.
          onBlocked = function(grid, selfPiece, blocker)
              self:_onBlocked(blocker) end,
          -- list of function(grid, piece, framesOld)
          onUpdate = {},
          onHit = {},
          onContact = {['avatar'] = {}},
      }
      for hitName, _ in pairs(self._hitsTable) do
        callbacks[uState].onHit[hitName] = function(
            grid, objPiece, hitterPiece)
          return self:_onHit(hitterPiece, hitName)
        end
      end
      for _, contactName in pairs(self._contactsTable) do
        callbacks[uState].onContact[contactName] = {}
        callbacks[uState].onContact[contactName].enter = function(
            grid, objPiece, initiatorPiece)
          self:_onEnter(initiatorPiece, contactName)
        end
        callbacks[uState].onContact[contactName].leave = function(
            grid, objPiece, initiatorPiece)
          self:_onExit(initiatorPiece, contactName)
        end
      end
      self:_prune_callbacks(callbacks[uState])
""",
        """
  local stateManager = self._stateManager
  local having = self._components_by_function
  local isTold = having['onStateChange'] ~= nil
  local isHit = having['onHit'] ~= nil
  local isMet = having['onEnter'] ~= nil or having['onExit'] ~= nil
  local isKept = isTold or isHit or isMet or having['onBlocked'] ~= nil
  stateManager._isKept = isKept
  local onBlocked = function(grid, selfPiece, blocker) self:_onBlocked(blocker) end
  local hits, enters, leaves = {}, {}, {}
  if isHit then
    for hitName, _ in pairs(self._hitsTable) do
      hits[hitName] = function(grid, objPiece, hitterPiece) return self:_onHit(hitterPiece, hitName) end
    end
  end
  if isMet then
    for _, contactName in pairs(self._contactsTable) do
      enters[contactName] = function(grid, objPiece, initiatorPiece) self:_onEnter(initiatorPiece, contactName) end
      leaves[contactName] = function(grid, objPiece, initiatorPiece) self:_onExit(initiatorPiece, contactName) end
    end
  end
  self:_doOnAllStates(
    function(uState)
      local plain = isKept and stateManager:deuniquifyState(uState)
      local own = {onBlocked = onBlocked, onUpdate = {}, onHit = {}, onContact = {['avatar'] = {}}}
      if isKept then
        own.onAdd = function(grid, piece)
          if stateManager._current then stateManager._current = plain end
          if isTold then self:_onAdd(uState) end
        end
      end
      own.onRemove = function(grid, piece) self:_onRemove(uState) end
      for hitName, onHit in next, hits do own.onHit[hitName] = onHit end
      for contactName, onEnter in next, enters do
        own.onContact[contactName] = {enter = onEnter, leave = leaves[contactName]}
      end
      callbacks[uState] = own
      self:_prune_callbacks(own)
""",
    ),
    Edit(
        OBJECT,
        """
    state_callbacks.onAdd = nil
    state_callbacks.onRemove = nil
""",
        """
    state_callbacks.onRemove = nil
""",
    ),
    Edit(
        OBJECT,
        """
function GameObject:reset()
""",
        """
function GameObject:reset()
  self._stateManager._current = nil
""",
    ),
    Edit(
        OBJECT,
        """
function GameObject:start(grid, optionalLocator)
""",
        """
function GameObject:start(grid, optionalLocator)
  self._stateManager._current = nil
""",
    ),
    # The components that have a function are found once, in the order in which each call looked for them.
    Edit(
        OBJECT,
        """
  component.gameObject = self
""",
        """
  component.gameObject = self
  self._having = nil
""",
    ),
    Edit(
        OBJECT,
        """
function GameObject:_doOnAllStates(func)
""",
        """
function GameObject:_allHaving(name)
  if not self._having then self._having = {} end
  local list = self._having[name]
  if not list then
    list = {}
    for _, component_list in pairs(self._components) do
      for _, component in ipairs(component_list) do
        if component[name] then list[#list + 1] = component end
      end
    end
    self._having[name] = list
  end
  return list
end
function GameObject:_doOnAllStates(func)
""",
    ),
    Edit(
        OBJECT,
        """
  self:_doOnAllComponents(
    function(component)
      if component.onStateChange then
        component:onStateChange(self._previousState)
      end
    end)
""",
        """
  local list = self:_allHaving('onStateChange')
  for i = 1, #list do list[i]:onStateChange(self._previousState) end
""",
    ),
    Edit(
        OBJECT,
        """
  self:_doOnAllComponents(
    function(component)
      if component.discreteActions then
        component:discreteActions(actions)
      end
    end)
""",
        """
  local list = self:_allHaving('discreteActions')
  for i = 1, #list do list[i]:discreteActions(actions) end
""",
    ),
    Edit(
        OBJECT,
        """
  local args = {...}
  args[1] = sim:getGameObjectFromPiece(args[1])
  return self:_doOnAllComponents(
    function(component)
      if component[eventFnName] then
        return component[eventFnName](component, unpack(args))
      end
    end)
""",
        """
  local first, second = ...
  first = sim:getGameObjectFromPiece(first)
  local list, returns = self:_allHaving(eventFnName), {}
  for i = 1, #list do
    local component = list[i]
    local retValue = component[eventFnName](component, first, second)
    if retValue then returns[#returns + 1] = retValue end
  end
  return returns
""",
    ),
    # A state that calls nothing needs no callbacks; a contact has one, however many states make it.
    Edit(
        "modules/api_factory.lua",
        """
    self.simulation:stateCallbacks(stateCallbacks)
""",
        """
    self.simulation:stateCallbacks(stateCallbacks)
    for state, own in next, stateCallbacks do
      local isIdle = true
      for name, call in next, own do
        if name ~= 'onUpdate' or next(call) ~= nil then isIdle = false end
      end
      if isIdle then stateCallbacks[state] = nil end
    end
""",
    ),
    Edit(
        "modules/base_simulation.lua",
        """
  for _, stateElement in pairs(config.states) do
    if stateElement.contact then
      table.insert(self._contacts, stateElement.contact)
    end
  end
""",
        """
  local isThere = {}
  for _, stateElement in pairs(config.states) do
    local contact = stateElement.contact
    if contact and not isThere[contact] then
      isThere[contact] = true
      table.insert(self._contacts, contact)
    end
  end
""",
    ),
    # Lists are walked by index.
    Edit(
        OBJECT,
        """
  if self._components_by_function['preUpdate'] ~= nil then
    for _, component in pairs(self._components_by_function['preUpdate']) do
      component:preUpdate()
    end
  end
""",
        """
  local list = self._components_by_function['preUpdate']
  if list ~= nil then
    for i = 1, #list do list[i]:preUpdate() end
  end
""",
    ),
    Edit(
        OBJECT,
        """
  if self._components_by_function['update'] ~= nil then
    for _, component in pairs(self._components_by_function['update']) do
      component:update()
    end
  end
""",
        """
  local list = self._components_by_function['update']
  if list ~= nil then
    for i = 1, #list do list[i]:update() end
  end
""",
    ),
    Edit(
        "modules/base_simulation.lua",
        """
  for _, gameObject in pairs(
      self._variables.objectsByFunctionName.preUpdate) do
    gameObject:preUpdate()
  end
  for _, gameObject in pairs(
      self._variables.objectsByFunctionName.update) do
    gameObject:update(grid)
  end
""",
        """
  local list = self._variables.objectsByFunctionName.preUpdate
  for i = 1, #list do list[i]:preUpdate() end
  list = self._variables.objectsByFunctionName.update
  for i = 1, #list do list[i]:update(grid) end
""",
    ),
    # Numbers are read from a tensor at once.
    Edit(
        "levels/grid_land/components.lua",
        """
    for idx = 1, indexTensor:size() do
      table.insert(newIndices, indexTensor(idx):val())
    end
""",
        """
    local values = indexTensor:val()
    for idx = 1, #values do
      newIndices[#newIndices + 1] = values[idx]
    end
""",
    ),
)


def misfit(files: Mapping[str, bytes], versions: Mapping[str, str]) -> str:
    """Return why the edits do not fit, or "" where they do.

    Args:
        files: path below `meltingpot/lua` -> content, as installed.
        versions: package -> the installed release.
    """
    for package, version in VERSIONS.items():
        if versions.get(package) != version:
            return f"{package} {versions.get(package)}, made for {version}"
    for edit in EDITS:
        if files.get(edit.file, b"").count(edit.old.encode()) != 1:
            return f"{edit.file} was changed"
    return ""


def edited(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the files with the edits, which must fit; each file keeps its number of lines."""
    done = dict(files)
    for file, old, new in EDITS:
        first, *lines = new.splitlines()
        code = " ".join(line.strip() for line in lines)
        padding = "\n" * (old.count("\n") - 1)
        done[file] = done[file].replace(
            old.encode(),
            f"{first}\n{code}{padding}".encode(),
        )
    return done
