"""Runs worker jobs one after the other, each in its own process. Knows processes and files; knows no measurement."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TIMEOUT_S = 600
QUIET = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}


class Workers:
    """Starts workers from the repository's root; a job that fails is noted, and the run goes on."""

    def __init__(self, root: Path, scratch: Path, environment: Mapping[str, str], threads: int | None) -> None:
        self._root, self._scratch = root, scratch
        fixed = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
        self._environment = {**environment, **QUIET, **fixed}
        self.failures: list[str] = []

    def call(self, label: str, job: dict[str, Any]) -> dict[str, Any] | None:
        """What the job found, or None where it failed; its own messages go to the terminal."""
        asked, answered = self._scratch / "job.json", self._scratch / "result.json"
        answered.unlink(missing_ok=True)
        asked.write_text(json.dumps(job))
        start = time.perf_counter()
        print(f"{label} ... ", end="", flush=True)
        command = [sys.executable, "-m", "benchmarks.worker", str(asked), str(answered)]
        try:
            subprocess.run(
                command, cwd=self._root, env=self._environment, stdout=sys.stderr, timeout=TIMEOUT_S, check=True
            )
        except subprocess.SubprocessError as error:
            ended = f"exit {error.returncode}" if isinstance(error, subprocess.CalledProcessError) else "timed out"
            self.failures.append(f"{label}: {ended}")
            print(ended, flush=True)
            return None
        print(f"{time.perf_counter() - start:.1f} s", flush=True)
        found: dict[str, Any] = json.loads(answered.read_text())
        return found

    def time_command(self, label: str, command: list[str]) -> float | None:
        """Seconds from start to end of a command, or None where it failed."""
        start = time.perf_counter()
        try:
            subprocess.run(command, cwd=self._root, env=self._environment, stdout=subprocess.DEVNULL, check=True)
        except (OSError, subprocess.CalledProcessError):
            self.failures.append(label)
            return None
        return time.perf_counter() - start


def process_environment() -> dict[str, str]:
    """The environment that this command was started in."""
    return dict(os.environ)
