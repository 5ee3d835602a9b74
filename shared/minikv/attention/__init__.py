"""How does a query read the keys and values of the tokens before it?

`causal.py` answers for one whole sequence without a cache, `paged.py` for a batch whose keys and
values lie in the blocks of the KV cache.
"""

from minikv.attention.causal import Causal
from minikv.attention.paged import KVCache, PagedBatch, Segment

__all__ = ["Causal", "KVCache", "PagedBatch", "Segment"]
