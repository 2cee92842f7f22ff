package pgsieve.lake;

import org.apache.spark.sql.classic.SparkSession;
import org.apache.spark.sql.connect.service.SparkConnectService$;

/**
 * Serves Spark Connect until it is ended, as Spark's own SparkConnectServer does. But that server isolates the artifacts of each
 * session. Then each session would have its own Python daemon, which would import all modules again. Here sessions share one.
 */
public final class EngineServer {
    private EngineServer() {}

    public static void main(String[] arguments) {
        try {
            SparkSession session = SparkSession.builder().config("spark.sql.artifact.isolation.enabled", "false").getOrCreate();
            SparkConnectService$.MODULE$.start(session.sparkContext());
            SparkConnectService$.MODULE$.server().awaitTermination();
        } catch (Exception error) {
            error.printStackTrace();
            System.exit(1);
        }
    }
}
