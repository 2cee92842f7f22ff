"""The command line: help, exit codes, and the output on stdout and stderr."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import pgsieve
from pgsieve.decoding.errors import PgsieveError
from pgsieve.pipelines.command_line import app as application
from pgsieve.pipelines.command_line import cli, comparison, console, replication
from pgsieve.pipelines.commands.results import SlotStatus, StatusReport, SubscriptionStatus, TableStatus
from pgsieve.resources.lake.jars import record_jars

ROOT = Path(__file__).parents[3]
COMMANDS = {
    "demo": "pgsieve demo --keep ./demo",
    "init": "pgsieve init --conninfo 'host=db dbname=shop user=pgsieve' --publication sales",
    "run": "pgsieve run sales",
    "resync": "pgsieve resync sales public.orders",
    "skip": "pgsieve skip sales 0/14C0A38",
    "enable": "pgsieve enable sales",
    "drop": "pgsieve drop sales --delete-tables",
    "status": "pgsieve status --json",
    "check": "pgsieve check sales && echo consistent",
    "maintain": "pgsieve maintain sales",
    "validate": "pgsieve validate -c pgsieve.yaml",
    "decode": "pgsieve decode shop --plugin test_decoding -o include-xids=false",
    "read": "pgsieve read sales public.orders --at '2026-03-01 12:00:00+00:00' > orders.csv",
    "restore": "pgsieve restore sales ./sales-before --at 16/B374D848",
    "refilter": "pgsieve refilter emea --from sales --plan",
    "ui": "pgsieve ui --port 3000",
    "jars": "pgsieve jars ./jars",
    "refresh-defs-state": "pgsieve refresh-defs-state",
}
REQUIRED = {
    "decode": ["shop", "--plugin", "json"],
    "resync": ["sales"],
    "skip": ["sales", "0/14C0A38"],
    "enable": ["sales"],
    "drop": ["sales"],
    "read": ["sales"],
    "restore": ["sales", "./before", "--at", "0/1"],
    "refilter": ["sales"],
}
READING = [command for command in COMMANDS if command not in {"demo", "init", "jars"}]

LEAST = """\
lake: ./lake
sources:
  shop: {conninfo: dbname=shop}
subscriptions:
  sales: {source: shop, publications: [p1]}
"""


@pytest.fixture
def invoke(tmp_path, monkeypatch):
    """Run a command in an empty folder, without the environment variables of the caller."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PGSIEVE_CONFIG", raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    return lambda *arguments: CliRunner().invoke(cli.app, arguments, prog_name="pgsieve")


# Help and version


def test_help_lists_every_command_and_an_example(invoke):
    result = invoke("--help")
    assert result.exit_code == 0
    assert all(f" {command} " in result.stdout for command in COMMANDS)
    assert "Example: pgsieve demo" in result.stdout


def test_the_list_of_commands_here_is_complete():
    registered = {each.name or each.callback.__name__ for each in cli.app.registered_commands}
    assert registered == set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(invoke, command):
    result = invoke(command, "--help")
    assert result.exit_code == 0
    assert f"Example: {COMMANDS[command]}" in result.stdout
    assert not re.search(r"<[a-z]", result.stdout), (
        "a value has the name of a type of Python, or a flag has a value"
    )
    assert result.stderr == ""


@pytest.mark.parametrize("command", READING)
def test_help_names_the_default_configuration_file(invoke, command):
    text = " ".join(invoke(command, "--help").stdout.replace("│", " ").split())
    assert "(default: $PGSIEVE_CONFIG, else ./pgsieve.yaml)" in text


def test_without_arguments_help_is_shown(invoke):
    result = invoke()
    assert result.exit_code == 2
    assert "First steps" in result.stdout + result.stderr


def test_version_is_the_projects(invoke):
    result = invoke("--version")
    assert result.exit_code == 0
    assert result.stdout == f"pgsieve {pgsieve.__version__}\n"


# Configuration


@pytest.mark.parametrize("command", READING)
def test_a_missing_file_is_one_error_line_and_a_hint_on_stderr(invoke, command):
    result = invoke(command, *REQUIRED.get(command, []))
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.splitlines() == [
        "error: pgsieve.yaml: cannot be read: No such file or directory",
        "hint: name the file with -c/--config or PGSIEVE_CONFIG",
    ]


@pytest.mark.parametrize("before", [True, False])
def test_config_may_precede_or_follow_the_command(invoke, before):
    option = ("-c", "elsewhere.yaml")
    result = invoke(*option, "status") if before else invoke("status", *option)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: elsewhere.yaml: cannot be read")


def test_config_after_the_command_wins(invoke):
    assert "b.yaml" in invoke("--config", "a.yaml", "status", "--config", "b.yaml").stderr


