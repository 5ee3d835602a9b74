"""Installing packages with uv, under the learner's own pip configuration.

uv is quick and shows what it does, but it does not read pip's configuration.
People behind a mirror or a proxy have told pip about it, not uv, so what pip
knows is read here and passed on.

Standard library only: this runs before any environment exists.
"""

from __future__ import annotations

import ast
import ctypes
import fcntl
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import termios
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

from kvlab.paths import SetupError, make_cache, need_room

TORCH = "2.13.0"

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def clean_environment() -> dict[str, str]:
    """This process's environment without what would send an install elsewhere."""
    stray = ("PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX", "UV_TORCH_BACKEND")
    kept = {name: value for name, value in os.environ.items() if name not in stray}
    # Some hosted notebooks set PIP_USER=1, with which pip refuses to work in a venv.
    return kept | {"PIP_USER": "0", "UV_CACHE_DIR": str(make_cache("uv"))}


def pip_settings(python: Path) -> dict[str, str]:
    """What `pip install` is configured with: {"index-url": ..., "find-links": ...}.

    From pip's files and PIP_* variables, the later ones winning as they do in pip.
    """
    listed = subprocess.run(
        [python, "-m", "pip", "config", "list"],
        capture_output=True,
        text=True,
        env=clean_environment(),
    )
    found: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in listed.stdout.splitlines():
        name, _, value = line.partition("=")
        section, _, option = name.rpartition(".")
        if section in found:
            found[section][option] = ast.literal_eval(value)
    return found["global"] | found["install"] | found[":env:"]


