"""FOR ALL SEQUENCES (section 29.8 of 19's manual): a publication that pgsieve takes, and of which it replicates no table."""

from __future__ import annotations

import json

from tests.fixtures.shop import Shop


def test_a_publication_of_sequences_is_no_error_alone_or_beside_tables(shop: Shop) -> None:
    shop.database.execute("CREATE SEQUENCE one; CREATE PUBLICATION seqs FOR ALL SEQUENCES")
    shop.configure(
        subscriptions={
            "beside": {"source": "shop", "publications": ["q", "seqs"]},
            "alone": {"source": "shop", "publications": ["seqs"]},
        }
    )
    ended, validated = shop.cli("validate", "--json")
    assert (ended, json.loads(validated)["problems"]) == (0, [])
    assert shop.cli("run")[0] == 0
    assert shop.ids("beside", "stock") == [1, 2, 3, 4]
