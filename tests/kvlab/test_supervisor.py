"""Whatever ends, and however: no process, port or temporary folder of an engine is left."""

from __future__ import annotations

import _multiprocessing
import contextlib
import errno
import gc
import http.server
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest
from nbclient import NotebookClient
from stand_in import StandIn

from kvlab import paths, supervisor
from kvlab.engines import process
from kvlab.engines.process import System
from kvlab.engines.protocol import EngineError

Facts = dict[str, Any]
PROGRAM = Path(__file__).with_name("stand_in.py")


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    # tmp_path would be too long for the sockets of an engine.
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("KVLAB_CACHE", folder)
        yield Path(folder)


def runs(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return True
    return False


def left(facts: Facts) -> dict[str, Any]:
    """What is still there of a run."""
    pids = [facts["supervisor"], facts["engine"], *facts["tree"]]
    found: dict[str, Any] = {}
    if alive := [pid for pid in pids if runs(pid)]:
        found["processes"] = alive
    if not is_free(facts["port"]):
        found["port"] = facts["port"]
    if Path(facts["folder"]).exists():
        found["folder"] = facts["folder"]
    return found


def assert_nothing_left(facts: Facts, seconds: float = 10) -> None:
    within(seconds, lambda: not left(facts))
    assert left(facts) == {}


@contextlib.contextmanager
def starter(*words: str) -> Iterator[tuple[subprocess.Popen[str], Facts]]:
    """A process that started a stand-in, in a group of its own as in a terminal."""
    process = subprocess.Popen(
        [sys.executable, str(PROGRAM), *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    assert process.stdout is not None
    with process:
        facts = json.loads(process.stdout.readline())
        assert len(facts["tree"]) == 7
        assert set(left(facts)) == {"folder", "processes", "port"}
        try:
            yield process, facts
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def test_stop_leaves_nothing() -> None:
    with StandIn() as engine:
        engine.start()
        facts = engine.facts()
        assert engine.is_alive
        assert engine.pid == facts["engine"]
        assert set(left(facts)) == {"processes", "port", "folder"}
    assert left(facts) == {}
    assert not engine.is_alive
    assert "serving" in engine.log.read_text()
    engine.stop()  # a second time: nothing happens


def test_two_threads_start_one_engine() -> None:
    with StandIn() as engine, ThreadPoolExecutor(2) as pool:
        pids = list(pool.map(lambda _: engine.start().pid, range(2)))
        assert pids[0] == pids[1]
        assert len(list((paths.make_cache("tmp")).glob("[0-9a-f]*"))) == 1


def test_an_exception_in_the_with_block_stops_it() -> None:
    engine = StandIn().start()
    facts = engine.facts()
    with pytest.raises(ZeroDivisionError), engine:
        _ = 1 / 0
    assert left(facts) == {}


def test_a_scratch_folder_goes_with_its_process() -> None:
    with process.Scratch() as folder:
        (folder / "chunk").write_text("KV")
        assert folder.parent.name not in process.sweep()
        assert folder.exists()
    assert not folder.parent.exists()
    program = "from kvlab.engines.process import Scratch; import os\n"
    program += "scratch = Scratch(); print(scratch.path, flush=True); os.kill(os.getpid(), 9)"
    killed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    folder = Path(killed.stdout.strip())
    assert folder.exists()
    assert folder.parent.name in process.sweep()
    assert not folder.parent.exists()


def test_a_scratch_that_cannot_be_made_leaves_nothing(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    descriptors = set(os.listdir("/proc/self/fd"))

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    make = Path.mkdir

    def refuse_files(path: Path, *rest: Any, **more: Any) -> None:
        (refuse if path.name == "files" else make)(path, *rest, **more)

    for place, name, instead in ((Path, "mkdir", refuse_files), (process.fcntl, "flock", refuse)):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, instead)
            with pytest.raises(OSError, match="No space left"):
                process.Scratch()
        assert list((own_cache / "tmp").iterdir()) == []
    assert set(os.listdir("/proc/self/fd")) == descriptors


def test_what_is_not_of_a_run_is_left_alone(own_cache: Path) -> None:
    """Stray files and folders in tmp and logs are in nobody's way."""
    for folder in ("tmp", "logs"):
        paths.make_cache(folder)
        for name in ("abc", "0123abcd", "x-0123abcd.log", ".0123abce"):
            (own_cache / folder / name).write_text("somebody's")
        (own_cache / folder / "a folder-0123abcf.log").mkdir()
    before = set(own_cache.rglob("*"))
    assert process.sweep() == []
    assert process.running() == []
    with StandIn("sane") as engine:
        engine.start()
        assert [one.name for one in process.running()] == ["stand-in"]
    assert set(own_cache.rglob("*")) - {engine.log} == before


def test_a_folder_whose_maker_was_killed_before_it_had_its_name_is_swept(own_cache: Path) -> None:
    new, old = own_cache / "tmp" / ".0123abcd", own_cache / "tmp" / ".0123abce"
    for folder in (paths.make_cache("tmp") / new.name, own_cache / "tmp" / old.name):
        folder.mkdir()
        (folder / "lock").touch()
    os.utime(old, (0, 0))
    assert process.sweep() == [old.name]
    assert new.exists()
    assert not old.exists()


def test_what_runs_is_listed_with_who_started_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with starter("start") as (program, facts):
        (one,) = process.running()
        assert one.name == "stand-in"
        assert one.starter.startswith(f"{program.pid} ")
        assert one.bytes > 1 << 20
        assert one.log is not None
        assert one.log.stem.endswith(Path(facts["folder"]).name)
        # Its log was removed, and a child has ended since its processes were listed.
        one.log.unlink()
        there = supervisor.marked
        ended = supervisor.Process(1 << 30, 0)
        with monkeypatch.context() as patch:
            patch.setattr(supervisor, "marked", lambda run: [ended, *there(run)])
            (again,) = process.running()
        assert again == one._replace(log=None, bytes=again.bytes)
    assert within(10, lambda: process.running() == [])


def test_restart_gives_another_tree_at_the_same_port() -> None:
    with StandIn("sane") as engine:
        before = engine.start().facts()
        after = engine.restart().facts()
        assert set(left(before)) == {"port"}
        assert after["port"] == before["port"]
        assert after["engine"] != before["engine"]
        assert engine.is_alive
    assert left(after) == {}


def test_restart_takes_another_port_where_somebody_has_the_old_one() -> None:
    with StandIn("sane") as engine, socket.socket() as other:
        before = engine.start().facts()
        engine.stop()
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", before["port"]))
        other.listen()
        after = engine.start().facts()
        assert after["port"] != before["port"]
    assert left(after) == {}


def test_a_forgotten_engine_is_stopped() -> None:
    engine = StandIn().start()
    facts = engine.facts()
    del engine
    gc.collect()
    assert left(facts) == {}


def test_an_interpreter_that_exits_stops_it() -> None:
    with starter("return") as (process, facts):
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(20) == 0
        assert left(facts) == {}  # not merely soon: it waited for that


def test_starter_killed() -> None:
    with starter("start") as (process, facts):
        process.kill()
        process.wait()
        assert_nothing_left(facts)


def test_starter_killed_while_a_fork_of_it_holds_the_pipe() -> None:
    with starter("fork") as (process, facts):
        process.kill()
        process.wait()
        assert_nothing_left(facts)


def test_starter_killed_while_the_engine_is_stopped() -> None:
    with starter("start") as (process, facts):
        for pid in [facts["engine"], *facts["tree"]]:
            os.kill(pid, signal.SIGSTOP)
        process.kill()
        process.wait()
        assert_nothing_left(facts)


def test_ctrl_c_in_the_terminal() -> None:
    with starter("start") as (process, facts):
        os.killpg(process.pid, signal.SIGINT)
        process.wait(20)
        assert_nothing_left(facts)


def test_ctrl_c_while_several_prompts_wait_for_an_engine_that_is_silent() -> None:
    with starter("ask") as (process, facts):
        (log,) = (paths.cache() / "logs").iterdir()
        assert within(20, lambda: log.read_text().count("GET /slow") == 2)
        process.send_signal(signal.SIGINT)
        process.wait(20)  # the answers would be waited for for a minute
        assert_nothing_left(facts)


def test_ctrl_c_does_not_reach_the_engine_itself() -> None:
    with starter("start") as (process, facts):
        assert os.getpgid(facts["supervisor"]) != process.pid
        assert os.getsid(facts["engine"]) not in (process.pid, os.getsid(process.pid))


def test_a_fork_of_the_starter_that_exits_stops_nothing() -> None:
    with StandIn() as engine:
        engine.start()
        child = os.fork()
        if child == 0:
            engine.stop()
            os._exit(0)
        os.waitpid(child, 0)
        time.sleep(0.3)
        assert engine.is_alive


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_supervisor_asked_to_end(number: signal.Signals) -> None:
    with StandIn() as engine:
        facts = engine.start().facts()
        os.kill(facts["supervisor"], number)
        assert_nothing_left(facts)


def test_supervisor_killed_then_stop() -> None:
    with StandIn() as engine:
        facts = engine.start().facts()
        os.kill(facts["supervisor"], signal.SIGKILL)
        assert within(5, lambda: not engine.is_alive)  # PR_SET_PDEATHSIG
        # What it does not cover is there until stop().
        assert any(runs(pid) for pid in facts["tree"])
    assert left(facts) == {}


def test_supervisor_stopped_then_stop() -> None:
    with StandIn() as engine:
        facts = engine.start().facts()
        os.kill(facts["supervisor"], signal.SIGSTOP)
    assert left(facts) == {}


def test_a_stop_that_is_interrupted_is_made_whole_by_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with StandIn() as engine:
        facts = engine.start().facts()
        os.kill(facts["supervisor"], signal.SIGSTOP)
        with monkeypatch.context() as patch:
            patch.setattr(subprocess.Popen, "wait", interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.stop()
        assert left(facts)
    assert left(facts) == {}


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_stopped_by_another_thread_before_there_was_anything_to_stop() -> None:
    class StoppedAtOnce(StandIn):
        def _check_room(self) -> None:
            other = threading.Thread(target=self.stop)
            other.start()
            other.join()

    engine = StoppedAtOnce()
    with pytest.raises(EngineError, match="was stopped while it started"):
        engine.start()
    assert not engine.is_alive


def test_stopped_by_another_thread_between_the_first_try_and_the_second() -> None:
    class Unlucky(StandIn):
        def _start_once(self, stops: int) -> None:
            tries.append(stops)
            if len(tries) == 1:
                other = threading.Thread(target=self.stop)
                other.start()
                other.join()
                raise process._PortTaken("A port was taken.")
            super()._start_once(stops)

    tries: list[int] = []
    engine = Unlucky()
    with pytest.raises(EngineError, match="was stopped while it started"):
        engine.start()
    assert len(tries) == 2
    assert not engine.is_alive
    assert list((paths.cache() / "tmp").iterdir()) == []
    assert engine.start().is_alive
    engine.stop()


@pytest.mark.parametrize(
    ("number", "cure"),
    [(errno.ENOSPC, "Free some room"), (errno.EMFILE, "The operating system refused that")],
)
@pytest.mark.parametrize("tries", [1, 2])
def test_what_the_operating_system_refuses_is_told_with_a_cure(
    number: int, cure: str, tries: int
) -> None:
    class Refused(StandIn):
        def _variables(self, folder: Path) -> dict[str, str]:
            tried.append(folder)
            if len(tried) < tries:
                raise process._PortTaken("A port was taken.")
            raise OSError(number, os.strerror(number))

    tried: list[Path] = []
    with pytest.raises(EngineError, match=cure) as error:
        Refused().start()
    assert os.strerror(number) in str(error.value)
    assert ("room" in str(error.value)) == (number == errno.ENOSPC)
    assert list((paths.cache() / "tmp").iterdir()) == []


def test_a_log_that_cannot_be_written_keeps_nothing_from_ending(tmp_path: Path) -> None:
    read, write = os.pipe()
    folder = tmp_path / "run"
    folder.mkdir()
    command = [sys.executable, "-I", "-S", supervisor.__file__, "--pipe", str(read)]
    command += ["--log", "/dev/full", "--folder", str(folder), "--grace", "5", "--", "sleep", "60"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=(read,)) as process:
        assert process.stdout is not None
        pid = json.loads(process.stdout.readline())["pid"]
        os.close(read)
        os.close(write)
        process.wait(10)
    assert not runs(pid)
    assert not folder.exists()


def test_a_log_that_was_removed_takes_no_word_away() -> None:
    with StandIn() as engine:
        engine.start()
        engine.log.unlink()
        os.kill(engine.pid, signal.SIGKILL)
        assert within(5, lambda: not engine.is_alive)
        with pytest.raises(EngineError, match="killed by signal 9"), engine._talking():
            pass


def test_supervisor_and_starter_killed_then_another_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(System, "grace", 0.5)
    with starter("start") as (process, facts), StandIn() as bystander:
        bystander.start()
        os.kill(facts["supervisor"], signal.SIGKILL)
        process.kill()
        process.wait()
        assert within(5, lambda: not runs(facts["supervisor"]))
        assert left(facts)
        with StandIn() as engine:
            engine.start()
            assert_nothing_left(facts, 1)
            assert engine.is_alive
            assert bystander.is_alive


def test_engine_killed() -> None:
    with StandIn() as engine:
        facts = engine.start().facts()
        os.kill(facts["engine"], signal.SIGKILL)
        assert_nothing_left(facts)
        assert not engine.is_alive
        began = time.monotonic()
        said = pytest.raises(EngineError, match=r"killed by signal 9 .*memory")
        with said as error, engine._talking() as http:
            http.get("/health")
        assert time.monotonic() - began < 60  # the client itself would wait 120 s for an answer
        assert str(engine.log) in str(error.value)
        with pytest.raises(EngineError, match=r"restart\(\)"), engine._talking() as http:
            http.get("/health")


def test_stopped_by_one_thread_while_another_waits_for_an_answer() -> None:
    with StandIn() as engine:
        facts = engine.start().facts()

        def ask() -> None:
            with engine._talking() as http:
                http.get("/slow")

        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(ask)
            assert within(10, lambda: "GET /slow" in engine.log.read_text())
            engine.stop()
            with pytest.raises(EngineError, match="was stopped while it was asked"):
                asked.result(60)
    assert left(facts) == {}


def test_starts_and_stops_leak_nothing() -> None:
    def held() -> tuple[set[str], int]:
        gc.collect()
        return set(os.listdir("/proc/self/fd")), threading.active_count()

    with StandIn("sane").start():
        pass
    before = held()
    trees = []
    for _ in range(100):
        with StandIn("sane") as engine:
            trees.append(engine.start().facts())
    assert held() == before
    assert [facts for facts in trees if left(facts)] == []
    assert len(list((paths.cache() / "logs").iterdir())) == 20  # of 101


def test_the_supervisor_starts_without_site_packages() -> None:
    with StandIn("sane").start() as engine:
        command = psutil.Process(engine.facts()["supervisor"]).cmdline()
        assert command[1:3] == ["-I", "-S"]


def test_a_command_that_does_not_exist() -> None:
    class Nowhere(StandIn):
        def _command(self) -> list[str]:
            return ["/nowhere/python"]

    with pytest.raises(EngineError, match="/nowhere/python"):
        Nowhere().start()
    assert list((paths.cache() / "tmp").iterdir()) == []


def test_an_engine_that_ends_says_why() -> None:
    with pytest.raises(EngineError) as error:
        StandIn("wrong").start()
    lines = str(error.value).splitlines()
    assert "ended before it was ready: exit status 3" in lines[0]
    assert lines[1:-1] == ["  ValueError: the moon is full"]
    assert error.value.log is not None
    assert str(error.value.log) in lines[-1]
    assert list((paths.cache() / "tmp").iterdir()) == []


def test_an_engine_that_is_never_ready() -> None:
    engine = StandIn("mute", deadline=1.5)
    with pytest.raises(EngineError, match=r"not ready after 1\.5 s"):
        engine.start()
    assert not engine.is_alive
    assert list((paths.cache() / "tmp").iterdir()) == []


def test_a_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(EngineError, match=f"Port {port} is in use"):
            StandIn(port=port).start()


def test_a_port_taken_while_it_starts_is_changed_once() -> None:
    class Unlucky(StandIn):
        def __init__(self, times: int) -> None:
            super().__init__("sane")
            self.taken = [socket.socket() for _ in range(times)]
            self.seen: list[int] = []

        def _command(self) -> list[str]:
            if len(self.seen) < len(self.taken):
                self.taken[len(self.seen)].bind(("127.0.0.1", self.port))
                self.taken[len(self.seen)].listen()
            self.seen.append(self.port)
            return super()._command()

    with Unlucky(1) as engine:
        engine.start()
        assert engine.is_alive
        assert engine.port == engine.seen[1] != engine.seen[0]
        engine.taken[0].close()
    with Unlucky(2) as engine, pytest.raises(EngineError, match="was taken by another program"):
        engine.start()
    for taken in engine.taken:
        taken.close()


def test_an_answer_from_somebody_elses_server_is_not_taken_for_its_own() -> None:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    class Deceived(StandIn):
        def _command(self) -> list[str]:
            self.other = http.server.ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
            threading.Thread(target=self.other.serve_forever, daemon=True).start()
            return super()._command()

    engine = Deceived("mute", deadline=1.5)
    with pytest.raises(EngineError, match="not ready"):
        engine.start()
    engine.other.shutdown()
    engine.other.server_close()


def test_who_has_the_port_of_one_that_died_gets_no_key() -> None:
    with StandIn() as engine, socket.socket() as other:
        engine.start()
        os.kill(engine.pid, signal.SIGKILL)
        assert within(10, lambda: is_free(engine.port))
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", engine.port))
        other.listen()
        with pytest.raises(EngineError, match="killed by signal 9"):
            engine._get("/health")
        other.settimeout(0.2)
        with pytest.raises(TimeoutError):  # nobody has called
            other.accept()


def test_a_long_cache_path_still_gives_short_sockets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path / ("long" * 20) / "a path with spaces"))
    with StandIn("sane") as engine:
        facts = engine.start().facts()
        with socket.socket(socket.AF_UNIX) as name:
            name.bind(facts["folder"] + "/0b486a68-a7ec-428d-8571-59c07be1f5d9")
    assert left(facts) == {}


def test_a_pid_that_was_used_again_is_not_ended() -> None:
    with subprocess.Popen(["sleep", "60"]) as other:
        now = supervisor.identify(other.pid)
        assert now is not None
        before = supervisor.Process(now.pid, now.started - 1)
        supervisor.send(before, signal.SIGKILL)
        assert not supervisor.alive(before)
        assert supervisor.alive(now)
        supervisor.send(now, signal.SIGKILL)
        assert other.wait(5) == -signal.SIGKILL
    supervisor.send(now, signal.SIGKILL)  # gone: nothing happens


@pytest.fixture
def segment() -> Iterator[Path]:
    """A file in /dev/shm, of 4096 bytes."""
    place = Path(f"/dev/shm/kvlab-test-{os.getpid()}")
    place.write_bytes(bytes(4096))
    yield place
    place.unlink(missing_ok=True)


@pytest.mark.parametrize("ends", ["stop", "kill", "kill all"])
def test_shared_memory_does_not_outlive_its_engine(ends: str) -> None:
    """A process that is killed cannot remove what it has in /dev/shm."""
    with StandIn("memory") as engine:
        facts = engine.start().facts()
        (name,) = Path(str(facts["folder"])).glob("psm_*")
        made = [Path("/dev/shm") / name.name, Path(f"/dev/shm/sem.stand-in-{facts['engine']}")]
        assert all(path.exists() for path in made)
        time.sleep(2 * supervisor._LOOK_SECONDS)
        if ends == "kill all":  # nobody is left who knows: the run's folder has the notes
            os.kill(facts["supervisor"], signal.SIGKILL)
        if ends != "stop":
            for pid in facts["tree"]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        if ends == "kill":
            within(10, lambda: not Path(facts["folder"]).exists())
        engine.stop()
        assert not any(path.exists() for path in made)


@pytest.mark.parametrize("ends", ["stop", "kill"])
def test_shared_memory_that_was_there_before_the_engine_stays(ends: str, segment: Path) -> None:
    with StandIn(f"memory={segment}") as engine:
        facts = engine.start().facts()
        if ends == "kill":
            os.kill(facts["supervisor"], signal.SIGKILL)
        engine.stop()
        assert segment.exists()
        assert not Path(f"/dev/shm/sem.stand-in-{facts['engine']}").exists()


def test_of_shared_memory_only_what_a_run_alone_has_is_removed(tmp_path: Path) -> None:
    me = supervisor.identify(os.getpid())
    assert me is not None
    memory = supervisor.Memory(tmp_path)
    memory.note()

    with contextlib.ExitStack() as stack:

        def made(access: int = mmap.ACCESS_WRITE) -> Path:
            """A file that this process had mapped while it was looked at."""
            place = Path(f"/dev/shm/kvlab-test-{os.urandom(4).hex()}")
            place.write_bytes(bytes(4096))
            stack.callback(place.unlink, missing_ok=True)
            with place.open("r+b") as file, mmap.mmap(file.fileno(), 0, access=access):
                memory.look([me])
            return place

        own, read, again, still_open = made(), made(mmap.ACCESS_READ), made(), made()
        first = again.stat().st_ino
        again.unlink()
        again.write_text("another program's")
        assert again.stat().st_ino != first
        stack.enter_context(still_open.open())
        # Mapped, and open no more.
        lock = _multiprocessing.SemLock(1, 1, 1, f"/kvlab-test-{os.getpid()}", False)
        still_mapped = Path(f"/dev/shm/sem.kvlab-test-{os.getpid()}")
        stack.callback(still_mapped.unlink, missing_ok=True)
        memory.look([me])

        memory = supervisor.Memory(tmp_path)  # from its notes
        memory.remove()
        assert not own.exists()
        assert read.exists()
        assert again.exists()
        assert still_open.exists()
        assert still_mapped.exists()
        del lock
        memory.remove()
        assert not still_mapped.exists()


NOTEBOOK = f"""
import sys
sys.path[:0] = [{str(PROGRAM.parent)!r}, {str(PROGRAM.parents[2] / "shared")!r}]
from stand_in import StandIn
engine = StandIn("sane", "late").start()
"""


def test_progress_in_a_notebook_leaves_one_stable_line(tmp_path: Path) -> None:
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(NOTEBOOK), nbformat.v4.new_code_cell("engine.stop()")]
    )
    seen: list[str] = []

    class Client(NotebookClient):
        def process_message(self, msg: Any, cell: Any, cell_index: int) -> Any:
            if "display_data" in msg["msg_type"]:
                seen.append(msg["content"]["data"]["text/plain"])
            return super().process_message(msg, cell, cell_index)

    Client(notebook, timeout=60, kernel_name="python3").execute()
    assert [output.data["text/plain"] for output in notebook.cells[0].outputs] == [
        "stand-in with nothing"
    ]
    assert seen[0] == seen[-1] == "stand-in with nothing"
    assert any("starting, 1 s" in text for text in seen)
    # And nbval, which compares what a display showed first, agrees.
    path = tmp_path / "progress.ipynb"
    nbformat.write(notebook, path)
    compared = subprocess.run(
        [sys.executable, "-m", "pytest", "--nbval", "--nbval-current-env", "-q", str(path)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert compared.returncode == 0, compared.stdout
