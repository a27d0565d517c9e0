"""What mkdocs.yml calls: shows documents of the repository as pages of the site, as they stand.

A page is one of docs/, or a document of PAGES. Links between documents lead to their pages, links to other files to the
repository; a link that leads nowhere is a warning, and so an error of `make docs`.
"""

from __future__ import annotations

import logging
import posixpath
import re
from collections.abc import Iterator
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
            obj.docstring.value = "\n".join(markdown_of(obj.docstring.value.splitlines()))

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Does what the decorator `forwards_loss_options` does: the options stand in place of **options."""
        options = pkg["inputs.LossOptions"].attributes
        for module in pkg.modules.values():
            for function in module.functions.values():
                if function.is_alias or "forwards_loss_options" not in [str(d.value) for d in function.decorators]:
                    continue
                del function.parameters["options"]
                for name, field in options.items():
                    kind, default = griffe.ParameterKind.keyword_only, '"auto"' if name == "backend" else "None"
                    function.parameters.add(
                        griffe.Parameter(name, annotation=field.annotation, kind=kind, default=default)
                    )


SECTION = re.compile(r"(Args|Example|Raises|Returns):")
ITEM = re.compile(r"(?P<name>[\w*]+(?:, [\w*]+)*): (?P<text>.+)")
CHOICE = re.compile(r'(?P<name>"?\w+"?)  +(?P<text>.+)')  # a value of an item


def markdown_of(lines: list[str]) -> Iterator[str]:
    """Yields Markdown for a docstring: a line `name: text` begins an item, and so does a heading above such lines; what
    is indented behind an empty line is code or a formula."""
    indents = [len(line) - len(line.lstrip()) for line in lines]
    texts = [line.strip() for line in lines]
    item: int | None = None  # the indent of the open one
    code = False
    block: int | None = None  # the indent of the open one
    for i, (indent, text) in enumerate(zip(indents, texts, strict=True)):
        if block is not None and text and indent < block:
            block = None
            yield from ("```", "")
        elif block is None and indent >= 4 and item is None and i and not texts[i - 1] and text[:3] != ">>>":
            block = indent
            yield "```python"
        if block is not None:
            yield lines[i][block:]
            continue
        if code != text.startswith(">>>") and not (code and text):
            code = not code
            yield "```pycon" if code else "```"
        if not text or (item is not None and indent < item):
            item = None
            yield ""
        if code:
            yield text
        elif heading := SECTION.fullmatch(text):
            item = None
            yield from (f"**{heading[1]}**", "")
        elif (begins := ITEM.fullmatch(text)) and (item is None or indent <= item):
            if item is None:
                yield ""
            item = indent
            yield f"- **{escaped(begins['name'])}**: {escaped(begins['text'])}"
        elif choice := CHOICE.fullmatch(text):
            yield f"    - {choice['name']}: {escaped(choice['text'])}"
        elif item is None and i + 1 < len(texts) and ITEM.fullmatch(texts[i + 1]) and indents[i + 1] > indent:
            yield from ("", f"**{escaped(text)}**", "")
        else:
            yield f"    {escaped(text)}" if item is not None else escaped(text)
    if code or block is not None:
        yield "```"


def escaped(text: str) -> str:
    """Returns plain text as Markdown, where the name of a public function between backticks is a link to it."""
    parts = re.split(r"(`[^`]*`)", text)
    parts[::2] = [part.replace("<", "&lt;").replace("*", r"\*") for part in parts[::2]]
    parts[1::2] = [f"[{part}][grpo_kernels.{part[1:-1]}]" if part[1:-1] in PUBLIC else part for part in parts[1::2]]
    return "".join(parts)
