"""At every cut all replicas together equal one moment of the publisher, whichever process writes and whichever runs."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psycopg
import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder

from pgsieve.assets.steps.apply.replica_tables import apply
from pgsieve.assets.steps.initial_sync.copy import find_tables_to_copy
from pgsieve.assets.steps.operations.initial_copy import copy_tables
from pgsieve.assets.steps.operations.maintenance import Retention, maintain_slot_stream, maintain_subscription
from pgsieve.assets.steps.records.cuts import Cut, Cuts, read_at_cut
from pgsieve.assets.steps.slot_consumption.drain import drain_slot
from pgsieve.assets.steps.slot_consumption.follow import FollowedSlotStream
from pgsieve.assets.steps.subscription import SlotStream, Subscription
from pgsieve.assets.steps.update_transformation.transform import transform
from pgsieve.decoding.lsn import format_lsn
from pgsieve.resources.lake.delta.errors import LakeError
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres.embedded import EmbeddedServer
from pgsieve.resources.postgres.source import Source
from tests.fixtures.background import always
from tests.fixtures.pgsieve_replica import engine
from tests.fixtures.servers import own_database

ACCOUNTS, BALANCE = 20, 100
TOTAL = 2 * ACCOUNTS * BALANCE
_numbers = itertools.count(1)


@dataclass
class Bank:
    """Accounts in two tables, and their replicas. Each step relies only on Delta, as after a restart."""

    conninfo: str
    subscription: Subscription
    lake: Lake

    def transfer(self, random: random.Random, connection: psycopg.Connection) -> None:
        source, target = random.sample(["checking", "savings"], 2)
        amount, accounts = random.randint(1, 9), [random.randint(1, ACCOUNTS) for _ in range(2)]
        with connection.transaction():
            connection.execute(
                f"update {source} set amount = amount - %s where id = %s", [amount, accounts[0]]
            )
            connection.execute(
                f"update {target} set amount = amount + %s where id = %s", [amount, accounts[1]]
            )

    def copy(self) -> None:
        copy_tables(self.subscription, self.lake, find_tables_to_copy(self.subscription, self.lake), _quiet)

    def receive(self) -> None:
        drain_slot(self.subscription.slot_stream, self.lake, [self.subscription], _quiet)
        transform(self.subscription, self.lake, _quiet)

    def run(self) -> None:
        """Do what `pgsieve run` does."""
        self.receive()
        apply(self.subscription, self.lake, _quiet)

    def follow(self) -> None:
        """Do what `pgsieve run --follow` does, for some slices."""
        with FollowedSlotStream(self.subscription.slot_stream, self.lake, _quiet) as streamed:
            for _ in itertools.islice(streamed.read_slice_ends(), 2):
                streamed.append_due_slice()
                transform(self.subscription, self.lake, _quiet)
                apply(self.subscription, self.lake, _quiet)

    def total(self, cut: Cut) -> int:
        """The sum over both tables at a cut, read by another Delta reader."""
        return sum(self._sum(*name, version) for name, version in cut.tables.items())

    def _sum(self, schema: str, table: str, version: int) -> int:
        replica = DeltaTable(self.lake.paths.replica("sub", schema, table), version=version)
        query = QueryBuilder().register("t", replica).execute("select sum(amount) as amount from t")
        return int(pa.table(query.read_all())["amount"][0].as_py())


def _quiet(_: str) -> None:
    pass


@pytest.fixture
def bank(publisher_server: EmbeddedServer, tmp_path: Path) -> Iterator[Bank]:
    name = f"bank_{next(_numbers)}"
    with own_database(publisher_server, name) as database:
        for table in ("checking", "savings"):
            database.execute(f"create table {table} (id int primary key, amount int not null)")
            database.execute(f"insert into {table} select i, {BALANCE} from generate_series(1, {ACCOUNTS}) i")
        database.execute("create publication p for table checking, savings")
        conninfo = publisher_server.conninfo(dbname=name)
        slot_stream = SlotStream(name, Source("bank", conninfo), name, name, False, {"sub": ("p",)})
        yield Bank(conninfo, Subscription("sub", slot_stream), Lake(str(tmp_path), lambda: engine().session))


@pytest.mark.drawn
@pytest.mark.spark
@pytest.mark.parametrize("way", [Bank.run, pytest.param(Bank.follow, marks=pytest.mark.long)])
def test_the_sum_is_the_same_at_every_cut_while_money_moves(bank: Bank, way: Callable[[Bank], None]) -> None:
    """It takes long: writers and readers work during many runs, and files are compacted."""
    seeded, read_cuts = random.Random(1), set()
    retention = Retention(timedelta(), timedelta(), timedelta(hours=2))

    def read() -> None:
        for cut in Cuts(bank.lake, "sub").read_all():
            if (cut.lsn, cut.at) not in read_cuts:
                assert bank.total(cut) == TOTAL, format_lsn(cut.lsn)
                read_cuts.add((cut.lsn, cut.at))
        time.sleep(0.05)

    bank.copy()
    bank.run()
    with (
        psycopg.connect(bank.conninfo, autocommit=True) as connection,
        always(lambda: bank.transfer(seeded, connection)),
        always(read),
    ):
        for number in range(4):
            way(bank)
            if number == 2:  # compaction while writers and readers work
                maintain_subscription(bank.subscription, bank.lake, retention, _quiet)
                maintain_slot_stream(
                    bank.subscription.slot_stream, bank.lake, [bank.subscription], retention, _quiet
                )
    assert len({lsn for lsn, _ in read_cuts}) >= 4
    newest = Cuts(bank.lake, "sub").read_all()[-1]
    spark = engine().session
    frames = read_at_cut(spark, bank.lake.uri, "sub", format_lsn(newest.lsn))
    assert sorted(frames) == ["public.checking", "public.savings"]
    assert sum(frame.agg({"amount": "sum"}).first()[0] for frame in frames.values()) == TOTAL


@pytest.mark.spark
def test_a_table_that_is_ahead_of_the_others_is_in_no_cut_until_they_follow(bank: Bank) -> None:
    """The table was applied by itself, or the run died before it applied the others."""
    bank.copy()
    bank.run()
    seeded = random.Random(2)
    with psycopg.connect(bank.conninfo, autocommit=True) as connection:
        for _ in range(3):
            bank.transfer(seeded, connection)
            bank.receive()
            apply(bank.subscription, bank.lake, _quiet, only_tables=[("public", "checking")])
        bank.run()
        bank.transfer(seeded, connection)
        drain_slot(bank.subscription.slot_stream, bank.lake, [bank.subscription], _quiet)
        bank.lake.records.append(  # slices that are received but not transformed are not in a cut either
            bank.lake.paths.replica("sub", "public", "savings"),
            pa.table({"id": pa.array([0], pa.int32())}),
            None,
        )
        apply(bank.subscription, bank.lake, _quiet)
        bank.run()
    recorded = Cuts(bank.lake, "sub").read_all()
    assert len(recorded) >= 3
    assert [bank.total(cut) for cut in recorded] == [TOTAL] * len(recorded)


def test_a_cut_is_found_by_its_lsn_and_by_the_names_of_any_table(tmp_path: Path) -> None:
    lake = Lake(str(tmp_path), engine)  # type: ignore[arg-type]
    names = [('a"."b', "t"), ("public", 'x"y'), ("S", "Order Lines")]
    for lsn in (10, 20):
        Cuts(lake, "sub").append(Cut(lsn, dict.fromkeys(names, lsn), datetime.now(UTC)))
    assert [cut.lsn for cut in Cuts(lake, "sub").read_all()] == [10, 20]
    assert set(Cuts(lake, "sub").read_all()[-1].tables) == set(names)
    with pytest.raises(LakeError, match='"sub" has no cut at or before 0/9'):
        read_at_cut(None, lake.uri, "sub", "0/9")  # type: ignore[arg-type]
