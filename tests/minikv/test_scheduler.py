"""The scheduler and the block pool alone, without a model.

A stand-in for the model's arithmetic makes mistakes visible: the "KV" that it writes into a slot is
the salt and every token up to that one, which is just what real keys and values depend on. Before
a token is chosen, every slot that the request would read must hold what it should.
"""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minikv import SamplingParams
from minikv.radix import RadixKVCacheManager
from minikv.request import Request, RequestStatus
from minikv.scheduler import Scheduler, make_kv

EOS = 3


def make(num_blocks, block_size, *, cache="hash", max_model_len=10_000, **options):
    kv = make_kv(num_blocks, block_size, cache)
    return Scheduler(kv, max_model_len=max_model_len, **options)


def request(
    name, tokens, max_tokens=1, *, arrival=0, priority=0, salt=None, ignore_eos=True, **params
):
    """A request; `tokens` may be their number: then no two requests have one in common."""
    if isinstance(tokens, int):
        first = int.from_bytes(name.encode()) * 10_000
        tokens = list(range(first, first + tokens))
    return Request(
        request_id=name, token_ids=list(tokens), arrival=arrival, priority=priority,
        cache_salt=salt, eos_token_ids=frozenset([EOS]),
        params=SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=ignore_eos, **params
        ),
    )  # fmt: skip


