"""Settings of every pytest run in the checkout.

They make a bare `pytest --nbval labs/` right from any folder in it: notebooks run under
the Python that runs pytest, a cell has ten minutes, and what differs from run to run
(times, addresses) is not compared.
"""

from pathlib import Path


def pytest_configure(config):
    if not config.getoption("nbval", default=False):
        return
    config.option.nbval_current_env = True
    if config.option.nbval_cell_timeout == 2000:  # nbval's default: nothing else was asked for
        config.option.nbval_cell_timeout = 600
    if config.option.nbval_sanitize_with is None:
        config.option.nbval_sanitize_with = str(
            Path(__file__).parent / "tests" / "nbval_sanitize.cfg"
        )
