"""Where the project is published: the one line to fill in. setup.py and the documentation site read it."""

REPOSITORY = ""  # https://github.com/OWNER/NAME

_owner, _, _name = REPOSITORY.removeprefix("https://github.com/").partition("/")
URLS = {
    "Documentation": f"https://{_owner}.github.io/{_name}/",
    "Repository": REPOSITORY,
    "Issues": f"{REPOSITORY}/issues",
    "Changelog": f"{REPOSITORY}/blob/main/CHANGELOG.md",
    "Wheels": f"https://{_owner}.github.io/{_name}/whl/",  # an index per CUDA version, .../whl/cu130/
} if REPOSITORY else {}  # fmt: skip
