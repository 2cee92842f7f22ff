"""The answers that `pgsieve init` takes for names with quotation marks and commas."""

from __future__ import annotations

import pytest

from pgsieve.decoding.publications.catalog import Catalog, Publication
from pgsieve.pipelines.command_line import interview
from pgsieve.pipelines.command_line.interview import Options, make_choice
from pgsieve.pipelines.commands.init import Choice, Survey
from pgsieve.pipelines.commands.results import SurveyedPublication, SurveyedTable

PUBLICATIONS = tuple(SurveyedPublication(name, ("public.a",), ()) for name in ("a, b", 'c"', "d"))
TABLES = tuple(SurveyedTable("public", name, True, False) for name in ("a", "B", 'c"', "d,e"))
OPTIONS = Options(None, None, False, None, None, (), (), "./lake", None, None)


def answered(
    monkeypatch: pytest.MonkeyPatch, answer: str | None, *publications: SurveyedPublication
) -> Choice:
    """The choice that follows from an answer, or from the default that is offered."""
    monkeypatch.setattr(interview, "_is_interactive", lambda: True)
    monkeypatch.setattr(interview, "_ask", lambda _, default: default if answer is None else answer)
    catalog = Catalog({}, {each.name: Publication(each.name) for each in publications})
    return make_choice(Survey("shop", "me", False, False, None, publications, TABLES, catalog), OPTIONS)


def test_all_tables_are_taken_whatever_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    assert answered(monkeypatch, None).tables == TABLES


def test_a_comma_within_quotes_is_a_part_of_a_table_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert answered(monkeypatch, 'public."d,e", public.a ,public."c"""').tables == TABLES[3::-3] + TABLES[2:3]


def test_all_publications_are_taken_whatever_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    assert answered(monkeypatch, None, *PUBLICATIONS).publications == ("a, b", 'c"', "d")
    assert answered(monkeypatch, 'd, c"', *PUBLICATIONS).publications == ("d", 'c"')
