"""`pgsieve decode`: prints the changes in a source's slot, or in the change log, as an output plugin prints them.

The change log is the table in which the lake stores the slot's messages.

In: the configuration, a plugin and its options
Out: the output of the plugin, as bytes

A slice is the changes between two positions of a slot. The command peeks at the slot, and does not confirm anything.
Raises PgsieveError for a source, slot, plugin or option that does not exist.
"""

from collections.abc import Iterator, Sequence
from itertools import chain, islice

from pgsieve.assets.steps.records.change_log import ChangeLog
from pgsieve.assets.steps.subscription import SlotStream
from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.plugins import find_plugin
from pgsieve.decoding.plugins.driver import PluginDriver, read_binary_changes
from pgsieve.pipelines.config.file import suggest_name
from pgsieve.pipelines.config.model import Config
from pgsieve.pipelines.project import Project, build_project
from pgsieve.resources.postgres.catalog import read_catalog
from pgsieve.resources.postgres.peeks import has_changes, peek_query, read_messages, read_type_names
from pgsieve.resources.postgres.plugin_options import PgoutputOptions, find_protocol_version
from pgsieve.resources.postgres.slot import (
    SlotMissingError,
    read_slot_state,
    translate_slot_errors,
    verify_slot,
)
from pgsieve.resources.postgres.wal import read_flushed_lsn

#: The first protocol version in which Stream Abort messages have an LSN and a time, provided that `streaming` is
#: parallel.
_MIN_PARALLEL_PROTOCOL_VERSION = 4


def decode(
    config: Config,
    source_name: str,
    plugin_name: str,
    options: Sequence[str],
    slot_name: str | None = None,
    *,
    from_change_log: bool = False,
) -> Iterator[bytes]:
    """Yield the output of the plugin, one item for each of its writes. Each of `options` is NAME or NAME=VALUE."""
    plugin_init = find_plugin(plugin_name)
    plugin_options = [_parse_option(text) for text in options]
    project = build_project(config)
    slot_stream = _find_slot_stream(project, source_name, slot_name)
    if from_change_log:
        with PluginDriver(plugin_init, plugin_options) as driver:
            yield from read_binary_changes(driver, _read_change_log_messages(project, slot_stream))
        return
    server_version = slot_stream.source.check_ready()
    with slot_stream.source.connect() as connection:
        type_names_by_oid = read_type_names(connection)
    is_parallel = find_protocol_version(server_version) >= _MIN_PARALLEL_PROTOCOL_VERSION
    with PluginDriver(
        plugin_init,
        plugin_options,
        parallel=is_parallel,
        server_version=server_version,
        type_names=type_names_by_oid,
    ) as driver:
        yield from read_binary_changes(
            driver, _read_slot_messages(slot_stream, server_version, streaming=driver.streaming)
        )


def _parse_option(text: str) -> tuple[str, str | None]:
    name, separator, value = text.partition("=")
    return name, value if separator else None


def _find_slot_stream(project: Project, source_name: str, slot_name: str | None) -> SlotStream:
    """Find the slot stream (a slot with its subscriptions) of a source.

    If the source has several slots, `slot_name` has to name one.
    """
    slot_streams_by_slot = {
        slot_stream.slot: slot_stream
        for slot_stream in project.slot_streams.values()
        if slot_stream.source.name == source_name
    }
    if not slot_streams_by_slot:
        source_names = tuple(
            dict.fromkeys(slot_stream.source.name for slot_stream in project.slot_streams.values())
        )
        raise PgsieveError(
            f'no subscription reads a source "{source_name}"', hint=suggest_name(source_name, source_names)
        )
    if slot_name is None and len(slot_streams_by_slot) > 1:
        raise PgsieveError(
            f'source "{source_name}" has several slots',
            hint=f"name one with --slot: {', '.join(slot_streams_by_slot)}",
        )
    selected_slot = next(iter(slot_streams_by_slot)) if slot_name is None else slot_name
    if selected_slot not in slot_streams_by_slot:
        raise PgsieveError(
            f'source "{source_name}" has no slot "{selected_slot}"',
            hint=suggest_name(selected_slot, tuple(slot_streams_by_slot)),
        )
    return slot_streams_by_slot[selected_slot]


def _read_change_log_messages(project: Project, slot_stream: SlotStream) -> Iterator[bytes]:
    """The messages in the change log, slice by slice."""
    lake = project.lake.open()
    path = ChangeLog(lake, slot_stream).path
    delta_rs = lake.require_delta_rs(
        PgsieveError(
            f'lake "{lake.uri}" can be read only by Spark, and decode does not start Spark',
            hint="leave out --from-change-log to read the changes that wait in the slot",
            sqlstate="0A000",
        )
    )
    with lake.access.translate_errors(path):
        if not delta_rs.exists(path):
            raise PgsieveError(
                f'source "{slot_stream.source.name}": the change log has nothing of slot "{slot_stream.slot}" yet',
                hint="`pgsieve run` reads the slot into it",
            )
        slices = delta_rs.open_slices(path)
        for end_lsn in slices.list_ends_after(0):
            yield from slices.read_messages(end_lsn)


def _read_slot_messages(slot_stream: SlotStream, server_version: int, *, streaming: bool) -> Iterator[bytes]:
    """The messages that wait in the slot, up to the LSN to which the server has flushed its WAL."""
    source, slot = slot_stream.source, slot_stream.slot
    with source.connect() as connection:
        state = read_slot_state(connection, slot)
        if state is None:
            raise SlotMissingError(
                f'source "{source.name}": replication slot "{slot}" does not exist',
                hint="`pgsieve run` creates it",
                sqlstate="42704",
            )
        verify_slot(state, source.name, slot, None)
        server_catalog = read_catalog(connection)
        catalog = slot_stream.with_defined_publications(server_catalog)
        publications = slot_stream.without_missing_publications(catalog).slot_publications(catalog)
        missing_publications = [name for name in publications if name not in server_catalog.publications]
        if missing_publications or not publications:
            raise PgsieveError(
                f'source "{source.name}": the slot "{slot}" is read with publications that do not exist:'
                f" {', '.join(missing_publications) or slot_stream.capture}",
                hint="`pgsieve run` creates them",
                sqlstate="42704",
            )
        end_lsn = read_flushed_lsn(connection)
        options = PgoutputOptions(
            publications,
            streaming="parallel" if streaming else "off",
            messages=True,
        )
        with slot_stream.hold_lock():
            first_query = peek_query(slot, end_lsn, options, server_version, max_messages=1)
            if not has_changes(connection, source.name, slot, first_query):
                return
            batches = read_messages(
                source.make_executor_conninfo(), peek_query(slot, end_lsn, options, server_version)
            )
            # The server decodes the whole slot before it sends the first row. After the first batch the server no longer
            # reads the slot, so the lock is released. Otherwise other processes would wait until everything is printed.
            with translate_slot_errors(source.name, slot, "read"):
                first_batch = list(islice(batches, 1))
    with translate_slot_errors(source.name, slot, "read"):
        for batch in chain(first_batch, batches):
            yield from batch.column("data").to_pylist()
