"""`from grpo_kernels.trainer import train`: a run from Python, with objects in place of names."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import training
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_kernels.commands.cli import main
from grpo_kernels.trainer import RunError, TrainArguments, train


@pytest.fixture(autouse=True)
def new_state():
    AcceleratorState._reset_state(reset_partial_state=True)


def options(output, **changes):
    given = {name: x for name, x in training.OPTIONS.items() if name != "reward_funcs"}
    return TrainArguments(**{**given, "output_dir": str(output), "use_cpu": True, **changes})


def rows_of(data):
    return [json.loads(line) for line in data.read_text().splitlines()]


def test_objects_take_the_steps_of_names(model, data, tmp_path):
    datasets = pytest.importorskip("datasets", reason="datasets is not installed: make test EXTRAS=dev,peers")
    named = train(str(model), "training:length", str(data), options(tmp_path / "a"), str(data))
    lm, prompts = AutoModelForCausalLM.from_pretrained(model), datasets.Dataset.from_list(rows_of(data))
    given = train(lm, [training.length], prompts, options(tmp_path / "b"), rows_of(data))
    assert given.keys() == named.keys() and given["output_dir"] == tmp_path / "b" and given["steps"] == 3
    assert given["pass_at_1_after"] == named["pass_at_1_after"]
    assert training.same_weights(tmp_path / "a", tmp_path / "b")
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert config["reward_funcs"] == ["training:length"] and config["dataset_name"] == "the rows of train_dataset"
    # The model is trained where it is.
    assert torch.equal(lm.lm_head.weight, training.weights(tmp_path / "b")["lm_head.weight"])
    assert (
        main(["evaluate", str(tmp_path / "b"), "--dataset-name", str(data), "--reward-funcs", "training:length"]) == 0
    )


@pytest.mark.parametrize(("lora", "number", "kind"), [
    (False, signal.SIGTERM, RunError), (True, signal.SIGINT, KeyboardInterrupt),
])  # fmt: skip
def test_a_call_goes_on_where_one_was_stopped(lora, number, kind, model, data, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(model)

    def call(output, reward, **changes):
        lm = AutoModelForCausalLM.from_pretrained(model)
        lm.config._name_or_path = lm.name_or_path = ""
        changes = {"use_peft": lora, "max_steps": 4, **changes}
        return train(lm, reward, rows_of(data), options(output, **changes), processing_class=tokenizer)

    def length(completion_ids, trainer_state, **columns):
        if trainer_state.global_step == 2 and signals:
            signal.raise_signal(signals.pop())
        return training.length(None, None, completion_ids)

    signals, output = [], tmp_path / "stopped"
    call(tmp_path / "a", length)
    signals.append(number)
    with pytest.raises(kind):
        call(output, length)
    assert call(output, length, resume_from_checkpoint="auto")["steps"] == 4
    name = f"model/{'adapter_model' if lora else 'model'}.safetensors"
    assert (output / name).read_bytes() == (tmp_path / "a" / name).read_bytes()
    with pytest.raises(ValueError, match=r"belongs to a run with other options: reward_funcs=.*training:constant"):
        call(output, training.constant, resume_from_checkpoint="auto")


def of_tests(completions, tests):
    """A reward that reads a column which the data lacks."""


def test_a_second_run_of_a_process_has_its_own_options(model, data, tmp_path):
    """accelerate keeps what the first Accelerator was made with; that of a user stays as it is."""
    with pytest.raises(ValueError, match="reads the column 'tests'"):
        train(str(model), of_tests, str(data), options(tmp_path / "failed", bf16=True))
    for bf16 in (False, True):
        assert train(str(model), training.length, str(data), options(tmp_path / str(bf16), bf16=bf16))["steps"] == 3
    norms = [[step["grad_norm"] for step in training.steps(tmp_path / name)] for name in ("False", "True")]
    assert norms[0] != norms[1]
    AcceleratorState._reset_state(reset_partial_state=True)
    own = Accelerator(cpu=True, mixed_precision="bf16")
    with pytest.raises(ValueError, match="bf16=False: this process has an Accelerator of mixed_precision=bf16"):
        train(str(model), "exact_answer", str(data), options(tmp_path / "own"))
    assert own.mixed_precision == "bf16"


def test_a_generation_config_that_transformers_does_not_save(model, data, tmp_path, capfd):
    """A temperature without do_sample, which generate() passes over: it is saved with do_sample."""
    lm, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    lm.generation_config.update(temperature=0.6, max_new_tokens=7)
    train(lm, training.length, str(data), options(tmp_path / "run", save_steps=1), processing_class=tokenizer)
    assert capfd.readouterr().err.count("without do_sample: it gets do_sample") == 1
    saved = json.loads((tmp_path / "run" / "model" / "generation_config.json").read_text())
    assert (saved["max_new_tokens"], saved["temperature"], saved["do_sample"]) == (7, 0.6, True)


def adapted(model, name="default", trainable=True, **changes):
    """A PeftModel that is far from its base."""
    peft = pytest.importorskip("peft", reason="peft is not installed: run make test")
    config = peft.LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **changes})
    torch.manual_seed(0)
    lm = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(model), config, adapter_name=name)
    with torch.no_grad():
        for parameter in lm.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.3)
                parameter.requires_grad_(trainable)
    return lm


def saved(folder, model, **changes):
    """An adapter's folder, with the tokenizer where it is told so."""
    lm, tokenizer = adapted(model, **changes), AutoTokenizer.from_pretrained(model)
    lm.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def logits(lm):
    with torch.no_grad():
        return lm(torch.tensor([[5, 6, 7, 8]])).logits


