"""vLLM's offloading to host memory, where the "GPU" is host memory too.

vLLM 0.32.0 offloads KV blocks with `OffloadingConnector`: its manager decides what goes, what comes
back and what is evicted, its worker copies. On a CPU it refuses to, for the worker's copies are
CUDA's. Here the manager is vLLM's own (v1/kv_offload/cpu/manager.py), and the worker copies with
torch: counts, decisions and hits are the real ones, speed says nothing. On a GPU the stock spec is
used, and this file is not loaded.
"""

from __future__ import annotations

import time

import torch
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class TorchWorker(OffloadingWorker):
    """Copies whole blocks between vLLM's KV tensors and tensors of its own, at once."""

    def __init__(self, kv_caches: CanonicalKVCaches, num_chunks: int) -> None:
        self.engine = [cache.tensor for cache in kv_caches.tensors]
        self.host = [tensor.new_zeros((num_chunks, *tensor.shape[1:])) for tensor in self.engine]
        self.finished: list[TransferResult] = []

    def _copy(
        self,
        job_id: int,
        source: list[torch.Tensor],
        source_spec: BlockIDsLoadStoreSpec,
        target: list[torch.Tensor],
        target_spec: BlockIDsLoadStoreSpec,
    ) -> bool:
        began = time.perf_counter()
        from_ids = torch.as_tensor(source_spec.block_ids, dtype=torch.long)
        to_ids = torch.as_tensor(target_spec.block_ids, dtype=torch.long)
        size = 0
        for a, b in zip(source, target, strict=True):
            b[to_ids] = a[from_ids]
            size += len(from_ids) * a[0].nbytes
        self.finished.append(TransferResult(job_id, True, size, time.perf_counter() - began))
        return True

    def submit_store(
        self, job_id: int, src_spec: BlockIDsLoadStoreSpec, dst_spec: BlockIDsLoadStoreSpec
    ) -> bool:
        return self._copy(job_id, self.engine, src_spec, self.host, dst_spec)

    def submit_load(
        self, job_id: int, src_spec: BlockIDsLoadStoreSpec, dst_spec: BlockIDsLoadStoreSpec
    ) -> bool:
        return self._copy(job_id, self.host, src_spec, self.engine, dst_spec)

    def get_finished(self) -> list[TransferResult]:
        finished, self.finished = self.finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Every copy is done when it was asked for."""


class HostMemorySpec(CPUOffloadingSpec):
    """The stock spec with that worker. One block is one chunk."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> TorchWorker:
        if self.blocks_per_chunk != 1:
            raise ValueError("this worker copies chunks of one block")
        return TorchWorker(kv_caches, self.num_chunks)  # asked once for each worker process
