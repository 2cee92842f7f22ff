"""Operations besides the four steps: maintaining the lake, dropping a subscription, copying tables again, and others.

A user runs them by a command, or a schedule runs them.
"""
