"""The teachers of a run: frozen models, each of which draws the policy to its distribution at the completions of its
own prompts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..integrations.transformers import fused_forward
from ..teacher import Teacher, check_teacher_values
from .arguments import TrainArguments
from .data import Prompt
from .memory import available
from .model import load_frozen, tokenizer_of

OPTION = "teacher_model_name_or_path"
SHARE_HELD = 0.5  # of the memory that is free at set-up: gradients, AdamW's state and a pass take the rest


def with_teachers(prompts: Sequence[Prompt], a: TrainArguments) -> list[Prompt]:
    """Returns the prompts with the index of the teacher that `teacher_column` names: by its path as the option has it,
    or by the last part of that, where it is of one teacher only. Raises ValueError for a column that is not there, a
    value that names none of them, and a teacher that no prompt names."""
    paths, column = [str(path) for path in a.teacher_model_name_or_path], a.teacher_column
    if column is None:
        return list(prompts)
    if column not in prompts[0].columns:
        found = ", ".join(map(repr, prompts[0].columns)) or "no others than the prompt"
        raise ValueError(f"teacher_column={column}: the data has no such column; found {found}")
    lasts = [os.path.basename(os.path.abspath(path)) for path in paths]
    index_of = {last: i for i, last in enumerate(lasts) if lasts.count(last) == 1}
    index_of |= {path: i for i, path in enumerate(paths)}
    chosen = []
    for row, prompt in enumerate(prompts):
        name = prompt.columns[column]
        if not isinstance(name, str) or name not in index_of:
            expected = ", ".join(map(repr, index_of))
            raise ValueError(f"the data, row {row}: teacher_column={column} holds {name!r:.80}; expected {expected}")
        chosen.append(prompt._replace(teacher=index_of[name]))
    if unnamed := set(range(len(paths))) - {prompt.teacher for prompt in chosen}:
        raise ValueError(f"{OPTION}={paths[min(unnamed)]}: no prompt names it in teacher_column={column}; leave it out")
    return chosen


def check_ids(a: TrainArguments, tokenizer: Any) -> None:
    """Raises ValueError for a teacher whose tokenizer gives other ids than the model's."""
    ids = tokenizer.get_vocab()
    for path in a.teacher_model_name_or_path:
        teacher_ids = tokenizer_of(path, a, name=OPTION).get_vocab()
        if (word := next((word for word, i in ids.items() if teacher_ids.get(word) != i), None)) is not None:
            raise ValueError(
                f"{OPTION}={path}: its tokenizer gives {word!r} the id {teacher_ids.get(word)}, the model's "
                f"{ids[word]}; expected a teacher with the same ids"
            )


def _tensors(lm: Any) -> list[Tensor]:
    return [*lm.parameters(), *lm.buffers()]


class Teachers:
    """Frozen models, whole in every process. Those that together take at most SHARE_HELD of the free memory stay on the
    device; the others stay in host memory, and one at a time has a copy on the device, until another is asked for.

    models: by the paths of the option, in their order. on_host: those without a place on the device. copied: the
    tensors of the one on turn, with what they hold on the host.
    """

    def __init__(self, a: TrainArguments, device: torch.device, vocab_size: int) -> None:
        self.device, self.vocab_size = device, vocab_size
        self.ids: dict[str, Any] = {"top_k": a.teacher_top_k, "mode": a.teacher_top_k_mode}
        self.models: dict[str, Any] = {}
        self.on_host: list[str] = []
        self.on_turn: str | None = None
        self.copied: list[tuple[Tensor, Tensor]] = []
        room = SHARE_HELD * available(device)
        for path in a.teacher_model_name_or_path:
            lm = self.models[path] = load_frozen(path, a, name=OPTION)
            room -= sum(x.nbytes for x in _tensors(lm))
            if room >= 0:
                lm.to(device)
            else:
                self.on_host.append(path)

    @torch.no_grad()
    def __call__(self, inputs: dict[str, Any], teacher_of: Sequence[int]) -> dict[str, Any]:
        """Returns the arguments `teacher` and, where these completions have several, `teacher_of` of the loss.

        inputs: of model_inputs. teacher_of: the index of each row's teacher. A teacher runs on its own rows alone, and
        not at all without any.
        """
        paths, present = list(self.models), sorted(set(teacher_of))
        rows = [[row for row, i in enumerate(teacher_of) if i == index] for index in present]
        teachers = [self._distribution(paths[i], inputs, own) for i, own in zip(present, rows, strict=True)]
        if len(present) == 1:
            return {"teacher": teachers[0]}
        of_rows = torch.tensor([present.index(i) for i in teacher_of], device=self.device)
        return {"teacher": teachers, "teacher_of": of_rows}

    def _distribution(self, path: str, inputs: dict[str, Any], rows: list[int]) -> Teacher:
        """Returns a teacher for some rows; rows of its weight beyond `vocab_size`, which are padding, are left out."""

        def head(
            hidden: Tensor, weight: Tensor, ids: Tensor, *, lm_head_bias: Tensor | None, **transform: Any
        ) -> Teacher:
            transform.pop("completion_mask")
            bias = None if lm_head_bias is None else lm_head_bias.detach()[: self.vocab_size]
            # Teachers of one loss have the same types; under autocast the last norm of some is float32.
            hidden, weight = hidden.to(weight.dtype), weight.detach()[: self.vocab_size]
            return Teacher(hidden, weight, bias, **transform, **self.ids)

        self._take_turn(path)
        names = "input_ids", "attention_mask", "completion_ids", "completion_mask"
        own = {name: inputs[name][rows] for name in names}
        teacher: Teacher = fused_forward(self.models[path], loss=head, **own)
        return teacher

    def _take_turn(self, path: str) -> None:
        """Copies a model to the device where it has no place there. The one before lets go of its copy, of which a loss
        that is yet to come keeps the weight of the lm_head."""
        if path not in self.on_host or path == self.on_turn:
            return
        for tensor, data in self.copied:
            tensor.data = data
        self.copied = [(tensor, tensor.data) for tensor in _tensors(self.models[path])]
        for tensor, data in self.copied:
            tensor.data = data.to(self.device, copy=True)
        self.on_turn = path

    @torch.no_grad()
    def check(self, probe: dict[str, Any]) -> None:
        """Raises ValueError for a teacher whose logits the loss does not understand. probe: inputs of one row."""
        for path in self.models:
            option = f"{OPTION}={path}"
            try:
                distribution = self._distribution(path, probe, [0])
                if (rows := len(distribution.weight)) < self.vocab_size:
                    raise ValueError(f"its lm_head has {rows} rows, the model's {self.vocab_size}; expected as many")
                option = f"teacher_top_k={self.ids['top_k']}"
                check_teacher_values(distribution, self.vocab_size, None)
            except (ValueError, TypeError) as error:
                raise ValueError(f"{option}: {error}") from error