class PretendModel:
    """Writes and reads slots as a real one does: in a step first all write, then all read."""

    def __init__(self, block_size):
        self.block_size = block_size
        self.slots = {}

    def run(self, out):
        writer = {}  # block -> who writes into it in this step
        for share in out.scheduled:
            for i in range(share.start, share.end):
                block = share.block_ids[i // self.block_size]
                assert writer.setdefault(block, share.request) is share.request, "two writers"
                self.slots[block, i % self.block_size] = self._value(share.request, i)
        for share in out.scheduled:
            for i in range(share.end):
                slot = share.block_ids[i // self.block_size], i % self.block_size
                assert self.slots.get(slot) == self._value(share.request, i), "foreign KV is read"
        return {s.request.request_id: next_token(s.request) for s in out.scheduled if s.samples}

    def _value(self, request, i):
        return request.cache_salt, tuple(request.token_ids[: i + 1])


def next_token(request):
    """Any function of all tokens would do; EOS comes up too."""
    return (sum(request.token_ids) + request.num_tokens // 3) % 4


def step(scheduler, model):
    out = scheduler.schedule()
    tokens = model.run(out)
    scheduler.update(out, tokens, dict.fromkeys(tokens, 0.0))
    return out


def first_and_last_step(scheduler, requests):
    """Run all to their end. In which step, from 1, does each get its first and its last token?"""
    model = PretendModel(scheduler.kv.block_size)
    for r in requests:
        scheduler.add(r)
    first, last, number = {}, {}, 0
    while scheduler.has_unfinished:
        number += 1
        step(scheduler, model)
        for r in requests:
            if r.output_token_ids:
                first.setdefault(r.request_id, number)
            if r.status.finished:
                last.setdefault(r.request_id, number)
    return first, last


# ---- any order of events -----------------------------------------------------------------------


class AnyOrder(RuleBasedStateMachine):
    """Requests come, run, lose their blocks and leave in any order; the books must balance."""

    @initialize(
        block_size=st.sampled_from([1, 2, 4]),
        spare=st.integers(0, 6),
        budget=st.integers(1, 30),
        max_num_seqs=st.integers(1, 5),
        threshold=st.integers(0, 6),
        policy=st.sampled_from(["fcfs", "priority"]),
        cache=st.sampled_from(["hash", "radix", None]),
    )
    def start(self, block_size, spare, budget, max_num_seqs, threshold, policy, cache):
        # The least pool in which a request of the greatest length fits, and a little more.
        self.scheduler = make(
            24 // block_size + 1 + spare, block_size, cache=cache, max_model_len=24,
            max_num_batched_tokens=budget, max_num_seqs=max_num_seqs,
            long_prefill_token_threshold=threshold, policy=policy,
        )  # fmt: skip
        self.model = PretendModel(block_size)
        self.requests = []

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=20),  # alike: they share blocks
        max_tokens=st.integers(1, 12),
        priority=st.integers(0, 2),
        salt=st.sampled_from([None, None, "s"]),
        ignore_eos=st.booleans(),
    )
    def add(self, tokens, max_tokens, priority, salt, ignore_eos):
        number = len(self.requests)
        new = request(f"r{number}", tokens, max_tokens, arrival=number, priority=priority,
                      salt=salt, ignore_eos=ignore_eos)  # fmt: skip
        self.requests.append(new)
        self.scheduler.add(new)

    @rule(times=st.integers(1, 4))
    def steps(self, times):
        for _ in range(times):
            out = step(self.scheduler, self.model)
            assert sum(s.num_tokens for s in out.scheduled) <= self.scheduler.max_num_batched_tokens
            assert all(s.num_tokens > 0 for s in out.scheduled)
            assert len(self.scheduler.running) <= self.scheduler.max_num_seqs

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data):
        victim = data.draw(st.sampled_from(self.requests))
        self.scheduler.finish(victim, RequestStatus.FINISHED_ABORTED)

    @rule()
    def failed_step(self):
        """The model ran out of memory, say: what the step should have written is not there."""
        for share in self.scheduler.schedule().scheduled:
            self.scheduler.finish(share.request, RequestStatus.FINISHED_ABORTED)

    @invariant()
    def books_balance(self):
        if not hasattr(self, "scheduler"):
            return
        kv = self.scheduler.kv
        if isinstance(kv, RadixKVCacheManager):
            tree_books_balance(kv)
            return
        pool = kv.pool
        owners = [b.block_id for table in kv.tables.values() for b in table]
        free = set(pool.free_queue)
        assert free | set(owners) == set(range(1, pool.num_blocks)), "a block is lost"
        assert not free & set(owners), "a block is free and owned"
        assert [b.ref_cnt for b in pool.blocks] == [owners.count(i) for i in range(pool.num_blocks)]
        assert all(len(t) == len({b.block_id for b in t}) for t in kv.tables.values())
        for hash, blocks in pool.cached.items():
            assert blocks
            assert all(pool.blocks[i] is b and b.hash == hash for i, b in blocks.items())
        assert sum(b.hash is not None for b in pool.blocks) == sum(map(len, pool.cached.values()))

    @invariant()
    def only_running_requests_own_blocks(self):
        if hasattr(self, "scheduler"):
            names = {r.request_id for r in self.scheduler.running}
            assert names == set(self.scheduler.kv.tables)

    @invariant()
    def cached_tokens_are_at_most_all_but_one(self):
        for r in getattr(self, "requests", ()):
            assert 0 <= r.num_cached_tokens <= max(0, r.num_prompt_tokens - 1)

    def teardown(self):
        """Left alone, every request comes to its end, and no block stays behind."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(100 + 50 * len(self.requests)):
            if not self.scheduler.has_unfinished:
                break
            step(self.scheduler, self.model)
        assert all(r.status.finished for r in self.requests), "some request never finishes"
        assert self.scheduler.kv.num_free == self.scheduler.kv.num_blocks - 1
        for r in self.requests:
            assert r.num_tokens <= 24
            if r.status is not RequestStatus.FINISHED_ABORTED:
                assert r.output_token_ids == alone(r), "not what the request gives alone"


def tree_books_balance(kv):
    """A page is free, or in the tree, or one request's own; and never two of these."""
    tree, nodes = kv.tree, [kv.tree.root]
    for node in nodes:
        nodes += node.children.values()
    cached = [page for node in nodes for page in node.pages]
    own = [page for table in kv.tables.values() for page in table.pages[table.num_shared :]]
    pages = sorted(tree.free_pages + cached + own)
    assert pages == list(range(1, kv.num_blocks)), "a page is lost, or has two places"
    assert tree.cached_pages == len(cached)
    assert tree.protected_pages == sum(len(node.pages) for node in nodes if node.locks)
    for node in nodes[1:]:
        assert node.locks >= sum(child.locks for child in node.children.values())
    for table in kv.tables.values():
        path, node = [], table.node
        while node is not None:
            path, node = node.pages + path, node.parent
        assert table.pages[: table.num_shared] == path, "what is shared is not the tree's"


