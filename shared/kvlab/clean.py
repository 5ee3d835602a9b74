"""`make clean` and `make clean-cache`: remove what the set-up made, and say how much.

Standard library only: it works with a broken environment, or with none.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import sys
from pathlib import Path

from kvlab.paths import (
    ROOT,
    TAG,
    VENV,
    SetupError,
    cache,
    is_own_cache,
    run_plainly,
    short_temp,
    size,
)

_LEFTOVERS = (".trials", ".pytest_cache", ".mypy_cache", ".ruff_cache", "build", ".hypothesis")


def remove(places: list[Path]) -> int:
    """Remove files and folders; returns the bytes that this freed."""
    folders = [place for place in places if place.is_dir() and not place.is_symlink()]
    freed = size(*folders, freed=True)
    freed += sum(place.lstat().st_size for place in places if place not in folders)
    for place in places:
        print(f"Removing {place}")
        if place.is_dir() and not place.is_symlink():
            shutil.rmtree(place)
        else:
            place.unlink()
    return freed


def user_kernel() -> Path | None:
    """The kernel that `make setup` registered for the user, if it starts this checkout."""
    data = os.environ.get("JUPYTER_DATA_DIR") or "~/.local/share/jupyter"
    folder = Path(data).expanduser() / "kernels" / "follow-the-request"
    try:
        python = json.loads((folder / "kernel.json").read_text())["argv"][0]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return folder if Path(python).is_relative_to(VENV) else None


def checkout() -> None:
    """Remove .venv and what tools left in the checkout; my/ stays."""
    places = [VENV, *(ROOT / name for name in _LEFTOVERS), *(ROOT / "shared").glob("*.egg-info")]
    for top in (ROOT / "shared", ROOT / "tests", ROOT / "chapters", ROOT / "labs"):
        for name in ("__pycache__", ".ruff_cache", ".ipynb_checkpoints"):
            places += top.rglob(name)
    kernel = user_kernel()
    if kernel:
        places.append(kernel)
    freed = remove([place for place in places if place.exists() or place.is_symlink()])
    print(f"Freed {freed / 1e9:.2f} GB. my/ stays, and so does {cache()} (`make clean-cache`).")


def cache_folder() -> None:
    """Remove the cache folder, which all clones share. Raises SetupError if it is not ours."""
    folder = cache().resolve()
    if not folder.exists():
        print(f"There is no cache folder {folder}.")
        return
    if not is_own_cache(folder):
        raise SetupError(
            f"{folder} was not made by the course (it has no tag of ours): nothing was removed."
        )
    runs = [*folder.glob("tmp/*/lock"), *short_temp().glob("*/lock")]
    for lock in [*folder.glob("locks/*.lock"), *runs]:
        with lock.open("r+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = file.read().strip() or "a running engine"
                raise SetupError(f"{folder} is in use by {holder}: nothing was removed.") from None
    # The tag goes last: without it, what an interrupted removal leaves would not be ours.
    tag = folder / TAG
    freed = remove([path for path in folder.iterdir() if path != tag]) + remove([tag])
    with contextlib.suppress(OSError):  # the folder may be a disk of its own
        folder.rmdir()
    print(f"Freed {freed / 1e9:.2f} GB. `make lab` will make it again.")


if __name__ == "__main__":
    sys.exit(run_plainly(cache_folder if sys.argv[1:] == ["cache"] else checkout))
