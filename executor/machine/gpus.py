"""GPUs that this process may use, their memory, and devices that EGL renders on."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from envherd.shm.interrupts import ignoring_refusals

_QUERY = "index,uuid,name,memory.total,memory.free"
_MIB = 2**20
_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    Attributes:
        name: from its driver.
        memory_bytes: all of it.
        free_bytes: unused memory; None if only torch is available to report it.
    """

    name: str
    memory_bytes: int
    free_bytes: int | None


class _Listed(NamedTuple):
    """A GPU as `nvidia-smi` lists it, with what `CUDA_VISIBLE_DEVICES` may call it."""

    number: str
    uuid: str
    gpu: Gpu


def read_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that `nvidia-smi` lists and `CUDA_VISIBLE_DEVICES` allows, or torch's if it is imported."""
    text = _ask(f"--query-gpu={_QUERY}")
    if not text:
        return _torch_gpus()
    return parse_smi(text, os.environ.get("CUDA_VISIBLE_DEVICES"))


def parse_smi(text: str, visible: str | None) -> tuple[Gpu, ...]:
    """Return the GPUs in the CSV that `nvidia-smi` prints.

    Args:
        text: one line for each: index, uuid, name, MiB, MiB free.
        visible: `CUDA_VISIBLE_DEVICES`: indices or the beginnings of uuids; None for all, empty for none.
    """
    listed: list[_Listed] = []
    for line in text.splitlines():
        match [field.strip() for field in line.split(",")]:
            case [number, uuid, name, total, free] if total.isdigit():
                free_bytes = int(free) * _MIB if free.isdigit() else None
                listed.append(
                    _Listed(number, uuid, Gpu(name, int(total) * _MIB, free_bytes))
                )
    if visible is None:
        return tuple(one.gpu for one in listed)
    found = []
    for wanted in visible.split(","):
        fitting = (
            one.gpu
            for one in listed
            if wanted and (wanted == one.number or one.uuid.startswith(wanted))
        )
        gpu = next(fitting, None)
        if gpu is None:
            break  # CUDA also stops at the first missing one
        found.append(gpu)
    return tuple(found)


def _ask(query: str) -> str:
    """Return what `nvidia-smi` prints; empty if there is none, or if it fails."""
    with contextlib.suppress(subprocess.TimeoutExpired), ignoring_refusals():
        done = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        return done.stdout if done.returncode == 0 else ""
    return ""


def _torch_gpus() -> tuple[Gpu, ...]:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return ()
    properties = [
        torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())
    ]
    return tuple(Gpu(one.name, int(one.total_memory), None) for one in properties)


# ---- renderers ---------------------------------------------------------------------------------
# Which devices EGL renders on: a new process draws one small picture on each, as drivers may crash.

_RENDERER_TIMEOUT_S = 30.0
_MOST = 64  # devices

