"""Every text in the configuration file gives a config or a refusal; no message contains a secret."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pgsieve.pipelines.config.model import ConfigError
from tests.fixtures.configs import LEAST, WHOLE, outcome


def _values(node: yaml.Node) -> Iterator[tuple[int, int]]:
    """The begin and the end of each value in the documented file."""
    if isinstance(node, yaml.ScalarNode):
        yield node.start_mark.index, node.end_mark.index
    for child in node.value if not isinstance(node, yaml.ScalarNode) else ():
        yield from _values(child[1] if isinstance(child, tuple) else child)


@pytest.mark.parametrize(("begin", "end"), _values(yaml.compose(WHOLE)))
def test_no_message_and_no_traceback_contains_a_value_of_the_environment(begin, end):
    """Put a secret at the place of each value, in a form that most places refuse."""
    secret = "s3cr3t = 'x"
    result = outcome(f"{WHOLE[:begin]}'${{PW}}'{WHOLE[end:]}", PW=secret)
    if isinstance(result, ConfigError):
        shown = "".join(traceback.format_exception(result))
        assert "s3cr3t" not in shown + repr(result) + repr(result.problems)
    else:
        assert "s3cr3t" not in repr(result.sources["shop"].conninfo)
        # Any text is allowed here, or the value belongs to Spark's settings, which no repr shows.
        assert "s3cr3t" in f"{result!r} {result.spark.master} {result.spark.conf}"


@pytest.mark.parametrize(
    "password", ["pw0 pw1", "pw0'pw1", "pw0 pw1=pw2", "*pw0", "%pw0", "[pw0", "pw0: pw1"]
)
def test_no_message_contains_a_part_of_a_password_in_the_file(password):
    for conninfo in (
        f"host=db password={password}",
        f'"host=db password={password}"',
        f"postgres://u:{password}@h/d",
    ):
        for text in (
            LEAST.replace("dbname=shop", conninfo),
            LEAST.replace("{conninfo: dbname=shop}", conninfo),
        ):
            assert "pw" not in str(outcome(text))


# any content of the file

YAMLISH = st.text(alphabet="ab:,-?[]{}'\"#&*!|>%@`\\ \t\n\r${}~<=.0x_U\x00\ud800\u2028é", max_size=60)


@st.composite
def spoiled(draw: st.DrawFn) -> str:
    """The documented file, damaged at one place."""
    at = draw(st.integers(0, len(WHOLE)))
    cut = draw(st.integers(0, 30))
    return WHOLE[:at] + draw(st.one_of(YAMLISH, st.text(max_size=10))) + WHOLE[at + cut :]


@given(st.one_of(st.text(), YAMLISH, YAMLISH.map("lake: ".__add__), spoiled()))
@example("%YAML 1." + "1" * 5000 + "\n---\na: b")
@example("a: &a [*a]")
@example("&a {*a : b}")
@example("? {a: b}\n: c")
@example("a: !!binary x")
@example("!!set {a, b}")
@example("sources: &s {a: {publications: *s}}")
@example("<<: {lake: x}")
@settings(max_examples=int(os.environ.get("PGSIEVE_EXAMPLES", "400")))
def test_any_text_is_a_config_or_a_config_error(text):
    result = outcome(text, A="x")
    if isinstance(result, ConfigError):
        str(result).encode()  # the text can be encoded for output
        assert result.problems
    else:
        assert result.sources
