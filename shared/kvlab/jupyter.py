"""The course's place in Jupyter: its kernel, its settings, its server."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode

import httpx

from kvlab.paths import ROOT, SetupError, cache, lock, make_cache

KERNEL = "follow-the-request"
TITLE = "Follow the Request"

# Read by JupyterLab from the environment it runs in: Markdown opens rendered,
# and no news is asked about or fetched.
_LAB_SETTINGS = {
    "@jupyterlab/docmanager-extension:plugin": {"defaultViewers": {"markdown": "Markdown Preview"}},
    "@jupyterlab/apputils-extension:notification": {
        "fetchNews": "false",
        "checkForUpdates": False,
        "doNotDisturbMode": False,
    },
}
# JupyterLab itself lets a stored SVG reach over a narrow page.
_STYLE = ".jp-RenderedSVG img { max-width: 100%; height: auto; }\n"


def register(user: bool) -> None:
    """Register this Python as the kernel "follow-the-request".

    In this environment always; with user=True in the user's own Jupyter folder too,
    where a hosted JupyterLab that runs elsewhere finds it.
    """
    _write_kernel(Path(sys.prefix) / "share" / "jupyter")
    settings = Path(sys.prefix) / "share" / "jupyter" / "lab" / "settings" / "overrides.json"
    settings.parent.mkdir(parents=True, exist_ok=True)
    settings.write_text(json.dumps(_LAB_SETTINGS, indent=1) + "\n")
    if user:
        from jupyter_core.paths import jupyter_data_dir

        place = _write_kernel(Path(jupyter_data_dir()))
        print(f"Registered the Jupyter kernel {TITLE!r} in {place}.")


def _write_kernel(data: Path) -> Path:
    """Write the kernel's folder into a Jupyter data folder; returns it."""
    # Imported, IPython makes its folder at once: in the cache folder, not at home.
    os.environ["IPYTHONDIR"] = str(make_cache("jupyter", "ipython"))
    from ipykernel.kernelspec import write_kernel_spec

    place = data / "kernels" / KERNEL
    # A hosted server knows neither where the cache folder is nor where `kvlab` is.
    env = {"PATH": f"{sys.prefix}/bin{os.pathsep}${{PATH}}", "KVLAB_CACHE": str(cache())}
    with lock("kernel", "registering the Jupyter kernel"):
        with contextlib.suppress(OSError, ValueError, LookupError):
            before = json.loads((place / "kernel.json").read_text())["argv"][0]
            if before != sys.executable:
                print(f"The kernel {TITLE!r} belonged to {before} and now to this checkout.")
        shutil.rmtree(place, ignore_errors=True)
        place.parent.mkdir(parents=True, exist_ok=True)
        write_kernel_spec(place, {"display_name": TITLE, "env": env})
    return place


def _options(root: Path, port: int) -> list[str]:
    """JupyterLab's command line for the course, but its token: `ps` would show it to others.
    Sets what its processes inherit, too."""
    for kind in ("config", "data", "runtime"):
        os.environ[f"JUPYTER_{kind.upper()}_DIR"] = str(make_cache("jupyter", kind))
    # So that `kvlab` and `python` in a JupyterLab terminal are the course's own.
    os.environ["PATH"] = f"{sys.prefix}/bin{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    os.environ["VIRTUAL_ENV"] = sys.prefix
    (make_cache("jupyter", "config", "custom") / "custom.css").write_text(_STYLE)
    _trust(root)
    return [
        "--ServerApp.ip=127.0.0.1",
        f"--ServerApp.port={port}",
        f"--ServerApp.root_dir={root}",
        "--ServerApp.default_url=/lab/tree/README.md",
        f"--ServerApp.allow_root={os.geteuid() == 0}",
        "--ServerApp.answer_yes=True",
        "--Application.log_level=WARN",
        f"--MultiKernelManager.default_kernel_name={KERNEL}",
        # Else other users of this machine could listen in, and every kernel says so.
        "--KernelManager.transport_encryption=auto",
        # A default of the server's (90000) of which the server itself complains.
        "--ServerApp.tornado_settings={'ws_ping_timeout': 30000}",
        "--LabApp.custom_css=True",
        "--LabApp.news_url=None",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
        "--LabApp.extension_manager=readonly",
        # It looks for language servers, which asks npm, which writes into the home folder.
        "--ServerApp.jpserver_extensions={'jupyter_lsp': False}",
        # The checkout may be on a disk whose files SQLite cannot lock; this is
        # only a cache of file ids.
        f"--FileIdManager.db_path={make_cache('jupyter', 'data') / 'file_ids.db'}",
    ]