def alone(r):
    """The output of a request that nobody disturbs."""
    copy = request("alone", r.token_ids[: r.num_prompt_tokens], r.params.max_tokens)
    while True:
        token = next_token(copy)
        copy.token_ids.append(token)
        if token == EOS and not r.params.ignore_eos:
            break
        if len(copy.output_token_ids) == r.params.max_tokens or copy.num_tokens == 24:
            break
    return copy.output_token_ids


# Derandomised: the same examples in every run, so a failure can be repeated.
AnyOrder.TestCase.settings = settings(
    max_examples=80, stateful_step_count=25, deadline=None, derandomize=True, database=None
)
test_any_order_of_events = AnyOrder.TestCase


# ---- who gets how many tokens ------------------------------------------------------------------


def long_and_short(threshold, short_output=1):
    scheduler = make(100, 16, cache=None, max_num_batched_tokens=128,
                     long_prefill_token_threshold=threshold)  # fmt: skip
    short = request("short", 20, short_output)
    return first_and_last_step(scheduler, [request("long", 1000), short])


def test_a_short_prompt_behind_a_long_one_waits_for_its_end():
    """7 steps of 128 are the long one's alone; the eighth has its last 104, and room for 20."""
    first, _ = long_and_short(threshold=0)
    assert first == {"long": 8, "short": 8}


@pytest.mark.parametrize(("short_output", "long_done"), [(1, 9), (4, 10), (16, 16)])
def test_a_threshold_lets_the_short_one_in(short_output, long_done):
    """While two are there, the long one gets 64 a step; alone, it gets all 128 again. So it is done
    the later, the longer the short one talks: 64 x 1 + 128 x 8, 64 x 4 + 128 x 6, 64 x 16."""
    first, last = long_and_short(64, short_output)
    assert first == {"long": long_done, "short": 1}
    assert last["short"] == short_output


def test_two_long_prompts_are_not_admitted_to_a_pool_for_one():
    """100 blocks of 16, two prompts of 75 blocks: the second waits, and nobody is preempted."""
    scheduler = make(101, 16, cache=None, max_num_batched_tokens=256)
    one, two = request("one", 1200), request("two", 1200)
    _, last = first_and_last_step(scheduler, [one, two])
    assert (one.num_preemptions, two.num_preemptions) == (0, 0)
    assert last == {"one": 5, "two": 10}


def test_nobody_overtakes():
    """The first in line does not fit yet. A small one behind it would, and waits all the same."""
    scheduler = make(11, 4, cache=None, max_num_batched_tokens=64)
    requests = [request("a", 24, 5), request("big", 20), request("small", 4)]
    first, _ = first_and_last_step(scheduler, requests)
    assert first == {"a": 1, "big": 6, "small": 6}


def test_at_most_max_num_seqs_run():
    scheduler = make(100, 4, max_num_seqs=2)
    first, _ = first_and_last_step(scheduler, [request(f"r{i}", 5) for i in range(5)])
    assert list(first.values()) == [1, 1, 2, 2, 3]


@pytest.mark.parametrize(("policy", "victim"), [("fcfs", "late"), ("priority", "early")])
def test_who_is_preempted(policy, victim):
    """Two prompts fill the pool; the second token needs a third block. "early" matters less."""
    scheduler = make(3, 4, policy=policy)
    early, late = request("early", 4, 3, priority=1), request("late", 4, 3, arrival=1)
    model = PretendModel(4)
    for r in (early, late):
        scheduler.add(r)
    step(scheduler, model)
    out = step(scheduler, model)
    assert [r.request_id for r in out.preempted] == [victim]
    assert scheduler.waiting == out.preempted
    assert out.preempted[0].num_tokens == 5  # the blocks are gone, the token it got is not