def test_the_variable_names_the_file(invoke, monkeypatch):
    monkeypatch.setenv("PGSIEVE_CONFIG", "of-the-variable.yaml")
    assert invoke("status").stderr.startswith("error: of-the-variable.yaml: cannot be read")


@pytest.mark.parametrize("command", READING)
def test_every_problem_of_the_file_has_its_own_lines(invoke, tmp_path, command):
    long_name = "s" * 200  # wider than the terminal, and still on one line
    (tmp_path / "pgsieve.yaml").write_text(
        LEAST + f"  {long_name}: {{source: shop, publications: [p]}}\nlakes: x\n"
    )
    result = invoke(command, *REQUIRED.get(command, []))
    assert result.exit_code == 2
    assert result.stderr.splitlines() == [
        f"error: pgsieve.yaml:6: subscriptions.{long_name}: cannot be a name",
        (
            "hint: letters, digits and underscores, no underscore first, 63 at most: "
            "it becomes a folder of the lake and part of an asset key"
        ),
        "error: pgsieve.yaml:7: lakes: unknown key",
        "hint: did you mean 'lake'? allowed here: lake, storage, spark, catalog, retention, dagster, sources, subscriptions",
    ]


@pytest.mark.parametrize("command", ["run", "check", "resync", "skip", "enable", "drop"])
def test_an_unknown_subscription_is_refused(invoke, tmp_path, command):
    (tmp_path / "pgsieve.yaml").write_text(LEAST)
    result = invoke(command, "sale", *REQUIRED.get(command, [])[1:])
    assert result.exit_code == 2
    assert result.stderr.splitlines() == [
        "error: subscription 'sale' is not in pgsieve.yaml",
        "hint: did you mean 'sales'? allowed here: sales",
    ]


@pytest.mark.parametrize(
    "arguments", [("run", "--folow"), ("ui", "--port", "x"), ("ui", "--port", "0"), ("stauts",)]
)
def test_wrong_arguments_are_refused(invoke, arguments):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert arguments[-1] in result.stderr or arguments[1] in result.stderr


# Errors inside a command


def _failing(error: BaseException) -> typer.Typer:
    """An app of pgsieve's own command and option classes, whose command fails."""
    app = typer.Typer(pretty_exceptions_enable=False)
    app.callback()(application.apply_common_options)

    def fail() -> None:
        secret = "s3cr3t"  # noqa: F841 - a variable that a traceback with variables would show
        raise error

    app.command(cls=application.Command)(fail)
    return app


def test_an_error_shows_its_sqlstate_and_is_not_read_as_markup():
    error = PgsieveError("table [red]a[/] :smile:", hint="try [b]", sqlstate="42P10")
    result = CliRunner().invoke(_failing(error), ["fail"])
    assert result.exit_code == 2
    assert result.stderr == "error: table [red]a[/] :smile: [42P10]\nhint: try [b]\n"


def test_an_unexpected_error_is_a_short_line_without_its_text():
    result = CliRunner().invoke(_failing(ValueError("row (1, s3cr3t)")), ["fail"])
    assert result.exit_code == 70
    assert (
        result.stderr == "error: unexpected ValueError\nhint: run `pgsieve --verbose …` for the traceback\n"
    )


def test_verbose_shows_the_traceback_without_variables():
    result = CliRunner().invoke(_failing(ValueError("why")), ["--verbose", "fail"])
    assert result.exit_code == 70
    assert "Traceback (most recent call last)" in result.stderr
    assert "ValueError: why" in result.stderr
    assert result.stderr.endswith("error: unexpected ValueError\n")
    assert result.stderr.count("s3cr3t") == result.stderr.count('secret = "s3cr3t"')


def test_a_commands_exit_code_is_kept():
    assert CliRunner().invoke(_failing(typer.Exit(1)), ["fail"]).exit_code == 1


def test_help_has_no_line_break_within_a_paragraph():
    """Typer keeps line breaks of the source, and a line would then end anywhere on the terminal."""
    for each in [
        *cli.app.registered_commands,
        *cli.app.registered_groups[0].typer_instance.registered_commands,
    ]:
        text = inspect.cleandoc(each.callback.__doc__)
        assert not re.search(r"[^\n]\n[^\n]", text), each.callback.__name__


def test_an_interrupted_question_is_130_too(invoke, monkeypatch):
    assert CliRunner().invoke(_failing(typer.Abort()), ["fail"]).exit_code == 130


