"""The real Mooncake: master, clients that hold objects, and what happens on a bad day."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import psutil
import pytest
from engine_help import need, within

from kvlab.engines import mooncake, transfer_engine
from kvlab.engines.mooncake import Master, Store, StoreError
from kvlab.engines.protocol import EngineError
from kvlab.engines.transfer_engine import TransferError

need("vllm")

MIB = 1 << 20


@pytest.fixture(scope="module")
def master() -> Iterator[Master]:
    with mooncake.start(lease_ms=2000, client_ttl_seconds=2) as running:
        yield running


@pytest.fixture(scope="module")
def shared_clients(master: Master) -> Iterator[tuple[Store, Store]]:
    with master.client(segment_bytes=32 * MIB) as a, master.client(segment_bytes=32 * MIB) as b:
        yield a, b


@pytest.fixture
def clients(master: Master, shared_clients: tuple[Store, Store]) -> tuple[Store, Store]:
    a, b = shared_clients

    def empty() -> bool:  # as soon as the leases of the test before have ended
        a.remove_all()
        return master.metrics()["master_key_count"] == 0

    assert within(30, empty)
    return a, b


def refused(code: int) -> object:
    return pytest.raises(StoreError, match=f"{code}, [A-Z_]+")


def test_put_get_size_remove(clients: tuple[Store, Store]) -> None:
    a, b = clients
    a.put("k", b"hello")
    assert b.get("k") == b"hello"
    assert (b.exists("k"), b.exists("other")) == (True, False)
    assert b.size("k") == 5
    assert b.get("other") is None
    with refused(-704):
        b.size("other")
    b.put_many({"x": b"1", "y": b"22"})
    assert a.get_many(["x", "nope", "y"]) == [b"1", None, b"22"]


@pytest.mark.parametrize(
    ("ask", "told"),
    [
        (lambda s: s.put("k", "hello"), r"value of 'k' is bytes, and not str: use text.encode\(\)"),
        (lambda s: s.put("k", None), "is bytes, and not NoneType"),
        (lambda s: s.put(5, b"x"), "A key is a text that is not empty, and not 5"),
        (lambda s: s.put("k", b"x", replicas=0), "replicas is a whole number from 1 on, and not 0"),
        (lambda s: s.put("k", b"x", replicas=1.5), "replicas is a whole number"),
        (lambda s: s.put("k", b"x", segment=s), "segment is a client's .segment"),
        (lambda s: s.put_many([("k", b"x")]), "values is a dict"),
        (lambda s: s.put_many({"k": "x"}), "is bytes, and not str"),
        (lambda s: s.get(b"k"), "A key is a text"),
        (lambda s: s.get(""), "A key is a text"),
        (lambda s: s.get_many("k"), "keys is a list of texts"),
        (lambda s: s.get_many(["k", None]), "A key is a text"),
        (lambda s: s.exists(None), "A key is a text"),
        (lambda s: s.size(["k"]), "A key is a text"),
        (lambda s: s.remove(5), "A key is a text"),
        (lambda s: s.replicas(5), "A key is a text"),
    ],
)
def test_what_cannot_be_asked_is_told_in_our_words(clients, ask, told: str) -> None:
    with pytest.raises(EngineError, match=told):
        ask(clients[0])
    assert clients[0].exists("k") is False  # nothing was kept, and it answers


@pytest.mark.parametrize("size", ["64M", 1.5, None, -1, True])
def test_sizes_are_whole_numbers(size) -> None:
    for ask in (
        lambda: mooncake.start(lease_ms=size),
        lambda: mooncake.start(client_ttl_seconds=size),
        lambda: master_of_nobody().client(segment_bytes=size),
        lambda: master_of_nobody().client(buffer_bytes=size),
        lambda: transfer_engine.start(size),
    ):
        with pytest.raises(EngineError, match=r"is a whole number from [01] on, and not"):
            ask()


def master_of_nobody() -> Master:
    return Master(lease_ms=1, client_ttl_seconds=1, port=None, deadline=1)


def test_a_second_put_changes_nothing(clients: tuple[Store, Store]) -> None:
    a, _ = clients
    a.put("k", b"old")
    a.put("k", b"new")
    assert a.get("k") == b"old"


def test_a_reader_has_a_lease(clients: tuple[Store, Store]) -> None:
    a, b = clients
    a.put("k", b"hello")
    a.remove("k")  # a put gives none
    a.put("k", b"hello")
    assert b.get("k") == b"hello"
    with refused(-706):
        a.remove("k")
    assert within(10, lambda: a.remove_all() == 1)
    a.put("k", b"hello")
    assert b.get("k")
    a.remove("k", force=True)
    assert not a.exists("k")


def test_where_an_object_lies(clients: tuple[Store, Store]) -> None:
    a, b = clients
    assert a.endpoint != b.endpoint
    a.put("on b", bytes(1000), segment=b.segment)
    assert a.replicas("on b") == [mooncake.Replica(b.endpoint, 1000)]
    a.put("on both", bytes(1000), replicas=2)
    assert {r.endpoint for r in a.replicas("on both")} == {a.endpoint, b.endpoint}
    a.put("three of two", bytes(1000), replicas=3)  # silently fewer
    assert len(a.replicas("three of two")) == 2
    assert a.replicas("other") == []


@pytest.mark.parametrize("size", [0, 17 * MIB, 33 * MIB])
def test_an_empty_value_and_one_larger_than_the_buffer_cannot_be_put(
    clients: tuple[Store, Store], size: int
) -> None:
    with refused(-600):
        clients[0].put("k", bytes(size))
    assert not clients[0].exists("k")


def test_eviction_spares_what_is_pinned(clients: tuple[Store, Store]) -> None:
    a, _ = clients
    a.put("pinned", bytes(MIB), hard_pin=True)
    a.put("pinned softly", bytes(MIB), soft_pin=True)
    a.put("plain", bytes(MIB))
    refusals = 0
    for number in range(90):  # 90 MiB into 64
        try:
            a.put(f"filler {number}", bytes(MIB))
        except StoreError as error:
            assert error.code == -200
            refusals += 1
            time.sleep(0.2)  # eviction runs behind
    assert refusals < 90
    assert a.exists("pinned")
    assert a.exists("pinned softly")
    assert not a.exists("plain")


def test_a_holder_is_killed(master: Master, clients: tuple[Store, Store]) -> None:
    a, _ = clients
    with master.client(segment_bytes=32 * MIB) as c:
        a.put("on c", b"hello", segment=c.segment)
        a.put("on c and another", b"hello", segment=c.segment, replicas=2)
        os.kill(c.pid, signal.SIGKILL)
        assert within(5, lambda: not c.is_alive)
        assert a.get("on c") is None  # at once: nobody answers there
        assert within(30, lambda: a.get("on c and another") == b"hello")
        assert within(30, lambda: not a.exists("on c"))  # the master has noticed
        with pytest.raises(EngineError, match="killed by signal 9"):
            c.get("on c")


def test_a_holder_is_frozen(master: Master, clients: tuple[Store, Store]) -> None:
    a, _ = clients
    with master.client(segment_bytes=32 * MIB) as c:
        a.put("on c", b"hello", segment=c.segment)
        os.kill(c.pid, signal.SIGSTOP)
        began = time.monotonic()
        assert a.get("on c") is None
        assert time.monotonic() - began < 60  # Mooncake gives a transfer half a minute
        os.kill(c.pid, signal.SIGCONT)


def test_a_client_that_leaves_takes_its_objects_along(
    master: Master, clients: tuple[Store, Store]
) -> None:
    a, _ = clients
    with master.client(segment_bytes=32 * MIB) as c:
        a.put("on c", b"hello", segment=c.segment)
    assert within(10, lambda: not a.exists("on c"))


def test_the_master_is_restarted() -> None:
    with mooncake.start() as master:
        with master.client() as store:
            store.put("k", b"hello")
            os.kill(master.pid, signal.SIGKILL)
            for asked in (store.exists, store.size, store.get, store.replicas):
                with pytest.raises(StoreError, match=rf"^{asked.__name__} 'k': -900"):
                    asked("k")
            with pytest.raises(StoreError, match=r"^get_many: -900"):
                store.get_many(["k"])
            assert store.get_many([]) == []
            with pytest.raises(EngineError, match="master is stopped"):
                master.client()
            master.restart()
            # The client comes back by itself; what the master knew is lost.
            assert within(30, lambda: master.metrics()["master_active_clients"] == 1)
            assert within(30, lambda: _can_put(store))
            assert not store.exists("k")


def _can_put(store: Store) -> bool:
    try:
        store.put("other", b"hello")
    except StoreError:
        return False
    return store.get("other") == b"hello"


def test_master_and_metrics_listen_on_loopback_alone(
    master: Master, clients: tuple[Store, Store]
) -> None:
    listening = [
        connection.laddr
        for connection in psutil.Process(master.pid).net_connections("tcp")
        if connection.status == "LISTEN"
    ]
    assert {address.ip for address in listening} == {"127.0.0.1"}
    assert {address.port for address in listening} == set(master.ports.values())


# The Transfer Engine.


@pytest.fixture(scope="module")
def ends() -> Iterator[tuple[transfer_engine.TransferEngine, transfer_engine.TransferEngine]]:
    with transfer_engine.start(MIB) as a, transfer_engine.start(MIB) as b:
        for end in (a, b):
            end.register()
        yield a, b


def test_write_and_read(ends) -> None:
    a, b = ends
    a.fill(0, b"hello")
    a.write(b, length=5, peer_offset=100)
    assert b.look(98, 9) == b"\0\0hello\0\0"
    b.fill(MIB - 3, b"end")
    a.read(b, length=3, offset=50, peer_offset=MIB - 3)
    assert a.look(50, 3) == b"end"
    with pytest.raises(EngineError, match="the buffer has"):
        a.fill(MIB - 2, b"end")


@pytest.mark.parametrize(("length", "peer_offset"), [(4096, MIB), (4096, MIB - 4095)])
def test_out_of_range(ends, length: int, peer_offset: int) -> None:
    a, b = ends
    with pytest.raises(TransferError, match="write failed: -1"):
        a.write(b, length=length, peer_offset=peer_offset)
    a.write(b, length=16)  # and the next one works


def test_a_peer_that_registered_nothing_or_is_dead(ends) -> None:
    a, _ = ends
    with transfer_engine.start(4096) as c:
        with pytest.raises(TransferError):
            a.write(c, length=16)
        c.register()
        a.write(c, length=16)
        c.unregister()
        with pytest.raises(TransferError):
            a.write(c, length=16)
        c.register()
        os.kill(c.pid, signal.SIGKILL)
        assert within(5, lambda: not c.is_alive)
        with pytest.raises(TransferError):
            a.write(c, length=16)
