"""Reads the changes of a batch from the change history, numbers their keys, and puts them in order.

A batch is the changes that one commit applies to a replica, from several slices; a slice is the changes between two
positions of the slot. In: Parquet files of the change history, which has a row for each change of a table. Only some
columns are read: the keys, the operations, the places, and the names of the columns that were not sent. For a replica
that keeps deleted rows, the metadata of these rows, such as the time of a DELETE, is read, too. The place of a change is
one number, made of the number of its slice in the batch and the change's number in this slice. Out: `KeyedChanges`, the
changes in order, in the form that `pgsieve.decoding.changes.net_change` takes. Everything is computed on whole columns; no
Python code runs per change. Raises Arrow's errors, and UnsuitedWayError if the changes take too much memory.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pgsieve.assets.steps.apply.keyed_changes import KeyedChanges
from pgsieve.assets.steps.apply.ways import UnsuitedWayError
from pgsieve.decoding.changes.arrays import NONE, Mask, Numbers
from pgsieve.decoding.changes.columns import COMMIT_TIME, ROW_OPERATIONS, struct_field
from pgsieve.decoding.changes.extent import PLACE_COLUMNS, Extent, compute_places
from pgsieve.decoding.changes.key_changes import DELETE, INSERT, LEAVE, UPDATE, KeyChanges, insert_deletes
from pgsieve.decoding.changes.keys import number_keys
from pgsieve.decoding.changes.metadata_columns import Metadata, make_truncate_metadata, metadata_schema
from pgsieve.resources.lake.delta.conforming import conform
from pgsieve.resources.lake.stores.store import Store

#: The operations; the index of each is its number (`INSERT`, `UPDATE`, `DELETE`) in `net_change`.
_OPERATIONS = pa.array(ROW_OPERATIONS)
_SORT_KEYS = [("commit_lsn", "ascending"), ("ordinal", "ascending")]
_NO_PLACES = np.empty(0, np.int64)


@dataclass(frozen=True)
class UnorderedChanges:
    """Some changes of a change history, in any order.

    - `keys`: the old key of each DELETE or LEAVE (see `split_moves`), and the new key of each other change
    - `move_indices`: the indices of the UPDATEs that sent an old key; `former_keys` has these old keys
    - `sent_masks`: for each column that some change did not send, a mask of the changes that sent it
    - `end_metadata`: for each change, the metadata that its old row gets if the replica keeps this row as a deleted row
    - `truncates`: the TRUNCATEs
    """

    places: Numbers
    commit_lsns: Numbers
    ordinals: Numbers
    operations: npt.NDArray[np.int8]
    keys: pa.Table
    move_indices: Numbers
    former_keys: pa.Table
    sent_masks: Sequence[Mask]
    end_metadata: pa.Table
    truncates: pa.Table

    @property
    def nbytes(self) -> int:
        """How much memory the arrays take."""
        numbers = sum(array.nbytes for array in (self.places, self.commit_lsns, self.ordinals))
        masks = self.operations.nbytes + sum(mask.nbytes for mask in self.sent_masks)
        return (
            sum(int(rows.nbytes) for rows in (self.keys, self.former_keys, self.end_metadata))
            + numbers
            + masks
        )


def read_changes(
    store: Store,
    files: Iterable[str],
    key_schema: pa.Schema,
    unsent_columns: Sequence[str],
    soft_delete_columns: Metadata = (),
) -> Iterator[pa.Table]:
    """Read the columns that `make_keyed_changes` needs from the files of a change history, file by file.

    The other columns are not read, because they may be large.
    """
    columns = list_change_columns(key_schema, unsent_columns, soft_delete_columns)
    return (store.read_columns(file, columns) for file in files)


def list_change_columns(
    key_schema: pa.Schema, unsent_columns: Sequence[str], soft_delete_columns: Metadata
) -> list[str]:
    """List the columns of a change history that `extract_changes` needs."""
    columns = [*PLACE_COLUMNS, *(f"{side}.{name}" for side in ("new", "old") for name in key_schema.names)]
    columns += (
        ["commit_time", *(f"old.{name}" for name, _ in soft_delete_columns)] if soft_delete_columns else []
    )
    return [*columns, "unchanged"] if unsent_columns else columns


def make_keyed_changes(
    changes: Iterable[pa.Table],
    key_schema: pa.Schema,
    unsent_columns: Sequence[str],
    extent: Extent,
    max_bytes: int | None = None,
    soft_delete_columns: Metadata = (),
) -> KeyedChanges:
    """Number the keys of a batch's changes, and put the changes in order.

    Raises UnsuitedWayError if they take more than `max_bytes`.

    `key_schema` has the names and types of the key's columns. `unsent_columns` are the columns that some change did not
    send. `extent` tells which of the `changes` belong to the batch.
    `soft_delete_columns` are the metadata columns of a replica that keeps deleted rows; empty for other replicas.
    """
    parts, size = (
        [
            extract_changes(
                _make_empty_changes(key_schema, soft_delete_columns),
                key_schema,
                unsent_columns,
                extent,
                soft_delete_columns,
            )
        ],
        0,
    )
    for part in changes:
        parts.append(extract_changes(part, key_schema, unsent_columns, extent, soft_delete_columns))
        size += parts[-1].nbytes
        if max_bytes is not None and size > max_bytes:
            raise UnsuitedWayError(f"the keys of the changes take more than {max_bytes} bytes")
    return join_changes(parts, unsent_columns, soft_delete_columns)


def join_changes(
    parts: Sequence[UnorderedChanges], unsent_columns: Sequence[str] = (), soft_delete_columns: Metadata = ()
) -> KeyedChanges:
    """Join one or more parts of a batch's changes; the other parameters are those of `make_keyed_changes`."""
    # If the places of different parts do not overlap, the changes of sorted parts are in order.
    parts = sorted(parts, key=lambda part: int(part.places[0]) if len(part.places) else NONE)
    begins = np.cumsum([0, *(len(part.places) for part in parts)])
    move_indices = np.concatenate(
        [part.move_indices + begin for part, begin in zip(parts, begins, strict=False)]
    )
    keys = [*(part.keys for part in parts), *(part.former_keys for part in parts)]
    numbers_of_keys = number_keys(pa.concat_tables(keys))
    change_count = int(begins[-1])
    operations = np.concatenate([part.operations for part in parts])
    is_end = (operations == DELETE) | (operations == LEAVE)
    new_numbers, old_numbers = (
        np.where(is_end, NONE, numbers_of_keys[:change_count]),
        np.where(is_end, numbers_of_keys[:change_count], NONE),
    )
    # Under REPLICA IDENTITY FULL an UPDATE sends the old key even if the key did not change.
    is_other_key = numbers_of_keys[change_count:] != new_numbers[move_indices]
    old_numbers[move_indices[is_other_key]] = numbers_of_keys[change_count:][is_other_key]
    sent_masks = [
        np.concatenate([part.sent_masks[index] for part in parts]) for index in range(len(unsent_columns))
    ]
    keyed_changes = KeyedChanges(
        _take_distinct_keys(pa.concat_tables(keys), numbers_of_keys),
        KeyChanges(operations, old_numbers, new_numbers, dict(zip(unsent_columns, sent_masks, strict=True))),
        np.concatenate([part.places for part in parts]),
        np.concatenate([part.commit_lsns for part in parts]),
        end_metadata=pa.concat_tables([part.end_metadata for part in parts]) if soft_delete_columns else None,
    )
    truncates = pa.concat_tables([part.truncates for part in parts]).sort_by(_SORT_KEYS)
    keyed_changes = _sort_changes(keyed_changes, np.concatenate([part.ordinals for part in parts]), truncates)
    return (
        _replace_truncates(keyed_changes, truncates, soft_delete_columns)
        if soft_delete_columns
        else keyed_changes
    )


