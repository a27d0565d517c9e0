"""Gives the relative links of a document other addresses: for the site (docs_site.py), and for PyPI (setup.py)."""

from __future__ import annotations

import re
from collections.abc import Callable

FENCE = re.compile(r"^( *```.*?^ *```)$", flags=re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?P<picture>!?)\[(?P<text>[^][]*)\]\((?!\w+:)(?P<path>[^)#\s]*)(?P<anchor>#[^)\s]*)?\)")


def with_addresses(text: str, address: Callable[[str, str], str]) -> str:
    """Returns Markdown in which each relative link leads to `address(path, anchor)`, "" where there is none: such a
    link becomes its text, such a picture goes."""

    def target(match: re.Match[str]) -> str:
        picture, shown, path, anchor = match.group("picture", "text", "path", "anchor")
        if found := address(path, anchor or ""):
            return f"{picture}[{shown}]({found})"
        return "" if picture else shown

    parts = FENCE.split(text)
    parts[::2] = [LINK.sub(target, part) for part in parts[::2]]
    return "".join(parts)


def in_repository(repository: str, path: str, anchor: str = "") -> str:
    """Returns the address of a file of the repository, or with path "" of its front page; "" without a repository."""
    if not repository or not path:
        return repository and repository + anchor
    return f"{repository}/{'raw' if path.endswith(('.png', '.svg')) else 'blob'}/main/{path}{anchor}"
