"""vLLM's own Scheduler, driven without a model: requests come in as JSON, steps go out.

Run under vLLM's Python by `kvlab.engines.vllm_scheduler`. The classes are vLLM 0.32.0's:
v1/core/sched/scheduler.py (`Scheduler`), v1/request.py (`Request`); what a model would
sample is 0 for every request whose tokens are all computed.
"""

from __future__ import annotations

from typing import Any

from kvlab.inside import calls


def make(model: str, settings: dict[str, Any]) -> Any:
    """A Scheduler with these settings; `model` only gives the configuration a shape."""
    import torch
    from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    num_blocks, block_size = settings["num_blocks"], settings["block_size"]
    longest = (num_blocks - 1) * block_size
    model_config = ModelConfig(model=model, dtype="float32", seed=0, max_model_len=2048)
    model_config.max_model_len = longest
    cache = CacheConfig(
        block_size=block_size,
        enable_prefix_caching=settings["prefix_cache"] == "hash",
        prefix_caching_hash_algo="sha256_cbor",
    )
    cache.num_gpu_blocks = num_blocks
    budget, max_num_seqs = settings["max_num_batched_tokens"], settings["max_num_seqs"]
    scheduling = SchedulerConfig(
        # The configuration wants budget >= max_num_seqs; the scheduler itself does not.
        max_num_batched_tokens=max(budget, max_num_seqs),
        max_num_seqs=max_num_seqs,
        max_model_len=longest,
        long_prefill_token_threshold=0,
        enable_chunked_prefill=True,
        async_scheduling=False,
        is_encoder_decoder=False,
        policy=settings["policy"],
    )
    config = VllmConfig(model_config=model_config, cache_config=cache, scheduler_config=scheduling)
    scheduling.max_num_batched_tokens = budget
    scheduling.long_prefill_token_threshold = settings["long_prefill_token_threshold"]
    attention = FullAttentionSpec(
        block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    kv_cache = KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], attention)],
    )
    scheduler = Scheduler(
        config,
        kv_cache,
        structured_output_manager=StructuredOutputManager(config),
        block_size=block_size,
        log_stats=True,
    )
    scheduler.max_model_len = longest
    return scheduler


def run(model: str, arrivals: list[dict[str, Any]], settings: dict[str, Any]) -> list[Any]:
    """The steps of the requests from arrival to end, as fields of `minikv.trace.Step`."""
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256_cbor
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

    scheduler = make(model, settings)
    init_none_hash(sha256_cbor)
    hasher = None
    if settings["prefix_cache"] == "hash":
        hasher = get_request_block_hasher(settings["block_size"], sha256_cbor)
    coming = list(enumerate(sorted(arrivals, key=lambda arrival: arrival["step"])))[::-1]
    requests: dict[str, Any] = {}
    steps: list[Any] = []
    for index in range(settings["max_steps"]):
        while coming and coming[-1][1]["step"] <= index:
            number, arrival = coming.pop()
            params = SamplingParams(temperature=0, max_tokens=arrival["output"], ignore_eos=True)
            requests[arrival["id"]] = request = Request(
                arrival["id"],
                arrival["prompt"],
                params,
                None,
                arrival_time=float(number),
                priority=arrival["priority"],
                block_hasher=hasher,
            )
            scheduler.add_request(request)
        if not scheduler.get_num_unfinished_requests():
            if not coming:
                return steps
            continue
        waited = [request.request_id for request in scheduler.waiting]
        out = scheduler.schedule()
        prefill: dict[str, int] = {}
        decode: dict[str, int] = {}
        cached: dict[str, int] = {}
        blocks: dict[str, list[int]] = {}
        for name, count in out.num_scheduled_tokens.items():
            request = requests[name]
            # schedule() has already counted this step's tokens as computed.
            start = request.num_computed_tokens - count
            alone = count == 1 and start >= request.num_prompt_tokens
            (decode if alone and start + 1 == request.num_tokens else prefill)[name] = count
            blocks[name] = scheduler.kv_cache_manager.get_block_ids(name)[0]
            if name in waited:
                cached[name] = start
        order = list(scheduler.waiting)
        if settings["policy"] == "priority":  # a heap: in order only when it is emptied
            order.sort()
        steps.append(
            {
                "index": index,
                "prefill": prefill,
                "decode": decode,
                "cached": cached,
                "preempted": sorted(out.preempted_req_ids or ()),
                "waiting": [request.request_id for request in order],
                "blocks": blocks,
                "free_blocks": scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
            }
        )
        names = list(out.num_scheduled_tokens)
        sampled = [
            [0] if requests[name].num_computed_tokens == requests[name].num_tokens else []
            for name in names
        ]
        scheduler.update_from_output(
            out,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: i for i, name in enumerate(names)},
                sampled_token_ids=sampled,
            ),
        )
    raise RuntimeError(f"not done after {settings['max_steps']} steps")


if __name__ == "__main__":
    import vllm.v1.core.sched.scheduler  # noqa: F401  # now, and not during the first call

    calls.serve({"run": run})
