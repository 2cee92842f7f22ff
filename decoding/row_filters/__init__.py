"""Row filters (section 29.4): from the text of a WHERE clause to a typed tree, or a refusal.

`analysis` reads the text as the server's parser does; the other modules have PostgreSQL's rules on types,
functions and constants.
"""
