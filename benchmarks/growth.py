"""How a cost grows with the length: the exponent of the power law that fits best."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def exponent(lengths: Sequence[float], costs: Sequence[float]) -> float:
    """Least-squares slope of log cost over log length: 1 is linear, 2 quadratic.

    >>> round(exponent([1000, 2000, 4000], [7.0, 28.0, 112.0]), 6)
    2.0
    """
    fit = statistics.linear_regression([math.log(each) for each in lengths], [math.log(each) for each in costs])
    return fit.slope
