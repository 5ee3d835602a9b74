"""`python -m kvlab.inside.sglang_launch ...`: sglang.launch_server, as the course starts it.

On a CPU it has the stand-ins for its copy kernels. And its log, which people show to others, says
"..." where it would print the key that its server asks for.

SGLang's scheduler and detokenizer are processes of their own, made by multiprocessing's "spawn":
each of them imports its parent's main module first, which is this one. So what stands outside
the `if` runs in all of them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import runpy
from typing import Any

from kvlab.inside import sglang_cpu, token

if "SGLANG_USE_CPU_ENGINE" in os.environ:
    sglang_cpu.install()

_make_record = logging.getLogRecordFactory()
_KEY = os.environ[token.VARIABLE]


def _without_key(*arguments: Any, **named: Any) -> logging.LogRecord:
    record = _make_record(*arguments, **named)
    # Arguments that do not fit the message are the handler's to report: it ends nothing.
    with contextlib.suppress(TypeError, ValueError, KeyError):
        if _KEY in (said := record.getMessage()):
            record.msg, record.args = said.replace(_KEY, "..."), ()
    return record


logging.setLogRecordFactory(_without_key)

if __name__ == "__main__":
    # Without alter_sys this module stays the main one, which the children import.
    runpy.run_module("sglang.launch_server", run_name="__main__")
