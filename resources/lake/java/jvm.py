"""Starts the JVM of a Spark session, with an environment and options that pgsieve chooses.

In: the settings of the session.
Out: a JVM that pyspark uses; or the parameters for starting another one.

Settings of the user's shell (locale, time zone, the folder of another Spark) do not change results. The user needs
no entry in /etc/passwd and no home directory. The name of the machine need not be known to DNS. All users of a
machine can read the arguments of a process. So settings and options are passed in files, in the private folder of
this process (`pgsieve.resources.private_folder`). Spark's temporary files are in this folder, too.

https://spark.apache.org/docs/4.1.0/configuration.html#environment-variables
"""

import atexit
import logging
import os
import pwd
import re
import shlex
import struct
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from pgsieve.resources.lake.java import class_archive
from pgsieve.resources.lake.java.login import AGENT
from pgsieve.resources.private_folder import private_folder
from pgsieve.resources.time_limit import limit_time

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Spark's setting for the options of the driver's JVM.
JAVA_OPTIONS = "spark.driver.extraJavaOptions"
_LOCAL_DIRECTORIES = "spark.local.dir"
_LOG_LEVEL = "spark.log.level"
_CATALOG, _WAREHOUSE = "spark.sql.catalogImplementation", "spark.sql.warehouse.dir"
#: Variables that the JVM does not get. Some change the language, the encoding of texts or the time zone; so do variables
#: that begin with `LC_`. The others choose another Spark, its mode, or its folders.
_EXCLUDED_VARIABLES = frozenset(
    (
        "LANG",
        "LANGUAGE",
        "TZ",
        "SPARK_HOME",
        "SPARK_REMOTE",
        "SPARK_TESTING",
        "SPARK_LOCAL_DIRS",
        "SPARK_ANSI_SQL_MODE",
    )
)
_QUIET_LEVELS = ("ERROR", "FATAL", "OFF")
_COLLECTOR_OPTION = re.compile(r"-XX:\+Use\w+GC\b")
_LOG_NAME = "spark.log"
#: Lines of a JVM that does not start. They name no reason, or show options, which may be secret.
_LINE_WITHOUT_REASON = re.compile(
    r"Picked up |NOTE: Picked up |Error: Could not create the Java Virtual Machine|Error: A fatal exception has occurred"
    r"|Error occurred during initialization of VM|.*: CMD: bad array subscript"
)
_LINE_WITH_REASON = re.compile(r"rror|xception|No such file")
#: Environment variables: the file into which a JVM writes its address, and the address at which pyspark finds this JVM.
_ADDRESS_FILE_VARIABLE = "_PYSPARK_DRIVER_CONN_INFO_PATH"
_PORT_VARIABLE, _SECRET_VARIABLE = "PYSPARK_GATEWAY_PORT", "PYSPARK_GATEWAY_SECRET"
#: An environment variable: the options of the Java program that computes the arguments of a JVM.
_LAUNCHER_VARIABLE = "SPARK_LAUNCHER_OPTS"
#: Environment variables of Java with options for each JVM.
_JAVA_VARIABLES = ("JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS", "_JAVA_OPTIONS")
_WAIT_SECONDS = 0.05
#: The time for a session to stop, and then for its JVM to end. The time is limited because the session's cluster
#: may be gone.
_STOP_SECONDS, _END_SECONDS = 5.0, 10.0
#: Settings for a JVM that serves only the process that starts it. Most such JVMs run for seconds. In this time Java's
#: optimising compiler would cost more than it saves. The user's options come after these settings, and so override them.
_OWN_JVM_SETTINGS = {JAVA_OPTIONS: "-XX:TieredStopAtLevel=1"}


