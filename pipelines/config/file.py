"""Parses a YAML file without interpreting its values, and replaces `${VAR}` by environment variables.

In: a file and the environment
Out: a `Document`: nested dicts and lists with str as leaves, and the line of each key

Raises only ConfigError. The message contains no value of the file, since a value may be a password.

All values stay text here, and the model of the configuration decides the type of each value. A YAML parser would
otherwise read `on`, `off` and `no` as booleans, `010` as eight and `12:30` as 750 (YAML 1.1). `streaming: off` and a
column named `no` would not work.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path

import yaml

from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.visible import escape_controls

#: The location of a value in the file: the keys and list positions that lead from the top of the file to the value.
Location = tuple[str | int, ...]

_NULL_TAG = "tag:yaml.org,2002:null"
_STR_TAG = "tag:yaml.org,2002:str"
_COLLECTION_TAGS = {"tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"}
_VARIABLE_REFERENCE = re.compile(r"\$\$\{|\$\{([A-Za-z_][A-Za-z0-9_]*)\}|\$\{")


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem in the file.

    - `key`: the dotted path of the key; "" if the problem concerns the whole file
    - `allowed`: the keys or values that are allowed at this place
    """

    key: str
    line: int | None
    message: str
    hint: str | None = None
    allowed: tuple[str, ...] = ()


class ConfigError(PgsieveError):
    """The configuration file has problems. The message has a line for each problem."""

    def __init__(self, file: Path, problems: Iterable[Problem]) -> None:
        self.file = file
        self.problems = tuple(sorted(problems, key=lambda problem: problem.line or 0))
        first_problem = self.problems[0]
        self.line = first_problem.line
        self.key = first_problem.key
        self.allowed = first_problem.allowed
        if len(self.problems) == 1:
            super().__init__(self.describe(first_problem), hint=first_problem.hint)
        else:
            lines = [f"{self.describe(problem)}{_format_hint(problem)}" for problem in self.problems]
            super().__init__("; ".join(lines))
            self.message = "\n".join(map(escape_controls, lines))

    def describe(self, problem: Problem) -> str:
        """Write a problem as `file:line: key: message`. Editors and terminals make a link of the beginning."""
        file_and_line = f"{self.file}:{problem.line}" if problem.line else str(self.file)
        return ": ".join(part for part in (file_and_line, problem.key, problem.message) if part)


def _format_hint(problem: Problem) -> str:
    """Write the hint of a problem in brackets, after a blank; an empty text if there is no hint."""
    return f" ({problem.hint})" if problem.hint else ""


def suggest_name(name: str | None, allowed_names: Sequence[str]) -> str:
    """A hint that lists the allowed names. If one of them is similar to `name`, the hint suggests it."""
    matches = get_close_matches(name, allowed_names, n=1) if name else []
    suggestion = f"did you mean {matches[0]!r}? " if matches else ""
    return (
        f"{suggestion}allowed here: {', '.join(allowed_names)}"
        if allowed_names
        else "no name is allowed here"
    )


def format_location(location: Location) -> str:
    """Write a location as text, for example `sources.shop.publications.emea.tables[0].where`.

    Keys with other characters than letters, digits, `_` and `-` are quoted.
    """
    text = ""
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += ("." if text else "") + (
                part if re.fullmatch(r"[\w-]+", part, re.ASCII) else json.dumps(part)
            )
    return text


@dataclass(frozen=True, slots=True)
class Document:
    """The parsed file.

    - `content`: the keys and values, with str at every leaf
    - `root`: PyYAML's nodes, which have the lines
    """

    content: dict[str, object]
    root: yaml.Node = field(repr=False)

    def find_line(self, location: Location) -> int:
        """The line of the key at a location. If there is no such key, the line of the nearest mapping or list around it."""
        key, node = self._follow_location(location)
        return int((key or node).start_mark.line) + 1

    def find_text(self, location: Location) -> str | None:
        """The text at a location before `${VAR}` is replaced. It may be a password: use it only to suggest an allowed value."""
        _, node = self._follow_location(location)
        return str(node.value) if isinstance(node, yaml.ScalarNode) else None

    def _follow_location(self, location: Location) -> tuple[yaml.Node | None, yaml.Node]:
        """Follow a location through the nodes, as far as they exist.

        Returns two nodes: that of the last key (None if the location ends in a list), and that of the value.
        """
        key: yaml.Node | None = None
        node = self.root
        for part in location:
            if isinstance(node, yaml.MappingNode):
                nodes_by_key = {key_node.value: (key_node, value) for key_node, value in node.value}
                if part not in nodes_by_key:
                    break
                key, node = nodes_by_key[part]
            elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
                key, node = None, node.value[part]
            else:
                break
        return key, node


