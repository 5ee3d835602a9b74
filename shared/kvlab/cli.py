"""`kvlab`: the commands behind the Makefile's targets."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from kvlab.paths import SetupError, run_plainly

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="The apparatus of Follow the Request."
)


@app.command()
def setup(
    engines: Annotated[bool, typer.Option(help="Make the engines' environments too.")] = True,
) -> None:
    """Set up what is missing and register the Jupyter kernel for the user."""
    from kvlab import setup

    setup.complete(user_kernel=True, engines=engines)
    print("Everything is set up. In Jupyter, choose the kernel 'Follow the Request'.")


@app.command()
def lab(
    port: Annotated[int, typer.Option(help="The first port to try.")] = 8888,
) -> None:
    """Set up what is missing and open JupyterLab at the course."""
    from kvlab import jupyter, setup

    setup.complete()
    jupyter.serve(port)


@app.command()
def test() -> None:
    """Set up what is missing and run all tests."""
    from kvlab import setup, suites

    setup.complete(check=False)
    raise typer.Exit(suites.run())


@app.command()
def doctor(
    deep: Annotated[bool, typer.Option(help="Check the model's bytes and import torch too.")] = False,
) -> None:
    """Say in one table what this machine can run, and why not the rest."""
    from kvlab import doctor

    doctor.report(deep)


@app.command()
def selfcheck() -> None:
    """Compare transformers, minikv and vLLM on one prompt."""
    from kvlab import selfcheck

    selfcheck.run()


@app.command()
def pins() -> None:
    """Resolve requirements/*.in into the pins files."""
    from kvlab import pins

    pins.make()


def main() -> None:
    """The console script: what goes wrong in the set-up is told without a traceback."""
    sys.exit(run_plainly(lambda: app()))


if __name__ == "__main__":
    main()
