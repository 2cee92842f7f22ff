"""Runs pgsieve from Airflow 3: a run every ten minutes, maintenance and a check every night.

Airflow's workers need `pgsieve` on their PATH, from a separate environment, and PGSIEVE_CONFIG with the path of pgsieve.yaml.
A task fails if pgsieve's exit code is not 0. The task's log has the remedy.
"""

from datetime import UTC, datetime, timedelta

from airflow.providers.standard.operators.bash import BashOperator
from airflow.sdk import DAG

FIRST = datetime(2026, 1, 1, tzinfo=UTC)

with DAG(
    "pgsieve_run",
    schedule=timedelta(minutes=10),
    start_date=FIRST,
    catchup=False,
    max_active_runs=1,  # A second run would wait for the slot.
):
    BashOperator(
        task_id="run",
        bash_command="pgsieve run --log-format json",
        append_env=True,
        retries=1,
        retry_delay=timedelta(minutes=2),
    )

with DAG("pgsieve_nightly", schedule="30 3 * * *", start_date=FIRST, catchup=False, max_active_runs=1):
    maintain = BashOperator(task_id="maintain", bash_command="pgsieve maintain", append_env=True, retries=1)
    # Exit code 1 means that a replica differs from the publisher, so a second attempt would fail, too.
    check = BashOperator(task_id="check", bash_command="pgsieve check", append_env=True, retries=0)
    maintain >> check
