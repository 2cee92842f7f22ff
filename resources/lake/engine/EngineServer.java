package pgsieve.lake;

import org.apache.spark.sql.classic.SparkSession;
import org.apache.spark.sql.connect.service.SparkConnectService$;

/**
 * Serves Spark Connect until it is ended, as Spark's own SparkConnectServer does; but that has each session's artifacts apart from
 * those of others, and with them its Python: a daemon, and all that is imported, would be started anew for each session.
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