class _TextLoader(yaml.SafeLoader):
    """A loader for YAML that knows only two kinds of scalar: null and text."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 - PyYAML's own class attribute


_TextLoader.add_implicit_resolver(_NULL_TAG, re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])


class _NodeConverter:
    """Converts PyYAML's nodes to dicts, lists and str, and collects all problems that it finds."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        # The values by the id of their node. An alias in YAML is the same node as its anchor, and gets the same value.
        self._values_by_id: dict[int, object] = {}
        self._ids_in_progress: set[int] = set()
        self.problems: list[Problem] = []

    def _add_problem(
        self, location: Location, node: yaml.Node, message: str, hint: str | None = None
    ) -> None:
        self.problems.append(Problem(format_location(location), node.start_mark.line + 1, message, hint))

    def convert(self, node: yaml.Node, location: Location) -> object:
        if id(node) in self._values_by_id:
            return self._values_by_id[id(node)]
        if id(node) in self._ids_in_progress:
            self._add_problem(location, node, "is an alias of a value that contains it")
            return ""
        self._ids_in_progress.add(id(node))
        if node.tag not in {_STR_TAG, _NULL_TAG} | _COLLECTION_TAGS:
            self._add_problem(
                location, node, "has a YAML tag", "leave the tag (!name) out: the key says what it is"
            )
        if isinstance(node, yaml.MappingNode):
            converted_value: object = self._convert_mapping(node, location)
        elif isinstance(node, yaml.SequenceNode):
            converted_value = [
                self.convert(item, (*location, index)) for index, item in enumerate(node.value)
            ]
        else:
            converted_value = self._convert_scalar(node, location)
        self._ids_in_progress.discard(id(node))
        self._values_by_id[id(node)] = converted_value
        return converted_value

    def _convert_mapping(self, node: yaml.MappingNode, location: Location) -> dict[str, object]:
        entries: dict[str, object] = {}
        lines_by_key: dict[str, int] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode) or not _is_text(key.value):
                self._add_problem(location, key, "has a key that is not text")
            elif key.value in entries:
                self._add_problem(
                    (*location, key.value),
                    key,
                    f"is given twice (first on line {lines_by_key[key.value]})",
                    "keep one of them",
                )
            else:
                lines_by_key[key.value] = key.start_mark.line + 1
                entries[key.value] = self.convert(value, (*location, key.value))
        return entries

    def _convert_scalar(self, node: yaml.Node, location: Location) -> str:
        if node.tag == _NULL_TAG:
            self._add_problem(
                location, node, "has no value", "write one, or leave the key out for its default"
            )
            return ""

        def replace_reference(match: re.Match[str]) -> str:
            name = match[1]
            if match[0] == "$${":
                return "${"
            if name is None:
                self._add_problem(
                    location,
                    node,
                    "has a '${' without a variable's name and a '}'",
                    "write ${NAME} for an environment variable, $${ for the two characters themselves",
                )
            elif name not in self._environ:
                self._add_problem(
                    location,
                    node,
                    f"environment variable {name} is not set",
                    f"set {name}, or $${{ for a literal ${{",
                )
            return self._environ.get(name, "") if name else ""

        text = _VARIABLE_REFERENCE.sub(replace_reference, str(node.value))
        if not _is_text(text):
            self._add_problem(location, node, "contains NUL or invalid Unicode")
            return ""
        return text


def _is_text(value: str) -> bool:
    """True if PostgreSQL could store the text: it has no NUL, and no half of a surrogate pair."""
    return "\0" not in value and not any("\ud800" <= character <= "\udfff" for character in value)


def _convert_syntax_error(error: yaml.YAMLError) -> Problem:
    """Convert a syntax error of PyYAML to a problem.

    PyYAML's excerpt of the line is left out, because it may contain a password.
    """
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    line = mark.line + 1 if mark is not None else None
    problem_text = str(getattr(error, "problem", None) or "")
    if isinstance(error, yaml.composer.ComposerError):
        if problem_text.startswith("found undefined alias"):
            return Problem(
                "", line, "a value begins with * but no anchor (&) of that name exists", "put it in quotes"
            )
        if problem_text == "second occurrence":
            return Problem(
                "", line, "two values begin with & and the same name, as anchors do", "put them in quotes"
            )
        return Problem("", line, "more than one YAML document", "keep one, without a line of ---")
    if isinstance(error, yaml.reader.ReaderError):
        return Problem("", line, "a character that YAML does not allow (a control character?)")
    return Problem(
        "",
        line,
        f"not valid YAML: {problem_text or 'unreadable'}",
        "a key or value with : # { [ * ! or % needs quotes, and so does one that begins with a quote:"
        """ '"Sales"."Order Lines".amount': string""",
    )


def read_file(path: Path) -> str:
    """Read the text of a file, which is in UTF-8, with or without a byte order mark."""
    try:
        content = path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name.
        reason = error.strerror if isinstance(error, OSError) else "not a file name"
        problem = Problem(
            "", None, f"cannot be read: {reason}", "name the file with -c/--config or PGSIEVE_CONFIG"
        )
        raise ConfigError(path, [problem]) from error
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(path, [Problem("", line, "not UTF-8", "save the file as UTF-8")]) from None


def parse_document(text: str, path: Path, environ: Mapping[str, str]) -> Document:
    """Parse the text of a configuration file; `environ` has the variables for `${VAR}`."""
    try:
        root = yaml.compose(text, Loader=_TextLoader)
    except yaml.YAMLError as error:
        raise ConfigError(path, [_convert_syntax_error(error)]) from None
    except RecursionError:
        raise ConfigError(path, [Problem("", None, "not valid YAML: nested too deeply")]) from None
    # PyYAML calls chr() for an escape and int() for a YAML version, and lets their errors pass.
    except (ValueError, OverflowError):
        raise ConfigError(
            path, [Problem("", None, "not valid YAML: an escape or number out of range")]
        ) from None
    if root is None:
        raise ConfigError(path, [Problem("", None, "is empty", "begin with `lake: ./lake`")])
    if not isinstance(root, yaml.MappingNode):
        problem = Problem(
            "", root.start_mark.line + 1, "should be a mapping (key: value)", "begin with `lake: ./lake`"
        )
        raise ConfigError(path, [problem])
    converter = _NodeConverter(environ)
    content = converter.convert(root, ())
    if converter.problems or not isinstance(content, dict):
        raise ConfigError(path, converter.problems)
    return Document(content, root)
