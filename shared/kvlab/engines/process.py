"""A system of the course in processes of its own: started, watched, explained, ended.

`System` is what vLLM, SGLang, LMCache, Mooncake and the others have in common. It starts
`kvlab.supervisor`, waits with progress and a deadline until the system is ready, keeps its log,
says what went wrong in words, and leaves nothing behind. `kvlab.engines.server.Server` derives from
it what is spoken to over HTTP, `kvlab.engines.worker.Worker` what runs a program of `kvlab.inside`
and is called through a socket. A system is added by deriving from one of the two: say its command
and its environment.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import psutil

from kvlab import environments, paths, supervisor
from kvlab.engines.protocol import EngineError
from kvlab.progress import Line
from kvlab.supervisor import Process

_KEPT_LOGS = 20
_LOCK = "lock"
_LONGEST_SOCKET = 107
"""Bytes in the path of a Unix socket (sun_path holds 108 with the closing zero)."""
_SOCKET_NAME = 40
"""Bytes to keep free for a socket's own name: ZeroMQ users name theirs by a UUID of 36."""


def free_ports(count: int) -> list[int]:
    """Loopback TCP ports that nobody listens on now."""
    with contextlib.ExitStack() as held:  # all at once, so that they differ
        probes = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def _port_is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As servers do, so that a port in TIME_WAIT counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_PREFIX = re.compile(
    r"^(?:\([^)]*pid=\d+\) )*"  # (EngineCore pid=123)
    r"(?:(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) \S+ \S+ \[[^\]]*\] ?)?"  # ERROR 11-30 05:12:01 [x]
)
_HARMLESS = re.compile(r"^(?:\([^)]*\) |\[[^\]]*\] |LMCache )*(?:DEBUG|INFO)\b")
_ERROR = re.compile(r"^(?:[\w.]+\.)?\w*(?:Error|Exception)\b[^'\"]*?:|\berror: |^Killed|^Aborted")
_FRAME = re.compile(r'^\s*(?:File "|Traceback \(|~*\^+~*\s*$)')


def telling_lines(log: Path, count: int = 4, start: int = 0) -> list[str]:
    """The lines of a log that say what went wrong: error messages without their tracebacks.

    start: bytes of the log that count no more. Empty if there is none, or no log.
    """
    raw = [line for line in _lines(log, start) if not _HARMLESS.search(line)]
    lines = [_PREFIX.sub("", line).rstrip() for line in raw]
    found: list[str] = []
    for index, line in enumerate(lines):
        if not _ERROR.search(line):
            continue
        # Some messages go on in the next lines (pydantic's do), indented.
        message = line.strip()
        for more in lines[index + 1 : index + 3]:
            if not more.startswith("  ") or _FRAME.match(more):
                break
            message += " " + more.strip()
        if message not in found:
            found.append(message[:500])
    # vLLM ends with "... See root cause above", which only repeats that something failed.
    return [line for line in found if "root cause above" not in line][-count:] or found[-count:]


def _lines(log: Path, start: int = 0) -> list[str]:
    """The end of a log, without colours; empty if it was removed meanwhile."""
    try:
        with log.open("rb") as file:
            file.seek(max(start, log.stat().st_size - (1 << 20)))
            return _COLOUR.sub("", file.read().decode(errors="replace")).splitlines()
    except FileNotFoundError:
        return []


def _temp_root() -> Path:
    """Where runs have their temporary folders."""
    root = paths.make_cache("tmp")
    if len(os.fsencode(root)) + len("/12345678/") + _SOCKET_NAME <= _LONGEST_SOCKET:
        return root
    # Engines put Unix sockets into this folder, and a socket's path has a limit.
    short = paths.short_temp()
    short.mkdir(mode=0o700, exist_ok=True)
    if short.is_symlink() or short.stat().st_uid != os.getuid():
        raise EngineError(
            f"{short} belongs to somebody else, and the path of the cache folder, {root}, is too "
            f"long for an engine's sockets. Set KVLAB_CACHE to a folder with a shorter path."
        )
    return short


