"""The C library's heap: large blocks that are freed leave the process, also those with smaller ones between them."""

import platform
import subprocess
import sys

import pytest

BLOCKS, LARGE_MIB, SMALL_MIB = 24, 20, 1
PROGRAM = f"""
import sys
import torch
from gatewright.train.heap import return_free_pages, return_large_blocks

def resident_mib():
    [line] = [line for line in open("/proc/self/status") if line.startswith("VmRSS:")]
    return int(line.split()[1]) / 1024

def block(mib):
    return torch.ones(int(mib * 2**18))

if sys.argv[1] == "large":
    return_large_blocks()
block({LARGE_MIB} + 1)  # freed: glibc would from now on keep blocks of this size
before = resident_mib()
large, small = zip(*[(block({LARGE_MIB}), block({SMALL_MIB})) for _ in range({BLOCKS})])
del large
if sys.argv[1] == "pages":
    return_free_pages()
print(resident_mib() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are left as they are")
@pytest.mark.parametrize("returned", ["large", "pages", "nothing"])
def test_what_is_freed_leaves_the_process(returned: str) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, returned], capture_output=True, text=True, check=True)
    held_mib = float(done.stdout)
    if returned == "nothing":  # else this test shows nothing
        assert held_mib > BLOCKS * LARGE_MIB * 0.8
    else:
        assert held_mib < BLOCKS * SMALL_MIB + LARGE_MIB