def test_a_victim_gives_back_its_share_of_the_step():
    """12 tokens a step. In the fifth "low" has got 8 when "high" finds no block: "low" loses its
    blocks and its 8 tokens, and "mid", next in line, is not skipped and gets 8 instead of 3."""
    scheduler = make(
        15, 4, max_num_batched_tokens=12, long_prefill_token_threshold=8, policy="priority"
    )
    model = PretendModel(4)
    given = []
    scheduler.add(request("low", 52, priority=2))
    for i in range(5):
        out = step(scheduler, model)
        given.append({s.request.request_id: s.num_tokens for s in out.scheduled})
        if i == 0:
            scheduler.add(request("high", 7, 9, arrival=1, priority=0))
            scheduler.add(request("mid", 12, arrival=2, priority=1))
    assert given == [
        {"low": 12},
        {"low": 8, "high": 4},
        {"low": 8, "high": 3, "mid": 1},
        {"low": 8, "high": 1, "mid": 3},
        {"high": 1, "mid": 8},
    ]
    assert [r.request_id for r in out.preempted] == ["low"]


def test_a_step_that_preempts_admits_nobody():
    """Not even one that is first in line and would fit."""
    scheduler = make(4, 4, max_num_seqs=2, policy="priority")
    model = PretendModel(4)
    scheduler.add(request("low", 5, 9, priority=2))
    step(scheduler, model)
    scheduler.add(request("high", 4, 9, arrival=1, priority=0))
    step(scheduler, model)
    scheduler.add(request("mid", 1, arrival=2, priority=1))
    out = step(scheduler, model)  # "high" takes one of the two blocks of "low"
    assert ([r.request_id for r in out.preempted], out.admitted) == (["low"], {})
    assert [r.request_id for r in scheduler.waiting] == ["mid", "low"]
    assert step(scheduler, model).admitted == {"mid": 0}


def test_a_prompt_is_admitted_as_a_whole_or_not_at_all():
    """In the second step there is budget for 4 of its 24 tokens, and 5 blocks are free. It needs 6,
    and could not go on beside "a": it waits until "a" is done."""
    scheduler = make(11, 4, cache=None, max_num_batched_tokens=12)
    a, b = request("a", 20, 4), request("b", 24)
    first, last = first_and_last_step(scheduler, [a, b])
    assert last["a"] == 5
    assert first["b"] == 7  # 24 tokens in two steps
    assert (a.num_preemptions, b.num_preemptions) == (0, 0)


def test_a_preempted_request_goes_to_the_head_of_the_queue():
    scheduler = make(3, 4, max_num_seqs=2)
    requests = [request(name, 4, 3) for name in "abc"]
    model = PretendModel(4)
    for r in requests:
        scheduler.add(r)
    step(scheduler, model)
    step(scheduler, model)
    assert [r.request_id for r in scheduler.waiting] == ["b", "c"]


def test_priority_orders_the_queue():
    scheduler = make(100, 4, max_num_seqs=1, policy="priority")
    requests = [
        request("c", 4, arrival=0, priority=2),
        request("a", 4, arrival=1, priority=0),
        request("b", 4, arrival=2, priority=0),
    ]
    first, _ = first_and_last_step(scheduler, requests)
    assert first == {"a": 1, "b": 2, "c": 3}


# ---- when it ends ------------------------------------------------------------------------------


def end(prompt, tokens, ignore_eos=False, **params):
    """Feed given output tokens to one request; its status after each."""
    scheduler = make(100, 4, max_model_len=8)
    r = request("r", prompt, ignore_eos=ignore_eos, **params)
    scheduler.add(r)
    said = []
    for token in tokens:
        scheduler.update(scheduler.schedule(), {"r": token}, {"r": -1.0})
        said.append(r.status.value)
    return said


