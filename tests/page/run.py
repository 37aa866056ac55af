"""Runs one scenario of the page in a real browser: `run.py SCENARIO WEIR`; the scenario is the file
of that name. Run by tests/page.rs, with the Python that scripts/python-clients installs.
"""

import importlib
import sys
from pathlib import Path

SCENARIOS = ("sizes", "change", "restart", "crowded", "hostile", "sparse", "start", "looks", "targets", "jobs")

if __name__ == "__main__":
    scenario, weir = sys.argv[1], Path(sys.argv[2]).resolve()
    if scenario not in SCENARIOS:
        sys.exit(f"run.py: {scenario}: no such scenario (one of {', '.join(SCENARIOS)})")
    importlib.import_module(scenario).run(weir)
