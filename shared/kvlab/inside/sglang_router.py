"""sglang-router 0.3.2, with its key from the environment: everybody sees a command line."""

from __future__ import annotations

import os
import sys

from sglang_router.launch_router import launch_router, parse_router_args

from kvlab.inside import token

if __name__ == "__main__":
    launch_router(parse_router_args([*sys.argv[1:], "--api-key", os.environ[token.VARIABLE]]))
