"""A filter of hashes passes all hashes that it was made of, and few others."""

import numpy as np
import pyarrow as pa
import pytest

from pgsieve.decoding.changes.digests import compute_row_digests, find_marks
from pgsieve.decoding.changes.hashes import compute_row_marks, hash_keys
from pgsieve.decoding.changes.key_filters import KeyFilter, KeySlots


@pytest.mark.parametrize("range_count", [1, 3, 16])
@pytest.mark.parametrize("key_count", [0, 1, 10, 5_000])
def test_all_keys_and_at_most_a_tenth_of_the_others_pass(range_count: int, key_count: int) -> None:
    keys, others = (
        hash_keys(pa.table({"k": pa.array(numbers)}))
        for numbers in (np.arange(key_count), np.arange(key_count, key_count + 20_000))
    )
    slots = KeySlots.make(key_count, range_count)
    parts = [slots.divide(part) for part in np.array_split(keys, 4)]
    bits = [slots.pack_range(number, [part[number] for part in parts]) for number in range(range_count)]
    made = KeyFilter(slots, np.frombuffer(b"".join(bits), np.uint8))
    assert len(made.bits) * 8 == slots.range_count * slots.range_length
    assert made.mask_passing(keys).all()
    assert made.mask_passing(others).mean() < 0.1


def test_the_mark_in_a_digest_is_that_of_its_row() -> None:
    rows = pa.RecordBatch.from_pydict(
        {"a": [1, None, 3], "b": ["x", "yy", None], "c": [0.0, -0.0, float("nan")]}
    )
    assert find_marks(compute_row_digests(rows)).tolist() == compute_row_marks(rows).tolist()
