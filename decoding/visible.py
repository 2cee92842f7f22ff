"""Text that is safe to show in a terminal and on a page: control characters become visible escapes.

In: names, messages and reasons, of which a part may come from a database. Out: the same on one line, without
control characters, and without those that reorder text or are invisible (Unicode Standard Annex 9,
bidirectional controls). Raises nothing.
"""

from __future__ import annotations

import json
import re
from typing import Final

#: Controls of C0 and C1, bidirectional and invisible formatting, ends of lines and paragraphs, lone surrogates, tags.
_STEERING: Final = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff"
    "\U000e0000-\U000e007f]"
)


def visible(text: str) -> str:
    r"""The text with `\x1b`, `\n`, `\u202e` in place of such characters."""
    return text if text.isprintable() else _STEERING.sub(_escaped, text)


def visible_json(text: str) -> str:
    r"""A JSON text with the same meaning, with `\u009b` and the like within its strings.

    Its own line ends stay.
    """
    return text if text.isprintable() else _STEERING.sub(_json_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode("ascii")


def _json_escaped(match: re.Match[str]) -> str:
    # JSON itself escapes those of C0: the remaining ones are its layout.
    return match[0] if match[0] < " " else json.dumps(match[0])[1:-1]
