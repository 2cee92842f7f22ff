"""Wiring: config file, Dagster definitions, command line."""
