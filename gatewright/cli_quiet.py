"""What must be said to libraries before they are imported."""

import logging
import os


def quiet_libraries() -> None:
    """Keeps libraries from asking a hub, from announcing kernels that a CPU does not need, and threads from spinning.

    On a machine that others use too, OpenMP threads that spin while they wait cost many times what they save. Tensors
    in host memory get pages of 2 MiB where the system allows it: giving such a block back costs few page faults.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
