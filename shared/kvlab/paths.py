"""Where everything lies: the checkout, and one cache folder outside it.

Standard library only: this runs before any environment exists.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv"

# The tag (bford.info/cachedir) tells backup programs to skip the folder, and
# tells `make clean-cache` that the course made it.
TAG = "CACHEDIR.TAG"
_TAG_TEXT = (
    "Signature: 8a477f597d28d172789f06886806bc55\n"
    "# Made by the course Follow the Request; `make clean-cache` removes it.\n"
)


class SetupError(Exception):
    """A step of the set-up failed; the message says what happened and what to do."""


def cache() -> Path:
    """The cache folder, which may not exist yet: $KVLAB_CACHE, or one in ~/.cache.

    Raises SetupError if that variable is empty.
    """
    named = os.environ.get("KVLAB_CACHE")
    if named == "":  # a variable that was misspelt, and not a wish for the default
        raise SetupError("KVLAB_CACHE is set, but empty: name a folder in it, or unset it.")
    if named:
        return Path(named).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().absolute() / "follow-the-request"


def short_temp() -> Path:
    """Where runs lie if the cache folder's own path is too long for a Unix socket's. It is the one
    thing outside of checkout and cache folder."""
    return Path(f"/tmp/follow-the-request-{os.getuid()}")


def is_own_cache(folder: Path) -> bool:
    """Whether the course made this folder, and so may remove it."""
    try:
        return (folder / TAG).read_text() == _TAG_TEXT
    except (OSError, UnicodeDecodeError):
        return False


def make_cache(*parts: str) -> Path:
    """Make the cache folder (and cache/parts...) where missing.

    Raises SetupError if it cannot be written, or holds something that is not ours.
    """
    folder = cache()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not is_own_cache(folder):
            # Another process may be at this very place: the tag appears whole and before
            # anything else, so whoever meets more than the start of a tag looks for it again.
            foreign = any(not path.name.startswith(f"{TAG}.") for path in folder.iterdir())
            if foreign and not is_own_cache(folder):
                raise SetupError(
                    f"{folder} is to be the cache folder, but holds other files.\n"
                    "Set KVLAB_CACHE to an empty or a new folder."
                )
            start = folder / f"{TAG}.{uuid.uuid4().hex}"
            start.write_text(_TAG_TEXT)
            start.replace(folder / TAG)
        place = folder.joinpath(*parts)
        place.mkdir(parents=True, exist_ok=True)
        return place
    except OSError as error:
        raise SetupError(
            f"The cache folder cannot be made: {error}.\n"
            "Set KVLAB_CACHE to a folder that you may write to, on a disk with room."
        ) from error


@contextmanager
def lock(name: str, doing: str) -> Iterator[int]:
    """Let one process at a time into the block; the others wait and say for whom.

    The kernel drops the lock when its holder ends, however it ends. Yields the
    lock's file descriptor, which a child process may keep.
    """
    path = make_cache("locks") / f"{name}.lock"
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "another process"
            print(f"Waiting for {holder}.", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        file.truncate(0)
        file.write(f"process {os.getpid()}, which is {doing}")
        file.flush()
        yield file.fileno()


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    while not folder.exists():
        folder = folder.parent
    return folder


def need_room(folder: Path, gigabytes: float, what: str) -> None:
    """Raise SetupError unless the disk under `folder` has `gigabytes` (1e9 bytes) free."""
    free = shutil.disk_usage(existing(folder)).free / 1e9
    if free < gigabytes:
        raise SetupError(
            f"Not enough room for {what}: it needs {gigabytes:.1f} GB under {folder},\n"
            f"and {free:.1f} GB are free there. Free {gigabytes - free:.1f} GB"
            + (" or set KVLAB_CACHE to a folder on\nanother disk" if folder != VENV else "")
            + ", then run the same command again."
        )


def size(*folders: Path, freed: bool = False) -> int:
    """Bytes on disk under the folders; a file with several names there counts once.

    freed: only what removing the folders would give back. uv's cache and the environments
    made from it share most files, and a shared file stays while it has a name elsewhere.
    """
    names: dict[tuple[int, int], int] = {}
    total = 0
    for top in folders:
        for place, below, files in os.walk(top):
            for name in [*below, *files]:
                try:
                    stat = os.lstat(os.path.join(place, name))
                except FileNotFoundError:
                    continue
                file = (stat.st_dev, stat.st_ino)
                names[file] = names.get(file, 0) + 1
                whole = stat.st_nlink if freed and name in files else 1
                if names[file] == whole:
                    total += stat.st_blocks * 512
    return total


def run_plainly(step: Callable[[], object]) -> int:
    """Run a step of the set-up; what goes wrong becomes a sentence and an exit code."""
    try:
        step()
    except SetupError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        print(
            f"\n{error}: .venv is damaged. `make clean`, then run the same command again.",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        print(
            "\nStopped. Nothing half-made will be used: the same command goes on from here.",
            file=sys.stderr,
        )
        return 130
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
            raise
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            cure = "Free some room, or set KVLAB_CACHE to a folder on another disk"
        else:
            cure = "Make the checkout as this user, or set KVLAB_CACHE to a folder of yours"
        print(f"\n{error}.\n{cure}; then run the same command again.", file=sys.stderr)
        return 1
    return 0
