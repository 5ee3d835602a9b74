"""How does a query read the keys and values of the tokens before it?

`causal.py` answers for one whole sequence without a cache, `paged.py` for a batch whose keys and
values lie in the blocks of the KV cache. `online.py` shows how it is done without ever holding all
scores, `kernels.py` the same on a GPU, through the block tables. The last one needs triton, so it
is imported where it is used.
"""

from minikv.attention.causal import Causal
from minikv.attention.paged import KVCache, PagedBatch, Segment

__all__ = ["Causal", "KVCache", "PagedBatch", "Segment"]
