"""The places of fields and columns (names.py) as constants that kernels read.

A field of the table has its name in capitals, a field of the values TOKEN_ before it, a column of the sums SUM_.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from ...names import COLUMNS, TABLE_FIELDS, VALUE_FIELDS

for _prefix, _names in (("", TABLE_FIELDS), ("TOKEN_", VALUE_FIELDS), ("SUM_", COLUMNS)):
    globals().update({f"{_prefix}{name.upper()}": tl.constexpr(place) for place, name in enumerate(_names)})
VALUE_COUNT: tl.constexpr = tl.constexpr(len(VALUE_FIELDS))
COLUMN_COUNT: tl.constexpr = tl.constexpr(len(COLUMNS))
COLUMN_WIDTH: tl.constexpr = tl.constexpr(triton.next_power_of_2(len(COLUMNS)))

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...
