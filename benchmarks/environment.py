"""The machine, the versions and the commit of a result."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

import torch

import fastlayers
from fastlayers.backends import available


def environment(device: torch.device) -> dict[str, object]:
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        "driver": output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version("triton"),
        "liger_kernel": version("liger_kernel"),
        "fastlayers": fastlayers.__version__,
        # CI and rented machines have a copy of the tree without .git, so the caller passes the commit.
        "commit": os.environ.get("GIT_COMMIT") or output_of("git", "describe", "--always", "--dirty", "--abbrev=10"),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "backends": available(),
    }


def version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def output_of(*command: str) -> str | None:
    """The first line that a command prints; None if the command does not exist or fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=10, cwd=Path(__file__).parent, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().partition("\n")[0] or None


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{name}, {os.cpu_count()} cores"
