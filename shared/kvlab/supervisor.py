"""Own an engine's process tree, and end it when whoever started it is gone.

A serving engine is several processes: vLLM's API server starts an engine core, which starts a
worker. If a notebook's kernel is killed while they run, they go on holding memory and a port.
So the kernel starts this program between itself and the engine:

    kernel ----pipe----> supervisor ----> engine's main process ----> its children ...

The kernel alone holds the pipe's write end and never writes to it. However the kernel ends, the
operating system closes that end; the supervisor sees end-of-file and ends the tree: SIGTERM to
every process, a time of grace, SIGKILL to what is left. The same happens when the supervisor gets
SIGTERM or SIGINT, and when the engine's main process ends by itself. Last it removes the run's
temporary folder and exits with the engine's status (128 + N if signal N ended it).

This file is a program of the standard library alone, run as `python -I -S supervisor.py`; it is
also a module, from which `kvlab.engines.process` takes the functions that find and end processes.
Linux only.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, NoReturn

MARK = "KVLAB_RUN"
"""Environment variable that every process of one run inherits, with the run's name as value."""

_SHM = "/dev/shm"
_LOOK_SECONDS = 2
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36


class Process(NamedTuple):
    """One process for good: a pid may be used again, a pid with its start time may not."""

    pid: int
    started: int
    """Clock ticks after boot, field 22 of /proc/PID/stat."""


class _Stat(NamedTuple):
    process: Process
    state: str
    parent: int


def _stat(pid: int) -> _Stat | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # Field 2 is the program's name in brackets, and may itself hold spaces and brackets.
    fields = text.rpartition(")")[2].split()
    return _Stat(Process(pid, int(fields[19])), fields[0], int(fields[1]))


