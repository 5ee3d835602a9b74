"""A KV connector in its smallest form: vLLM's full blocks, kept in a Mooncake Store.

vLLM 0.32.0 asks a connector at a few moments of each step
(distributed/kv_transfer/kv_connector/v1/base.py). It makes two of them: one beside the scheduler,
which only plans, and one in each worker, which copies.

    scheduler    get_num_new_matched_tokens   a request is to be admitted: how much do you have?
                 update_state_after_alloc     it was; its blocks are these
                 build_connector_meta         the step is decided: the plan for the workers
    worker       start_load_kv                before the pass: blocks come in
                 wait_for_save                after the pass: blocks that are full now go out

An object is one block: the bytes of all layers, one after the other. Its name has the model's name,
the type of its KV, the block size, and vLLM's own block hash, which stands for all tokens up to the
block's end and for the cache salt. What is not in it: which checkpoint bears the name, how a block
is laid out in memory, which part it is of a model that is split over several GPUs. Two engines that
differ in one of these must not share a store (chapter 09).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from mooncake.store import MooncakeDistributedStore
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

logger = init_logger("vllm.kvlab.block_store")

BUFFER_BYTES = 64 << 20

Pairs = list[tuple[str, int]]
"""(name of an object, id of a block), again and again."""


@dataclass
class Plan(KVConnectorMetadata):
    """What the workers are to copy in one step."""

    loads: Pairs = field(default_factory=list)
    stores: Pairs = field(default_factory=list)


class BlockStoreConnector(KVConnectorBase_V1):
    """See the head of this file. `kv_connector_extra_config` has "master", its host:port."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any
    ) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        model, cache = vllm_config.model_config, vllm_config.cache_config
        self.block_size = cache.block_size
        dtype = model.dtype if cache.cache_dtype == "auto" else cache.cache_dtype
        name = model.served_model_name
        name = name if isinstance(name, str) else name[0]
        self.prefix = f"{name}/{dtype}/{self.block_size}/"
        self.store = MooncakeDistributedStore()
        master = self._kv_transfer_config.get_from_extra_config("master", "")
        # A segment of 0 bytes: this process uses the store, and lends it nothing.
        code = self.store.setup("127.0.0.1", "P2PHANDSHAKE", 0, BUFFER_BYTES, "tcp", "", master)
        if code:
            raise RuntimeError(f"Mooncake's master at {master} was not reached: {code}")
        # The scheduler's:
        self.requests: dict[str, Request] = {}
        self.local: dict[str, int] = {}
        """Tokens that vLLM's own cache had when it asked; the request does not know them yet."""
        self.blocks: dict[str, list[int]] = {}
        self.plan = Plan()
        # A worker's:
        self.layers: list[torch.Tensor] = []
        self.failed: set[int] = set()

    # Beside the scheduler.

    def names(self, request: Request, first: int, end: int) -> list[str]:
        """Objects of a request's full blocks from `first` to before `end`."""
        return [self.prefix + block_hash.hex() for block_hash in request.block_hashes[first:end]]

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Tokens that the store has beyond those that vLLM's own cache has. Never the last token
        of the request: it has to be computed for its logits."""
        self.local[request.request_id] = num_computed_tokens
        first = num_computed_tokens // self.block_size
        names = self.names(request, first, (request.num_tokens - 1) // self.block_size)
        found = 0
        for there in self.store.batch_is_exist(names) if names else []:  # it grants leases, too
            if there != 1:
                break
            found += 1
        return found * self.block_size, False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self.requests[request.request_id] = request
        local = self.local.pop(request.request_id, 0)
        if num_external_tokens == 0:
            return
        ids = blocks.get_block_ids()[0]
        count = num_external_tokens // self.block_size
        # vLLM's own hits come first in the table, then what is to be loaded.
        first = local // self.block_size
        names = self.names(request, first, first + count)
        self.plan.loads += zip(names, ids[first : first + count], strict=True)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Plan:
        plan, self.plan = self.plan, Plan()
        for new in scheduler_output.scheduled_new_reqs:
            self.blocks[new.req_id] = list(new.block_ids[0])
            self.plan_stores(plan, scheduler_output, new.req_id, new.num_computed_tokens)
        known = scheduler_output.scheduled_cached_reqs
        for request_id, ids, computed in zip(
            known.req_ids, known.new_block_ids, known.num_computed_tokens, strict=True
        ):
            if request_id in known.resumed_req_ids:  # it was preempted: all its blocks are new
                self.blocks[request_id] = []
            if ids is not None:
                self.blocks[request_id] += ids[0]
            self.plan_stores(plan, scheduler_output, request_id, computed)
        for request_id in scheduler_output.finished_req_ids:
            self.blocks.pop(request_id, None)
            self.requests.pop(request_id, None)
            self.local.pop(request_id, None)
        return plan

    def plan_stores(
        self, plan: Plan, scheduler_output: SchedulerOutput, request_id: str, computed: int
    ) -> None:
        """Plan to keep the blocks that this step fills."""
        first = computed // self.block_size
        end = (computed + scheduler_output.num_scheduled_tokens[request_id]) // self.block_size
        names = self.names(self.requests[request_id], first, end)
        plan.stores += zip(names, self.blocks[request_id][first:end], strict=True)

    # In a worker.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """kv_caches: a tensor for each layer, whose first dimension counts blocks."""
        self.layers = list(kv_caches.values())
        storages = [tensor.untyped_storage() for tensor in self.layers]  # layers may share one
        for address, size in {part.data_ptr(): part.nbytes() for part in storages}.items():
            code = self.store.register_buffer(address, size)
            if code:
                raise RuntimeError(f"Mooncake did not take the KV cache's memory: {code}")

    def pieces(self, block: int) -> tuple[list[int], list[int]]:
        """Addresses and bytes of a block in each layer."""
        views = [tensor[block] for tensor in self.layers]
        if not all(view.is_contiguous() for view in views):
            raise RuntimeError("a block of this layout does not lie in one piece")
        return [view.data_ptr() for view in views], [view.nbytes for view in views]

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        loads = self._get_connector_metadata().loads
        if not loads:
            return
        names, blocks = zip(*loads, strict=True)
        addresses, sizes = zip(*map(self.pieces, blocks), strict=True)
        codes = self.store.batch_get_into_multi_buffers(list(names), list(addresses), list(sizes))
        # A code is the count of bytes that came, or what went wrong.
        bad = [(b, c) for b, c, s in zip(blocks, codes, sizes, strict=True) if c != sum(s)]
        self.failed.update(block for block, _ in bad)
        logger.info("loaded %d of %d blocks %s", len(blocks) - len(bad), len(blocks), bad)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that did not come; vLLM computes them, if kv_load_failure_policy is recompute."""
        failed, self.failed = self.failed, set()
        return failed

    def wait_for_layer_load(self, layer_name: str) -> None:
        """All layers are there when start_load_kv returns."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Whole blocks go out after the pass."""

    def wait_for_save(self) -> None:
        stores = self._get_connector_metadata().stores
        # A pass over KV that did not come: vLLM runs it all the same, throws away what it sampled,
        # and computes anew. What it filled must not get out. Nor do blocks of other requests in
        # this pass, which are right: they are missing for the next reader, no more.
        if not stores or self.failed:
            return
        there = self.store.batch_is_exist([name for name, _ in stores])
        new = [pair for pair, code in zip(stores, there, strict=True) if code != 1]
        if not new:
            return
        names, blocks = zip(*new, strict=True)
        addresses, sizes = zip(*map(self.pieces, blocks), strict=True)
        codes = self.store.batch_put_from_multi_buffers(list(names), list(addresses), list(sizes))
        # One that does not fit is simply not there for the next reader.
        logger.info("stored %d of %d blocks", sum(code == 0 for code in codes), len(new))

    def shutdown(self) -> None:
        self.store.close()
