"""Row filters, PostgreSQL documentation 29.4: from the text of a WHERE clause to a typed tree, or a refusal.

`analysis` reads one as the server's parser does; the other modules have its rules on types, functions and
constants.
"""
