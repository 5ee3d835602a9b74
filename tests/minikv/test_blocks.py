"""Where KV lives and who may use it again: hashes, the queue of free blocks, eviction."""

import hashlib

import pytest

from minikv.blocks import NONE_HASH, BlockPool, KVCacheManager, block_hash, extend_hashes


def cbor(value):
    """The few kinds of canonical CBOR (RFC 8949) that a key is made of, by hand."""

    def head(major, n):
        if n < 24:
            return bytes([major << 5 | n])
        size = next(size for size in (1, 2, 4, 8) if n < 1 << 8 * size)  # the shortest that holds n
        return bytes([major << 5 | 24 + (1, 2, 4, 8).index(size)]) + n.to_bytes(size, "big")

    match value:
        case None:
            return b"\xf6"
        case int():
            return head(0, value)
        case bytes():
            return head(2, len(value)) + value
        case str():
            return head(3, len(value.encode())) + value.encode()
        case tuple():
            return head(4, len(value)) + b"".join(cbor(item) for item in value)


def sha(value):
    return hashlib.sha256(cbor(value)).digest()


# ---- hashes ------------------------------------------------------------------------------------


def test_chain_of_hashes():
    """hash = sha256(cbor([parent, tokens, extra])); the first parent is a fixed seed."""
    tokens = [0, 23, 24, 255, 256, 65_535, 65_536, 151_935]  # every width that CBOR has for them
    first = sha((sha("vllm-none-hash"), tuple(tokens[:4]), None))
    second = sha((first, tuple(tokens[4:]), None))
    hashes = []
    extend_hashes(hashes, tokens, block_size=4)
    assert hashes == [first, second]
    assert block_hash(None, tokens[:4]) == first


def test_equal_tokens_after_different_tokens_are_another_block():
    one, other = [], []
    extend_hashes(one, [1, 2, 7, 7], block_size=2)
    extend_hashes(other, [1, 3, 7, 7], block_size=2)
    assert one[1] != other[1]