def _make_empty_changes(key_schema: pa.Schema, soft_delete_columns: Metadata) -> pa.Table:
    types = dict.fromkeys(PLACE_COLUMNS, pa.int64()) | {"operation": pa.string(), "commit_time": COMMIT_TIME}
    row = pa.struct([*key_schema, *metadata_schema(soft_delete_columns)])
    return pa.schema({**types, "unchanged": pa.list_(pa.string()), "new": row, "old": row}).empty_table()


def extract_changes(
    changes: pa.Table,
    key_schema: pa.Schema,
    unsent_columns: Sequence[str],
    extent: Extent,
    soft_delete_columns: Metadata = (),
) -> UnorderedChanges:
    """Extract the row changes and the TRUNCATEs of a batch; the parameters are those of `make_keyed_changes`."""
    places, lsns = compute_places(changes, extent.slices), np.asarray(changes["commit_lsn"])
    is_chosen, is_truncate = extent.mask_changes(changes), pc.equal(changes["operation"], "truncate")
    columns = ["commit_lsn", "ordinal", *(["commit_time"] if soft_delete_columns else [])]
    truncates = changes.select(columns).filter(pc.and_(is_truncate, pa.array(is_chosen)))
    is_chosen &= ~np.asarray(is_truncate)
    if not is_chosen.all():
        changes, places, lsns = changes.filter(pa.array(is_chosen)), places[is_chosen], lsns[is_chosen]
    operations = np.asarray(pc.index_in(changes["operation"], _OPERATIONS)).astype(np.int8)
    keys, old_keys = _extract_keys(changes, key_schema)
    move_indices = np.flatnonzero((operations == UPDATE) & np.asarray(pc.is_valid(changes["old"])))
    return UnorderedChanges(
        places,
        lsns,
        np.asarray(changes["ordinal"]),
        operations,
        keys,
        move_indices,
        old_keys.take(pa.array(move_indices)),
        _mask_sent_values(changes["unchanged"], unsent_columns) if unsent_columns else (),
        conform(
            pa.table({name: struct_field(changes["old"], name) for name, _ in soft_delete_columns}),
            metadata_schema(soft_delete_columns),
        ),
        truncates,
    )


