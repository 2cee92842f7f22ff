"""Arrays of numbers and masks. Changes, keys and rows are referred to by their numbers.

In and out: NumPy arrays. Raises nothing.
"""

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

#: Stands for "no key", "no change" and "no row" in arrays of numbers.
NONE = -1


def mask_new_numbers(numbers: Numbers) -> Mask:
    """Return the mask of the elements that differ from the element before them; the first element is masked, too."""
    is_new = np.ones(len(numbers), np.bool_)
    is_new[1:] = numbers[1:] != numbers[:-1]
    return is_new


def find_first_indexes(keys: Numbers, count: int) -> Numbers:
    """Return the index of the first occurrence of each key in `keys`, or the length of `keys` if it does not occur.

    The keys are the numbers below `count`.
    """
    first_indexes = np.full(count, len(keys), np.int64)
    indexes = np.flatnonzero(keys != NONE)[::-1]
    # The indexes descend. If a key occurs several times, NumPy keeps the value that is assigned last: the first index.
    first_indexes[keys[indexes]] = indexes
    return first_indexes


def are_distinct(keys: Numbers, count: int) -> bool:
    """Whether no key occurs twice. The keys are numbers below `count`."""
    occurs = np.zeros(count, np.bool_)
    occurs[keys] = True
    return int(np.count_nonzero(occurs)) == len(keys)


def fill_none(count: int) -> Numbers:
    """Return an array with `count` times `NONE`."""
    return np.full(count, NONE, np.int64)


def is_in(numbers: Numbers, sorted_numbers: Numbers) -> Mask:
    """Return the mask of those elements of `numbers` that are among `sorted_numbers`, which ascend."""
    if not len(sorted_numbers):
        return np.zeros(len(numbers), np.bool_)
    indexes = np.minimum(np.searchsorted(sorted_numbers, numbers), len(sorted_numbers) - 1)
    is_member: Mask = sorted_numbers[indexes] == numbers
    return is_member