def test_hashes_grow_as_tokens_do():
    """Only full blocks have one, and it does not matter how often one looks."""
    tokens = list(range(11))
    at_once, bit_by_bit = [], []
    extend_hashes(at_once, tokens, block_size=4)
    lengths = []
    for n in range(len(tokens) + 1):
        extend_hashes(bit_by_bit, tokens[:n], block_size=4)
        lengths.append(len(bit_by_bit))
    assert lengths == [n // 4 for n in range(12)]
    assert bit_by_bit == at_once


def test_a_salt_is_in_the_first_block_and_through_it_in_all():
    first = sha((NONE_HASH, (1, 2), (("cache_salt", "anna"),)))
    second = sha((first, (3, 4), None))
    hashes = {}
    for salt in (None, "anna", "ben"):
        hashes[salt] = []
        extend_hashes(hashes[salt], [1, 2, 3, 4], block_size=2, salt=salt)
    assert hashes["anna"] == [first, second]
    assert len({h for chain in hashes.values() for h in chain}) == 6


# ---- the pool ----------------------------------------------------------------------------------


def ids(blocks):
    return [block.block_id for block in blocks]


def test_block_0_is_never_handed_out():
    pool = BlockPool(5)
    assert pool.num_free == 4
    assert ids(pool.take(4)) == [1, 2, 3, 4]
    with pytest.raises(ValueError, match="1 blocks asked for, 0 are free"):
        pool.take(1)


def test_blocks_without_content_are_used_first_and_cached_ones_last():
    pool = BlockPool(7)
    taken = pool.take(4)  # 1 to 4; 5 and 6 were never used
    pool.publish(taken[0], b"a")
    pool.publish(taken[2], b"c")
    pool.free(taken[::-1])
    # 4 and 2 hold nothing that could be hit; 3, the tail, is evicted before 1, the head.
    assert list(pool.free_queue) == [4, 2, 5, 6, 3, 1]


def test_a_free_block_keeps_its_content_until_it_is_taken():
    pool = BlockPool(3)
    one, two = pool.take(2)
    pool.publish(one, b"a")
    pool.publish(two, b"b")
    pool.free([one, two])
    assert pool.lookup(b"a") is one
    assert pool.take(1) == [one]  # least recently used
    assert pool.lookup(b"a") is None
    assert pool.lookup(b"b") is two


def test_a_hit_makes_a_block_the_last_to_be_evicted():
    pool = BlockPool(4)
    blocks = pool.take(3)
    for block, name in zip(blocks, (b"a", b"b", b"c"), strict=True):
        pool.publish(block, name)
    pool.free(blocks)
    pool.touch([blocks[0]])
    assert list(pool.free_queue) == [2, 3]
    pool.free([blocks[0]])
    assert list(pool.free_queue) == [2, 3, 1]


def test_a_block_is_free_when_its_last_owner_leaves():
    pool = BlockPool(2)
    (block,) = pool.take(1)
    pool.publish(block, b"a")
    pool.touch([block])
    pool.free([block])
    assert pool.num_free == 0
    pool.free([block])
    assert pool.num_free == 1


def test_two_blocks_with_the_same_content():
    """Both stay findable: evicting one must not hide the other."""
    pool = BlockPool(3)
    one, two = pool.take(2)
    pool.publish(one, b"a")
    pool.publish(two, b"a")
    assert pool.lookup(b"a") is one
    pool.free([one])
    assert pool.take(1) == [one]
    assert pool.lookup(b"a") is two
    pool.unpublish(two)
    assert pool.cached == {}


def test_reset_only_when_nobody_owns_a_block():
    pool = BlockPool(3)
    (block,) = pool.take(1)
    pool.publish(block, b"a")
    assert not pool.reset()
    assert pool.lookup(b"a") is block
    pool.free([block])
    assert pool.reset()
    assert pool.lookup(b"a") is None
    assert pool.num_free == 2


# ---- block tables ------------------------------------------------------------------------------


def chain(tokens, block_size=4):
    hashes = []
    extend_hashes(hashes, tokens, block_size)
    return hashes


def computed(kv, name, tokens):
    """A request that has computed its tokens and has left."""
    assert kv.allocate(name, len(tokens))
    kv.publish(name, chain(tokens), len(tokens))
    kv.release(name, len(tokens))


def test_a_table_holds_whole_blocks():
    kv = KVCacheManager(num_blocks=9, block_size=4)
    for num_tokens, num_blocks in [(1, 1), (4, 1), (5, 2), (8, 2), (9, 3)]:
        assert kv.allocate("a", num_tokens)
        assert len(kv.block_ids("a")) == num_blocks
    assert kv.allocate("a", 9)  # asked again: nothing more
    assert len(kv.block_ids("a")) == 3


def test_the_longest_cached_beginning_without_the_last_token():
    kv = KVCacheManager(num_blocks=9, block_size=4)
    tokens = list(range(12))
    computed(kv, "a", tokens)
    for prompt, found in [
        (tokens + [99], 3),
        (tokens, 2),  # all 12 are there, but one must be computed
        (tokens[:11], 2),
        (tokens[:4], 0),
        (tokens[:4] + [99] + tokens[5:], 1),  # what comes after the difference is not looked at
        ([99] + tokens[1:], 0),
    ]:
        assert len(kv.match(chain(prompt), len(prompt))) == found


def test_hits_are_owned_before_the_rest_is_taken():
    """The rest could evict them: they are free blocks like any other."""
    kv = KVCacheManager(num_blocks=4, block_size=4)
    tokens = list(range(12))
    computed(kv, "a", tokens)
    hits = kv.match(chain(tokens), 12)
    assert len(hits) == 2
    assert kv.allocate("b", 12, hits)
    assert kv.block_ids("b")[:2] == ids(hits)
    assert len(set(kv.block_ids("b"))) == 3


def test_hits_on_free_blocks_are_counted_as_needed():
    """3 blocks are free, 2 of them are the hit: 2 more do not fit, and nothing has changed."""
    kv = KVCacheManager(num_blocks=4, block_size=4)
    tokens = list(range(16))
    computed(kv, "a", tokens[:8])
    hits = kv.match(chain(tokens), 16)
    assert len(hits) == 2
    before = list(kv.pool.free_queue)
    assert not kv.allocate("b", 16, hits)
    assert list(kv.pool.free_queue) == before
    assert [block.ref_cnt for block in hits] == [0, 0]
    assert kv.block_ids("b") == []


def test_a_chunk_is_refused_if_the_whole_would_not_fit():
    kv = KVCacheManager(num_blocks=4, block_size=4)
    assert not kv.allocate("a", 4, must_fit=13)
    assert kv.allocate("a", 4, must_fit=12)
    assert len(kv.block_ids("a")) == 1


def test_the_tail_of_a_request_is_evicted_before_its_head():
    kv = KVCacheManager(num_blocks=4, block_size=4)
    tokens = list(range(12))
    computed(kv, "a", tokens)
    assert kv.allocate("b", 4)  # takes one block: the last of "a"
    assert len(kv.match(chain(tokens + [0]), 13)) == 2


def test_what_was_published_but_not_computed_is_forgotten():
    kv = KVCacheManager(num_blocks=4, block_size=4)
    tokens = list(range(12))
    kv.allocate("a", 12)
    kv.publish("a", chain(tokens), 12)
    kv.release("a", num_computed_tokens=7)
    assert len(kv.match(chain(tokens), 12)) == 1


def test_caching_off():
    kv = KVCacheManager(num_blocks=4, block_size=4, enable_caching=False)
    computed(kv, "a", list(range(12)))
    assert kv.pool.cached == {}
