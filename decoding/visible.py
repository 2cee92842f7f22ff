"""Text that is safe to show in a terminal and on a page: control characters become visible escapes.

In: names, messages and reasons, parts of which may come from a database. Out: the same text on one line, with
escapes for control characters and for characters that reorder text or are invisible (Unicode Standard Annex
9, bidirectional controls). Raises nothing.
"""

from __future__ import annotations

import json
import re
from typing import Final

#: Controls of C0 and C1, bidirectional and invisible formatting, ends of lines and paragraphs, lone
#: surrogates, tags.
_CONTROLS: Final = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff"
    "\U000e0000-\U000e007f]"
)


def visible(text: str) -> str:
    r"""The text with escapes such as `\x1b`, `\n` and `\u202e` in place of these characters."""
    return text if text.isprintable() else _CONTROLS.sub(_escaped, text)


def visible_json(text: str) -> str:
    r"""The same JSON document with escapes such as `\u009b` in its strings.

    Line ends between its parts stay.
    """
    return text if text.isprintable() else _CONTROLS.sub(_json_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode("ascii")


def _json_escaped(match: re.Match[str]) -> str:
    # JSON escapes the characters of C0 in strings; the others are the document's layout.
    return match[0] if match[0] < " " else json.dumps(match[0])[1:-1]
