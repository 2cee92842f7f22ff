"""Operations outside the four steps: maintenance of the lake, dropping a subscription, copying tables again.

A user asks for them by name, or a schedule runs them.
"""
