"""minikv: a serving stack small enough to read, that does what the large ones do.

Read the files in the order in which a request meets them:

    engine.py      how does a request get from text to text?
    tokenizer.py   how does text become tokens, and when is a token text again?
    request.py     what is one request, and in which state is it?
    scheduler.py   who runs in this step, and with how many tokens?
    blocks.py      where does KV live, and who may use it again?
    radix.py       which beginning of this prompt has KV already?
    runner.py      a scheduled batch goes in; how do the next tokens come out?
    model.py       what does the model compute for one token, and where does it need the others?
    linear.py      how does a matrix product with fixed weights become fast on a CPU?
    attention/     how does a query read the keys and values of the tokens before it?
    weights.py     what lies in a model folder, and is it all there?

And without a model: trace.py (what did a step do?), simulate.py (how would these requests fare, if
a step took so long?).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minikv.engine import LLM
    from minikv.request import RequestOutput, SamplingParams

__all__ = ["LLM", "RequestOutput", "SamplingParams"]

_ROOMS = {"LLM": "engine", "RequestOutput": "request", "SamplingParams": "request"}


def __getattr__(name: str) -> Any:
    """A name comes from its room when it is first asked for: so `minikv.attention` alone needs no
    tokenizer, and runs on a machine that has little more than torch."""
    if name not in _ROOMS:
        raise AttributeError(f"module 'minikv' has no attribute {name!r}")
    return getattr(import_module(f"minikv.{_ROOMS[name]}"), name)
