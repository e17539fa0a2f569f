"""Commands say what they take without importing what they run with."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("command", ["ask", "generate", "chat", "info"])
def test_help_imports_no_torch(command: str) -> None:
    code = (
        "import sys; from kvouch.cli.main import load_command; "
        f"load_command({command!r}); "
        "print(sorted({'torch', 'tokenizers', 'jinja2', 'numpy', 'rich.progress'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
