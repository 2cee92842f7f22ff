"""Settings of the publisher's database and role change no row: literals, patterns, NULLs and text keep their meaning.

PostgreSQL documentation, Client Connection Defaults.
"""

from __future__ import annotations

import pytest

from tests.fixtures.oracle import Scenario

pytestmark = pytest.mark.spark

SETTINGS = {
    "standard_conforming_strings": "off",
    "backslash_quote": "off",
    "array_nulls": "off",
    "transform_null_equals": "on",
    "quote_all_identifiers": "on",
    "default_transaction_isolation": "serializable",
    "default_transaction_deferrable": "on",
    "row_security": "off",
    "datestyle": "'SQL, DMY'",
    "intervalstyle": "iso_8601",
    "timezone": "'Asia/Kathmandu'",
    "bytea_output": "escape",
    "extra_float_digits": "-15",
    "search_path": "other",
    "escape_string_warning": "off",
}
#: Row filters as written in a session that has all of these settings.
FILTERS = {
    "paths": r"path = 'C:\\dir' OR path LIKE 'D:\\\\%' OR path ~ '^E:\\\\'",
    "nothing": "path = NULL OR path IN ('C:\\\\dir')",
    "times": "at > '01/03/2020 05:45:00+05:45' OR at = '2020-02-29 00:00:00+00'",
    "bytes": r"y = '\\x5c' OR f > 0.30000000000000004::float8 OR f = 0.1::float8 + 0.2",
}


def test_settings_of_the_database_and_the_role_change_no_row(scenario: Scenario) -> None:
    escaped = scenario.publisher_server.version < 19  # 19 has only standard literals

    def spelled(text: str) -> str:
        return text if escaped else text.replace("\\\\", "\\")

    scenario.subscriber("CREATE SCHEMA other")
    scenario.publisher("CREATE SCHEMA other")
    columns = "id int PRIMARY KEY, path text, at timestamptz, y bytea, f float8, i interval, a text[]"
    for table in FILTERS:
        scenario.tables(
            f"CREATE TABLE other.{table} ({columns}); ALTER TABLE other.{table} REPLICA IDENTITY FULL"
        )
    for name, value in SETTINGS.items():
        if name in {"standard_conforming_strings", "escape_string_warning"} and not escaped:
            continue
        scenario.publisher(f"ALTER DATABASE {scenario.name} SET {name} = {value}")
        scenario.publisher(f"ALTER ROLE postgres IN DATABASE {scenario.name} SET {name} = {value}")
    published = ", ".join(f"{table} WHERE ({where})" for table, where in FILTERS.items())
    with scenario.session() as inherited:
        inherited(spelled(f"CREATE PUBLICATION pub FOR TABLE {published}"))
        assert inherited(spelled("SELECT 'a\\\\b' = 'a' || chr(92) || 'b'")) == [("t",)]

        def insert(first: int) -> None:
            for table in FILTERS:
                inherited(
                    spelled(rf"""
                    INSERT INTO {table} VALUES
                      ({first}, 'C:\\dir', '2020-02-29 00:00:00+00', '\\x5c', 0.1::float8 + 0.2, '1 mon -2 days', '{{NULL}}'),
                      ({first + 1}, 'C:dir', '2020-01-03 00:00:00+00', '\\x5d', 0.3, '1 day', '{{}}'),
                      ({first + 2}, 'D:\\x', '2020-03-01 00:00:00+00', '\\x', 'NaN', NULL, NULL),
                      ({first + 3}, 'D:x', '2020-03-02 00:00:00+00', NULL, 1e-30, '1 year', '{{a\\\\b}}'),
                      ({first + 4}, NULL, NULL, NULL, NULL, NULL, NULL),
                      ({first + 5}, 'E:\\y', 'infinity', '\\xff', '-0', '-1 mon', '{{"NULL"}}')
                """)
                )

        insert(1)
        scenario.subscribe("pub")
        insert(11)
        for table in FILTERS:
            moved = spelled(f"UPDATE {table} SET i = '2 days', path = 'C:\\\\dir' WHERE id IN (12, 13)")
            inherited(f"{moved}; DELETE FROM {table} WHERE id = 1")
        scenario.check()
    assert scenario.builtin is not None
    for table in FILTERS:
        assert 2 <= len(scenario.builtin.rows("other", table)) <= 10, table
