"""Where pulled models live. Reads one variable of the environment; knows nothing of what lies there."""

import os
from pathlib import Path

VARIABLE = "KVOUCH_HOME"


def kvouch_home() -> Path:
    """The folder that KVOUCH_HOME names (`~` is expanded), or `~/.cache/kvouch` where it is unset or empty."""
    named = os.environ.get(VARIABLE)
    return Path(named).expanduser() if named else Path.home() / ".cache" / "kvouch"
