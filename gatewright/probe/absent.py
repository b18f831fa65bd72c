"""Absent: there is nothing here to measure, and why."""


class Absent(Exception):
    """Raised by a measurement that has no subject on this machine."""


NO_GPU = "no CUDA or ROCm device is visible to torch"
