#!/bin/sh
# Starts a standalone cluster for pgsieve, in the foreground: `spark: {master: "spark://HOST:7077"}`. Ctrl-C ends it.
#   SPARK_HOME=/opt/spark deploy/spark/standalone-cluster.sh [HOST [WORKERS]]
# This host has the master and workers. On other hosts start only a worker: spark-class org.apache.spark.deploy.worker.Worker spark://HOST:7077
# Executors use the Python of `spark: {conf: {spark.pyspark.python: …}}`, with the packages of connect-server.sh. They get Delta's jars
# from pgsieve's driver. They must reach the driver, the database and the lake, which may be a folder only if all hosts mount it.
set -eu
host=${1:-127.0.0.1}
workers=${2:-1}
started=
# shellcheck disable=SC2086 # A list of process ids.
trap 'kill $started 2>/dev/null || true' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
"$SPARK_HOME/bin/spark-class" org.apache.spark.deploy.master.Master --host "$host" --port "${SPARK_PORT:-7077}" --webui-port "${SPARK_WEB_PORT:-8080}" &
started=$!
for _ in $(seq "$workers"); do
    "$SPARK_HOME/bin/spark-class" org.apache.spark.deploy.worker.Worker --host "$host" --webui-port 0 --cores "${CORES:-2}" \
        --memory "${SPARK_MEMORY:-4g}" "spark://$host:${SPARK_PORT:-7077}" &
    started="$started $!"
done
wait