#: Draws on device number argv[1] and prints what it found; with no such device it prints null. Constants are those of
#: EGL/egl.h, EGL/eglext.h (EXT_device_query, EXT_platform_device, NV_device_cuda, EXT_device_drm) and GL/gl.h.
_DRAW = """
import ctypes, json, sys
number = int(sys.argv[1])
egl = ctypes.CDLL("libEGL.so.1")
egl.eglGetProcAddress.restype = ctypes.c_void_p

def function(name, result, *arguments):
    address = egl.eglGetProcAddress(name.encode())
    if not address:
        raise OSError("EGL lacks " + name)
    return ctypes.CFUNCTYPE(result, *arguments)(address)

P, I, U = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint
devices, count = (P * 64)(), I()
function("eglQueryDevicesEXT", U, I, P, P)(64, devices, ctypes.byref(count))
if number >= count.value:
    print("null")
    sys.exit()
device, found = devices[number], {"number": number, "cuda": None, "file": None}
text = function("eglQueryDeviceStringEXT", ctypes.c_char_p, P, I)
extensions = (text(device, 0x3055) or b"").decode().split()
if "EGL_NV_device_cuda" in extensions:
    value = ctypes.c_ssize_t()
    if function("eglQueryDeviceAttribEXT", U, P, I, P)(device, 0x323A, ctypes.byref(value)):
        found["cuda"] = value.value
if "EGL_EXT_device_drm" in extensions:
    found["file"] = (text(device, 0x3233) or b"").decode() or None
display = function("eglGetPlatformDisplayEXT", P, U, P, P)(0x313F, device, None)
initialize = function("eglInitialize", U, P, P, P)
if not display or not initialize(display, None, None):
    raise OSError("the device cannot be opened (permissions of /dev/dri or /dev/nvidia*?)")
function("eglBindAPI", U, U)(0x30A2)
config, number_of = P(), I()
wanted = (I * 5)(0x3033, 0x0001, 0x3040, 0x0008, 0x3038)
function("eglChooseConfig", U, P, P, P, I, P)(display, wanted, ctypes.byref(config), 1, ctypes.byref(number_of))
surface = function("eglCreatePbufferSurface", P, P, P, P)(display, config, (I * 5)(0x3057, 8, 0x3056, 8, 0x3038))
context = function("eglCreateContext", P, P, P, P, P)(display, config, None, None)
if not context or not function("eglMakeCurrent", U, P, P, P, P)(display, surface, surface, context):
    raise OSError("no OpenGL context")
F = ctypes.c_float
function("glClearColor", None, F, F, F, F)(1.0, 0.0, 1.0, 1.0)
function("glClear", None, U)(0x4000)
pixel = (ctypes.c_ubyte * 4)()
function("glReadPixels", None, I, I, I, I, U, U, P)(3, 3, 1, 1, 0x1908, 0x1401, pixel)
found["is_right"] = list(pixel)[:3] == [255, 0, 255]
found["renderer"] = function("glGetString", ctypes.c_char_p, U)(0x1F01).decode()
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Renderer:
    """A device of EGL.

    Attributes:
        number: of the device, for `MUJOCO_EGL_DEVICE_ID`.
        name: of what drew, from OpenGL; "" if nothing was drawn.
        cuda: number of the GPU for `CUDA_VISIBLE_DEVICES`, if its driver says which it is.
        file: of the GPU, as `/dev/dri/card0`, if its driver says which it is.
        problem: why no right picture was drawn; "" if it was.
    """

    number: int
    name: str = ""
    cuda: int | None = None
    file: str | None = None
    problem: str = ""

    @property
    def is_software(self) -> bool:
        """Whether the processor drew."""
        return any(
            word in self.name.lower()
            for word in ("llvmpipe", "softpipe", "swrast", "software")
        )

    def describe(self) -> str:
        """Return what drew and which GPU that is, or the problem."""
        if self.problem:
            return self.problem
        which = [f"CUDA GPU {self.cuda}"] if self.cuda is not None else []
        which += [self.file] if self.file else []
        which += ["on the processor"] if self.is_software else []
        suffix = f" ({', '.join(which)})" if which else ""
        return f"{self.name}{suffix}"


def find_renderers() -> Iterator[Renderer]:
    """Draw a picture on each device of EGL; yield none where there is no EGL. Takes about 0.2 s a device."""
    environment = {
        name: value for name, value in os.environ.items() if name != "DISPLAY"
    }
    for number in range(_MOST):
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-c", _DRAW, str(number)],
                capture_output=True,
                text=True,
                timeout=_RENDERER_TIMEOUT_S,
                check=False,
                stdin=subprocess.DEVNULL,
                env=environment,
            )
        except subprocess.TimeoutExpired:
            yield Renderer(
                number,
                problem=f"the driver did not answer within {_RENDERER_TIMEOUT_S:g} s",
            )
            return
        lines = done.stdout.splitlines()
        if done.returncode < 0:
            yield Renderer(
                number,
                problem=f"the driver crashed (signal {-done.returncode})",
            )
        elif done.returncode or not lines:
            why = (done.stderr.strip().splitlines() or ["?"])[-1].partition(": ")[2]
            if "libEGL" in why or "eglQueryDevicesEXT" in why:
                return
            yield Renderer(number, problem=why)
        else:
            found = json.loads(lines[-1])
            if found is None:
                return
            problem = (
                "" if found["is_right"] else f"{found['renderer']} draws wrong pictures"
            )
            yield Renderer(
                number,
                found["renderer"],
                found["cuda"],
                found["file"],
                problem,
            )
