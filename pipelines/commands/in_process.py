"""Runs Dagster in this process: opens its instance, and materialises assets for a command.

In: a configuration, to open the instance; assets and the name of the task, to materialise them
Out: a run in Dagster's records, which `pgsieve ui` shows

If a step fails, its own error is raised, and not the error by which Dagster reports it. If the run was interrupted,
KeyboardInterrupt is raised.
"""

import fcntl
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import TextIO

import dagster as dg
from dagster._core.execution import compute_logs
from dagster_shared.error import SerializableErrorInfo

from pgsieve.assets.lake import lake_resources
from pgsieve.assets.outcome import IncompleteError, StepFailedError
from pgsieve.assets.translator import DagsterNames
from pgsieve.decoding.errors import PgsieveError
from pgsieve.pipelines.commands.dagster_runs import delete_earlier_idle_runs, make_run_tags
from pgsieve.pipelines.commands.event_log import cache_event_log
from pgsieve.pipelines.commands.results import Progress
from pgsieve.pipelines.commands.ui import find_dagster_home
from pgsieve.pipelines.config.model import Config
from pgsieve.pipelines.project import Project
from pgsieve.resources.tracing import is_traced, send_span, span

_logger = logging.getLogger(__name__)

_STEP_END_TYPES = {dg.DagsterEventType.STEP_SUCCESS, dg.DagsterEventType.STEP_FAILURE}
_INTERRUPT_ERROR_NAMES = {dg.DagsterExecutionInterruptedError.__name__, KeyboardInterrupt.__name__}
_QUIET_RUN_CONFIG = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}
#: How often the output of a step is printed.
_PRINT_INTERVAL_SECONDS = 0.05
#: The number of asset records per query.
_MAX_RECORDS_PER_QUERY = 100
#: The asset keys that the runs of commands use. A translator that a user passes to `pgsieve.build_definitions` does not
#: change these keys.
DEFAULT_NAMES = DagsterNames()


@contextmanager
def open_instance(config: Config) -> Iterator[dg.DagsterInstance]:
    """Open the Dagster instance that records the runs.

    If the environment variable DAGSTER_HOME is set, it names the instance. Otherwise it is the instance of `pgsieve ui`.
    """
    home = find_dagster_home(config)
    home.mkdir(parents=True, exist_ok=True)
    former_home = os.environ.get("DAGSTER_HOME")
    os.environ["DAGSTER_HOME"] = str(home)
    try:
        with _open_databases(home) as instance:
            yield instance
    finally:
        if former_home is None:
            del os.environ["DAGSTER_HOME"]
        else:
            os.environ["DAGSTER_HOME"] = former_home


@contextmanager
def _open_databases(home: Path) -> Iterator[dg.DagsterInstance]:
    """Open the Dagster instance. One process at a time creates its databases, and holds a lock meanwhile.

    If two processes created them at the same time, Dagster's migrations would fail in one of them, or would record a
    version with which the next run fails.
    """
    # If Ctrl-C interrupts the end of a connection to a database, SQLAlchemy logs a traceback, and raises the interrupt.
    logging.getLogger("sqlalchemy.pool").setLevel(logging.CRITICAL)
    with ExitStack() as stack:
        with (home / ".opening").open("ab") as lock:
            with suppress(OSError):  # A file system without locks.
                fcntl.flock(lock, fcntl.LOCK_EX)
            instance = stack.enter_context(dg.DagsterInstance.get())
            # Dagster creates each database at its first use, so each of them is used here once.
            instance.get_runs_count()
            instance.has_asset_key(dg.AssetKey("any"))
            instance.all_instigator_state()
        stack.enter_context(cache_event_log(instance.event_log_storage))
        stack.enter_context(_print_step_output_in_threads())
        yield instance


@contextmanager
def _print_step_output_in_threads() -> Iterator[None]:
    """Within the block, let threads of this process print the output of steps, which Dagster writes into files.

    Dagster would start two processes for each stream of a step: `tail`, and one that ends `tail`. To start and end them
    takes a tenth of a second for each step, and Ctrl-C in a terminal would end them before the step.
    """
    start_printing = compute_logs.execute_posix_tail
    compute_logs.execute_posix_tail = _print_growing_file
    try:
        yield
    finally:
        compute_logs.execute_posix_tail = start_printing


