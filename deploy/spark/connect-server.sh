#!/bin/sh
# Starts a Spark Connect server for pgsieve, in the foreground: `spark: {master: "sc://HOST:15002"}`.
#   SPARK_HOME=/opt/spark PYSPARK_PYTHON=/opt/workers/bin/python deploy/spark/connect-server.sh [ADDRESS [PORT]] [--conf …]
# The workers' Python needs the minor version of pgsieve's Python, and: pip install numpy pyarrow psycopg[binary] adbc-driver-postgresql deltalake.
# Without TLS and a token, any client that reaches the port can run code: let only trusted hosts reach it.
# LAKE_ON_S3=/path/to/pgsieve-log-store.jar (in pgsieve/resources/lake/stores/log_store) for a lake at s3://.
set -eu
address=127.0.0.1
port=15002
case ${1:--} in -*) ;; *) address=$1; shift ;; esac
case ${1:--} in -*) ;; *) port=$1; shift ;; esac
packages=io.delta:delta-spark_4.1_2.13:4.4.0
if [ -n "${LAKE_ON_S3:-}" ]; then
    sdk=2.29.52
    packages=$packages,org.apache.hadoop:hadoop-aws:3.4.2,software.amazon.awssdk:s3:$sdk,software.amazon.awssdk:s3-transfer-manager:$sdk
    packages=$packages,software.amazon.awssdk:sts:$sdk
    set -- --jars "$LAKE_ON_S3" --conf spark.delta.logStore.s3a.impl=pgsieve.lake.ConditionalPutLogStore \
        --exclude-packages software.amazon.awssdk:bundle "$@"
fi
exec "$SPARK_HOME/bin/spark-submit" --class org.apache.spark.sql.connect.service.SparkConnectServer \
    --master "${SPARK_MASTER:-local[*]}" --driver-memory "${SPARK_MEMORY:-4g}" --packages "$packages" \
    --conf spark.sql.extensions=io.delta.sql.DeltaSparkSessionExtension \
    --conf spark.sql.catalog.spark_catalog=org.apache.spark.sql.delta.catalog.DeltaCatalog \
    --conf "spark.connect.grpc.binding.address=$address" --conf "spark.connect.grpc.binding.port=$port" \
    "$@" spark-internal
