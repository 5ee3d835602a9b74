"""Nothing stays behind: 100,000 requests come, are cut, thrown out, aborted and finished."""

import random

import pytest
from test_scheduler import make, request, tree_books_balance

from minikv.radix import RadixKVCacheManager
from minikv.request import RequestStatus

REQUESTS = 50_000
BLOCKS = 41


@pytest.mark.parametrize("cache", ["hash", "radix"])
def test_nothing_leaks(cache):
    rng = random.Random(6)
    scheduler = make(
        BLOCKS, 4, cache=cache, max_model_len=64, max_num_batched_tokens=48, max_num_seqs=12,
        long_prefill_token_threshold=16,
    )  # fmt: skip
    sent = preemptions = aborted = chunks = hits = 0
    while sent < REQUESTS or scheduler.has_unfinished:
        while sent < REQUESTS and len(scheduler.waiting) < 8:
            # One of 40 beginnings, and an end of its own: some of it is found again.
            prompt = [rng.randrange(40)] * rng.choice([4, 12, 24]) + [sent] * rng.randint(1, 6)
            scheduler.add(request(str(sent), prompt, rng.randint(1, 12), arrival=sent))
            sent += 1
        if rng.random() < 0.1:
            victim = rng.choice(scheduler.waiting + scheduler.running)
            scheduler.finish(victim, RequestStatus.FINISHED_ABORTED)
            aborted += 1
        out = scheduler.schedule()
        sampled = [share.request.request_id for share in out.scheduled if share.samples]
        scheduler.update(out, dict.fromkeys(sampled, 1), dict.fromkeys(sampled, 0.0))
        preemptions += len(out.preempted)
        chunks += len(out.scheduled) - len(sampled)
        hits += sum(out.admitted.values())
    # It is of use only if all of it has happened.
    assert min(preemptions, aborted, chunks, hits) > 1000

    kv = scheduler.kv
    assert kv.num_free == BLOCKS - 1
    assert not kv.tables
    if isinstance(kv, RadixKVCacheManager):
        tree_books_balance(kv)
        assert kv.tree.protected_pages == 0
        assert len(kv.tree._queue) <= kv.tree.cached_pages
    else:
        assert set(kv.pool.free_queue) == set(range(1, BLOCKS))
        assert not any(block.ref_cnt for block in kv.pool.blocks)
        assert sum(map(len, kv.pool.cached.values())) <= BLOCKS - 1
        assert not kv._num_published
