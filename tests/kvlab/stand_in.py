"""A stand-in for an engine: the same shape of process tree, up in a fraction of a second.

    python stand_in.py tree PORT [WORD...]   the engine's command: see `tree`
    python stand_in.py start [WORD...]       a starter: starts one, prints what it has, waits
    python stand_in.py fork [WORD...]        the same, and leaves a fork of itself running
    python stand_in.py return [WORD...]      the same, and ends without stop() at a line of input
    python stand_in.py ask [WORD...]         the same, and waits for two answers that never come

Words: "sane" for a tree in which every process heeds SIGTERM; "mute" for an engine that never
listens; "late" for one that listens after 2.5 seconds; "wrong" for one that says why it ends;
"memory" for a tree that shares memory, "memory=FILE" for one that shares a file that is there.
"""

from __future__ import annotations

import _multiprocessing
import http.server
import json
import mmap
import os
import signal
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "shared"))

from kvlab.engines.protocol import Completion, Prompt, complete
from kvlab.engines.server import Server


class StandIn(Server):
    name = "stand-in"
    grace = 0.5

    def __init__(self, *words: str, port: int | None = None, deadline: float = 20) -> None:
        super().__init__("with nothing", port=port, deadline=deadline)
        self.words = words

    def _command(self) -> list[str]:
        return [sys.executable, __file__, "tree", str(self.port), *self.words]

    def _variables(self, folder: Path) -> dict[str, str]:
        return {**os.environ, "TMPDIR": str(folder)}

    def answer(self, prompt: Prompt) -> Completion:
        """It sends none."""
        with self._talking() as http:
            http.get("/slow", timeout=600)
        raise AssertionError("it has answered")

    def facts(self) -> dict[str, object]:
        """Everything that has to be gone later."""
        assert self._run is not None
        folder = self._run.folder
        return {
            "supervisor": self._run.process.pid,
            "engine": self.pid,
            "tree": [int(path.name) for path in (folder / "pids").iterdir()],
            "folder": str(folder),
            "port": self.port,
        }


def tree(port: int, words: list[str]) -> None:
    """A main process that serves, a child and a grandchild, and three that do not want to go.

    Each writes its pid into the temporary folder, which is also where it is started.
    """
    if "wrong" in words:
        sys.stderr.write(
            "(Main pid=7) ERROR 11-30 05:12:01 [main.py:10] Traceback (most recent call last):\n"
            '(Main pid=7) ERROR 11-30 05:12:01 [main.py:10]   File "main.py", line 10, in run\n'
            "(Main pid=7) ERROR 11-30 05:12:01 [main.py:10] ValueError: the moon is full\n"
            "RuntimeError: it failed. See root cause above.\n"
        )
        sys.exit(3)
    pids = Path("pids")
    pids.mkdir()

    def sign() -> None:
        (pids / str(os.getpid())).touch()

    def wait() -> None:
        sign()
        while True:
            signal.pause()

    def child() -> None:
        if os.fork() == 0:
            wait()
        wait()

    def leaves_the_group() -> None:
        os.setsid()
        wait()

    def loses_its_parent() -> None:
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                wait()
            os._exit(0)
        wait()

    def ignores_term() -> None:
        if "sane" not in words:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        wait()

    for word in (word for word in words if word.startswith("memory")):
        segment = Path(f"/dev/shm/psm_stand_in_{os.getpid()}")
        if "=" in word:
            segment = Path(word.partition("=")[2])
        else:
            segment.write_bytes(bytes(4096))
        with segment.open("r+b") as file:
            held = mmap.mmap(file.fileno(), 0)
        held[0] = 1
        _ = _multiprocessing.SemLock(1, 1, 1, f"/stand-in-{os.getpid()}", False)
        Path(segment.name).touch()

    for role in (child, leaves_the_group, loses_its_parent, ignores_term):
        if os.fork() == 0:
            role()
    Path("something").write_text("to be removed")
    while len(list(pids.iterdir())) < 6:
        time.sleep(0.01)
    sign()
    if "mute" in words:
        signal.pause()
    if "late" in words:
        time.sleep(2.5)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            if self.path == "/slow":
                time.sleep(60)

    print("serving", flush=True)
    http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


def main() -> None:
    what, *words = sys.argv[1:]
    if what == "tree":
        tree(int(words[0]), words[1:])
        return
    engine = StandIn(*words).start()
    if what == "fork" and os.fork() == 0:
        # It holds a copy of all that the starter has open, the supervisor's pipe included.
        os.close(1)
        time.sleep(60)
        os._exit(0)
    print(json.dumps(engine.facts()), flush=True)
    if what == "ask":
        complete(["a", "b"], engine.answer)
    elif what == "return":
        sys.stdin.readline()
    else:
        signal.pause()


if __name__ == "__main__":
    main()