class _Launches:
    """What this process has launched: whether any JVM, and the JVM that waits for its session, with its settings."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.has_launched = False
        self.prepared_jvm: tuple[dict[str, str], subprocess.Popen[bytes]] | None = None


_launches = _Launches()


class JavaEndedError(Exception):
    """The JVM ended before it could be used, or it cannot be started.

    The message is the JVM's last output, or the reason.
    """


def make_environment(master: str) -> dict[str, str]:
    """The environment variables of a JVM that this process starts for a session with this master."""
    variables = {name: value for name, value in os.environ.items() if not _must_be_left_out(name, master)}
    # Spark's scripts start a small Java program first, which computes the arguments of the JVM. It starts in half the time
    # with these options.
    has_collector = any(_COLLECTOR_OPTION.search(variables.get(name, "")) for name in _JAVA_VARIABLES)
    # With options for two garbage collectors, the program would not start.
    launcher_options = "-XX:TieredStopAtLevel=1" + (" -XX:+UseSerialGC" if not has_collector else "")
    variables = {_LAUNCHER_VARIABLE: launcher_options, **variables}
    variables |= {"LC_ALL": "C.UTF-8", "TZ": "UTC", "TMPDIR": str(private_folder()), "HOME": _find_home()}
    if master.startswith("local"):
        # Only this machine connects to the JVM. Without this, Spark would look up the machine's name, which DNS may not
        # know.
        variables = {"SPARK_LOCAL_IP": "127.0.0.1", **variables}
    if name := _find_substitute_user_name():
        variables |= {"SPARK_USER": name, "HADOOP_USER_NAME": name}
    return variables


def _must_be_left_out(name: str, master: str) -> bool:
    """True if a variable must be left out of the JVM's environment.

    For a cluster SPARK_HOME is not left out, because the settings of the cluster may be in this folder.
    """
    return name.startswith("LC_") or (
        name in _EXCLUDED_VARIABLES and (name != "SPARK_HOME" or master.startswith("local"))
    )


def _find_home() -> str:
    """The user's home directory, which may contain credentials; a temporary folder if the user has no home directory."""
    return home if (home := _find_named_home()) and os.access(home, os.X_OK) else str(private_folder())


def _find_named_home() -> str | None:
    """The user's home directory as the environment or /etc/passwd names it, or None. It need not exist."""
    home = os.environ.get("HOME") or os.path.expanduser("~")  # noqa: PTH111 - Path.expanduser raises if there is none
    return home if Path(home).is_absolute() else None


def has_writable_home() -> bool:
    """True if this user has a home directory that can be written.

    Without one, Ivy writes its files into the private folder of this process, which is removed when the process ends.
    """
    home = _find_named_home()
    return home is not None and os.access(home, os.W_OK | os.X_OK)


def _find_substitute_user_name() -> str | None:
    """The id of the user as a name, if the user has no entry in /etc/passwd. None for other users."""
    try:
        pwd.getpwuid(os.geteuid())
    except KeyError:
        return str(os.geteuid())
    return None