def test_an_interrupt_is_130_as_in_a_shell():
    assert CliRunner().invoke(_failing(KeyboardInterrupt()), ["fail"]).exit_code == 130


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        (["status"], "interrupted\n"),
        (["resync", "sales"], "interrupted: committed work stays; repeat the command\n"),
        (
            ["--log-format", "json", "run"],
            '"level": "warning", "message": "interrupted: committed work stays, and the next run continues"}\n',
        ),
    ],
)
def test_an_interrupt_says_what_stays_and_what_to_do(monkeypatch, capfd, arguments, printed):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for module in (comparison, replication):
        monkeypatch.setattr(module, "load_settings", interrupt)
    monkeypatch.setattr(sys, "argv", ["pgsieve", *arguments])
    with pytest.raises(SystemExit) as exit_request:
        cli.main()
    console.log_as_text()
    assert exit_request.value.code == 130
    assert capfd.readouterr().err.endswith(printed)


@pytest.mark.parametrize("signal_name", ["SIGINT", "SIGTERM"])
def test_an_interrupt_during_the_imports_is_said_as_any_other(tmp_path, signal_name):
    # Python imports this module first. It sends the signal when the command line begins to import its modules.
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "class Sender:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'pgsieve.decoding.errors':\n"
        "            sys.meta_path.remove(self)\n"
        f"            os.kill(os.getpid(), signal.{signal_name})\n"
        "sys.meta_path.insert(0, Sender())\n"
    )
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT / 'src'}"}
    done = subprocess.run(
        [sys.executable, "-m", "pgsieve", "-c", "none.yaml", "run"],
        capture_output=True, text=True, env=environ, check=False, timeout=300,
    )  # fmt: skip
    expected = (130, "", "interrupted: committed work stays, and the next run continues\n")
    assert (done.returncode, done.stdout, done.stderr) == expected


@pytest.mark.slow
def test_jars_are_copied_for_a_machine_without_network(invoke, tmp_path, monkeypatch):
    monkeypatch.delenv("PGSIEVE_JARS", raising=False)
    report = json.loads(invoke("jars", "copy", "--json").stdout)
    assert report["folder"] == str(tmp_path / "copy")
    delta, s3 = report["packages"]
    assert delta["package"].startswith("io.delta:delta-spark_")
    assert s3["package"].startswith("org.apache.hadoop:hadoop-aws:")
    jars = list((tmp_path / "copy").glob("*.jar"))
    assert sum(jar.stat().st_size for jar in jars) == delta["bytes"] + s3["bytes"]
    monkeypatch.setenv("PGSIEVE_JARS", report["folder"])
    shown = invoke("jars")
    assert shown.exit_code == 0
    assert delta["package"] in shown.stdout
    assert invoke("jars", "again").exit_code == 2
    monkeypatch.setenv("PGSIEVE_JARS", str(tmp_path))
    refused = invoke("jars")
    assert refused.exit_code == 2
    assert "has no jars of io.delta" in refused.stderr


def test_jars_are_fetched_for_a_folder_where_the_environment_cannot_be_written(invoke, tmp_path, monkeypatch):
    monkeypatch.delenv("PGSIEVE_JARS", raising=False)
    monkeypatch.setattr("sys.prefix", str(tmp_path / "nowhere"))
    refused = invoke("jars")
    assert refused.exit_code == 2
    assert "pgsieve jars FOLDER" in refused.stderr

    def fetched(packages, repositories, file):
        assert Path(repositories["spark.jars.ivy"]).parent == file.parent
        (file.parent / f"{len(packages.coordinates)}.jar").write_bytes(b"jar")
        record_jars(packages.name, f"file://{file.parent}/{len(packages.coordinates)}.jar", file)

    monkeypatch.setattr("pgsieve.resources.lake.jars._fetch", fetched)
    assert json.loads(invoke("jars", "copy", "--json").stdout)["folder"] == str(tmp_path / "copy")
    assert sorted(jar.name for jar in (tmp_path / "copy").glob("*.jar")) == ["1.jar", "4.jar"]


# JSON

REPORT = StatusReport(
    slots=(
        SlotStatus(
            source="shop",
            subscription=None,
            slot="pgsieve_shop",
            exists=True,
            active=False,
            wal_status="reserved",
            confirmed_lsn="0/1BF7B90",
            lag_bytes=20_480,
            change_log_lsn="0/1BF7B90",
        ),
    ),
    subscriptions=(
        SubscriptionStatus(
            name="sales",
            source="shop",
            row_filter="pipeline",
            tables=(TableStatus("public", "größe", "ready", "(region = 'EMEA')", "0/1BF7B90", 4, 17),),
        ),
    ),
)


def test_the_json_of_a_status_holds_every_field(capsys):
    console.print_json(REPORT)
    captured = capsys.readouterr()
    assert json.loads(captured.out) == json.loads(json.dumps(asdict(REPORT)))
    assert json.loads(captured.out)["subscriptions"][0]["tables"][0] == {
        "schema": "public",
        "name": "größe",
        "state": "ready",
        "row_filter": "(region = 'EMEA')",
        "lsn": "0/1BF7B90",
        "version": 4,
        "rows": 17,
        "problem": None,
        "since_copy": [],
        "behind": False,
    }
    assert captured.err == ""