def load(folder, model):
    peft = pytest.importorskip("peft", reason="peft is not installed: run make test")
    return peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), folder)


@pytest.mark.parametrize("use_peft", [False, True])
def test_the_adapter_of_a_model_is_trained_on(use_peft, model, data, tmp_path):
    """One of two, whose names are the user's."""
    peft = pytest.importorskip("peft", reason="peft is not installed: run make test")
    lm = adapted(model, "mine", use_rslora=True, lora_dropout=0.1)
    lm.add_adapter("other", peft.LoraConfig(r=2, target_modules=["k_proj"]))
    before, given = logits(lm.eval()), options(tmp_path / "run", learning_rate=1e-30, use_peft=use_peft)
    assert train(lm, training.length, rows_of(data), given)["steps"] == 3
    result = load(tmp_path / "run" / "model", model)
    torch.testing.assert_close(logits(result.eval()), before)
    config = result.peft_config["default"]
    assert (config.r, config.use_rslora, config.target_modules) == (4, True, {"q_proj", "v_proj"})
    words = ["--dataset-name", str(data), "--reward-funcs", "training:length"]
    assert main(["evaluate", str(tmp_path / "run"), *words]) == 0

    def call(name, **changes):
        changes = {"max_steps": 4, "save_steps": 2, "beta": 0.1, "save_total_limit": None, **changes}
        train(adapted(model, "mine"), training.length, rows_of(data), options(tmp_path / name, **changes))
        assert training.steps(tmp_path / name)[0]["kl"] == 0.0 or "resume_from_checkpoint" in changes
        return (tmp_path / name / "model" / "adapter_model.safetensors").read_bytes()

    assert call("a") == call("b", resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))