def write_parameters(settings: Mapping[str, str], folder: Path, jvm_settings: Mapping[str, str]) -> Path:
    """Write the parameters of a JVM into a folder that only this user can read. Return the file of Spark's settings.

    `settings` are the settings of the session. `jvm_settings` are more settings for this JVM, among them Java
    options.
    """
    temporary_folder = private_folder()
    options = [f"-Djava.io.tmpdir={temporary_folder}", f"-Duser.home={_find_home()}", "-Duser.language=en"]
    # With UsePerfData, Java would show the process and its command to all users of the machine.
    options += ["-Dfile.encoding=UTF-8", "-Dsun.jnu.encoding=UTF-8", "-XX:-UsePerfData"]
    # A JVM that has only its first compiler (TieredStopAtLevel=1) would have a code cache of 48 MB. Spark fills it after a
    # while, and then nothing is compiled any more. The default with both compilers is 240 MB.
    options += ["-XX:ReservedCodeCacheSize=240m"]
    if name := _find_substitute_user_name():
        options += [f"-Duser.name={name}", f"-javaagent:{AGENT}={name}"]
    user_options, jvm_options = settings.get(JAVA_OPTIONS, ""), jvm_settings.get(JAVA_OPTIONS, "")
    if _COLLECTOR_OPTION.search(user_options):
        # A JVM with options for two garbage collectors does not start, so the user's option replaces pgsieve's.
        jvm_options = _COLLECTOR_OPTION.sub("", jvm_options)
    all_options = f"{jvm_options} {user_options}"
    is_local = settings["spark.master"].startswith("local")
    options += [
        *(class_archive.make_archive_options(all_options) if is_local else []),
        *shlex.split(all_options),
    ]
    options_path = _write_private(folder / "java.options", "\n".join(map(_quote_option, options)))
    spark_settings = {
        **settings,
        **jvm_settings,
        JAVA_OPTIONS: f"-XX:VMOptionsFile={_escape_option(str(options_path))}",
    }
    if not has_writable_home():
        # Ivy writes lock files even if all jars exist, so it needs a folder that can be written.
        spark_settings = {"spark.jars.ivy": str(temporary_folder / "ivy"), **spark_settings}
    if is_local:
        folders = (
            settings.get(_LOCAL_DIRECTORIES)
            or os.environ.get("SPARK_LOCAL_DIRS")
            or str(temporary_folder.parent)
        )
        spark_settings[_LOCAL_DIRECTORIES] = ",".join(
            str(private_folder(parent.strip())) for parent in folders.split(",")
        )
        if settings.get(_CATALOG) != "hive":
            # Spark creates this folder even if nothing is written there. By default it would be in the current folder.
            spark_settings = {_WAREHOUSE: str(temporary_folder / "warehouse"), **spark_settings}
    return _write_private(folder / "spark.conf", format_properties(spark_settings))


def _write_private(file: Path, text: str) -> Path:
    """Write a file that only its owner can read. It replaces an older file."""
    file.unlink(missing_ok=True)
    with os.fdopen(
        os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8"
    ) as stream:
        stream.write(text)
    return file


def _quote_option(option: str) -> str:
    """An option in the format of a file of JVM options. This format has two kinds of quotation marks, but no escapes."""
    quote = "'" if '"' in option else '"'
    return f"{quote}{option}{quote}"


def _escape_option(text: str) -> str:
    """A text as one option in `spark.driver.extraJavaOptions`. Spark splits the value of this setting at blanks."""
    return '"' + text.replace("\\", r"\\").replace('"', r"\"") + '"'


def format_properties(settings: Mapping[str, str]) -> str:
    """Settings as the text of a Java properties file."""
    escapes = {"\\": r"\\", "\n": r"\n", "\r": r"\r", "\t": r"\t"} | {c: f"\\{c}" for c in " =:#!"}

    def escape(text: str) -> str:
        return "".join(escapes.get(c, c if c.isascii() else _encode_utf16(c)) for c in text)

    return "".join(f"{escape(name)}={escape(value)}\n" for name, value in settings.items())


def _encode_utf16(character: str) -> str:
    """The escapes of a character in a Java properties file: one per UTF-16 code unit."""
    units = character.encode("utf-16-be")
    return "".join(f"\\u{units[i]:02x}{units[i + 1]:02x}" for i in range(0, len(units), 2))


def find_submit_script(master: str) -> str:
    """The path of the script of Spark that starts a JVM.

    It is pyspark's own script, or for a cluster the script in SPARK_HOME.
    """
    import pyspark

    pyspark_folder = Path(pyspark.__file__).parent
    spark_homes = [pyspark_folder, pyspark_folder.parent.parent]
    if not master.startswith("local") and (spark_home := os.environ.get("SPARK_HOME")):
        spark_homes.insert(0, Path(spark_home))
    return next(
        (str(script) for home in spark_homes if (script := home / "bin" / "spark-submit").is_file()),
        "spark-submit",
    )


