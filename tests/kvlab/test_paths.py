"""One cache folder that is known to be ours, locks that say for whom one waits, plain errors."""

import errno
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from kvlab import paths
from kvlab.paths import SetupError


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "a cache"
    monkeypatch.setenv("KVLAB_CACHE", str(folder))
    return folder


def test_cache_follows_the_variables(tmp_path, monkeypatch):
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path / "x"))
    assert paths.cache() == tmp_path / "x"
    monkeypatch.delenv("KVLAB_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert paths.cache() == tmp_path / "follow-the-request"


def test_a_made_cache_is_our_own(cache):
    assert not paths.is_own_cache(cache)
    assert paths.make_cache("a", "b").is_dir()
    assert paths.is_own_cache(cache)


def test_a_folder_with_other_files_is_refused(cache):
    cache.mkdir()
    (cache / "thesis.txt").write_text("years of work")
    with pytest.raises(SetupError, match="holds other files"):
        paths.make_cache()
    assert [path.name for path in cache.iterdir()] == ["thesis.txt"]


def test_a_tag_that_was_not_finished_does_not_make_a_folder_foreign(cache):
    cache.mkdir()
    (cache / f"{paths.TAG}.1234").write_text("")  # its writer was killed
    paths.make_cache()
    assert paths.is_own_cache(cache)


def test_many_may_make_the_cache_at_once(tmp_path, monkeypatch):
    def make(_):
        together.wait()
        return paths.make_cache("locks")

    with ThreadPoolExecutor(8) as threads:
        for attempt in range(200):
            monkeypatch.setenv("KVLAB_CACHE", str(tmp_path / f"cache {attempt}"))
            together = Barrier(8)
            made = list(threads.map(make, range(8)))
            assert made == [tmp_path / f"cache {attempt}" / "locks"] * 8


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_without_rights_the_message_says_what_to_set(tmp_path, monkeypatch):
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path / "of root"))
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:  # as nobody
        said = "no error"
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            paths.make_cache()
        except SetupError as error:
            said = str(error)
        finally:
            os.write(writer, said.encode())
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as pipe:
        said = pipe.read()
    assert "Permission denied" in said
    assert "Set KVLAB_CACHE" in said


def test_the_second_waits_and_says_for_whom(cache):
    program = (
        "from kvlab.paths import lock\nwith lock('x', 'installing'): print('inside', flush=True)"
    )
    env = os.environ | {"PYTHONPATH": str(paths.ROOT / "shared")}
    with paths.lock("x", "installing vLLM"):
        second = subprocess.Popen(
            [sys.executable, "-c", program], env=env, stdout=subprocess.PIPE, text=True
        )
        assert second.stdout.readline() == (
            f"Waiting for process {os.getpid()}, which is installing vLLM.\n"
        )
    said, _ = second.communicate(timeout=30)
    assert said == "inside\n"


def test_too_little_room_is_said_in_gigabytes(tmp_path):
    paths.need_room(tmp_path / "not yet there", 0, "nothing")
    with pytest.raises(SetupError, match=r"it needs 1000000\.0 GB"):
        paths.need_room(tmp_path, 1e6, "a big thing")


def test_size_counts_a_linked_file_once(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 100_000)
    once = paths.size(tmp_path)
    os.link(tmp_path / "a", tmp_path / "b")
    assert paths.size(tmp_path) == once >= 100_000


def test_a_file_with_a_name_elsewhere_is_not_freed(tmp_path):
    for name in ("cache", "clone"):
        (tmp_path / name).mkdir()
    (tmp_path / "cache" / "a").write_bytes(b"x" * 100_000)
    os.link(tmp_path / "cache" / "a", tmp_path / "clone" / "a")
    clone, cache = tmp_path / "clone", tmp_path / "cache"
    assert paths.size(clone, freed=True) < 100_000 <= paths.size(clone)
    assert paths.size(clone, cache, freed=True) == paths.size(clone, cache) < 200_000


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (SetupError("The moon is full."), 1, "The moon is full."),
        (KeyboardInterrupt(), 130, "goes on from here"),
        (OSError(errno.ENOSPC, "No space left on device"), 1, "Free some room"),
    ],
)
def test_what_goes_wrong_becomes_a_sentence(capsys, error, code, words):
    def step():
        raise error

    assert paths.run_plainly(step) == code
    said = capsys.readouterr().err
    assert words in said
    assert "Traceback" not in said


def test_a_mistake_in_the_code_stays_one():
    with pytest.raises(ZeroDivisionError):
        paths.run_plainly(lambda: 1 // 0)
