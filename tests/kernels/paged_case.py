"""Random requests whose keys and values lie scattered in a cache full of NaN."""

import torch
from conftest import ON_GPU

from minikv.attention import Segment

DEVICE = torch.device("cuda" if ON_GPU else "cpu")
# Against float64, for values of about 1: what the result's own dtype rounds away, and more for the
# weights of a softmax, which a tensor core takes in that dtype too.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
LSE_TOLERANCE = 2e-4


class Case:
    """segments: (start, end) of each; their rows of q follow one another after `before` rows that
    belong to nobody."""

    def __init__(self, rng, segments, *, group, page, head_dim, dtype, kv_heads=2, before=1):
        self.dtype, self.group, self.page, self.kv_heads = dtype, group, page, kv_heads
        heads = group * kv_heads
        counts = [-(-end // page) for _, end in segments]
        ids = rng.sample(range(1, sum(counts) + 3), sum(counts))  # block 0 is the null block
        shape = (sum(counts) + 3, page, kv_heads, head_dim)
        k, v = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
        self.segments, row = [], before
        for (start, end), count in zip(segments, counts, strict=True):
            own, ids = ids[:count], ids[count:]
            position = torch.arange(end)
            places = torch.tensor(own)[position // page], position % page
            k[places], v[places] = torch.randn(2, end, kv_heads, head_dim)
            self.segments.append((row, Segment(start, end, own)))
            row += end - start
        q = torch.randn(row + 1, heads, head_dim) * 2
        self.q, self.k, self.v = (x.to(DEVICE, dtype) for x in (q, k, v))
        # What is not written stays NaN, and so does what is not read.
        self.out = torch.full_like(self.q, torch.nan)
        self.lse = torch.full((len(q), heads), torch.nan, device=DEVICE)

    def expected(self):
        """(output, lse) in float64: the whole matrix of scores of each request, masked."""
        out, lse = self.out.double(), self.lse.double()
        out[:], lse[:] = torch.nan, torch.nan
        for row, s in self.segments:
            n = s.end - s.start
            keys, values = (
                x[s.block_ids].flatten(0, 1)[: s.end].double().repeat_interleave(self.group, 1)
                for x in (self.k, self.v)
            )
            q = self.q[row : row + n].double()
            scores = torch.einsum("nhd,mhd->hnm", q, keys) * q.shape[2] ** -0.5
            positions = torch.arange(s.start, s.end, device=DEVICE)
            unread = torch.arange(s.end, device=DEVICE) > positions[:, None]
            scores = scores.masked_fill(unread, -torch.inf)
            weights = scores.softmax(-1).nan_to_num(0)  # a row that reads nothing gives zeros
            out[row : row + n] = torch.einsum("hnm,mhd->nhd", weights, values)
            lse[row : row + n] = scores.logsumexp(-1).T
        return out, lse

    def check(self):
        out, lse = self.expected()
        largest = (self.out.double() - out).nan_to_num(0).abs().max()
        print(f"largest error {self.dtype} {largest:.2g}")
        tolerance = TOLERANCE[self.dtype]
        close = dict(rtol=0, equal_nan=True)
        torch.testing.assert_close(self.out.double(), out, atol=tolerance, **close)
        torch.testing.assert_close(self.lse.double(), lse, atol=LSE_TOLERANCE, **close)
