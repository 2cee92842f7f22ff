"""Reads and writes structs of Thrift's compact protocol, in which the footer of a Parquet file is written.

In: bytes, or structs. Out: the same structs, or bytes. A struct is known only by the numbers of its fields, so it keeps
fields of later versions of Parquet. Raises IndexError if bytes end too early, and ValueError for an unknown type.

Source: "Thrift Compact protocol encoding" in the documentation of Apache Thrift. Footers have no maps.
"""

from typing import Any

#: The types of values. A field of the type boolean has its value in the type: true or false.
_TRUE, _FALSE, _BYTE, _INT16, _INT32, _INT64, _DOUBLE, _BINARY, _LIST, _SET = range(1, 11)
_STRUCT = 12
_DOUBLE_BYTES = 8
#: A list with at least this many elements has its length after the byte of the type.
_LONG_LIST = 15
#: A field whose number is at most this much greater than the last one's needs no byte for its number.
_MAX_STEP = 15

#: A struct maps the numbers of its fields to pairs of a type and a value. The value of a list is a pair, too: the type
#: of its elements, and a Python list of them. Numbers are `int`, texts and doubles `bytes`.
Struct = dict[int, tuple[int, Any]]


def parse_struct(octets: bytes) -> Struct:
    """Parse the struct with which these bytes begin."""
    return _Parser(octets).parse_struct()


def format_struct(struct: Struct) -> bytes:
    """Return the bytes of a struct, its fields in ascending order."""
    octets = bytearray()
    _append_struct(octets, struct)
    return bytes(octets)


class _Parser:
    """Parses bytes from a position on, which each method moves behind what it has parsed."""

    def __init__(self, octets: bytes) -> None:
        self._octets, self._position = octets, 0

    def parse_struct(self) -> Struct:
        """Parse a struct: fields, and a byte 0 after the last one."""
        octets, struct, number = self._octets, Struct(), 0
        while header := octets[self._position]:
            self._position += 1
            value_type = header & 15
            number = number + (header >> 4) if header > _MAX_STEP else self._parse_signed()
            struct[number] = value_type, self._parse_value(value_type)
        self._position += 1
        return struct

    def _parse_value(self, value_type: int) -> Any:
        if value_type in {_INT32, _INT64, _INT16}:
            return self._parse_signed()
        if value_type == _BINARY:
            return self._take(self._parse_unsigned())
        if value_type == _STRUCT:
            return self.parse_struct()
        if value_type in {_LIST, _SET}:
            return self._parse_list()
        if value_type in {_TRUE, _FALSE}:
            return value_type == _TRUE
        if value_type in {_BYTE, _DOUBLE}:
            return self._take(1 if value_type == _BYTE else _DOUBLE_BYTES)
        raise ValueError(f"a footer has a value of the type {value_type}")

    def _parse_list(self) -> tuple[int, list[Any]]:
        (header,) = self._take(1)
        length, element_type = header >> 4, header & 15
        if length == _LONG_LIST:
            length = self._parse_unsigned()
        if element_type in {_TRUE, _FALSE}:
            return element_type, list(self._take(length))
        return element_type, [self._parse_value(element_type) for _ in range(length)]

    def _parse_unsigned(self) -> int:
        """Parse a number of which each byte has seven bits, the least bits first; the last byte is less than 128."""
        octets, number, shift = self._octets, 0, 0
        while (octet := octets[self._position]) > 127:
            number |= (octet & 127) << shift
            shift += 7
            self._position += 1
        self._position += 1
        return number | octet << shift

    def _parse_signed(self) -> int:
        """Parse a number in the "zigzag" form: 0, -1, 1, -2 are written as 0, 1, 2, 3."""
        number = self._parse_unsigned()
        return (number >> 1) ^ -(number & 1)

    def _take(self, length: int) -> bytes:
        begin, self._position = self._position, self._position + length
        return self._octets[begin : self._position]


def _append_struct(octets: bytearray, struct: Struct) -> None:
    last_number = 0
    for number, (value_type, value) in sorted(struct.items()):
        stored_type = (_TRUE if value else _FALSE) if value_type in {_TRUE, _FALSE} else value_type
        step = number - last_number
        if 0 < step <= _MAX_STEP:
            octets.append(step << 4 | stored_type)
        else:
            octets.append(stored_type)
            _append_signed(octets, number)
        if value_type not in {_TRUE, _FALSE}:
            _append_value(octets, value_type, value)
        last_number = number
    octets.append(0)


def _append_value(octets: bytearray, value_type: int, value: Any) -> None:
    if value_type in {_INT32, _INT64, _INT16}:
        _append_signed(octets, value)
    elif value_type == _STRUCT:
        _append_struct(octets, value)
    elif value_type in {_LIST, _SET}:
        element_type, elements = value
        octets.append(min(len(elements), _LONG_LIST) << 4 | element_type)
        if len(elements) >= _LONG_LIST:
            _append_unsigned(octets, len(elements))
        if element_type in {_TRUE, _FALSE}:
            octets += bytes(elements)
        else:
            for element in elements:
                _append_value(octets, element_type, element)
    else:
        if value_type == _BINARY:
            _append_unsigned(octets, len(value))
        octets += value


def _append_signed(octets: bytearray, number: int) -> None:
    _append_unsigned(octets, number << 1 if number >= 0 else ~(number << 1))


def _append_unsigned(octets: bytearray, number: int) -> None:
    while number > 127:
        octets.append(number & 127 | 128)
        number >>= 7
    octets.append(number)