def test_reasons_to_end():
    assert end(3, [0, 0], max_tokens=2) == ["running", "length"]
    assert end(6, [0, 0], max_tokens=9) == ["running", "length"]  # the window: 6 + 2 = 8
    assert end(3, [0, EOS], max_tokens=9) == ["running", "stop"]
    assert end(3, [0, EOS], max_tokens=2) == ["running", "stop"]  # the token decides, not its place
    assert end(3, [EOS, 0], max_tokens=2, ignore_eos=True) == ["running", "length"]
    assert end(3, [0, 1], max_tokens=9, stop_token_ids=[1]) == ["running", "stop"]
    assert end(3, [EOS, 1], max_tokens=9, stop_token_ids=[1], ignore_eos=True)[1] == "stop"


# ---- a cache that publishes after the pass -----------------------------------------------------


def test_a_second_request_stands_back_until_the_first_has_published():
    """Alike for 8 tokens: "hash" lets both in at once, "radix" the second when it can be hit."""
    entered = {}
    for cache in ("hash", "radix"):
        scheduler = make(40, 4, cache=cache, max_num_batched_tokens=64)
        model = PretendModel(4)
        for name, tokens in {"a": [1] * 8 + [2], "b": [1] * 8 + [0], "c": [2] * 9}.items():
            scheduler.add(request(name, tokens, max_tokens=4))
        entered[cache] = [step(scheduler, model).admitted for _ in range(2)]
    assert entered["hash"] == [{"a": 0, "b": 8, "c": 0}, {}]
    assert entered["radix"] == [{"a": 0, "c": 0}, {"b": 8}]  # and "c" overtook it


def test_a_long_prompt_that_is_computed_in_chunks_is_waited_for():
    scheduler = make(40, 4, cache="radix", max_num_batched_tokens=8)
    model = PretendModel(4)
    scheduler.add(request("a", [1] * 20, max_tokens=9))
    scheduler.add(request("b", [1] * 20, max_tokens=9))
    admitted = [step(scheduler, model).admitted for _ in range(4)]
    assert admitted == [{"a": 0}, {}, {"b": 16}, {}]


def test_a_request_with_another_salt_does_not_wait():
    scheduler = make(40, 4, cache="radix", max_num_batched_tokens=64)
    scheduler.add(request("a", [1] * 9))
    scheduler.add(request("b", [1] * 9, salt="s"))
    assert scheduler.schedule().admitted == {"a": 0, "b": 0}


def test_the_output_is_published_when_the_request_ends():
    scheduler = make(40, 4, cache="radix")
    model = PretendModel(4)
    first = request("a", [1] * 6, max_tokens=7)
    scheduler.add(first)
    while scheduler.has_unfinished:
        step(scheduler, model)
    scheduler.add(request("b", [*first.token_ids, 1], max_tokens=1))
    assert step(scheduler, model).admitted == {"b": 12}  # 6 + 7 tokens, the last never computed


def test_a_finished_request_is_finished_once():
    scheduler = make(10, 4)
    r = request("r", 3)
    first_and_last_step(scheduler, [r])
    scheduler.finish(r, RequestStatus.FINISHED_ABORTED)
    assert r.status is RequestStatus.FINISHED_LENGTH_CAPPED
    assert scheduler.kv.pool.num_free == 9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            dict(policy="lifo"),
            "scheduling_policy must be one of .*'fcfs', 'priority'.*; got 'lifo'",
        ),
        (dict(max_num_batched_tokens=0), "max_num_batched_tokens must be at least 1; got 0"),
        (dict(max_num_seqs=0), "max_num_seqs must be at least 1; got 0"),
        (dict(long_prefill_token_threshold=-1), "threshold must be 0 .off. or more; got -1"),
    ],
)
def test_settings_that_cannot_work(options, message):
    with pytest.raises(ValueError, match=message):
        make(10, 4, **options)
