"""csrc/names.h, written from grpo_kernels/names.py."""

from __future__ import annotations

import runpy

from .host import ROOT, write_if_changed

HEADER = ROOT / "csrc" / "names.h"


def write_header() -> None:
    names = runpy.run_path(str(ROOT / "grpo_kernels" / "names.py"))
    lines = [
        "// Written by setup.py from grpo_kernels/names.py, which says what each name means.",
        "// clang-format off",
        "#pragma once",
        "#include <stdint.h>",
        "",
        "namespace gk {",
        f'constexpr const char* kInterface = "{names["INTERFACE"]}";',
    ]
    for enumeration, prefix, members in names["ENUMERATIONS"]:
        listed = ", ".join([prefix + _camel_case(member) for member in members] + [f"k{enumeration}Count"])
        lines.append(f"enum {enumeration} : int32_t {{ {listed} }};")
    for struct, members in names["STRUCTS"]:
        integers, floats = names["integers_first"](members)
        lines.append(f"struct {struct} {{ int32_t {', '.join(integers)}; float {', '.join(floats)}; }};")
    lines += [f"constexpr float {name} = {value!r}f;" for name, value in names["CONSTANTS"]]
    write_if_changed(HEADER, "\n".join([*lines, "}  // namespace gk", ""]))


def _camel_case(name: str) -> str:
    return "".join(part.capitalize() for part in name.replace("+", "_plus").split("_"))