def uv_options(settings: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """pip's settings as `uv pip install` takes them: (flags, variables)."""

    def words(option: str) -> list[str]:
        return settings.get(option, "").split()

    # pip takes the best version that any index has; uv by default stops at the
    # first index that knows the name. Their answers must not differ here.
    flags = ["--index-strategy", "unsafe-best-match"]
    if index := settings.get("index-url"):
        flags += ["--default-index", index]
    for index in words("extra-index-url"):
        flags += ["--index", index]
    for place in words("find-links"):
        # pip overlooks a folder that is not there; to uv it is an error.
        remote = "://" in place and not place.startswith("file:")
        if remote or os.path.exists(unquote(urlsplit(place).path)):
            flags += ["--find-links", place]
    for file in words("constraint"):
        flags += ["--constraint", file]
    for host in words("trusted-host"):
        flags += ["--allow-insecure-host", host]
    if settings.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        flags += ["--no-index"]

    variables = {}
    timeout = settings.get("timeout") or settings.get("default-timeout")
    if timeout:
        variables["UV_HTTP_TIMEOUT"] = str(int(float(timeout)))
    if cert := settings.get("cert"):
        variables["SSL_CERT_FILE"] = cert
    if proxy := settings.get("proxy"):
        variables |= {"HTTP_PROXY": proxy, "HTTPS_PROXY": proxy, "ALL_PROXY": proxy}
    return flags, variables


def die_with_parent() -> None:
    """Run in the child: ask the kernel for SIGTERM should the set-up be killed."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


# What uv lists at the end, in colour on a terminal: " + torch==2.13.0", 150 times.
_PACKAGE_LINE = re.compile(rb"^ (?:\x1b\[\d+m)?[-+~](?:\x1b\[\d+m)? [^\r\n]*\r?\n", re.MULTILINE)


def run_shown(
    command: Sequence[str | Path],
    environment: Mapping[str, str],
    keep_open: Sequence[int] = (),
) -> tuple[int, str]:
    """Run a command with its output on the screen: (exit code, that output).

    On a terminal the command gets one too, or it would not draw its progress. uv's
    list of every package it installed is left out.
    keep_open: descriptors that the child keeps; a lock held there stays held
    until the child has ended as well.
    """
    sys.stdout.flush()
    if sys.stderr.isatty():
        reader, writer = pty.openpty()
        shape = fcntl.ioctl(sys.stderr, termios.TIOCGWINSZ, b"\0" * 8)
        fcntl.ioctl(writer, termios.TIOCSWINSZ, shape)
    else:
        reader, writer = os.pipe()
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=writer,
        stderr=writer,
        env=dict(environment),
        pass_fds=tuple(keep_open),
        preexec_fn=die_with_parent,
    ) as process:
        os.close(writer)
        output = shown = b""
        try:
            while True:
                try:
                    piece = os.read(reader, 65536)
                except OSError:  # how a terminal says end of file
                    break
                if not piece:
                    break
                output = (output + piece)[-20_000:]
                shown += piece
                # A line that may yet turn out to name a package waits for its end.
                end = shown.rfind(b"\n") + 1
                end = end if shown.startswith(b" ", end) else len(shown)
                os.write(2, _PACKAGE_LINE.sub(b"", shown[:end]))
                shown = shown[end:]
        except KeyboardInterrupt:
            process.terminate()
            raise
        finally:
            os.write(2, shown)
            os.close(reader)
    text = output.decode(errors="replace").replace("\r", "\n")
    return process.returncode, re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


_CURES = (
    (
        r"No space left|os error 28|Disk quota|os error 122",
        "the disk is full",
        "Free some room, or set KVLAB_CACHE to a folder on another disk.",
    ),
    (
        r"certificate|UnknownIssuer|SSLError",
        "the server's certificate was not accepted",
        "Behind a company proxy, set SSL_CERT_FILE to its certificate file, or\n"
        "UV_SYSTEM_CERTS=1 to use the system's certificates.",
    ),
    (
        r"dns error|[Cc]onnect|timed out|[Tt]imeout|tunnel|error sending request|"
        r"error decoding|body from connection|Failed to (fetch|download)|network|"
        r"IncompleteRead|IncompleteMessage|unexpected EOF|Temporary failure in name",
        "the network failed",
        "Check the network, the proxy (HTTPS_PROXY) and pip's configuration\n"
        "(python3 -m pip config list).",
    ),
    (
        r"No solution found|not found in the|No matching distribution|"
        r"lookups were disabled|no wheels with a matching",
        "a package was not found where pip is configured to look",
        "Check pip's configuration (python3 -m pip config list): a mirror must hold\n"
        "the package in this version, and no-index must not be set.",
    ),
)


def failure(what: str, output: str) -> SetupError:
    """The error for an install that failed: what happened, uv's last words, the cure."""
    lines = [line.rstrip() for line in output.splitlines() if line.strip()]
    starts = [n for n, line in enumerate(lines) if re.match(r"error|WARNING: Retrying", line)]
    telling = lines[starts[-1] :] if starts else lines
    said = "\n".join("    " + line for line in telling[-8:])
    known = ((reason, cure) for pattern, reason, cure in _CURES if re.search(pattern, output))
    reason, cure = next(known, ("the installer stopped", "Its own words above say why."))
    return SetupError(
        f"Could not install {what}: {reason}.\n{said}\n{cure}\n"
        "Then run the same command again: it goes on, and downloads nothing twice."
    )


class Installer:
    """Installs into environments with the uv and the pip settings of one Python."""

    def __init__(self, tool: Path, keep_open: Sequence[int] = ()) -> None:
        """tool: a Python that has pip and uv."""
        self._uv = [str(tool), "-m", "uv"]
        self._flags, variables = uv_options(pip_settings(tool))
        self._environment = clean_environment() | variables
        self._keep_open = keep_open

    def make(self, folder: Path, python: Path) -> None:
        """Make an empty environment in `folder` that may be moved afterwards."""
        command = [*self._uv, "venv", "--quiet", "--relocatable", "--no-project"]
        self._run([*command, "--python", str(python), str(folder)], "An environment")

    def pip(self, python: Path, arguments: Sequence[str], what: str) -> None:
        """`uv pip install` into the environment of `python`, shown on the screen.

        Raises SetupError with the reason; `what` names the thing in its message.
        """
        self._run([*self._command(python), *arguments], what)

    def pins(self, python: Path, file: Path, device: str, what: str) -> None:
        """Install a pins file, with the build of torch that fits the device."""
        listed = ["--no-deps", "--requirements", str(file)]
        lines = file.read_text().splitlines()
        if device == "cuda":
            # A configuration that offers torch's CPU build too must not win here.
            torch = [line.replace("==", "!=") + "+cpu" for line in lines if line[:7] == "torch=="]
            self.pip(python, [*listed, *torch], what)
            return
        if f"torch=={TORCH}" not in lines:
            self.pip(python, listed, what)
            return
        extra = self._cpu_torch(python)
        if extra is None:
            print(
                "No CPU build of torch is within reach, so PyPI's comes, with its CUDA\n"
                "libraries: about 2.4 GB more to download, and 4.5 GB on disk.",
                flush=True,
            )
            need_room(make_cache("uv"), 5, "PyPI's torch")
            # Its own wish for a triton gives way to the pin: on a CPU torch runs without.
            self.pip(python, [f"torch=={TORCH}", "--override", str(file)], what)
            extra = []
        self.pip(python, [*listed, *extra], what)

    def _cpu_torch(self, python: Path) -> list[str] | None:
        """Arguments that bring torch's CPU build; None where there is none."""
        for extra in ([f"torch=={TORCH}+cpu"], [f"torch=={TORCH}", "--torch-backend", "cpu"]):
            command = [*self._command(python), "--dry-run", "--no-deps", *extra]
            # One failed look is enough here; the real install tries again and again.
            environment = self._environment | {"UV_HTTP_RETRIES": "0"}
            if subprocess.run(command, env=environment, capture_output=True).returncode == 0:
                return extra
        return None

    def _command(self, python: Path) -> list[str]:
        return [*self._uv, "pip", "install", "--python", str(python), *self._flags]

    def _run(self, command: Sequence[str], what: str) -> None:
        code, output = run_shown(command, self._environment, self._keep_open)
        if code:
            raise failure(what, output or f"error: {shlex.join(command)} ended with code {code}")
