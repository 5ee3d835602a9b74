"""What every engine of the course has in common.

`Engine` is the protocol that notebooks speak. `Server` is the part behind it that engines in
processes of their own share: it starts `kvlab.supervisor`, waits until the engine answers, keeps
its log, says what went wrong in words, and leaves nothing behind. An engine is added by deriving
from `Server`: say its command, its environment, and how it generates (`kvlab.engines.vllm`).
"""

from __future__ import annotations

import contextlib
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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self, overload

import httpx
import psutil

from kvlab import paths, supervisor
from kvlab.supervisor import Process

Prompt = str | list[int]
"""Text, or the token ids themselves."""

_KEPT_LOGS = 20
_LOCK = "lock"
_LONGEST_SOCKET = 107
"""Bytes in the path of a Unix socket (sun_path holds 108 with the closing zero)."""
_SOCKET_NAME = 40
"""Bytes to keep free for a socket's own name: ZeroMQ users name theirs by a UUID of 36."""


@dataclass(frozen=True)
class Completion:
    """What an engine gave back for one prompt."""

    text: str
    token_ids: list[int]
    """The new tokens; the prompt's are not among them."""
    logprobs: list[float]
    """Natural log-probability of each new token, from the raw logits; same length."""
    prompt_tokens: int
    cached_tokens: int
    """How many of the prompt's tokens were not computed because their KV was in a cache."""
    finish_reason: str
    """"length" (max_tokens reached) or "stop" (end-of-sequence token or stop string)."""


@dataclass(frozen=True)
class Chunk:
    """What a stream brought since the chunk before; the last one also says how it ended."""

    text: str
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None


class EngineError(RuntimeError):
    """An engine cannot do what was asked; the message says why and what to do.

    `log` is the engine's log file where one was written.
    """

    def __init__(self, message: str, log: Path | None = None) -> None:
        super().__init__(message)
        self.log = log