def split_moves(changes: UnorderedChanges, lost_places: Numbers = _NO_PLACES) -> UnorderedChanges:
    """Replace each UPDATE that moves a row to another key by a LEAVE of the old key and an INSERT of the new key.

    Both have the place of the UPDATE. The INSERT lacks the values that the UPDATE did not send. `lost_places` are the places
    of UPDATEs that find no row; they get no INSERT.
    """
    updates, former_keys = changes.move_indices, changes.former_keys
    numbers = number_keys(pa.concat_tables([changes.keys.take(pa.array(updates)), former_keys]))
    # Under REPLICA IDENTITY FULL an UPDATE sends the old key even if the key did not change.
    is_move = numbers[: len(updates)] != numbers[len(updates) :]
    moves, former_keys = updates[is_move], former_keys.filter(pa.array(is_move))
    operations = changes.operations.copy()
    operations[moves] = INSERT
    is_kept = np.ones(len(operations), np.bool_)
    is_kept[moves] = ~np.isin(changes.places[moves], lost_places)
    kept_changes = np.flatnonzero(is_kept)
    source_indices = np.concatenate([moves, kept_changes])
    return UnorderedChanges(
        changes.places[source_indices],
        changes.commit_lsns[source_indices],
        changes.ordinals[source_indices],
        np.concatenate([np.full(len(moves), LEAVE, np.int8), operations[kept_changes]]),
        pa.concat_tables([former_keys, changes.keys.take(pa.array(kept_changes))]),
        updates[:0],
        former_keys.slice(0, 0),
        [is_sent[source_indices] for is_sent in changes.sent_masks],
        changes.end_metadata.take(pa.array(source_indices)),
        changes.truncates,
    )


