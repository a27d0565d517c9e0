"""What mkdocs.yml calls: shows documents of the repository as pages of the site, as they stand.

A page is one of docs/, or a document of PAGES. Links between documents lead to their pages, links to other files to the
repository; a link that leads nowhere is a warning, and so an error of `make docs`.
"""

from __future__ import annotations

import logging
import posixpath
import re
import textwrap
from pathlib import Path
from typing import Any

import griffe
from addresses import URLS
from links import in_repository, with_addresses
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "index.md": "README.md",
    "library.md": "grpo_kernels/README.md",
    "variants.md": "VARIANTS.md",
    "trainers/integrations.md": "grpo_kernels/integrations/README.md",
    "trainers/examples.md": "examples/README.md",
    "trainer.md": "grpo_kernels/trainer/README.md",
    "measurements/index.md": "bench/README.md",
    "measurements/results.md": "bench/RESULTS.md",
    "measurements/notes.md": "bench/results/NOTES.md",
    "project/architecture.md": "ARCHITECTURE.md",
    "project/contributing.md": "CONTRIBUTING.md",
    "project/changelog.md": "CHANGELOG.md",
    "project/security.md": "SECURITY.md",
    "project/conduct.md": "CODE_OF_CONDUCT.md",
}
PUBLIC = re.findall(r'^    "(\w+)",$', (ROOT / "grpo_kernels/__init__.py").read_text(encoding="utf-8"), re.MULTILINE)
log = logging.getLogger("mkdocs.docs_site")


def on_config(config: MkDocsConfig) -> None:
    config.repo_url, config.site_url = URLS.get("Repository"), URLS.get("Documentation")


def on_files(files: Files, config: MkDocsConfig) -> None:
    pictures = {f"figures/{path.name}": path for path in (ROOT / "bench" / "figures").iterdir()}
    for uri, path in ({uri: ROOT / document for uri, document in PAGES.items()} | pictures).items():
        files.append(File.generated(config, uri, abs_src_path=str(path)))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Returns the text with its links, which are relative to the document, as links of the page."""
    document = Path(page.file.abs_src_path)
    uris = {Path(file.abs_src_path): file.src_uri for file in files if file.abs_src_path}

    def address(link: str, anchor: str) -> str:
        path = (document.parent / link).resolve() if link else document
        if path in uris:
            return posixpath.relpath(uris[path], posixpath.dirname(page.file.src_uri)) + anchor
        if not path.exists():
            log.warning(f"{document.relative_to(ROOT)}: {link} leads nowhere")
            return ""
        return in_repository(URLS.get("Repository", ""), path.relative_to(ROOT).as_posix(), anchor)

    return with_addresses(markdown, address)


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> None:
    """Writes llms.txt: the site's title, description and pages, https://llmstxt.org."""
    lines = [f"# {config.site_name}", "", f"> {config.site_description}"]
    for item in nav.items:
        lines += ["", f"## {item.title}", ""] if item.is_section else [""]
        pages = item.children if item.is_section else [item]
        lines += [f"- [{page.title}]({posixpath.join(config.site_url or '', page.url)})" for page in pages]
    files.append(File.generated(config, "llms.txt", content="\n".join([*lines, ""])))


class Docstrings(griffe.Extension):
    """Shows docstrings, which are laid out for help(), as Markdown, and signatures as help() does."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = markdown_of(obj.docstring.value)

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        for parameter in func.parameters:
            if parameter.default == "...":  # as the extension unpack_typeddict writes an option that may be left out
                parameter.default = '"auto"' if parameter.name == "backend" else "None"


NAMES = r"[\w*]+(?:, [\w*]+)*"
HEADING = re.compile(rf"^(?!{NAMES}: )(\S.*?):?\n(?=    )", re.MULTILINE)  # a line above indented ones
ITEM = re.compile(rf"^ {{0,4}}({NAMES}): (?=\S)", re.MULTILINE)


def markdown_of(docstring: str) -> str:
    """Returns Markdown for a docstring: a line `name: text` begins an item, a line above indented ones is a heading.
    What is indented behind an empty line, and the example, is code or a formula."""
    blocks = []
    for block in docstring.replace("Example:\n", "__Example__\n\n").split("\n\n"):
        if block.startswith("    "):
            block = f"```{'pycon' if '>>>' in block else 'python'}\n{textwrap.dedent(block)}\n```"
        else:
            block = ITEM.sub(r"\n- **\1**: ", HEADING.sub(r"\n**\1**\n\n", escaped(block)))
            block = re.sub(r"^ +", "", block, flags=re.MULTILINE)
        blocks.append(block)
    return "\n\n".join(blocks)


def escaped(text: str) -> str:
    """Returns plain text as Markdown, where the name of a public function between backticks is a link to it."""
    parts = re.split(r"(`[^`]*`)", text)
    parts[::2] = [part.replace("<", "&lt;").replace("*", r"\*") for part in parts[::2]]
    parts[1::2] = [f"[{part}][grpo_kernels.{part[1:-1]}]" if part[1:-1] in PUBLIC else part for part in parts[1::2]]
    return "".join(parts)
