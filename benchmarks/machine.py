"""What the figures were taken on. Reads the CPU's name, versions and the commit; keeps no host name and no path."""

import os
import platform
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

CPUINFO, GOVERNOR = Path("/proc/cpuinfo"), Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16")
BF16_FLAGS = ("avx512_bf16", "amx_bf16", "bf16")
PACKAGES = ("torch", "transformers", "kvouch", "tokenizers", "safetensors", "numpy")
CODE = ("src", "benchmarks", "pyproject.toml")  # what may not differ from the commit, or it is said


def environment(root: Path, torch_sees: dict[str, Any]) -> dict[str, Any]:
    """The record beside the results; `torch_sees` is what a worker found out (threads, CPU capability)."""
    cpu = cpu_facts(_text(CPUINFO))
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9),
        "governor": _text(GOVERNOR).strip() or "unknown",
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": {name: version(name) for name in PACKAGES},
        "torch": torch_sees,
        "commit": _git(root, "rev-parse", "HEAD") or "unknown",
        "dirty": bool(_git(root, "status", "--porcelain", "--", *CODE)),
    }


def cpu_facts(cpuinfo: str) -> dict[str, Any]:
    """Name, family, model and the flags that matter, from the text of /proc/cpuinfo (x86 or ARM)."""
    fields: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    return {
        "model": fields.get("model name") or platform.processor() or platform.machine(),
        "family": fields.get("cpu family", "unknown"),
        "model_number": fields.get("model") or fields.get("CPU part") or "unknown",
        "flags": [flag for flag in FLAGS if flag in flags],
        "bf16_instructions": any(flag in flags for flag in BF16_FLAGS),
    }


def machine_name(record: dict[str, Any]) -> str:
    """A folder name: CPU model, what torch uses of it, cores."""
    words = f"{record['cpu']['model']} {record['torch']['capability']} {record['cores']} cores"
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"\((r|tm)\)|cpu|@.*?ghz", "", words.lower())).strip("-")


def resident_bytes() -> int:
    """Resident set of this process now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def console_script(name: str) -> str:
    """The script of this environment, whether the environment is activated or not."""
    return str(Path(sys.executable).with_name(name))


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _git(root: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()
