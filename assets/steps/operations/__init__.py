"""Operations outside the four steps: maintenance of the lake, dropping a subscription, copying tables again.

A user runs them by a command, or a schedule does.
"""
