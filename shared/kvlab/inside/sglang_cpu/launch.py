"""`python -m kvlab.inside.sglang_cpu.launch ...`: sglang.launch_server, with the stand-ins.

SGLang's scheduler and detokenizer are processes of their own, made by multiprocessing's "spawn":
each of them imports its parent's main module first, which is this one. So what stands outside
the `if` runs in all of them.
"""

from __future__ import annotations

import runpy

from kvlab.inside import sglang_cpu

sglang_cpu.install()

if __name__ == "__main__":
    # Without alter_sys this module stays the main one, which the children import.
    runpy.run_module("sglang.launch_server", run_name="__main__")