def _new_folder(holder: str) -> tuple[Path, int]:
    """A run's temporary folder, and a descriptor that holds its lock while it is open.

    holder: whose it is, for whoever meets the lock.
    """
    root = _temp_root()
    run = secrets.token_hex(4)
    # Locked before it has its name, so that sweep() never sees it unlocked.
    new = root / f".{run}"
    new.mkdir(mode=0o700)
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, new, ignore_errors=True)
        lock = os.open(new / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)  # NFS locks no folders
        stack.callback(os.close, lock)
        os.write(lock, holder.encode())
        fcntl.flock(lock, fcntl.LOCK_EX)
        new.rename(root / run)
        stack.pop_all()
    return root / run, lock


class Scratch:
    """A temporary folder in the cache folder, for what systems write.

    It goes with remove(), with its `with` block, when it is forgotten, or when the interpreter
    exits; if this process is killed, at the next start of any system.
    """

    def __init__(self) -> None:
        folder, lock = _new_folder(f"process {os.getpid()}")
        self._remove = weakref.finalize(self, _discard, folder, lock, os.getpid())
        self.path = folder / "files"
        try:
            self.path.mkdir()
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        self._remove()

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.remove()


def _discard(folder: Path, lock: int, owner: int) -> None:
    if os.getpid() == owner:  # and no fork of it that exits
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def sweep() -> list[str]:
    """End and remove runs whose supervisor was killed; returns the names of their folders.

    A supervisor holds its folder's lock for as long as it lives (a Scratch for as long as its
    process does), so a folder that can be locked has lost its own. Every start calls this first.
    """
    swept = []
    for folder in _folders():
        with contextlib.ExitStack() as stack:
            try:
                lock = stack.enter_context((folder / _LOCK).open("r+"))
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except FileNotFoundError:
                pass  # about to be removed by its supervisor, or was to be
            except OSError:
                continue  # its supervisor lives; or it is not ours to lock
            if folder.name.startswith(".") and _age(folder) < _MAKING_SECONDS:
                continue  # it is about to be locked and get its name
            supervisor.end_marked(folder, System.grace)
            shutil.rmtree(folder, ignore_errors=True)
            swept.append(folder.name)
    return swept


_MAKING_SECONDS = 60


def _folders() -> list[Path]:
    """The folders of all runs, and hidden ones that have not got their name yet."""
    names = re.compile(r"\.?[0-9a-f]{8}")
    root = _temp_root()
    return [place for place in root.iterdir() if names.fullmatch(place.name) and place.is_dir()]


def _age(place: Path) -> float:
    """Seconds since it was changed; 0 if it is gone."""
    try:
        return time.time() - place.stat().st_mtime
    except FileNotFoundError:
        return 0


class Running(NamedTuple):
    """A system that runs on this machine, whoever started it with this cache folder."""

    name: str
    bytes: int
    """Resident memory of its processes; what they share counts in each."""
    starter: str
    """Process id and command of who started it, and whose end would end it."""
    log: Path | None
    """None if it was removed."""


def running() -> list[Running]:
    """The systems that run now, the largest first."""
    found, logs = [], paths.make_cache("logs")
    for folder in _folders():
        pids = {process.pid for process in supervisor.marked(folder.name)}
        size, starter = 0, "its starter has ended"
        for pid in pids:
            with contextlib.suppress(psutil.Error):  # this one has just ended
                process = psutil.Process(pid)
                size += process.memory_info().rss
                parent = process.parent()
                if parent and parent.pid not in pids:
                    starter = f"{parent.pid} {' '.join(parent.cmdline())}"
        if size:  # else a Scratch, or one that has just ended
            with contextlib.suppress(FileNotFoundError):
                name = (folder / _LOCK).read_text()
                log = next(logs.glob(f"*-{folder.name}.log"), None)
                found.append(Running(name, size, starter, log))
    return sorted(found, key=lambda one: -one.bytes)


_LOG = re.compile(r".*-([0-9a-f]{8})\.log")


def _new_log(name: str, run: str) -> Path:
    folder = paths.make_cache("logs")
    # One whose run still has its folder is of an engine that lives.
    running = {place.name for place in _folders()}
    done = []
    for log in folder.iterdir():
        named = _LOG.fullmatch(log.name)
        if named and named[1] not in running and log.is_file():
            done.append((_age(log), log))
    for _, old in sorted(done)[_KEPT_LOGS - 1 :]:
        old.unlink(missing_ok=True)
    log = folder / f"{name.replace(' ', '-')}-{time.strftime('%Y%m%d-%H%M%S')}-{run}.log"
    log.touch(mode=0o600)
    return log


