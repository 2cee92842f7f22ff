"""A Dagster project with assets of its own, which read replicas of a PostgreSQL database."""
