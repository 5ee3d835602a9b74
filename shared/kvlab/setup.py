"""From a bare checkout to a whole set-up, and on from wherever it stopped.

`python3 -m kvlab.setup COMMAND...` makes .venv with nothing but the standard
library, then hands over to its Python, which runs `kvlab COMMAND...`. Each step
first looks whether its work is done, so a second run is there in seconds.
"""

from __future__ import annotations

import sys

PYTHONS = ((3, 11), (3, 12))


def refusal() -> str:
    """Why this machine or this Python cannot run the course; "" if it can.

    Called before anything else is imported: an old Python must get a sentence.
    """
    import platform

    if sys.version_info[:2] not in PYTHONS:
        return (
            f"Found Python {platform.python_version()} ({sys.executable});"
            " the course needs 3.11 or 3.12.\n"
            "Try `make lab PYTHON=/path/to/python3.12`."
        )
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return (
            f"This is {platform.system()} on {platform.machine()}; the engines run on Linux"
            " on x86-64.\nOpen the checkout in its devcontainer: README says how."
        )
    if platform.libc_ver()[0] != "glibc":
        return (
            "This Linux has no glibc, which the engines' packages need (Alpine has none).\n"
            "Open the checkout in its devcontainer: README says how."
        )
    return ""


def wanted_venv() -> dict[str, str]:
    """What .venv must have been made from to be used as it is."""
    from kvlab import environments
    from kvlab.paths import VENV

    device = environments.device()
    return {
        "python": sys.base_prefix,
        "folder": str(VENV),
        "device": device,
        "pins": environments.key("notebook", device),
    }


def ensure_venv() -> None:
    """Make or mend .venv: the notebook environment with this checkout in it.

    Raises SetupError.
    """
    import hashlib
    import importlib.util
    import json
    import shutil
    import time
    from pathlib import Path

    from kvlab import environments
    from kvlab.install import Installer, clean_environment, failure, run_shown
    from kvlab.paths import ROOT, VENV, SetupError, lock

    marker = VENV / environments.MARKER
    wanted = wanted_venv()

    def made_from() -> dict[str, str]:
        if not environments.is_whole(VENV):
            return {}
        loaded: dict[str, str] = json.loads(marker.read_text())
        return loaded

    if made_from() == wanted:
        return
    name = "venv-" + hashlib.sha256(str(VENV).encode()).hexdigest()[:12]
    with lock(name, f"installing {environments.TITLES['notebook']} in {VENV}") as held:
        found = made_from()
        if found == wanted:
            return
        changed = [part for part in wanted if found.get(part) != wanted[part]]
        if VENV.exists() and changed != ["pins"]:
            reason = {
                "python": "was made by another Python",
                "folder": f"was made in {found.get('folder')}",
                "device": f"was made for {found.get('device')}",
            }
            why = reason[changed[0]] if found else "is not whole"
            print(f".venv {why}: it is made again.", flush=True)
            shutil.rmtree(VENV)
        elif found:
            print("The pins have moved: .venv is brought up to date.", flush=True)
            marker.unlink()

        what = environments.TITLES["notebook"]
        environments.announce("notebook", wanted["device"], VENV)
        began = time.monotonic()
        python = VENV / "bin" / "python"
        if not VENV.exists():
            if importlib.util.find_spec("ensurepip") is None:
                version = f"{sys.version_info.major}.{sys.version_info.minor}"
                raise SetupError(
                    f"Python {version} lacks its venv module. On Debian and Ubuntu:\n"
                    f"    sudo apt install python{version}-venv\nThen run the same command again."
                )
            base = getattr(sys, "_base_executable", sys.executable)
            code, output = run_shown([base, "-m", "venv", str(VENV)], clean_environment(), [held])
            if code:
                raise failure(what, output)
        file = environments.pins("notebook", wanted["device"])
        (uv,) = (line for line in file.read_text().splitlines() if line.startswith("uv=="))
        # pip follows the learner's configuration by itself.
        pip = [str(python), "-m", "pip", "install", "--no-deps", "--no-input"]
        pip += ["--disable-pip-version-check", uv]
        code, output = run_shown(pip, clean_environment(), [held])
        if code:
            raise failure("uv, the installer", output)
        installer = Installer(python, keep_open=[held])
        installer.pins(python, file, wanted["device"], what)
        checkout = ["--no-deps", "--no-build-isolation", "--quiet", "--editable", str(ROOT)]
        installer.pip(python, checkout, "the checkout")
        Path(marker).write_text(json.dumps(wanted, indent=1) + "\n")
        print(f"Installed {what} in {time.monotonic() - began:.0f} s.", flush=True)


def complete(
    user_kernel: bool = False, engines: tuple[str, ...] = ("vllm",), check: bool = True
) -> None:
    """The rest of the set-up, in the notebook environment. Raises SetupError.

    user_kernel: register the Jupyter kernel for the user, not only in .venv.
    engines: whose environments to make; chapters that want others say so. check: compare three
    ways to run a model.
    """
    from kvlab import environments, jupyter, models, notebooks, selfcheck
    from kvlab.paths import ROOT

    for name in engines:
        environments.build(name)
    models.get(models.DEFAULT)
    jupyter.register(user_kernel)
    for copy in notebooks.copy_labs(ROOT / "my"):
        print(f"Copied labs/{copy.name} to my/: work there.")
    if "vllm" in engines and check:
        selfcheck.run_where_changed()


def main(arguments: list[str]) -> int:
    """Make .venv whole, then run `kvlab ARGUMENTS` in it."""
    refused = refusal()
    if refused:
        print(refused, file=sys.stderr)
        return 1
    import os
    import time

    from kvlab.paths import VENV, run_plainly

    os.environ["KVLAB_BEGAN"] = str(time.time())  # for `kvlab setup --record`
    code = run_plainly(ensure_venv)
    if code:
        return code
    os.environ.pop("PYTHONPATH", None)
    python = str(VENV / "bin" / "python")
    os.execv(python, [python, "-m", "kvlab.cli", *arguments])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
