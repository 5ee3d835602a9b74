"""A client of the Mooncake Store in a process of its own.

Run under a Python that has mooncake-transfer-engine by `kvlab.engines.mooncake`. A client may lend
the store a *segment*, a piece of its memory in which objects of all clients lie; when its process
is gone, so are they. The class is mooncake.store.MooncakeDistributedStore 0.3.13.post1; what its
functions return is passed on as it is: 0 or a count, or a negative ErrorCode
(mooncake-store/include/types.h).
"""

from __future__ import annotations

import os
from typing import Any

from mooncake.store import MooncakeDistributedStore, ReplicateConfig, SoftPinAction

from kvlab.inside import calls

store = MooncakeDistributedStore()


def setup(master: str, segment_bytes: int, buffer_bytes: int) -> int:
    """Join the store of this master; 0 when joined."""
    return store.setup("127.0.0.1", "P2PHANDSHAKE", segment_bytes, buffer_bytes, "tcp", "", master)


def name() -> str:
    """host:port, by which the master and other clients know this client's segment."""
    return store.get_hostname()


def put(key: str, value: bytes, replicas: int, segment: str, soft_pin: bool, hard_pin: bool) -> int:
    config = ReplicateConfig()
    config.replica_num = replicas
    config.preferred_segment = segment
    if soft_pin:
        config.soft_pin_action = SoftPinAction.ENABLE
    config.with_hard_pin = hard_pin
    return store.put(key, value, config)


def put_many(values: dict[str, bytes]) -> int:
    return store.put_batch(list(values), list(values.values()))


def get(key: str) -> bytes:
    """The value; empty if there is none, or if whoever holds it does not answer."""
    return store.get(key)


def get_many(keys: list[str]) -> list[bytes]:
    return store.get_batch(keys)


def exists(keys: list[str]) -> list[int]:
    return store.batch_is_exist(keys)


def size(key: str) -> int:
    return store.get_size(key)


def remove(key: str, force: bool) -> int:
    return store.remove(key, force)


def remove_all() -> int:
    """How many were removed."""
    return store.remove_all()


def replicas(key: str) -> list[dict[str, Any]]:
    """Where the replicas of an object lie."""
    found = []
    for replica in store.get_replica_desc(key):
        if replica.is_memory_replica():
            buffer = replica.get_memory_descriptor().buffer_descriptor
            found.append({"endpoint": buffer.transport_endpoint, "bytes": buffer.size})
    return found


if __name__ == "__main__":
    try:
        calls.serve(
            {
                function.__name__: function
                for function in (
                    *(setup, name, put, put_many, get, get_many),
                    *(exists, size, remove, remove_all, replicas),
                )
            }
        )
    finally:
        store.close()
        os._exit(0)  # its threads would otherwise go on for some seconds