def _trust(root: Path) -> None:
    """Let JupyterLab show the pictures that the course's notebooks were committed with, before
    anything is run. It draws no SVG of a notebook that nobody on this machine has signed."""
    import nbformat
    from nbformat.sign import NotebookNotary

    notary = NotebookNotary(data_dir=str(make_cache("jupyter", "data")))
    for part in ("chapters", "labs", "solutions"):
        for path in (root / part).glob("*.ipynb"):
            notary.sign(nbformat.read(path, as_version=4))


def lab(port: int) -> None:
    """Run JupyterLab for the checkout on 127.0.0.1 until Ctrl-C.

    port: the first one to try; the next free one is taken.
    """
    token = secrets.token_urlsafe(24)
    options = [*_options(ROOT, port), f"--IdentityProvider.token={token}"]  # of this process
    from jupyter_server.serverapp import list_running_servers
    from jupyterlab.labapp import LabApp

    others = [server for server in list_running_servers() if Path(server["root_dir"]) == ROOT]
    options += [f"--ServerApp.open_browser={has_display()}"]
    try:
        app = LabApp.initialize_server(argv=options)
    except SystemExit as error:
        raise SetupError(
            "JupyterLab did not start; its own words above say why.\n"
            "`make lab PORT=9000` tries the ports from 9000 on."
        ) from error
    print()
    if others:
        url, known = others[0]["url"], urlencode({"token": others[0]["token"]})
        print(f"Another JupyterLab runs for this checkout already: {url}lab?{known}")
    if app.port != port:
        print(f"Port {port} is taken, so this one uses {app.port}.")
    print(
        f"JupyterLab: http://127.0.0.1:{app.port}/lab/tree/README.md?token={token}\n"
        "Work in my/; Ctrl-C here ends it.",
        flush=True,
    )
    app.start()


@dataclass(frozen=True)
class Running:
    """A JupyterLab started by serve()."""

    pid: int
    port: int
    token: str

    def url(self, place: str = "lab", reset: bool = False) -> str:
        """The address of a page, with the token; reset: with an empty workspace."""
        query = urlencode({"token": self.token})
        return f"http://127.0.0.1:{self.port}/{place}?{'reset&' if reset else ''}{query}"


@contextmanager
def serve(root: Path, open_app_in_browser: bool = False) -> Iterator[Running]:
    """A JupyterLab over the folder `root`, in a process of its own, for tests.

    open_app_in_browser: give scripts in the page the object window.jupyterapp.
    Raises SetupError with its last words if it does not answer within a minute.
    """
    from kvlab.engines.process import free_ports
    from kvlab.install import die_with_parent

    token, [port] = secrets.token_urlsafe(24), free_ports(1)
    command = [sys.executable, "-m", "jupyterlab", *_options(root, port)]
    command += ["--ServerApp.open_browser=False", "--ServerApp.port_retries=0"]
    command += [f"--LabApp.expose_app_in_browser={open_app_in_browser}"]
    log = make_cache("logs") / f"jupyterlab-{port}.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=output,
            env=os.environ | {"JUPYTER_TOKEN": token},
            preexec_fn=die_with_parent,
        )
    running = Running(process.pid, port, token)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                if httpx.get(running.url("api/status"), trust_env=False).is_success:
                    break
            except httpx.TransportError:
                pass
            if process.poll() is not None or time.monotonic() > deadline:
                said = "\n".join(log.read_text().splitlines()[-5:])
                raise SetupError(f"JupyterLab did not start ({log}):\n{said}")
            time.sleep(0.2)
        yield running
    finally:
        process.send_signal(signal.SIGTERM)  # it ends its kernels, then itself
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def has_display() -> bool:
    """Whether a browser opened on this machine would be seen."""
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