def test_an_adapter_in_a_folder_is_trained_on(model, data, tmp_path, monkeypatch):
    """What it names as its base is found from any directory, also in the files of the run."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model, "base")
    start = load(saved("start", "base"), "base")
    shutil.copytree(
        "start", "bare", ignore=lambda folder, names: [n for n in names if "token" in n]
    )  # as PEFT saves it
    for name in ("start", "bare"):
        given = options(tmp_path / f"of-{name}", learning_rate=1e-30, use_peft=True)
        train(name, training.length, rows_of(data), given)
        result = load(tmp_path / f"of-{name}" / "model", model)
        assert torch.equal(logits(result), logits(start))
        assert result.peft_config["default"].base_model_name_or_path == str(tmp_path / "base")
    words = f"start is an adapter to {tmp_path / 'base'}; expected use_peft=True, which trains it on"
    with pytest.raises(ValueError, match=re.escape(words)):
        train("start", training.length, rows_of(data), options("run"))


@pytest.mark.parametrize(("changes", "words"), [
    ({"lora_r": 8}, "lora_r=8 has no effect on an adapter that is trained on; leave it out"),
    ({"lora_target_modules": ["q_proj"]}, "lora_target_modules=['q_proj'] has no effect on an adapter"),
])  # fmt: skip
def test_options_that_an_adapter_contradicts(changes, words, model, data, tmp_path):
    given = options(tmp_path / "run", use_peft=True, **changes)
    for lm in (saved(tmp_path / "start", model), adapted(model)):
        with pytest.raises(ValueError, match=re.escape(words)):
            train(lm, training.length, rows_of(data), given)


def frozen(model):
    return adapted(model, trainable=False)


def two_active(model):
    peft = pytest.importorskip("peft", reason="peft is not installed: run make test")
    lm = adapted(model)
    lm.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj"]))
    lm.base_model.set_adapter(["default", "other"])
    return lm


def with_its_base(model):
    lm = adapted(model)
    lm.get_base_model().lm_head.weight.requires_grad_(True)
    return lm


def of_transformers(model):
    peft = pytest.importorskip("peft", reason="peft is not installed: run make test")
    lm = AutoModelForCausalLM.from_pretrained(model)
    lm.add_adapter(peft.LoraConfig(target_modules=["q_proj"]))
    return lm


@pytest.mark.parametrize(("make", "words"), [
    (frozen, "none of its parameters is trained; expected requires_grad=True, of an adapter PeftModel.from_pretrained"),
    (two_active, "model has the active adapters ['default', 'other']; expected one"),
    (with_its_base, "lm_head.weight, which the files of an adapter do not hold; expected it frozen"),
    (of_transformers, "model has adapters of transformers (load_adapter, add_adapter); expected a PeftModel of peft"),
    (lambda model: AutoModelForCausalLM.from_pretrained(model).requires_grad_(False), "none of its parameters is"),
])  # fmt: skip
def test_adapters_that_cannot_be_trained_on(make, words, model, data, tmp_path):
    with pytest.raises(ValueError, match=re.escape(words)):
        train(make(model), training.length, rows_of(data), options(tmp_path / "run"))


def test_adapters_whose_files_cannot_be_used(model, data, tmp_path):
    start = saved(tmp_path / "start", model)
    path, config = start / "adapter_model.safetensors", start / "adapter_config.json"
    tensors, whole = load_file(path), config.read_text()
    save_file(dict(list(tensors.items())[1:]), path)
    shutil.copytree(start, tmp_path / "base")
    named = json.dumps({**json.loads(whole), "base_model_name_or_path": str(tmp_path / "base")})
    for text, words in (
        (whole, "UserWarning: Found missing adapter keys while loading the checkpoint"),
        (named, f"the base model {tmp_path / 'base'} is an adapter too; expected a whole model"),
    ):
        config.write_text(text)
        with pytest.raises(ValueError, match=re.escape(words)):
            train(start, training.length, rows_of(data), options(tmp_path / "run", use_peft=True))


def test_an_async_reward_runs_in_a_notebook(model, data, tmp_path):
    """In a running event loop, and in a thread that is not the main one."""

    async def length(completions, **columns):
        await asyncio.sleep(0)
        return [float(len(completion)) for completion in completions]

    async def notebook(name):
        return train(str(model), length, str(data), options(tmp_path / name))["steps"]

    with ThreadPoolExecutor(1) as pool:
        assert asyncio.run(notebook("run")) == pool.submit(lambda: asyncio.run(notebook("thread"))).result() == 3


@pytest.mark.parametrize(("changes", "kind", "words"), [
    ({"model": 7}, TypeError, "model is a int; expected a path, a name, a PreTrainedModel or a PeftModel"),
    ({"reward_funcs": 7}, TypeError, "reward_funcs is a int; expected names and functions"),
    ({"train_dataset": 7}, TypeError, "train_dataset is a int; expected rows, a path or a name"),
    ({"eval_dataset": 7}, TypeError, "eval_dataset is a int; expected rows, a path or a name"),
    ({"reward_funcs": [7]}, TypeError, "reward_funcs is a int; expected names and functions"),
    ({"eval_dataset": [{"prompt": "1+1="}]}, ValueError, "held-out prompts: reward 'exact_answer' reads the column"),
    ({"args": {"dataset_name": "x"}}, ValueError, "args.dataset_name='x'; expected train_dataset of"),
    ({"args": {"dry_run": True}}, ValueError, "args.dry_run=True"),
    ({"args": {"dataset_train_split": "x"}, "train_dataset": [{"prompt": "1"}]}, ValueError, "train_dataset is one"),
    ({"args": {"dtype": "bfloat16"}, "model": None}, ValueError, "args.dtype=bfloat16 with a model of float32"),
    ({"args": {"learning_rate": "1e-5"}}, TypeError, "learning_rate='1e-5' is a str; expected float"),
    ({"args": {"save_steps": 1.5}}, TypeError, "save_steps=1.5 is a float; expected int"),
    ({"args": {"use_vllm": True}, "model": None}, ValueError, "args.use_vllm=True with a model in memory"),
])  # fmt: skip
def test_bad_input_raises(changes, kind, words, model, data, tmp_path):
    given = {"model": str(model), "reward_funcs": "exact_answer", "train_dataset": str(data), **changes}
    given["args"] = options(tmp_path / "run", **changes.get("args", {}))
    given["model"] = given["model"] or AutoModelForCausalLM.from_pretrained(model)
    with pytest.raises(kind, match=re.escape(words)):
        train(**given)


def test_a_call_that_failed_holds_no_folder(model, data, tmp_path):
    """In a notebook the error lives on, and with it the frames of the call."""
    with pytest.raises(ValueError, match="reads the column 'tests'") as caught:
        train(str(model), of_tests, str(data), options(tmp_path / "run"))
    assert train(model, "exact_answer", data, options(tmp_path / "run"))["steps"] == 3 and caught.value