def is_running() -> bool:
    """True if pyspark already has a JVM in this process."""
    from pyspark import SparkContext

    return SparkContext._gateway is not None  # noqa: SLF001 - pyspark has no public name for it


def start_session(settings: Mapping[str, str], end_seconds: float = _END_SECONDS) -> "SparkSession":
    """The session of this process. It is in the JVM that pyspark already uses, or else in a new JVM.

    The JVM ends with this process, and has `end_seconds` to do so. Raises JavaEndedError if the JVM ends too
    early, and pyspark's errors if the session does not start.
    """
    from pyspark.sql import SparkSession

    # With this variable, pyspark would connect to another master than the configured one.
    os.environ.pop("SPARK_REMOTE", None)
    builder = SparkSession.builder
    for key, value in settings.items():
        # The JVM gets these settings in another form, from `write_parameters`.
        if key not in {JAVA_OPTIONS, _LOCAL_DIRECTORIES}:
            builder = builder.config(key, value)
    if is_running():
        return builder.getOrCreate()
    with _start_gateway(settings, end_seconds):
        return builder.getOrCreate()


@contextmanager
def _start_gateway(settings: Mapping[str, str], end_seconds: float) -> Iterator[None]:
    """Start a JVM, and make pyspark connect to it within the block, as if spark-submit had started Python.

    The JVM ends with this process.
    """
    logging.getLogger().addFilter(_is_of_no_request)
    with _launches.lock:
        process = _take_prepared_jvm(settings) or _launch(settings, end_seconds)
    _import_client()
    gateway_path = _find_gateway_path()
    while process.poll() is None and not gateway_path.is_file():
        time.sleep(_WAIT_SECONDS)
    if not gateway_path.is_file():
        raise JavaEndedError(_summarize_log(private_folder() / _LOG_NAME))
    port, secret = _parse_address(gateway_path.read_bytes())
    os.environ |= {_PORT_VARIABLE: str(port), _SECRET_VARIABLE: secret}
    try:
        yield
    finally:
        del os.environ[_PORT_VARIABLE], os.environ[_SECRET_VARIABLE]


def _is_of_no_request(record: logging.LogRecord) -> bool:
    """True if a record of the root logger is not pyspark's report of a request to the JVM that failed.

    The same error is raised, so its caller reports it. If this process ends while another thread starts the session, the
    report would be a traceback on the terminal.
    """
    return Path(record.pathname).parent.name != "py4j"


def prepare(settings: Mapping[str, str]) -> None:
    """Begin to start a JVM, and do not wait for it. `start_session` uses it if it is called with the same settings.

    If a JVM was started before, nothing happens. Raises JavaEndedError if the JVM cannot be started.
    """
    with _launches.lock:
        if not _launches.has_launched:
            _launches.prepared_jvm = dict(settings), _launch(settings, _END_SECONDS)


def _take_prepared_jvm(settings: Mapping[str, str]) -> "subprocess.Popen[bytes] | None":
    """The JVM that was prepared for these settings. A JVM for other settings is ended."""
    if _launches.prepared_jvm is None:
        return None
    (prepared_settings, process), _launches.prepared_jvm = _launches.prepared_jvm, None
    if prepared_settings == settings:
        return process
    _end_jvm(process, _END_SECONDS)
    return None


def _find_gateway_path() -> Path:
    """The file into which a JVM of this process writes its address."""
    return private_folder() / "gateway"


