"""The steps of replication, a folder each, as functions over resources that know no orchestrator.

Each step reads what the one before made durable; what several of them read and write is in `records`.
"""
