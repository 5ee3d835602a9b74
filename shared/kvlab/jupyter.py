"""The course's place in Jupyter: its kernel, the learner's copies, the server."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import sys
from pathlib import Path

from kvlab.paths import ROOT, SetupError, make_cache

KERNEL = "follow-the-request"
TITLE = "Follow the Request"

# Read by JupyterLab from the environment it runs in: Markdown opens rendered,
# and no news is asked about or fetched.
_LAB_SETTINGS = {
    "@jupyterlab/docmanager-extension:plugin": {
        "defaultViewers": {"markdown": "Markdown Preview"}
    },
    "@jupyterlab/apputils-extension:notification": {
        "fetchNews": "false",
        "checkForUpdates": False,
        "doNotDisturbMode": False,
    },
}


def register(user: bool) -> None:
    """Register this Python as the kernel "follow-the-request".

    In this environment always; with user=True in the user's own Jupyter folder too,
    where a hosted JupyterLab that runs elsewhere finds it.
    """
    from ipykernel.kernelspec import install

    install(prefix=sys.prefix, kernel_name=KERNEL, display_name=TITLE)
    settings = Path(sys.prefix) / "share" / "jupyter" / "lab" / "settings" / "overrides.json"
    settings.parent.mkdir(parents=True, exist_ok=True)
    settings.write_text(json.dumps(_LAB_SETTINGS, indent=1) + "\n")
    if user:
        place = install(user=True, kernel_name=KERNEL, display_name=TITLE)
        print(f"Registered the Jupyter kernel {TITLE!r} in {place}.")


def copy_labs() -> None:
    """Copy each lab to my/, where the learner works; a copy that is there stays."""
    for lab in sorted((ROOT / "labs").glob("*.ipynb")):
        copy = ROOT / "my" / lab.name
        if not copy.exists():
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(lab, copy)
            print(f"Copied labs/{lab.name} to my/{lab.name}: work there.")


def serve(port: int) -> None:
    """Run JupyterLab for the checkout on 127.0.0.1 until Ctrl-C.

    port: the first one to try; the next free one is taken.
    """
    for kind in ("config", "data", "runtime"):
        os.environ[f"JUPYTER_{kind.upper()}_DIR"] = str(make_cache("jupyter", kind))
    os.environ["IPYTHONDIR"] = str(make_cache("jupyter", "ipython"))
    # So that `kvlab` and `python` in a JupyterLab terminal are the course's own.
    os.environ["PATH"] = f"{Path(sys.prefix) / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
    os.environ["VIRTUAL_ENV"] = sys.prefix
    from jupyter_server.serverapp import list_running_servers
    from jupyterlab.labapp import LabApp

    others = [s for s in list_running_servers() if Path(s["root_dir"]) == ROOT]
    token = secrets.token_urlsafe(24)
    arguments = [
        "--ServerApp.ip=127.0.0.1",
        f"--ServerApp.port={port}",
        f"--IdentityProvider.token={token}",
        f"--ServerApp.root_dir={ROOT}",
        "--ServerApp.default_url=/lab/tree/README.md",
        f"--ServerApp.allow_root={os.geteuid() == 0}",
        f"--ServerApp.open_browser={has_display()}",
        "--ServerApp.answer_yes=True",
        "--ServerApp.log_level=WARN",
        f"--MultiKernelManager.default_kernel_name={KERNEL}",
        "--LabApp.news_url=None",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
        "--LabApp.extension_manager=readonly",
        # The checkout may be on a disk whose files SQLite cannot lock; this is
        # only a cache of file ids.
        f"--FileIdManager.db_path={make_cache('jupyter', 'data') / 'file_ids.db'}",
    ]
    try:
        app = LabApp.initialize_server(argv=arguments)
    except SystemExit as error:
        raise SetupError(
            "JupyterLab did not start; its own words above say why.\n"
            "`make lab PORT=9000` tries the ports from 9000 on."
        ) from error
    print()
    if others:
        print(f"Another JupyterLab runs for this checkout, at {others[0]['url']}.")
    if app.port != port:
        print(f"Port {port} is taken, so this one uses {app.port}.")
    print(
        f"JupyterLab: http://127.0.0.1:{app.port}/lab/tree/README.md?token={token}\n"
        "Work in my/; Ctrl-C here ends it.",
        flush=True,
    )
    app.start()


def has_display() -> bool:
    """Whether a browser opened on this machine would be seen."""
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
