"""Makes text safe to show in a terminal and on a page.

In: names and messages that may contain text from a database. Out: the same text on one line. Control characters,
characters that change the order of text, and invisible characters are replaced by escapes (Unicode Standard Annex 9,
bidirectional controls). Raises nothing.
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
    r"""Replace control characters and invisible characters by escapes such as `\x1b`, `\n` and `\u202e`."""
    return text if text.isprintable() else _CONTROLS.sub(_escape, text)


def escape_controls_in_json(text: str) -> str:
    r"""Replace control characters and invisible characters in a JSON document by escapes such as `\u009b`.

    Line ends between the parts of the document are not replaced.
    """
    return text if text.isprintable() else _CONTROLS.sub(_json_escape, text)


def _escape(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode("ascii")


def _json_escape(match: re.Match[str]) -> str:
    # JSON has already escaped the characters of C0 in strings. Those that remain belong to the layout of the document.
    return match[0] if match[0] < " " else json.dumps(match[0])[1:-1]