def _launch(settings: Mapping[str, str], end_seconds: float) -> "subprocess.Popen[bytes]":
    """Start the process of a JVM, which has `end_seconds` to end when this process ends."""
    master, folder = settings["spark.master"], private_folder()
    # Spark's launcher does not handle characters above U+FFFF (parseOptionString() in CommandBuilderUtils.java).
    if max(str(folder)) > "\uffff":
        raise JavaEndedError(
            f"Spark cannot use the temporary folder {folder}: set TMPDIR to a folder without characters above U+FFFF"
        )
    parameters_path, gateway_path = (
        write_parameters(settings, folder, _OWN_JVM_SETTINGS),
        _find_gateway_path(),
    )
    gateway_path.unlink(missing_ok=True)
    with (folder / _LOG_NAME).open("wb") as file:
        # The log may contain values of cells. It goes to the terminal only if the user's log level shows more than errors.
        output = file if settings.get(_LOG_LEVEL, "") in _QUIET_LEVELS else None
        process = subprocess.Popen(  # noqa: S603 - Spark's own script, no shell
            [
                *(
                    find_submit_script(master),
                    "--properties-file",
                    str(parameters_path),
                    "--load-spark-defaults",
                ),
                *shlex.split(os.environ.get("PYSPARK_SUBMIT_ARGS", "pyspark-shell")),
            ],
            env=make_environment(master)
            | {"SPARK_CONNECT_MODE": "0", _ADDRESS_FILE_VARIABLE: str(gateway_path)},
            # The JVM ends when this pipe is closed. The system closes it when this process ends, even by SIGKILL.
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            # In a session of its own, the JVM gets no signal from Ctrl-C. This process gets the signal, and ends the JVM.
            start_new_session=True,
        )
    _launches.has_launched = True
    atexit.register(_end_jvm, process, end_seconds)
    return process


def _import_client() -> None:
    """Import the modules that pyspark needs for its first requests, such as pandas.

    The JVM starts at the same time, so the imports take no extra time.
    """
    with suppress(ImportError):
        import pyspark.sql.pandas.conversion
        import pyspark.testing  # noqa: F401 - imported by NumpyArrayConverter in pyspark/sql/types.py


def _parse_address(content: bytes) -> tuple[int, str]:
    """The port and the secret of a gateway, from the content of its file.

    The content is the port and the length of the secret, as big-endian integers, and the secret.
    """
    port, length = struct.unpack_from(">ii", content)
    return port, content[8 : 8 + length].decode()


def _end_jvm(process: "subprocess.Popen[bytes]", seconds: float) -> None:
    """End the session, and then the JVM. In another order, pyspark's threads would report that the JVM is gone."""
    from pyspark import SparkContext

    assert process.stdin is not None
    try:
        with suppress(Exception), limit_time(_STOP_SECONDS):
            if (context := SparkContext._active_spark_context) is not None:  # noqa: SLF001 - no public name
                _detach_accumulator_server(context)
                context.stop()
        with suppress(Exception), limit_time(_STOP_SECONDS):
            # Without this, Python's garbage collector would later send requests to a JVM that is gone.
            if (gateway := SparkContext._gateway) is not None:  # noqa: SLF001
                gateway.shutdown()
        process.stdin.close()
        process.wait(seconds)
    # Another Ctrl-C means that the user does not want to wait for the JVM.
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        process.kill()


def _detach_accumulator_server(context: Any) -> None:
    """Take the accumulator server away from a context, because `stop` would wait for this server for up to a second.

    pgsieve does not need the server. The server's thread ends with this process. Until then it reports no errors, for
    example that the JVM has ended.
    """
    if (server := getattr(context, "_accumulatorServer", None)) is not None:
        server.handle_error = lambda *_: None
        context._accumulatorServer = None  # noqa: SLF001 - pyspark has no public name for it


def _summarize_log(log_path: Path) -> str:
    """The line of a log that says most: the first line about an error, or else the last line."""
    log = log_path.read_text(encoding="utf-8", errors="replace") if log_path.is_file() else ""
    lines = [
        line.strip() for line in log.splitlines() if line.strip() and not _LINE_WITHOUT_REASON.match(line)
    ]
    errors = [line for line in lines if _LINE_WITH_REASON.search(line)]
    return [*errors[:1], *lines[-1:], "the JVM ended and printed nothing"][0][:300]
