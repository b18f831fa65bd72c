"""Folders that compilers, kernels and model loaders write to without being asked: where they are, and what is left."""

import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from gatewright.probe.children import Wanted
from gatewright.probe.storage import SHARED, existing, file_system, free_inodes
from gatewright.spec.probe import Cache

HOME = "~"
PLACES: tuple[tuple[str, str], ...] = (
    ("HF_HOME", "~/.cache/huggingface"),
    ("TRITON_CACHE_DIR", "~/.triton/cache"),
    ("TORCHINDUCTOR_CACHE_DIR", "{tmp}/torchinductor_{user}"),
    ("TORCH_EXTENSIONS_DIR", "~/.cache/torch_extensions"),
    ("TMPDIR", "{tmp}"),
)
"""Variable, and where its tool goes without it."""
AMD_PLACES: tuple[tuple[str, str], ...] = (
    ("MIOPEN_USER_DB_PATH", "~/.config/miopen"),
    ("MIOPEN_CUSTOM_CACHE_DIR", "~/.cache/miopen"),
)


def measure_caches(wanted: Wanted) -> tuple[str, list[dict[str, object]]]:
    places = (*PLACES, *(AMD_PLACES if Path("/dev/kfd").exists() else ()))
    caches = [look(name, default, os.environ) for name, default in places]
    shared = [cache.variable for cache in caches if cache.shared]
    bad = [cache.variable for cache in caches if not cache.writable]
    text = f"{len(caches)} folders; shared by nodes: {', '.join(shared) or 'none'}"
    return text + (f"; not writable: {', '.join(bad)}" if bad else ""), [asdict(cache) for cache in caches]


def look(variable: str, default: str, environment: Mapping[str, str]) -> Cache:
    """The cache's folder, or the one that it would be made in."""
    user = environment.get("USER", "") or str(os.getuid())
    given = environment.get(variable)
    path = Path(given or default.format(tmp=tempfile.gettempdir(), user=user)).expanduser()
    there = existing(path)
    space, home = os.statvfs(there), Path(HOME).expanduser()
    kind = file_system(there)
    return Cache(
        variable=variable,
        path=str(path),
        given=given is not None,
        kind=kind,
        shared=kind in SHARED,
        in_home=path.resolve().is_relative_to(home.resolve()),
        writable=os.access(there, os.W_OK | os.X_OK),
        free_bytes=space.f_bavail * space.f_frsize,
        free_inodes=free_inodes(space),
    )