class Supervised:
    """One supervisor with its engine, from start to end."""

    def __init__(
        self,
        name: str,
        folder: Path,
        lock: int,
        log: Path,
        command: Sequence[str],
        env: dict[str, str],
        grace: float,
    ) -> None:
        self.folder = folder
        self.grace = grace
        self.log = log
        self.owner = os.getpid()
        self.engine = Process(0, 0)  # nobody, until the supervisor says who it is
        self.ending = threading.Lock()
        self.ended = False
        """Whether it was told to end."""
        self.gone = False
        """Whether all of it has ended."""
        self.died = False
        """Whether the engine had ended before it was told to."""
        self.quiet = 0
        """Bytes of the log when it was ready: what stands there was no harm."""
        # Python's pipes are not inherited by the programs that this process starts.
        read, self.pipe = os.pipe()
        try:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-I", "-S", supervisor.__file__),
                    *("--pipe", str(read), "--log", str(self.log), "--folder", str(folder)),
                    *("--grace", str(grace), "--", *command),
                ],
                env={**env, supervisor.MARK: folder.name},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in this terminal is not for the engine
                pass_fds=(read, lock),
            )
        except BaseException:
            os.close(self.pipe)
            shutil.rmtree(folder, ignore_errors=True)
            raise
        finally:
            os.close(read)
            os.close(lock)
        assert self.process.stdout is not None
        try:
            with self.process.stdout as output:
                report: dict[str, Any] = json.loads(output.readline() or '{"error": "it ended"}')
        except BaseException:  # Ctrl-C
            self.end()
            raise
        if "error" in report:
            self.end()
            raise EngineError(f"{name} could not be started: {report['error']}", self.log)
        self.engine = Process(report["pid"], report["started"])

    @property
    def alive(self) -> bool:
        return not self.ended and supervisor.alive(self.engine)

    def end(self) -> None:
        """End everything of this run, whatever state it is in.

        A second call does nothing, but waits for a first one in another thread, or ends what one
        that was interrupted has left.
        """
        if os.getpid() != self.owner:
            return  # a fork of the owner is exiting; the run is not its own
        with self.ending:
            if self.gone:
                return
            if not self.ended:
                self.died = not supervisor.alive(self.engine)
                self.ended = True
                os.close(self.pipe)  # for the supervisor this is the word to end
            try:
                self.process.wait(self.grace + 10)
            except subprocess.TimeoutExpired:  # it is stopped, say
                self.process.kill()
                self.process.wait()
            # A supervisor that did its work has removed the folder last. One that was killed
            # has not, and has left processes that only their mark still names.
            if self.folder.exists():
                supervisor.end_marked(self.folder, self.grace)
                shutil.rmtree(self.folder, ignore_errors=True)
            self.gone = True

    def status(self) -> str:
        """How the engine ended, in words; call after end()."""
        code = self.process.returncode
        number = code - 128
        if number in set(signal.Signals):
            killed = signal.Signals(number).name
            if number == signal.SIGKILL:
                killed += ", as Linux does when memory runs out, or by hand"
            return f"killed by signal {number} ({killed})"
        if code < 0:
            return f"its supervisor was killed by signal {-code}"
        return f"exit status {code}"


TOKEN = secrets.token_hex(24)
"""What this process's servers ask of whoever wants more than a look; one for all, so that a router
can speak with its replicas. In hex, for it may not begin with "-" on a command line."""


