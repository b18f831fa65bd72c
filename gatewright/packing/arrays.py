"""The arrays of the packer and the schedules: whole numbers, such as tokens and documents, and seconds."""

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
