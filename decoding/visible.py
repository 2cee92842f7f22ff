"""Makes text safe to show in a terminal and on a page.

In: names and messages with parts from a database. Out: the same text on one line, with escapes for control
characters, and for characters that reorder text or are invisible (Unicode Standard Annex 9, bidirectional
controls). Raises nothing.
"""

from __future__ import annotations

import json
import re
from typing import Final

#: Control characters (C0, C1), bidirectional and invisible formatting, line and paragraph separators, lone
#: surrogates, tags.
_CONTROLS: Final = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff"
    "\U000e0000-\U000e007f]"
)


def escape_controls(text: str) -> str:
    r"""Replace these characters by escapes such as `\x1b`, `\n` and `\u202e`."""
    return text if text.isprintable() else _CONTROLS.sub(_escape, text)


def escape_controls_in_json(text: str) -> str:
    r"""Replace these characters in the strings of a JSON document by escapes such as `\u009b`.

    Line ends stay.
    """
    return text if text.isprintable() else _CONTROLS.sub(_json_escape, text)


def _escape(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode("ascii")


def _json_escape(match: re.Match[str]) -> str:
    # In strings JSON has escaped the characters of C0; the rest of them are the document's layout.
    return match[0] if match[0] < " " else json.dumps(match[0])[1:-1]
