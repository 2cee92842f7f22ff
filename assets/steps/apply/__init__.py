"""The fourth step: changes of a partition root or a table become one commit of its replica, then a cut.

`net_change` reduces them to one row per key (by the rules of `tenures` where rows move); `equal_rows` counts where
there is no key; `writer` merges.
"""
