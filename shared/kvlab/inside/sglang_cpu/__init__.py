"""What SGLang 0.5.23 lacks on a CPU, put in its place when it is imported.

The wheel is the stock one and its files stay as they are. Its scheduler, its radix tree, its
tiers and its prefill/decode handoff run without a GPU. What does not exist there: the kernels of
`sgl_kernel` (the wheel sglang-kernel 0.4.10, for CUDA), of which HiCache needs two; memory that
is pinned for a GPU; and torchvision, which some configurations of models with pictures import.
Where CUDA is, none of this is used.

`kvlab.inside.sglang_launch` puts it there.
"""

from __future__ import annotations

import enum
import importlib.machinery
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from kvlab.inside.sglang_cpu import kernels


class InterpolationMode(enum.Enum):
    """torchvision.transforms.InterpolationMode, as far as SGLang reads it at import."""

    BICUBIC = "bicubic"


class _Absent(ModuleType):
    """A module of a package that is not installed: importable, and a refusal when called."""

    def __init__(self, name: str, **contents: Any) -> None:
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        self.__path__: list[str] = []
        self.__dict__.update(contents)
        sys.modules[name] = self

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)

        def refuse(*_: Any, **__: Any) -> Any:
            raise NotImplementedError(f"{self.__name__}.{name} has no stand-in for a CPU")

        return refuse


def install() -> None:
    """Put the stand-ins in place; call before anything of SGLang is imported.

    Changes five names in three of its modules, in memory: two functions and an attribute of
    srt/mem_cache/pool_host, a constant there, a flag of srt/disaggregation/mooncake/conn.py.
    """
    # transformers has to go on seeing that there is no torchvision: it remembers its first look.
    from transformers.utils.import_utils import is_torchvision_available

    is_torchvision_available()
    modes = {"InterpolationMode": InterpolationMode}
    functional = _Absent("torchvision.transforms.functional", **modes)
    transforms = _Absent("torchvision.transforms", functional=functional, **modes)
    _Absent("torchvision", transforms=transforms)
    # Its CPU path imports names from here (mem_cache/allocation.py) that only speculative
    # decoding calls. That torch.ops has none of its operators selects the paths in plain torch.
    _Absent("sgl_kernel")

    from sglang.srt.disaggregation.mooncake import conn
    from sglang.srt.mem_cache.pool_host import base, mha

    mha.transfer_kv_all_layer_direct_lf_pf = kernels.transfer_kv_all_layer_direct_lf_pf
    mha.transfer_kv_per_layer_direct_pf_lf = kernels.transfer_kv_per_layer_direct_pf_lf
    # Memory is pinned for copies by a GPU; without one, asking for it is an error.
    base.HostKVCache.pin_memory = property(lambda pool: False, lambda pool, wanted: None)
    # It leaves 10 GiB of the machine's memory free, more than many a laptop has. The L2 pools of
    # the course are a few megabytes, and `kvlab.engines` looks for room before the start.
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0
    # Otherwise a prefill server copies page numbers through pinned memory and waits for an event
    # of torch.cuda (disaggregation/prefill.py, send_kv_chunk); they are on the CPU already.
    conn.MooncakeKVSender.supports_host_tensor_indices = False
