"""A scheduled batch goes in; how do the next tokens come out?

The shares of all requests become one row of tokens, the model runs on it once, and only the last
row of each request that has caught up with its tokens is turned into logits. Then each of those
requests chooses its next token. A step with a prompt chunk and seven decodes is one pass, not
eight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minikv.attention import Causal, KVCache, PagedBatch, Segment
from minikv.model import CausalLM
from minikv.request import SamplingParams
from minikv.scheduler import ScheduledRequest

if TYPE_CHECKING:  # at run time this needs triton
    from minikv.attention.kernels import TritonBatch


class Runner:
    """Holds the model and the KV cache, and keeps no state of requests between steps.

    copied_bytes: of keys and values, copied by the last step to read them.
    attention: what reads the KV cache, made anew for each step.
    """

    def __init__(
        self,
        model: CausalLM,
        cache: KVCache,
        attention: type[PagedBatch] | type[TritonBatch] = PagedBatch,
    ) -> None:
        self.model = model
        self.cache = cache
        self.attention = attention
        self.device = cache.k[0].device
        self.copied_bytes = 0

    @torch.inference_mode()
    def execute(self, batch: Sequence[ScheduledRequest]) -> tuple[dict[str, int], dict[str, float]]:
        """Run one step: next token and its log-probability, by request id.

        Requests whose share ends before their last token (a chunk of a prompt) get neither. The
        log-probability is the model's own, before temperature and top_p. Raises ValueError if the
        model gives NaN.
        """
        token_ids = [t for share in batch for t in share.request.token_ids[share.start : share.end]]
        attend = self.attention(
            self.cache, [Segment(share.start, share.end, share.block_ids) for share in batch]
        )
        hidden = self.model(self._tensor(token_ids), attend.positions, attend)
        self.copied_bytes = attend.copied_bytes

        ends = torch.tensor([share.num_tokens for share in batch]).cumsum(0) - 1
        last_rows = {s.request: int(row) for s, row in zip(batch, ends, strict=True) if s.samples}
        if not last_rows:
            return {}, {}
        logits = self.model.logits(hidden[self._tensor(list(last_rows.values()))])
        all_logprobs = logits.log_softmax(-1)
        if all_logprobs.isnan().any():
            raise ValueError(
                "the model gave NaN: its weights are damaged, or too large for this dtype"
            )
        chosen = logits.argmax(-1).tolist()
        for i, request in enumerate(last_rows):
            if not request.params.greedy:
                chosen[i] = sample(logits[i], request.params, request.rng.random())
        logprobs = all_logprobs.gather(1, self._tensor(chosen)[:, None])[:, 0].tolist()
        ids = [request.request_id for request in last_rows]
        return dict(zip(ids, chosen, strict=True)), dict(zip(ids, logprobs, strict=True))

    @torch.inference_mode()
    def forward(self, token_ids: Sequence[int]) -> Tensor:
        """Logits after each token of one sequence, float32 [n, vocab_size]; no KV cache."""
        positions = torch.arange(len(token_ids), device=self.device)
        return self.model.logits(self.model(self._tensor(token_ids), positions, Causal()))

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)


def sample(logits: Tensor, params: SamplingParams, uniform: float) -> int:
    """Choose a token from logits [vocab_size] by inverting the cumulative distribution.

    With the tokens in a row, each as long as its probability, the choice is the one in which
    `uniform` * total length falls. Under top_p the row is sorted and ends with the token that
    completes the mass. One number per token, drawn from the request's own generator, is all the
    chance there is: so with the same logits a seed gives the same tokens.
    """
    probs = torch.softmax(logits / params.temperature, dim=-1)
    if params.top_p < 1:
        probs, order = probs.sort(descending=True, stable=True)
        cumulative = probs.double().cumsum(0)
        kept = int((cumulative - probs < params.top_p).sum())  # mass before it is not yet enough
        cumulative = cumulative[:kept]
    else:
        order = None
        cumulative = probs.double().cumsum(0)
    # right=True: a token of probability 0 is never chosen. The clamp: rounding at the far end.
    place = torch.searchsorted(cumulative, uniform * cumulative[-1], right=True)
    place = place.clamp(max=len(cumulative) - 1)
    return int(place if order is None else order[place])
