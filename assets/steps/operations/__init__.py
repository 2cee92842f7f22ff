"""What is asked for by name or by the clock: maintenance of the lake, dropping a subscription, copying again.

None of it belongs to one of the four steps.
"""