def _extract_keys(changes: pa.Table, key_schema: pa.Schema) -> tuple[pa.Table, pa.Table]:
    """Extract two tables with a row per change.

    The first has the key of the change: for a DELETE the old key, otherwise the new key. The second has the old key, or
    NULLs if it was not sent.
    """
    keys, old_keys = (
        conform(pa.table({name: struct_field(changes[side], name) for name in key_schema.names}), key_schema)
        for side in ("new", "old")
    )
    is_delete = pc.equal(changes["operation"], "delete").combine_chunks()
    if pc.any(is_delete).as_py():
        keys = pa.table(
            {name: pc.if_else(is_delete, old_keys[name], keys[name]) for name in key_schema.names}, key_schema
        )
    return keys, old_keys


def _mask_sent_values(unchanged: pa.ChunkedArray, unsent_columns: Sequence[str]) -> list[Mask]:
    """For each of `unsent_columns`, make a mask of the changes that sent it.

    `unchanged` has for each change the names of the columns that it did not send.
    """
    lists = unchanged.combine_chunks()
    change_indices, names = np.asarray(pc.list_parent_indices(lists)), lists.flatten()
    masks = []
    for name in unsent_columns:
        is_sent = np.ones(len(lists), np.bool_)
        is_sent[change_indices[np.asarray(pc.equal(names, name))]] = False
        masks.append(is_sent)
    return masks


def _take_distinct_keys(keys: pa.Table, numbers: Numbers) -> pa.Table:
    """Take each distinct key once, in the order of their numbers; `numbers` has the number of each row of `keys`."""
    first_rows = np.zeros(int(numbers.max(initial=-1)) + 1, np.int64)
    first_rows[numbers[::-1]] = np.arange(len(numbers))[::-1]
    return keys.take(pa.array(first_rows))


def _sort_changes(changes: KeyedChanges, ordinals: Numbers, truncates: pa.Table) -> KeyedChanges:
    if not (np.diff(changes.places) > 0).all():
        order, key_changes = np.argsort(changes.places, kind="stable"), changes.changes
        ordinals = ordinals[order]
        changes = KeyedChanges(
            changes.keys,
            KeyChanges(
                key_changes.operations[order],
                key_changes.old_keys[order],
                key_changes.new_keys[order],
                {name: is_sent[order] for name, is_sent in key_changes.is_sent_by_column.items()},
            ),
            changes.places[order],
            changes.commit_lsns[order],
            end_metadata=None if changes.end_metadata is None else changes.end_metadata.take(pa.array(order)),
        )
    lsns, truncate_indices = changes.commit_lsns, []
    for lsn, ordinal in zip(
        truncates["commit_lsn"].to_pylist(), truncates["ordinal"].to_pylist(), strict=True
    ):
        begin, end = (
            int(index) for index in (np.searchsorted(lsns, lsn), np.searchsorted(lsns, lsn, "right"))
        )
        truncate_indices.append(begin + int(np.searchsorted(ordinals[begin:end], ordinal)))
    return replace(
        changes,
        truncate_indices=tuple(truncate_indices),
        truncate_lsns=tuple(truncates["commit_lsn"].to_pylist()),
    )


def _replace_truncates(
    changes: KeyedChanges, truncates: pa.Table, soft_delete_columns: Metadata
) -> KeyedChanges:
    """Replace each TRUNCATE by a DELETE of each key that may have a row, with the metadata that its deleted row gets."""
    if not changes.truncate_indices:
        return changes
    key_changes, source_indices = insert_deletes(
        changes.changes, changes.truncate_indices, changes.keys.num_rows
    )
    truncated_metadata = make_truncate_metadata(truncates, soft_delete_columns)
    return KeyedChanges(
        changes.keys,
        key_changes,
        # A TRUNCATE has no new row, so its place is never used.
        np.append(changes.places, np.full(truncates.num_rows, NONE))[source_indices],
        np.append(changes.commit_lsns, np.asarray(truncates["commit_lsn"]))[source_indices],
        end_metadata=pa.concat_tables([changes.end_metadata, truncated_metadata]).take(
            pa.array(source_indices)
        ),
        truncated_metadata=truncated_metadata.slice(0, 1),
    )