class Engine(Protocol):
    """The calls that a notebook makes on any engine."""

    @overload
    def generate(self, prompt: Prompt, *, max_tokens: int = ...) -> Completion: ...
    @overload
    def generate(self, prompt: list[Prompt], *, max_tokens: int = ...) -> list[Completion]: ...
    def stream(self, prompt: Prompt, *, max_tokens: int = ...) -> Iterator[Chunk]: ...
    def metrics(self) -> dict[str, float]: ...
    def reset_prefix_cache(self) -> bool: ...
    def stop(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...


def available_memory() -> int:
    """Bytes of main memory that a new process can have: the machine's, or its container's."""
    left = psutil.virtual_memory().available
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "":  # version 2, https://docs.kernel.org/admin-guide/cgroup-v2.html
            root, limit, usage = Path("/sys/fs/cgroup"), "memory.max", "memory.current"
        elif "memory" in controllers.split(","):  # version 1
            root = Path("/sys/fs/cgroup/memory")
            limit, usage = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        # Inside a container the group's path may be the host's; then the root is its own group.
        for folder in {root / group.lstrip("/"), root}:
            with contextlib.suppress(OSError, ValueError):  # no such file, or "max": no limit
                stat = dict(
                    line.split() for line in (folder / "memory.stat").read_text().splitlines()
                )
                used = int((folder / usage).read_text())
                # File pages that nobody used for long are given up before anyone is killed.
                used -= int(stat.get("total_inactive_file", stat["inactive_file"]))
                left = min(left, max(0, int((folder / limit).read_text()) - used))
    return left


def free_port() -> int:
    """A loopback TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _port_is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As servers do, so that a port in TIME_WAIT counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


_PREFIX = re.compile(
    r"^(?:\([^)]*pid=\d+\) )*"  # (EngineCore pid=123)
    r"(?:(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) \S+ \S+ \[[^\]]*\] ?)?"  # ERROR 11-30 05:12:01 [x]
)
_ERROR = re.compile(r"^(?:[\w.]+\.)?\w*(?:Error|Exception)\b[^'\"]*?:|\berror: |^Killed|^Aborted")
_FRAME = re.compile(r'^\s*(?:File "|Traceback \(|~*\^+~*\s*$)')


def telling_lines(log: Path, count: int = 4) -> list[str]:
    """The lines of a log that say what went wrong: error messages without their tracebacks.

    Empty if there is none.
    """
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - (1 << 20)))
        raw = file.read().decode(errors="replace").splitlines()
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


def _temp_root() -> Path:
    """Where runs have their temporary folders."""
    root = paths.make_cache("tmp")
    if len(os.fsencode(root)) + len("/12345678/") + _SOCKET_NAME <= _LONGEST_SOCKET:
        return root
    # Engines put Unix sockets into this folder, and a socket's path has a limit. If the cache
    # folder's own path is too long for that, this is the one thing that lies outside of it.
    short = Path(f"/tmp/follow-the-request-{os.getuid()}")
    short.mkdir(mode=0o700, exist_ok=True)
    if short.is_symlink() or short.stat().st_uid != os.getuid():
        raise EngineError(
            f"{short} belongs to somebody else, and the path of the cache folder, {root}, is too "
            f"long for an engine's sockets. Set KVLAB_CACHE to a folder with a shorter path."
        )
    return short


def _new_folder() -> tuple[Path, int]:
    """A run's temporary folder, and a descriptor that holds its lock while it is open."""
    root = _temp_root()
    run = secrets.token_hex(4)
    # Locked before it has its name, so that sweep() never sees it unlocked.
    new = root / f".{run}"
    new.mkdir(mode=0o700)
    lock = os.open(new / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)  # NFS locks no folders
    fcntl.flock(lock, fcntl.LOCK_EX)
    new.rename(root / run)
    return root / run, lock


def sweep() -> list[str]:
    """End and remove runs whose supervisor was killed; returns their names.

    A supervisor holds its folder's lock for as long as it lives, so a folder that can be locked
    has lost its own. Every start calls this first.
    """
    swept = []
    for folder in _temp_root().glob("[0-9a-f]*"):
        with contextlib.ExitStack() as stack:
            # One without its lock is about to be removed by its supervisor, or was to be.
            with contextlib.suppress(FileNotFoundError):
                lock = stack.enter_context((folder / _LOCK).open("r+"))
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue  # its supervisor lives
            supervisor.end_marked(folder.name, Server.grace)
            shutil.rmtree(folder, ignore_errors=True)
            swept.append(folder.name)
    return swept


def _new_log(name: str, run: str) -> Path:
    folder = paths.make_cache("logs")
    logs = sorted(folder.glob("*.log"), key=lambda log: log.stat().st_mtime)
    for old in logs[: 1 - _KEPT_LOGS]:
        old.unlink(missing_ok=True)
    log = folder / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{run}.log"
    log.touch(mode=0o600)
    return log


class _Run:
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
        self.died = False
        """Whether the engine had ended before it was told to."""
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

        A second call does nothing, but waits for a first one in another thread.
        """
        if os.getpid() != self.owner:
            return  # a fork of the owner is exiting; the run is not its own
        with self.ending:
            if self.ended:
                return
            self.died = not supervisor.alive(self.engine)
            self.ended = True
            with contextlib.suppress(OSError):
                os.close(self.pipe)  # for the supervisor this is the word to end
            try:
                self.process.wait(self.grace + 10)
            except subprocess.TimeoutExpired:  # it is stopped, say
                self.process.kill()
                self.process.wait()
            # A supervisor that did its work has removed the folder last. One that was killed
            # has not, and has left processes that only their mark still names.
            if self.folder.exists():
                supervisor.end_marked(self.folder.name, self.grace)
                shutil.rmtree(self.folder, ignore_errors=True)

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


class _Progress:
    """One line while an engine starts, which leaves nothing that changes from run to run.

    In a terminal: a line with the seconds, gone when ready. In a notebook: a display whose text
    is replaced while waiting. nbval compares the text a display had first, the stored notebook
    holds the one it had last; so both are the same, `title`.
    """

    def __init__(self, title: str, log: Path) -> None:
        self._title = title
        self._log = log
        self._status: Any = None
        self._handle: Any = None
        self._began = time.monotonic()
        self._shown = 0.0

    def __enter__(self) -> Self:
        ipython = sys.modules.get("IPython")
        shell = ipython.get_ipython() if ipython else None
        if shell is not None and shell.has_trait("kernel"):
            from IPython.display import display

            self._handle = display({"text/plain": self._title}, raw=True, display_id=True)
        else:
            from rich.console import Console

            console = Console(stderr=True)
            if console.is_terminal:
                self._status = console.status(f"{self._title}: starting")
                self._status.start()
        return self

    def tick(self, deadline: float) -> None:
        seconds = time.monotonic() - self._began
        if seconds - self._shown < 1:
            return
        self._shown = seconds
        text = (
            f"{self._title}: starting, {seconds:.0f} s (given up after {deadline:.0f} s; "
            f"log: {self._log})"
        )
        if self._handle is not None:
            self._handle.update({"text/plain": text}, raw=True)
        elif self._status is not None:
            self._status.update(text)

    def __exit__(self, kind: object, *_: object) -> None:
        if self._status is not None:
            self._status.stop()
        elif self._handle is not None:
            text = self._title if kind is None else f"{self._title}: not started"
            self._handle.update({"text/plain": text}, raw=True)


class Server:
    """An engine in processes of its own, spoken to over HTTP on a loopback port.

    A derived class sets `name`, gives `_command` and `_environment`, and may translate what the
    engine says when it fails in `_explain`. It is ready when GET `_health` answers 200.

    Everything of it ends with stop(), with its `with` block, when the object is forgotten, when
    the interpreter exits, and, by the supervisor, when this process is killed.
    """

    name = "engine"
    grace = 10.0
    """Seconds between SIGTERM and SIGKILL. A healthy vLLM needs less than one."""
    _health = "/health"
    _fatal = ""
    """What the engine says while it still answers, though an inner process of it has died."""

    def __init__(self, model: str, *, port: int | None, deadline: float) -> None:
        if port is not None and not (isinstance(port, int) and 0 < port < 65536):
            raise EngineError(f"A port is a whole number from 1 to 65535, and not {port!r}.")
        self.model = model
        """The model's name, as metrics and requests have it."""
        self._wanted_port = port
        self._deadline = deadline
        self._run: _Run | None = None
        self._end: weakref.finalize[Any, Any] | None = None
        self._client: httpx.Client | None = None
        self._token = ""
        self.port = 0

    # What a derived class gives.

    def _command(self, port: int) -> list[str]:
        raise NotImplementedError

    def _environment(self, folder: Path) -> dict[str, str]:
        raise NotImplementedError

    def _check_room(self) -> None:
        """Raise EngineError where the engine cannot fit; what others left is gone by now."""

    def _explain(self, line: str) -> str | None:
        """A clear sentence for one of the engine's error lines, or None."""
        return None

    # Start and stop.

    def start(self) -> Self:
        """Start the engine and wait until it is ready.

        Raises EngineError if its port is taken, if it ends, or if it is not ready in time;
        nothing of it is left then. A running engine stays as it is.
        """
        if self.is_alive:
            return self
        self.stop()  # what may be left of one that died
        sweep()
        self._check_room()
        if self._wanted_port is not None and not _port_is_free(self._wanted_port):
            raise EngineError(
                f"Port {self._wanted_port} is in use by another program. Give {self.name} "
                f"another one, or leave out port= and a free one is chosen."
            )
        try:
            self._start_once()
        except _PortTaken as taken:
            # Between choosing a port and binding it somebody else took it.
            if self._wanted_port is not None:
                raise EngineError(str(taken), taken.log) from None
            self._start_once()
        return self

    def _start_once(self) -> None:
        self.port = self._wanted_port or free_port()
        self._token = secrets.token_urlsafe(24)
        command = self._command(self.port)
        folder, lock = _new_folder()
        try:
            environment = self._environment(folder)
            log = _new_log(self.name, folder.name)
        except BaseException:
            os.close(lock)
            shutil.rmtree(folder)
            raise
        run = self._run = _Run(self.name, folder, lock, log, command, environment, self.grace)
        # Runs when this object is collected and when the interpreter exits, but once.
        self._end = weakref.finalize(self, run.end)
        self._client = httpx.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {self._token}"},
            # Reading may take long: an answer that is not streamed comes after its last token.
            # A dead server does not have to be waited for: its connection breaks at once.
            timeout=httpx.Timeout(600, connect=5),
            limits=httpx.Limits(max_connections=None),
            trust_env=False,  # no proxy between here and the loopback
        )
        try:
            with _Progress(f"{self.name} with {self.model}", run.log) as progress:
                self._wait(run, progress)
        except BaseException:  # KeyboardInterrupt is one
            self.stop()
            raise

    def _wait(self, run: _Run, progress: _Progress) -> None:
        until = time.monotonic() + self._deadline
        while time.monotonic() < until:
            if not run.alive:
                raise self._ended("ended before it was ready")
            with contextlib.suppress(httpx.HTTPError):
                answer = self._http.get(self._health, timeout=2)
                # Somebody else's server could answer on this port.
                if answer.status_code == 200 and self._listens(run):
                    return
            progress.tick(self._deadline)
            time.sleep(0.1)
        raise EngineError(
            f"{self.name} was not ready after {self._deadline:g} s and was stopped. If its log "
            f"shows progress, give it a longer deadline.{_last_line(run.log)}\n"
            f"Its log: {run.log}",
            run.log,
        )

    def _listens(self, run: _Run) -> bool:
        for process in supervisor.marked(run.folder.name):
            with contextlib.suppress(psutil.Error):
                for connection in psutil.Process(process.pid).net_connections("tcp"):
                    if connection.status == "LISTEN" and connection.laddr.port == self.port:
                        return True
        return False

    def stop(self) -> None:
        """End the engine's processes and remove its temporary folder; its log stays."""
        if self._client is not None:
            self._client.close()
            self._client = None
        if self._end is not None:
            self._end()

    def restart(self) -> Self:
        """Stop, and start again with the same settings; its port may be another one."""
        self.stop()
        return self.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        state = f"running on port {self.port}" if self.is_alive else "stopped"
        return f"<{self.name} with {self.model}, {state}>"

    # What is known about it.

    @property
    def is_alive(self) -> bool:
        """Whether the engine's main process runs."""
        return self._run is not None and self._run.alive

    @property
    def pid(self) -> int:
        """Process id of the engine's main process."""
        if self._run is None:
            raise EngineError(f"{self.name} was not started")
        return self._run.engine.pid

    @property
    def log(self) -> Path:
        """The file that holds what the engine's processes printed."""
        if self._run is None:
            raise EngineError(f"{self.name} was not started")
        return self._run.log

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    # Talking to it.

    @property
    def _http(self) -> httpx.Client:
        if self._client is None:
            raise EngineError(f"{self.name} is stopped. Start it again with restart().")
        return self._client

    @contextlib.contextmanager
    def _talking(self) -> Iterator[httpx.Client]:
        """The HTTP client; turns what goes wrong on the way into an EngineError."""
        client = self._http
        try:
            yield client
        except httpx.TimeoutException:
            if not self.is_alive:
                raise self._ended("ended while it was asked") from None
            raise EngineError(
                f"{self.name} runs but gave no answer for {client.timeout.read:g} s. "
                f"restart() starts it anew. Its log: {self.log}",
                self.log,
            ) from None
        except httpx.TransportError as error:
            # A connection breaks some moments before its process is gone; a server that closes
            # because an inner process died takes longer (vLLM looks every five seconds).
            until = time.monotonic() + 10
            while self.is_alive and time.monotonic() < until:
                time.sleep(0.05)
            if not self.is_alive:
                raise self._ended("ended while it was asked") from None
            raise EngineError(
                f"{self.name} broke off the connection ({error}). Its log: {self.log}", self.log
            ) from error

    def _checked(self, response: httpx.Response) -> httpx.Response:
        """The response if it is a good one; else raises what the engine said."""
        if response.status_code < 400:
            return response
        response.read()
        raise self._refused(response.text)

    def _refused(self, text: str) -> EngineError:
        """The error for what an engine answered in place of a result."""
        with contextlib.suppress(ValueError, KeyError, TypeError):
            error = json.loads(text)["error"]
            text = error["message"] if isinstance(error, dict) else str(error)
        if not self.is_alive:
            return self._ended("ended while it was asked")
        if self._fatal and self._fatal in text:
            log = self.log
            self.stop()  # what still answers cannot serve any more
            return EngineError(
                f"{self.name} lost an inner process and was stopped. It said: {text}\n"
                f"Its log: {log}",
                log,
            )
        clear = self._explain(text)
        return EngineError(
            f"{self.name} refused: {text}" + (f" {clear}" if clear else ""), self.log
        )

    def _ended(self, when: str) -> EngineError:
        """The error for an engine whose main process is gone; cleans up after it."""
        run = self._run
        assert run is not None
        self.stop()
        run.end()  # the stop() may be another thread's, and not yet be done
        if not run.died:
            return EngineError(f"{self.name} was stopped while it was asked.", run.log)
        lines = telling_lines(run.log)
        if any("ddress already in use" in line for line in lines):
            return _PortTaken(
                f"Port {self.port} was taken by another program while {self.name} started.",
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
    """The engine could not bind its port."""


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith("[supervisor]")]
    return f"\n  {_PREFIX.sub('', lines[-1])[:500]}" if lines else ""
