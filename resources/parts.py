"""Into how many parts work is cut: as its bytes ask for, and so that whoever runs parts beside each other shares it evenly.

In: bytes, the most that one part should have, and how many parts are run at a time. Out: a number. Raises nothing.
"""

#: So many bytes are worth a part of their own.
LEAST_BYTES = 4 * 1024 * 1024


def number_of_parts(size: int, most: int, beside: int) -> int:
    """How many parts `size` bytes make, of at most `most` each; a multiple of `beside`, where the parts are not too small for that."""
    shared = max(1, min(beside, size // LEAST_BYTES))
    return -(-max(1, -(-size // most)) // shared) * shared
