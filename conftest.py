"""Settings of every pytest run in the checkout.

They make a bare `pytest --nbval labs/` right from any folder in it: notebooks run under
the Python that runs pytest, and what differs from run to run (times, addresses) is not
compared.
"""

import os
from pathlib import Path

import pytest


def pytest_configure(config):
    if not config.getoption("nbval", default=False):
        return
    config.option.nbval_current_env = True
    if os.environ.get("KVLAB_STRICT") == "1":
        # To grade is to look at verdicts: what a learner's own cells print is not compared.
        config.option.nbval, config.option.nbval_lax = False, True
    if config.option.nbval_sanitize_with is None:
        config.option.nbval_sanitize_with = str(
            Path(__file__).parent / "tests" / "nbval_sanitize.cfg"
        )


def pytest_collection_modifyitems(items):
    """A copy of a lab that lost a check must not pass for a lab that was done."""
    if os.environ.get("KVLAB_STRICT") != "1":
        return
    from kvlab import notebooks

    for path in sorted({item.path for item in items if item.path.suffix == ".ipynb"}):
        if missing := notebooks.unchecked(path):
            raise pytest.UsageError(
                f"{path.name} no longer checks {', '.join(missing)}: put the cell back "
                "(it is in labs/), without tags that switch it off."
            )
