"""Connectors for vLLM: what `vllm.start(connector=...)` takes.

A connector looks, when a request is admitted, how much of its KV it has; brings that in; and takes
out what the pass has computed. `kvlab.engines.lmcache.LMCache.connector` makes one more.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from kvlab import environments
from kvlab.engines.mooncake import Master
from kvlab.engines.protocol import EngineError, whole
from kvlab.engines.vllm import Connector

_OWN = "kvlab.inside.connectors"


def to_disk(folder: str | Path) -> Connector:
    """vLLM's own ExampleConnector: for each prompt a folder, with a file of safetensors a layer.

    It finds whole prompts, not beginnings of them, by their token ids alone: the model, the type of
    its KV and a request's cache salt make no difference. It is what its name says.
    """
    if not isinstance(folder, (str, Path)):
        raise EngineError(f"folder is a path, and not {folder!r:.80}.")
    place = str(Path(folder).expanduser().absolute())
    return Connector(
        lambda: {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": place},
        }
    )


def to_host(memory_bytes: int) -> Connector:
    """vLLM's OffloadingConnector: full blocks are copied to host memory as they are computed, and
    are still there when the engine's cache has dropped them.

    On a CPU its worker is the course's own (kvlab/inside/connectors/host_memory.py).
    """
    extra: dict[str, Any] = {"cpu_bytes_to_use": whole("memory_bytes", memory_bytes)}
    if environments.device() == "cpu":
        extra |= {"spec_name": "HostMemorySpec", "spec_module_path": f"{_OWN}.host_memory"}
    return Connector(
        lambda: {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        },
        memory_bytes=memory_bytes,
    )


def to_store(master: Master) -> Connector:
    """The course's own connector over a Mooncake Store: kvlab/inside/connectors/block_store.py.

    The store needs a client that lends it memory. Blocks that do not come are computed. Mooncake's
    Transfer Engine, in vLLM's worker, listens on all interfaces (`kvlab.engines.transfer_engine`).
    """
    _check(master)
    return Connector(
        lambda: {
            "kv_connector": "BlockStoreConnector",
            "kv_connector_module_path": f"{_OWN}.block_store",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"master": master.address},
        },
        server=master,
    )


def to_mooncake(master: Master, *, segment_bytes: int = 0) -> Connector:
    """vLLM's own MooncakeStoreConnector.

    vLLM's worker lends the store segment_bytes; with 0 some other client has to. Where blocks do
    not come, because who held them is gone, vLLM 0.32.0 would by default give the request up
    (kv_load_failure_policy in vllm/config/kv_transfer.py). Here it begins anew, which asks the
    store again: so it tries and fails until the master too knows that the holder is gone
    (client_ttl_seconds), and then computes. The worker's Transfer Engine listens on all interfaces
    (`kvlab.engines.transfer_engine`).
    """
    _check(master)
    segment_bytes = whole("segment_bytes", segment_bytes, least=0)

    buffer_bytes = 64 << 20

    def config() -> dict[str, str]:
        told = {
            "metadata_server": "P2PHANDSHAKE",
            "master_server_address": master.address,
            "global_segment_size": segment_bytes,
            "local_buffer_size": buffer_bytes,
            "protocol": "tcp",
            "device_name": "",
            "mode": "embedded" if segment_bytes else "standalone-store",
        }
        return {"mooncake.json": json.dumps(told)}

    return Connector(
        lambda: {
            "kv_connector": "MooncakeStoreConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
        },
        server=master,
        variables={"MOONCAKE_CONFIG_PATH": "mooncake.json"},
        files=config,
        memory_bytes=segment_bytes + buffer_bytes,
    )


def over_nixl(role: Literal["kv_producer", "kv_consumer"]) -> Connector:
    """vLLM's NixlConnector: KV straight from one vLLM's memory into another's
    (`kvlab.engines.vllm_pd`). The producer is the prefill side.

    NIXL moves bytes with UCX: on a CPU over loopback TCP, on a GPU also from GPU to GPU.
    """
    if role not in ("kv_producer", "kv_consumer"):
        raise EngineError(f"role is kv_producer (prefill) or kv_consumer, and not {role!r:.80}.")
    config: dict[str, Any] = {"kv_connector": "NixlConnector", "kv_role": role}
    # UCX would listen on every network device.
    variables = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "UCX_NET_DEVICES": "lo"}
    if environments.device() == "cpu":
        config["kv_buffer_device"] = "cpu"
        variables["UCX_TLS"] = "tcp,sm,self"
    ports = ("VLLM_NIXL_SIDE_CHANNEL_PORT",)
    return Connector(lambda: config, variables=variables, ports=ports)


def _check(master: object) -> None:
    if not isinstance(master, Master):
        raise EngineError(f"master is what mooncake.start() gives, and not {master!r:.80}.")