@contextmanager
def _print_growing_file(path: str, stream: TextIO) -> Iterator[tuple[None, None]]:
    """Within the block, print what is appended to a file on a stream, as `tail -F` does.

    At the beginning, Dagster has not yet redirected the stream into the file. Yields no ids of processes.
    """
    try:
        descriptor = os.dup(stream.fileno())
    except (OSError, ValueError, AttributeError):
        yield None, None  # The stream has no file descriptor, so Dagster does not redirect it.
        return
    is_complete = Event()

    def print_until_complete() -> None:
        # If the reader of a pipe has ended, nothing more can be printed.
        with suppress(OSError), os.fdopen(descriptor, "wb") as output, Path(path).open("rb") as file:
            has_ended = False
            while not has_ended:
                has_ended = is_complete.wait(_PRINT_INTERVAL_SECONDS)
                output.write(file.read())
                output.flush()

    printer = Thread(target=print_until_complete, name="pgsieve-step-output", daemon=True)
    printer.start()
    try:
        yield None, None
    finally:
        is_complete.set()
        printer.join()


def materialize(
    instance: dg.DagsterInstance,
    project: Project,
    assets: Sequence[dg.AssetsDefinition],
    progress: Progress,
    task: str,
    tags: dict[str, str] | None = None,
    *,
    raise_on_error: bool = True,
) -> dg.ExecuteInProcessResult | None:
    """Materialise assets in this process.

    Raises the error of a failed step. With `raise_on_error` false, the result of the failed run is returned instead.

    If a table is set aside (its changes are not applied, because of an error) or the subscription is disabled, the
    Dagster run fails, although all other work is done. In that case None is returned, and no error is raised; the
    result of the command names the table or the subscription.
    """
    progress.start(task)
    result = None
    try:
        with span(task), unwrap_step_errors():
            _read_input_records(instance, assets)
            result = dg.materialize(
                list(assets),
                instance=instance,
                resources=lake_resources(project.lake, DEFAULT_NAMES),
                run_config=_QUIET_RUN_CONFIG,
                tags=make_run_tags(task, tags),
                raise_on_error=raise_on_error,
            )
            if is_traced():
                _trace_steps(instance, result.run_id)
    finally:
        progress.finish(task)
    if result is None:
        return None
    if any(error.cls_name in _INTERRUPT_ERROR_NAMES for error in _find_errors(result)):
        raise KeyboardInterrupt
    delete_earlier_idle_runs(instance, result)
    return result


def _read_input_records(instance: dg.DagsterInstance, assets: Sequence[dg.AssetsDefinition]) -> None:
    """Read the records of all assets on which these assets depend. The instance keeps them (`cache_event_log`).

    Otherwise each step would query the records of its own inputs.
    """
    if len(assets) < 2:
        return
    input_keys = sorted({key for asset in assets for key in set(asset.dependency_keys) - asset.keys})
    for start in range(0, len(input_keys), _MAX_RECORDS_PER_QUERY):
        instance.get_asset_records(input_keys[start : start + _MAX_RECORDS_PER_QUERY])


@contextmanager
def unwrap_step_errors() -> Iterator[None]:
    """Raise the error of a step in place of Dagster's error about it.

    IncompleteError (some tables have problems, and all other work is done) is only logged.
    """
    step_error = None
    try:
        yield
    except IncompleteError as incomplete_error:
        _logger.info(incomplete_error.description)
    except dg.DagsterExecutionInterruptedError:
        raise KeyboardInterrupt from None
    except StepFailedError as step_failure:
        step_error = step_failure.error
    except dg.Failure as dagster_failure:
        raise PgsieveError(dagster_failure.description or str(dagster_failure)) from dagster_failure
    if step_error is not None:
        # This is not raised in the handler above, where Python would add Dagster's error as its context.
        raise step_error


def make_run_error(result: dg.ExecuteInProcessResult) -> PgsieveError:
    """Make an error from Dagster's last message, for a run that failed although no step of pgsieve did."""
    messages = [" ".join(error.message.split()) for error in _find_errors(result)]
    return PgsieveError(messages[-1] if messages else f"Dagster's run {result.run_id} failed")


def _find_errors(result: dg.ExecuteInProcessResult) -> list[SerializableErrorInfo]:
    """The errors in the events of a run."""
    errors = [getattr(event.event_specific_data, "error", None) for event in result.all_events]
    return [error for error in errors if error is not None]


def _trace_steps(instance: dg.DagsterInstance, run_id: str) -> None:
    """Record a span of OpenTelemetry for each step of a Dagster run. They become parts of the span that is open now."""
    start_times_by_step: dict[str, float] = {}
    for entry in instance.all_logs(run_id, {dg.DagsterEventType.STEP_START, *_STEP_END_TYPES}):
        event, step_key = entry.get_dagster_event(), entry.step_key
        if step_key is None:
            continue
        if event.event_type == dg.DagsterEventType.STEP_START:
            start_times_by_step[step_key] = entry.timestamp
        elif step_key in start_times_by_step:
            is_failure = event.event_type == dg.DagsterEventType.STEP_FAILURE
            send_span(
                step_key,
                start_times_by_step.pop(step_key),
                entry.timestamp,
                has_failed=is_failure,
                step=step_key,
            )
