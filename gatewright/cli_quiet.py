"""Libraries that talk while they are imported, told to be quiet before they are."""

import logging
import os


def quiet_libraries() -> None:
    """Keeps libraries from asking a hub, and from announcing kernels that a CPU does not need."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