# The process


def _process(*arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environ, check=False, timeout=300
    )


def test_the_console_script_exits_with_the_code(tmp_path):
    result = _process("-m", "pgsieve.pipelines.command_line.cli", "-c", str(tmp_path / "none.yaml"), "run")
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith(f"error: {tmp_path}/none.yaml: cannot be read")


@pytest.mark.drawn
@pytest.mark.slow
@pytest.mark.parametrize(("where", "code"), [("> /dev/full", 2), (">&-", 1), ("2>&- | cat", 0)])
def test_a_full_stdout_gives_exit_code_2_and_a_closed_one_no_traceback(tmp_path, where, code):
    (tmp_path / "pgsieve.yaml").write_text(LEAST)
    shell = f"{sys.executable} -m pgsieve -c {tmp_path}/pgsieve.yaml engine status --json {where}"
    # As in a shell: Python writes at once if PYTHONUNBUFFERED is set, otherwise at its end.
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": ""}
    done = subprocess.run(
        ["sh", "-c", shell], capture_output=True, text=True, env=environ, check=False, timeout=300
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    assert ("No space left on device" in done.stderr) == (code == 2)


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_refusal_that_cannot_be_written_gives_its_exit_code(tmp_path, unbuffered):
    shell = f"{sys.executable} -m pgsieve -c {tmp_path}/none.yaml run 2> /dev/full"
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": unbuffered}
    assert subprocess.run(["sh", "-c", shell], env=environ, check=False, timeout=300).returncode == 2


@pytest.mark.drawn
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", ["--help", "status --help", "--version", "engine"])
def test_help_and_version_that_cannot_be_written_are_refused(arguments, unbuffered):
    shell = f"{sys.executable} -m pgsieve {arguments} > /dev/full"
    environ = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "PYTHONUNBUFFERED": unbuffered,
        "SHELL": "/bin/bash",
    }
    done = subprocess.run(
        ["sh", "-c", shell], capture_output=True, text=True, env=environ, check=False, timeout=300
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines() == [
        "error: stdout cannot be written: No space left on device",
        "hint: make room, or write elsewhere",
    ]


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("pgsieve run s", "sales,sports"),
        ("pgsieve drop sp", "sports"),
        ("pgsieve -c other.yaml check ", "other"),
        ("pgsieve resync -c other.yaml ", "other"),
        ("pgsieve -c nowhere.yaml run ", ""),
    ],
)
def test_a_shell_completes_subscriptions_of_the_file(tmp_path, words, names):
    (tmp_path / "pgsieve.yaml").write_text(LEAST + "  sports: {source: shop, publications: [p2]}\n")
    (tmp_path / "other.yaml").write_text(LEAST.replace("sales", "other"))
    asked = {"_PGSIEVE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    done = subprocess.run(
        [Path(sys.executable).with_name("pgsieve")],
        cwd=tmp_path, env={**os.environ, **asked}, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.stdout.split() == [name for name in names.split(",") if name]


@pytest.mark.slow
def test_a_run_imports_data_frames_and_the_filter_parser_only_when_used(
    tmp_path,
):
    (tmp_path / "pgsieve.yaml").write_text("lake: ./lake\nsources: {shop: {conninfo: dbname=shop}}\n")
    spared = "sorted({'pandas', 'polars', 'sqlglot'} & set(sys.modules))"
    code = (
        "import sys\nfrom pathlib import Path\nfrom types import SimpleNamespace\n"
        "from pgsieve.pipelines.command_line.app import load_settings\n"
        f"load_settings(SimpleNamespace(obj=None), Path({str(tmp_path / 'pgsieve.yaml')!r}))\n"
        "import pyarrow, pgsieve.pipelines.commands.run, adbc_driver_postgresql.dbapi\n"
        f"pyarrow.array([1])\nprint({spared})\n"
        "print(pyarrow.table({'a': [1]}).to_pandas()['a'].tolist())\n"
        "import pandas, polars\n"
        "print(pyarrow.array(pandas.Series([1, None]), from_pandas=True).null_count, polars.DataFrame({'a': [1]}).height)"
    )
    assert _process("-c", code).stdout == "[]\n[1]\n1 1\n"


@pytest.mark.slow
def test_help_and_a_wrong_file_import_neither_dagster_nor_spark():
    heavy = "{'dagster', 'pyspark', 'delta', 'pyarrow', 'sqlglot'} & set(sys.modules)"
    code = (
        "import sys\nfrom pgsieve.pipelines.command_line.cli import app\n"
        "try: app(['run', '-c', '/nowhere.yaml'])\n"
        f"except SystemExit: print(sorted({heavy}))"
    )
    assert _process("-c", code).stdout == "[]\n"