def _all() -> list[_Stat]:
    stats = (_stat(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return [stat for stat in stats if stat is not None]


def identify(pid: int) -> Process | None:
    """The process that has this pid now, or None."""
    stat = _stat(pid)
    return stat.process if stat else None


def alive(process: Process) -> bool:
    """Whether this very process runs; one that ended and is not yet reaped does not."""
    stat = _stat(process.pid)
    return stat is not None and stat.process == process and stat.state not in "ZX"


def descendants(pid: int) -> list[Process]:
    """Children of `pid`, their children, and so on, that still run."""
    children: dict[int, list[_Stat]] = {}
    for stat in _all():
        children.setdefault(stat.parent, []).append(stat)
    found, parents = [], [pid]
    while parents:
        for stat in children.get(parents.pop(), []):
            parents.append(stat.process.pid)
            if stat.state not in "ZX":
                found.append(stat.process)
    return found


def marked(run: str) -> list[Process]:
    """Processes of the run with this name, whoever their parent is by now.

    This finds what a dead supervisor left: its orphans belong to init, and may have left their
    process group, but what they were started with still stands in /proc/PID/environ.
    """
    mark = f"{MARK}={run}".encode()
    found = []
    for stat in _all():
        try:
            environ = Path(f"/proc/{stat.process.pid}/environ").read_bytes()
        except OSError:  # another user's, or gone
            continue
        if mark in environ.split(b"\0") and stat.state not in "ZX":
            found.append(stat.process)
    return found


def send(process: Process, number: int) -> None:
    """Send a signal to this very process; do nothing if it is gone."""
    try:
        # A pidfd keeps its process: what is checked here is what gets the signal.
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    except OSError:
        # Some container sandboxes have no pidfd: the same with a gap of microseconds.
        if identify(process.pid) == process:
            os.kill(process.pid, number)
        return
    try:
        if identify(process.pid) == process:
            signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        pass
    finally:
        os.close(handle)


File = tuple[int, int]
"""Device and inode: a name may be used again."""


def _files() -> dict[File, str]:
    """What lies in /dev/shm now, and under which path."""
    found = {}
    with contextlib.suppress(FileNotFoundError):  # there is no such folder
        for entry in os.scandir(_SHM):
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                stat = entry.stat(follow_symlinks=False)
                found[stat.st_dev, stat.st_ino] = entry.path
    return found


def _mapped(process: Process) -> Iterator[tuple[str, File]]:
    """Files of /dev/shm that a process has mapped, each with the mapping's permissions."""
    try:
        maps = Path(f"/proc/{process.pid}/maps").read_text(errors="replace")
    except OSError:  # gone, or another user's
        return
    for line in maps.splitlines():
        if f" {_SHM}/" in line:
            # No name: a semaphore is mapped under one that it has lost since.
            _, permissions, _, device, inode, *_ = line.split()
            major, minor = (int(part, 16) for part in device.split(":"))
            yield permissions, (os.makedev(major, minor), int(inode))


def _opened(process: Process) -> Iterator[File]:
    """Files of /dev/shm that a process has open, mapped or not."""
    folder = f"/proc/{process.pid}/fd"
    try:
        links = [f"{folder}/{name}" for name in os.listdir(folder)]
    except OSError:  # gone, or another user's
        return
    for link in links:
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.readlink(link).startswith(f"{_SHM}/"):
                stat = os.stat(link)
                yield stat.st_dev, stat.st_ino


class Memory:
    """What the processes of a run have made in /dev/shm.

    It outlives its processes: whoever is killed cannot remove its own. The run's folder keeps the
    notes, for the supervisor may be killed as well. Without notes nothing counts as theirs.
    """

    def __init__(self, folder: Path) -> None:
        self._notes = folder / "shared-memory"
        try:
            before, made = json.loads(self._notes.read_text())
        except (OSError, ValueError):  # at the start
            before, made = _files(), []
        self._before: set[File] = {(device, inode) for device, inode in before}
        """What was there before the run, and so is not its own."""
        self._made: set[File] = {(device, inode) for device, inode in made}

    def note(self) -> None:
        with contextlib.suppress(OSError):  # a full disk, say
            self._notes.write_text(json.dumps([list(self._before), list(self._made)]))

    def look(self, processes: Iterable[Process]) -> None:
        """Note what these have now: what they can write and share. What a process only reads
        somebody else has made."""
        found = {
            file
            for process in processes
            for permissions, file in _mapped(process)
            if "w" in permissions and "s" in permissions
        }
        if new := found - self._before - self._made:
            self._made |= new
            self.note()

    def remove(self) -> None:
        """Remove it, but for what a living process still has mapped or open."""
        left = {file: path for file, path in _files().items() if file in self._made}
        if not left:
            return
        for stat in _all():
            for file in [*(file for _, file in _mapped(stat.process)), *_opened(stat.process)]:
                left.pop(file, None)
        for path in left.values():
            with contextlib.suppress(OSError):  # its owner has removed it meanwhile
                os.unlink(path)


def end(
    find: Callable[[], Iterable[Process]],
    gone: Callable[[float], bool],
    grace: float,
    memory: Memory,
) -> bool:
    """End processes: SIGTERM, up to `grace` seconds, then SIGKILL until none is left.

    `find` lists those that live now; `gone(seconds)` waits up to that long and says whether none
    is left; `memory` knows what they have made in /dev/shm. Returns False if some outlive five
    seconds of SIGKILL (stuck in the kernel).
    """
    memory.look(find())
    for process in find():
        send(process, signal.SIGTERM)
        # A stopped process acts on SIGTERM only when it goes on.
        send(process, signal.SIGCONT)
    ended = gone(grace)
    for _ in range(25):  # again and again: a process may have forked since it was listed
        if ended:
            break
        for process in find():
            send(process, signal.SIGKILL)
        ended = gone(0.2)
    memory.remove()
    return ended


def end_marked(folder: Path, grace: float) -> bool:
    """End all processes of a run, by its folder, without their supervisor. Returns whether none is
    left."""
    run = folder.name

    def gone(seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while marked(run):
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.05)
        return True

    return end(lambda: marked(run), gone, grace, Memory(folder))


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl option {option} failed")


class _Children:
    """Reaps children as they end, the engine's main process among them."""

    def __init__(self) -> None:
        # SIGCHLD writes a byte to a pipe. Because a byte stays until it is read, a child that
        # ends between a check and the next poll() is not missed.
        self.signals, write = os.pipe()
        os.set_blocking(self.signals, False)
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        self.stop_asked = False
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._ask_stop)
        self.main = 0
        self.status: int | None = None

    def _ask_stop(self, *_: object) -> None:
        self.stop_asked = True

    def reap(self) -> bool:
        """Reap whoever ended; True if no child is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return True
            if pid == 0:
                return False
            if pid == self.main:
                code = os.waitstatus_to_exitcode(status)
                self.status = code if code >= 0 else 128 - code

    def drain(self) -> None:
        try:
            while os.read(self.signals, 4096):
                pass
        except BlockingIOError:
            pass

    def gone(self, seconds: float) -> bool:
        """Wait up to `seconds` for the last child; True if none is left."""
        poll = select.poll()
        poll.register(self.signals, select.POLLIN)
        deadline = time.monotonic() + seconds
        while not self.reap():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            poll.poll(left * 1000)
            self.drain()
        return True


def _watch(children: _Children, pipe: int, memory: Memory) -> str:
    """Wait until the tree has to end; returns why, for the log.

    Every few seconds it looks which shared memory the tree has: should all of its processes be
    killed at once, nobody could be asked any more.
    """
    poll = select.poll()
    poll.register(children.signals, select.POLLIN)
    poll.register(pipe, select.POLLIN)
    # A child that the kernel forked without exec (multiprocessing does) holds a copy of the
    # pipe's write end and would keep it open; so the kernel process itself is watched, too.
    starter = os.getppid()
    handle = -1
    try:
        handle = os.pidfd_open(starter)
        poll.register(handle, select.POLLIN)
    except OSError:
        pass  # gone already (the next line sees it), or no pidfd here: the pipe remains
    if os.getppid() != starter:
        return "its starter is gone"
    while True:
        children.reap()
        if children.status is not None:
            return "the engine's main process ended"
        if children.stop_asked:
            return "a signal asked for it"
        memory.look(descendants(os.getpid()))
        for fd, _ in poll.poll(_LOOK_SECONDS * 1000):
            if fd == pipe and not os.read(pipe, 1):
                return "its starter closed the pipe or is gone"
            if fd == handle:
                return "its starter is gone"
        children.drain()


def _say(what: str) -> None:
    """Into the engine's log."""
    try:
        print(f"[supervisor] {what}", flush=True)
    except OSError:
        pass  # a full disk, say; there is more to do


def main() -> NoReturn:
    parser = argparse.ArgumentParser(description="Run a command; end its whole process tree.")
    parser.add_argument("--pipe", type=int, required=True, help="descriptor: end-of-file = stop")
    parser.add_argument("--log", required=True, help="file for the command's output")
    parser.add_argument("--folder", required=True, help="temporary folder, removed at the end")
    parser.add_argument("--grace", type=float, required=True, help="seconds from TERM to KILL")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    command = options.command[1:]  # without the "--" before it

    children = _Children()
    # Orphans in the tree become children of this process instead of init's: none escapes by
    # leaving its process group, and "no child left" means "nothing of the tree left".
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    me = os.getpid()

    def before_exec() -> None:
        # If this supervisor is itself killed with SIGKILL, the engine's main process goes with
        # it. That covers the main process alone: the signal is not inherited by its children.
        # They are found by their mark: by stop() in the kernel, or by the next start of any
        # engine (kvlab.engines.process.sweep). It is sent when the parent *thread* ends, and this
        # program has only one.
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != me:
            os._exit(1)

    memory = Memory(Path(options.folder))
    memory.note()
    log = os.open(options.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    report: dict[str, object]
    try:
        engine = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=options.folder,
            start_new_session=True,
            preexec_fn=before_exec,
        )
    except (OSError, subprocess.SubprocessError) as error:
        report = {"error": str(error)}
        children.status = 127
    else:
        children.main = engine.pid
        engine.returncode = 0  # it is reaped here, not by subprocess
        # Nobody but this process reaps it, so the pid is still its own.
        process = identify(engine.pid)
        assert process is not None
        report = {"pid": process.pid, "started": process.started}
    try:
        sys.stdout.write(json.dumps(report) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        pass  # the starter is gone: the pipe says so, too
    # From here on the log is the only place to write to.
    for fd in (1, 2):
        os.dup2(log, fd)

    try:
        reason = _watch(children, options.pipe, memory)
    except OSError as error:  # no file descriptor is left, say
        reason = f"the supervisor failed: {error}"
    _say(f"ending the engine's processes: {reason}")
    if not end(lambda: descendants(me), children.gone, options.grace, memory):
        left = ", ".join(str(process.pid) for process in descendants(me))
        _say(f"still there after SIGKILL: {left}")
    shutil.rmtree(options.folder, ignore_errors=True)
    sys.exit(children.status if children.status is not None else 1)


if __name__ == "__main__":
    main()