class System:
    """A system in processes of its own.

    A derived class sets `name` and `_environment_name`, gives `_command`, says in `_is_ready` when
    it is ready, and may add to `_variables`, or translate in `_sentences` what it says when it
    fails. Its ports are free ones on loopback, chosen at the first start, under the names in
    `_port_names`.

    Everything of it ends with stop(), with its `with` block, when the object is forgotten, when
    the interpreter exits, and, by the supervisor, when this process is killed.
    """

    name = "system"
    grace = 10.0
    """Seconds between SIGTERM and SIGKILL. A healthy engine needs less than one."""
    _environment_name = ""
    """Whose Python runs it; see kvlab.environments."""
    _port_names: tuple[str, ...] = ("http",)

    def __init__(self, of: str = "", *, port: int | None = None, deadline: float = 300) -> None:
        if port is not None and not (isinstance(port, int) and 0 < port < 65536):
            raise EngineError(f"A port is a whole number from 1 to 65535, and not {port!r}.")
        self._of = of
        """What it works on, for progress and repr: "with smollm2-135m"."""
        self._wanted_port = port
        """The first port, where its user chose one."""
        self._deadline = deadline
        self._starting = threading.RLock()
        self._stops = 0
        """How often stop() was called."""
        self._run: Supervised | None = None
        self.ports: dict[str, int] = {}
        """The loopback ports of this run, by what they are for."""

    # What a derived class gives.

    def _command(self) -> list[str]:
        raise NotImplementedError

    def _variables(self, folder: Path) -> dict[str, str]:
        """Its variables; `folder` is the run's own, removed with it, and where it is started."""
        return environments.clean_variables(self._environment_name, self._python) | {
            "TMPDIR": str(folder),
            "PYTHONPATH": str(paths.ROOT / "shared"),  # kvlab.inside
        }

    def _check_room(self) -> None:
        """Raise EngineError where it cannot fit; what others left is gone by now."""

    def _is_ready(self, run: Supervised) -> bool:
        raise NotImplementedError

    def _connect(self, run: Supervised) -> None:
        """Prepare what is needed to speak with a run that has just begun to start."""

    def _disconnect(self) -> None:
        """Close what _connect opened; may be called twice."""

    _sentences: tuple[tuple[str, str], ...] = ()
    """Patterns of its error lines, each with a clear sentence; the first that fits counts."""

    def _explain(self, line: str) -> str | None:
        """A clear sentence for one of its error lines, or None."""
        return next((said for pattern, said in self._sentences if re.search(pattern, line)), None)

    # Start and stop.

    def start(self) -> Self:
        """Start it and wait until it is ready.

        Raises EngineError if its port is taken, if it ends, or if it is not ready in time;
        nothing of it is left then. One that runs stays as it is. A second thread that starts it
        meanwhile waits, and finds it running.
        """
        with self._starting:
            if not self.is_alive:
                self._start()
        return self

    def _start(self) -> None:
        stops = self._stops
        self._end()  # what may be left of one that died
        try:
            sweep()
            self._check_room()
            if self._wanted_port is not None and not _port_is_free(self._wanted_port):
                raise EngineError(
                    f"Port {self._wanted_port} is in use by another program. Give {self.name} "
                    f"another one, or leave out port= and a free one is chosen."
                )
            try:
                self._start_once(stops)
            except _PortTaken as taken:
                # Between choosing a port and binding it somebody else took it.
                if self._wanted_port is not None:
                    raise EngineError(str(taken), taken.log) from None
                self.ports = {}
                self._start_once(stops)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                cure = "Free some room, or set KVLAB_CACHE to a folder on a disk with room."
            else:
                cure = (
                    "The operating system refused that. If it names a place, set KVLAB_CACHE to a "
                    "folder that you may write to."
                )
            raise EngineError(f"{self.name} could not be started: {error}. {cure}") from error

    def _start_once(self, stops: int) -> None:
        """Start it, if stop() was not called since it had been called so often."""
        if not self.ports or not all(map(_port_is_free, self.ports.values())):
            numbers = free_ports(len(self._port_names))
            self.ports = dict(zip(self._port_names, numbers, strict=True))
            if self._wanted_port is not None:
                self.ports[self._port_names[0]] = self._wanted_port
        folder, lock = _new_folder(self.name)
        try:
            command = self._command()
            environment = self._variables(folder)
            log = _new_log(self.name, folder.name)
        except BaseException:
            _discard(folder, lock, os.getpid())
            raise
        run = self._run = Supervised(self.name, folder, lock, log, command, environment, self.grace)
        # Runs when this object is collected and when the interpreter exits.
        weakref.finalize(self, run.end)
        try:
            if self._stops != stops:  # by another thread, before there was anything to stop
                raise EngineError(f"{self.name} was stopped while it started.")
            self._connect(run)
            with Line(self._title) as line:
                self._wait(run, line)
            run.quiet = run.log.stat().st_size
        except BaseException:  # KeyboardInterrupt is one
            self._end()
            raise

    def _wait(self, run: Supervised, line: Line) -> None:
        until = time.monotonic() + self._deadline
        while time.monotonic() < until:
            if not run.alive:
                raise self._ended("ended before it was ready")
            if self._is_ready(run):
                return
            line.tick(
                lambda seconds: (
                    f"starting, {seconds:.0f} s (given up after {self._deadline:.0f} s; "
                    f"log: {run.log})"
                )
            )
            time.sleep(0.1)
        raise EngineError(
            f"{self.name} was not ready after {self._deadline:g} s and was stopped. If its log "
            f"shows progress, give it a longer deadline.{_last_line(run.log)}\n"
            f"Its log: {run.log}",
            run.log,
        )

    def _listens(self, run: Supervised, port: int) -> bool:
        """Whether a process of this very run listens there: somebody else's could."""
        for process in supervisor.marked(run.folder.name):
            with contextlib.suppress(psutil.Error):
                for connection in psutil.Process(process.pid).net_connections("tcp"):
                    if connection.status == "LISTEN" and connection.laddr.port == port:
                        return True
        return False

    def stop(self) -> None:
        """End its processes and remove its temporary folder; its log stays."""
        self._stops += 1
        self._end()

    def _end(self) -> None:
        """The same, where nobody has asked for it."""
        self._disconnect()
        if self._run is not None:
            self._run.end()

    def restart(self) -> Self:
        """Stop, and start again with the same settings; at the same ports, unless somebody else
        has taken one meanwhile."""
        self.stop()
        return self.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        state = f"running, ports {self.ports}" if self.is_alive else "stopped"
        return f"<{self._title}, {state}>"

    # What is known about it.

    @property
    def _python(self) -> Path:
        """The interpreter that runs it. Raises kvlab.environments.EnvironmentMissing."""
        return environments.python(self._environment_name)

    @property
    def _title(self) -> str:
        return f"{self.name} {self._of}".strip()

    @property
    def is_alive(self) -> bool:
        """Whether its main process runs."""
        return self._run is not None and self._run.alive

    def need(self) -> None:
        """Raise EngineError if it does not run: another one is about to rely on it."""
        if not self.is_alive:
            raise EngineError(f"{self._title} is stopped or has ended: restart() it first.")

    @property
    def pid(self) -> int:
        """Process id of its main process."""
        return self._begun.engine.pid

    @property
    def log(self) -> Path:
        """The file that holds what its processes printed."""
        return self._begun.log

    @property
    def _begun(self) -> Supervised:
        if self._run is None:
            raise EngineError(f"{self.name} was not started")
        return self._run

    def _has_ended(self) -> bool:
        """Whether it ends within ten seconds: what it speaks through breaks some moments before
        its process is gone, and one whose inner process died takes longer (vLLM looks every five
        seconds)."""
        until = time.monotonic() + 10
        while self.is_alive and time.monotonic() < until:
            time.sleep(0.05)
        return not self.is_alive

    def _ended(self, when: str) -> EngineError:
        """The error for a system whose main process is gone; cleans up after it."""
        run = self._begun
        self._end()
        run.end()  # the stop() may be another thread's, and not yet be done
        if not run.died:
            return EngineError(f"{self.name} was stopped while it was asked.", run.log)
        lines = telling_lines(run.log, start=run.quiet)
        if not run.quiet and any("ddress already in use" in line for line in lines):
            return _PortTaken(
                f"A port of {', '.join(map(str, self.ports.values()))} was taken by another "
                f"program while {self.name} started. Start it again, or give another port=.",
                run.log,
            )
        clear = [text for text in map(self._explain, lines) if text]
        said = "".join(f"\n  {line}" for line in lines) or _last_line(run.log)
        return EngineError(
            f"{self.name} {when}: {run.status()}."
            + "".join(f" {text}" for text in dict.fromkeys(clear))
            + (f" It said:{said}" if said else " It said nothing.")
            + f"\nIts log: {run.log}",
            run.log,
        )


class _PortTaken(EngineError):
    """It could not bind one of its ports."""


def _last_line(log: Path) -> str:
    lines = [line for line in _lines(log) if line.strip()]
    lines = [line for line in lines if not line.startswith("[supervisor]")]
    return f"\n  {_PREFIX.sub('', lines[-1])[:500]}" if lines else ""
