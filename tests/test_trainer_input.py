"""What a user can get wrong: one sentence before the first step, exit status 2, nothing written or overwritten."""

from __future__ import annotations

import errno
import json
import math
import shutil
from types import SimpleNamespace

import pytest
import torch
import training
from accelerate.utils import LoggerType
from tiny_models import tiny_model
from training import run
from transformers import AutoTokenizer, LlamaForCausalLM

from grpo_kernels.trainer.arguments import parse
from grpo_kernels.trainer.run import open_run


def one_short(prompts, completions, **columns):
    return [0.0] * (len(prompts) - 1)


def always_raises(prompts, completions, **columns):
    raise KeyError("no such key in my reward")


def beyond_float(prompts, completions, **columns):
    return [10**400] * len(prompts)


def reads_gold(completions, gold):
    return gold


def harmful(prompts, completions, completion_ids, answer, **columns):
    found = training.length(prompts, completions, completion_ids)
    for ids in completion_ids:
        ids[:] = [1]
    prompts.clear(), completions.clear(), answer.clear()
    torch.set_grad_enabled(False)
    return found


def interrupts(*given, **columns):
    raise KeyboardInterrupt


@pytest.fixture
def refused(model, data, tmp_path, capfd):
    """refused(**options) is the sentence with which a run ends, which has left nothing in its folder."""

    def sentence(**options):
        output = tmp_path / "run"
        assert run(model, data, output, **options) == 2
        error = capfd.readouterr().err.strip().splitlines()
        assert error[-1].startswith("grpo-kernels train: "), error
        assert not output.exists() or not any(output.iterdir())
        return error[-1]

    return sentence


@pytest.mark.parametrize(("options", "words"), [
    ({"num_generations": 3}, ["num_generations=3", "8 completions of a rollout", "per_device_train_batch_size=8"]),
    ({"steps_per_generation": 3, "gradient_accumulation_steps": 2}, ["steps_per_generation=3", "multiple"]),
    ({"share_prompts": True, "gradient_checkpointing": True}, ["share_prompts keeps", "gradient_checkpointing"]),
    ({"output_dir": ""}, ["output_dir is empty"]),
    ({"config": ""}, ["config=: "]),
    ({"loss_type": "gpro"}, ["loss_type='gpro'", "grpo"]),
    ({"temperature": 0.0}, ["temperature=0.0", "positive"]),
    ({"loss": "eager", "top_k": 5}, ["loss='eager'", "top_k"]),
    ({"epsilon_high": -1.0}, ["epsilon_high=-1.0"]),
    ({"loss_options": {"nonsense": 1}}, ["loss_options", "nonsense"]),
    ({"loss_options": {"logit_scale": 2.0}}, ["loss_options", "logit_scale is read from the model"]),
    ({"loss": "eager", "loss_options": {"chunk_rows": 5}}, ["chunk_rows=5 has no effect without loss=fused"]),
    ({"loss_options": {"off_policy_mask_threshold": 0.1}}, ["off_policy_mask_threshold=0.1 has no effect without old"]),
    ({"kl_target": 0.1}, ["kl_target=0.1", "beta=0"]),
    ({"ref_model_sync_steps": 4}, ["ref_model_sync_steps=4", "without beta"]),
    ({"reward_funcs": None}, ["reward_funcs is empty"]),
    ({"reward_funcs": "no_such_reward"}, ["no_such_reward", "exact_answer"]),
    ({"reward_funcs": "soft_overlong=6"}, ["reward 'soft_overlong=6': ", "1 to max_completion_length=5"]),
    ({"model_name_or_path": "no/such/model"}, ["model_name_or_path=no/such/model: there is no such file or folder"]),
    ({"dataset_name": "no.csv"}, ["dataset_name=no.csv: there is no such file or folder"]),
    ({"prompt_column": "question"}, ["has no column \"question\"; found 'prompt', 'answer'"]),
    ({"system_prompt": "Be brief."}, ["row 0", "no chat template"]),
    ({"model_name_or_path": None}, ["model_name_or_path is missing"]),
    ({"dataset_name": None}, ["dataset_name is missing"]),
    ({"max_completion_length": 40}, ["max_completion_length=40", "32 positions"]),
    ({"max_completion_length": 28}, ["row 5", "tokens", "the model leaves 4"]),
    ({"eval_steps": 1}, ["eval_steps=1", "eval_dataset_name"]),
    ({"dataset_test_split": "test"}, ["dataset_test_split='test'", "is one split", "eval_dataset_name"]),
    ({"warmup_steps": 5}, ["warmup_steps=5", "a schedule with warm-up"]),
    ({"fsdp": True}, ["fsdp=True", "several processes"]),
    ({"save_total_limit": 0}, ["save_total_limit=0", "at least 1"]),
    ({"step_delimiter": ""}, ["step_delimiter is empty"]),
    ({"num_generations": 1}, ["num_generations=1", "no advantage"]),
    ({"lr_scheduler_type": "reduce_lr_on_plateau"}, ["lr_scheduler_type='reduce_lr_on_plateau'", "linear, cosine"]),
    ({"use_peft": True, "lora_target_modules": ["nothing"]}, ["lora_target_modules=['nothing']: ", "not found"]),
    ({"optim_args": {"betas": [0.9, 1.0]}}, ["optim_args={'betas': [0.9, 1.0]}: Invalid beta parameter"]),
    ({"optim_args": {"betas": [0.9]}}, ["optim_args={'betas': [0.9]}: expected two numbers as betas"]),
    ({"optim_args": {"betas": 0.9}}, ["optim_args={'betas': 0.9}: "]),
    ({"optim_args": {"eps": "1e-8"}}, ["optim_args={'eps': '1e-8'}: "]),
    ({"optim_args": {"eps": 1e39}}, ["optim_args={'eps': 1e+39}: "]),
    ({"learning_rate": 1e38}, ["learning_rate=1e+38, optim_args=None: "]),
    ({"learning_rate": 0}, ["learning_rate=0.0, optim_args=None: a step changes a weight of 0 by 0.0; expected"]),
    ({"reward_weights": [0]}, ["reward_weights=[0.0] leave no reward"]),
    ({"optim_args": {"amsgrad": True}}, ["expected no others than betas, eps, weight_decay"]),
    ({"report_to": "all"}, ["report_to='all'", "tensorboard, trackio, wandb"]),
    ({"config": "/no/such.yaml"}, ["config=/no/such.yaml"]),
    ({"resume_from_checkpoint": "/no/such/checkpoint"}, ["/no/such/checkpoint", "no such folder"]),
    ({"teacher_model_name_or_path": "no/such/model"}, ["teacher_model_name_or_path=no/such/model: there is"]),
    ({"loss_options": {"distill_coef": 0.5}}, ["distill_coef=0.5", "without teacher_model_name_or_path"]),
    ({"teacher_model_name_or_path": ".", "loss_options": {"sparse_backward": 0.1}}, ["sparse_backward", "teacher_m"]),
    ({"teacher_model_name_or_path": ".", "loss_options": {"distill_coef": 0.0}}, ["distill_coef=0 leaves"]),
    ({"teacher_model_name_or_path": ".", "loss_options": {"divergence_beta": 0.5}}, ["divergence_beta=0.5 has no"]),
    ({"teacher_top_k": 4}, ["teacher_top_k=4 has no effect without teacher_model_name_or_path"]),
    ({"teacher_model_name_or_path": ".", "teacher_top_k": 0}, ["teacher_top_k=0", "at least 1"]),
    ({"teacher_model_name_or_path": ".", "teacher_top_k_mode": "renormalize"}, ["has no effect without teacher_top_k"]),
    ({"teacher_model_name_or_path": "."}, ["teacher_model_name_or_path=.: "]),
    ({"teacher_model_name_or_path": [".", ".."]}, ["teacher_column is missing", "['.', '..'] are several"]),
    ({"teacher_model_name_or_path": [".", "no/such/model"], "teacher_column": "answer"},
     ["teacher_model_name_or_path=no/such/model: there is"]),
    ({"teacher_model_name_or_path": ".", "teacher_column": "answer"}, ["teacher_column='answer'", "without several"]),
    ({"use_vllm": True}, ["use_vllm needs vllm: pip install vllm"]),
    ({"rollout_rs": {"token_k1": [0.5, 2.0]}}, ["rollout_rs={'token_k1': [0.5, 2.0]} has no effect without use_vllm"]),
    ({"use_vllm": True, "rollout_rs": {"token_k4": 1}}, ["a key of rollout_rs='token_k4'; expected one of token_k1"]),
    ({"use_vllm": True, "rollout_rs": {"token_k1": 2}}, ["rollout_rs['token_k1']=2; expected a pair"]),
    ({"use_vllm": True, "rollout_rs_mask": True}, ["rollout_rs_mask=True has no effect without rollout_rs"]),
    ({"use_vllm": True, "rollout_is_batch_normalize": True, "vllm_importance_sampling_mode": "none"},
     ["rollout_is_batch_normalize=True has no effect without use_vllm and a vllm_importance_sampling_mode"]),
    *(({"use_vllm": True, "loss_type": "vespo", **given}, ["VESPO multiplies the weights of a completion's tokens: "])
      for given in ({}, {"vllm_importance_sampling_mode": "token_mask", "rollout_is_batch_normalize": True},
                    {"vllm_importance_sampling_mode": "none", "rollout_rs": {"token_k2": 0.5}})),
    ({"use_vllm": True, "top_p": 0.9}, ["use_vllm", "top_p", "needs a top_k"]),
    ({"use_vllm": True, "min_p": 0.1}, ["use_vllm", "min_p", "needs a top_k"]),
    ({"min_p": -0.1}, ["min_p=-0.1; expected a number in [0, 1]"]),
    ({"top_p": 0.0}, ["top_p=0.0; expected a number in (0, 1]"]),
    ({"top_k": -1}, ["top_k=-1; expected at least 0"]),
    ({"reward_funcs": "test_trainer_input:reads_gold"}, ["'reads_gold' reads the column 'gold'; there are: answer"]),
])  # fmt: skip
def test_one_sentence_and_nothing_written(options, words, refused):
    sentence = refused(**options)
    assert all(word in sentence for word in words), sentence


@pytest.mark.parametrize(("changes", "words"), [
    ({"answer": "2", "prompts": 1}, "column 'prompts'"), ({"answer": "2", "log_metric": 1}, "column 'log_metric'"),
    ({}, "'answer'"),
])  # fmt: skip
@pytest.mark.parametrize("name", ["dataset_name", "eval_dataset_name"])
def test_rows_that_do_not_fit(name, changes, words, refused, tmp_path):
    """prompts and log_metric: what reward functions get from the trainer."""
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "1+1="} | changes) + "\n")
    assert words in refused(**{name: path})


def test_trackers_that_are_not_installed_or_refuse(refused, tmp_path, monkeypatch):
    """accelerate leaves out what is not installed without a word; wandb refuses who has no account."""

    def init(self, run_name, **settings):
        raise RuntimeError(f"No API key configured: {settings['dir']}")

    monkeypatch.setattr("accelerate.tracking.get_available_trackers", lambda: [LoggerType.WANDB])
    monkeypatch.setattr("accelerate.tracking.WandBTracker.__init__", init)
    missing = "report_to=tensorboard: not installed (pip install tensorboard)"
    for dry_run in (True, False):
        assert missing in refused(report_to=["wandb", "tensorboard"], dry_run=dry_run)
    assert f"report_to=wandb: No API key configured: {tmp_path / 'run'}" in refused(report_to="wandb")


@pytest.mark.parametrize(("name", "value", "words"), [
    ("ACCELERATE_MIXED_PRECISION", "fp16", "mixed_precision=fp16; expected no"),
    ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4", "gradient_accumulation_steps=4; expected 1"),
    ("ACCELERATE_DYNAMO_BACKEND", "EAGER", "dynamo_backend=eager; expected no"),
    ("ACCELERATE_USE_DEEPSPEED", "true", "has distributed_type=DEEPSPEED; expected DDP or FSDP2"),
])  # fmt: skip
def test_a_configuration_of_accelerate_that_would_change_the_steps(name, value, words, refused, monkeypatch):
    monkeypatch.setenv(name, value)
    assert words in refused()


def cut_off(name):
    def change(folder):
        (folder / name).write_bytes((folder / name).read_bytes()[:1000])

    return change


def lose_the_head(folder):
    """transformers makes a random one, and says so in a table among others."""
    LlamaForCausalLM.from_pretrained(folder).model.save_pretrained(folder)


def become_nan(folder):
    lm = LlamaForCausalLM.from_pretrained(folder)
    lm.model.norm.weight.data.fill_(math.nan)
    lm.save_pretrained(folder)


def end_at(ids):
    def change(folder):
        lm = LlamaForCausalLM.from_pretrained(folder)
        lm.generation_config.update(eos_token_id=ids)
        lm.save_pretrained(folder)

    return change


def read_padding(folder):
    """Its log-probabilities would depend on what else is in a batch."""
    tiny_model("recurrent_gemma", num_hidden_layers=3, lru_width=16).save_pretrained(folder)


def change_tokenizer(**tokens):
    def change(folder):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        for name, token in tokens.items():
            tokenizer.add_special_tokens({name: token}) if token else setattr(tokenizer, name, None)
        tokenizer.save_pretrained(folder)

    return change


@pytest.mark.parametrize(("change", "words"), [
    (cut_off("model.safetensors"), "/model: "), (cut_off("tokenizer.json"), "/model: "),
    (lose_the_head, "its files lack 1 tensors of a LlamaForCausalLM, lm_head.weight among them"),
    (become_nan, "the log-probabilities of its tokens are nan"),
    (change_tokenizer(pad_token=None), "has no pad_token"), (change_tokenizer(eos_token=None), "has no eos_token"),
    (change_tokenizer(eos_token="<end>"), "eos_token_id of the tokenizer is 32; expected an id from 0 to 31"),
    (change_tokenizer(pad_token="<pad>"), "gives '<pad>' the id 32, the model has 32 embeddings; expected its own"),
    (end_at([0, 32]), "of the generation_config of the model is 32; expected an id from 0 to 31"),
    (end_at(-1), "of the generation_config of the model is -1; expected an id from 0"),
    (end_at(10**9), "of the generation_config of the model is 1000000000"),
    (read_padding, "RecurrentGemmaForCausalLM: in a batch that is padded on the left, its log-probabilities differ by"),
])  # fmt: skip
def test_models_that_do_not_fit(change, words, model, refused, tmp_path, monkeypatch):
    """Before a rollout, which takes minutes with a large model."""
    folder = shutil.copytree(model, tmp_path / "model")
    change(folder)
    monkeypatch.setattr("grpo_kernels.trainer.rollout.Sampler.sample", interrupts)
    assert words in refused(model_name_or_path=folder)


def test_what_an_option_needs_is_named(refused, monkeypatch):
    monkeypatch.setattr("grpo_kernels.trainer.find_spec", lambda name: None)
    assert refused(use_peft=True) == "grpo-kernels train: use_peft needs peft: pip install peft"


def test_folders_that_are_not_the_trainers_are_left_alone(model, data, tmp_path, capfd):
    output = tmp_path / "mine"
    for name in ("model", "start"):
        (output / name).mkdir(parents=True)
        (output / name / "weights").write_text("mine")
    assert run(model, data, output, resume_from_checkpoint="auto") == 2
    assert "holds another run (model" in capfd.readouterr().err
    (output / "model").rename(output / "other")
    assert run(model, data, output, max_steps=1, save_steps=0) == 0
    assert (output / "start" / "weights").read_text() == (output / "other" / "weights").read_text() == "mine"


def test_a_folder_of_another_run_is_left_alone(model, data, tmp_path, capfd):
    one, two, file = (tmp_path / name for name in ("one", "two", "file"))
    given, begin = {"max_steps": 2, "save_steps": 1}, {"resume_from_checkpoint": one / "checkpoint-1"}
    assert run(model, data, one, **given) == run(model, data, two, **given, temperature=0.5) == 0
    (two / "notes.txt").write_text("mine")
    file.write_text("")
    before = {path: path.read_bytes() for path in two.rglob("*") if path.is_file()}
    for output, options, words in (
        (two, {}, f"output_dir={two} holds another run"),
        (two, begin, f"output_dir={two} holds another run"),
        (one, {"max_steps": 1, "resume_from_checkpoint": "auto"}, "checkpoint-2 is beyond max_steps=1"),
        (file, {}, "cannot be made: File exists"),
        (file / "run", {}, f"output_dir={file / 'run'} cannot be made: Not a directory"),
    ):
        assert run(model, data, output, **given | options) == 2
        assert words in capfd.readouterr().err
    assert before == {path: path.read_bytes() for path in two.rglob("*") if path.is_file()}
    assert run(model, data, tmp_path / "new", **given, **begin) == 0
    assert training.same_weights(one, tmp_path / "new")


def test_a_folder_that_another_run_is_using(model, data, tmp_path, capfd):
    """Both would go on from the same checkpoint, and write the same files."""
    output = tmp_path / "run"
    made = open_run(parse(training.arguments(model, data, output)))
    assert run(model, data, output, resume_from_checkpoint="auto") == 2
    assert f"output_dir={output} is in use by another run" in capfd.readouterr().err
    made.close()
    assert run(model, data, output, resume_from_checkpoint="auto", max_steps=1) == 0


@pytest.mark.parametrize(("options", "words"), [
    ({"reward_funcs": "test_trainer_input:one_short"}, ["reward 'one_short' returned 7 values, expected 8"]),
    ({"reward_funcs": "test_trainer_input:beyond_float"}, ["reward 'beyond_float' returned 1000"]),
    ({"reward_funcs": "test_trainer_input:always_raises"},
     ["always_raises failed for every completion of step 1", "no such key in my reward", "in always_raises"]),
    ({"reward_funcs": "training:huge", "scale_rewards": "none"}, ["step 1: the gradient norm is inf; the run ends"]),
    ({"reward_funcs": "training:length", "learning_rate": 1e30},
     ["step 1 leaves weights whose norm is inf; the run ends here"]),
    ({"reward_funcs": "training:length", "learning_rate": 1e12}, ["the policy's logits are NaN"]),
    ({"step_delimiter": "+"}, ["has no effect: no function gave rewards of steps"]),
])  # fmt: skip
def test_a_run_that_fails_ends_with_a_sentence_or_the_rewards_own_traceback(options, words, model, data, tmp_path,
                                                                            capfd):  # fmt: skip
    assert run(model, data, tmp_path / "run", **options) == 1
    error = capfd.readouterr().err
    assert "grpo-kernels train: " in error and all(word in error for word in words), error
    assert error.count("Traceback") == ("in always_raises" in words)
    assert not training.steps(tmp_path / "run") or "learning_rate" in options


def out_of_cpu_memory(*given, **options):
    torch.empty(2**60, dtype=torch.uint8)


def out_of_gpu_memory(*given, **options):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nMore of it")


@pytest.mark.parametrize(("error", "where", "options", "words"), [
    (out_of_cpu_memory, "generate", {},
     "out of memory (sampling): {}; lower per_device_train_batch_size"),
    (out_of_gpu_memory, "fused_grpo_loss", {}, "out of memory (updates): {}; lower per_device_train_batch_size"),
    (out_of_gpu_memory, "fused_logps", {}, "out of memory (set-up): {}; lower per_device_train_batch_size"),
])  # fmt: skip
def test_what_to_lower_where_memory_runs_out(error, where, options, words, model, data, tmp_path, monkeypatch, capfd):
    reason = "CUDA out of memory. Tried to allocate 20.00 GiB." if error is out_of_gpu_memory else ""
    if where == "generate":  # in the steps, not in the check of the sampler at set-up
        monkeypatch.setattr("grpo_kernels.trainer.run.check_sampler", lambda *given: None)
    monkeypatch.setattr(f"grpo_kernels.trainer.model.{where}", error)
    for further in ({}, {"dry_run": True}):
        assert run(model, data, tmp_path / "run", **options, **further) in (1, 2)
        said = capfd.readouterr().err
        assert "Traceback" not in said, said
        for part in words.format(reason or "#").split("#"):
            assert part in said, said


def test_a_reward_that_changes_what_it_gets_changes_no_step(trained):
    with torch.enable_grad():  # and as it was before afterwards
        harmful = trained("harmful", reward_funcs="test_trainer_input:harmful")
    assert training.same_weights(trained("harmless", reward_funcs="training:length"), harmful)


@pytest.mark.parametrize("when", ["set-up", "run"])
def test_an_interrupt_without_a_traceback(when, model, data, tmp_path, monkeypatch, capfd):
    if when == "set-up":
        monkeypatch.setattr("grpo_kernels.trainer.run.load_model", interrupts)
    assert run(model, data, tmp_path / "run", reward_funcs="test_trainer_input:interrupts") == 130
    assert "grpo-kernels train: interrupted" in capfd.readouterr().err


@pytest.mark.parametrize(("name", "where"), [("dataset_name", "train: row 7"),
                                             ("eval_dataset_name", "train: held-out prompts: row 7")])  # fmt: skip
def test_the_wrong_reward_fails_the_dry_run_too(name, where, data, refused, tmp_path):
    rows = [json.loads(line) | {"answer": "#### 1"} for line in data.read_text().splitlines()]
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    good.write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows[7]["answer"] = "about six"
    bad.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sentence = refused(**{"dataset_name": good, "reward_funcs": "gsm8k", "dry_run": True, name: bad})
    assert f"{where}, reward 'gsm8k'" in sentence


def test_what_could_not_be_saved_is_known_before_the_first_step(model, refused, tmp_path, monkeypatch, capfd):
    def full(path):
        return SimpleNamespace(free=2**20 // 50)

    for further in ({}, {"dry_run": True}):
        with monkeypatch.context() as patched:
            patched.setattr("shutil.disk_usage", full)
            words = f"output_dir={tmp_path / 'run'}: a checkpoint takes 0.1 MiB, its disk has 0.0 MiB left"
            assert words in refused(**further)
        with monkeypatch.context() as patched:
            patched.setattr("transformers.PreTrainedTokenizerBase.save_pretrained", out_of_space)
            assert "run: model and tokenizer cannot be saved: OSError: [Errno 28] no space" in refused(**further)


def out_of_space(*given, **options):
    raise OSError(errno.ENOSPC, "no space")


def test_a_dry_run_says_what_a_run_takes_and_writes_nothing(model, data, tmp_path, capfd):
    output = tmp_path / "run"
    assert run(model, data, output, dry_run=True, beta=0.1, reward_funcs="training:length") == 0
    out = capfd.readouterr().out
    for words in ("12 prompts", "rewards    length", "one step", "MiB per process before the step", "completion ",
                  "1 process,", "MiB for a checkpoint", "of the completions do not end within"):  # fmt: skip
        assert words in out, out
    assert "equal rewards" not in out
    options = {"reward_funcs": None, "teacher_model_name_or_path": model, "dtype": "bfloat16"}
    assert run(model, data, output, dry_run=True, **options) == 0
    assert "rewards    none" in capfd.readouterr().out and not output.exists()
    assert run(model, data, output, dry_run=True, reward_funcs="training:constant") == 0
    assert "note       100% of the groups have equal rewards" in capfd.readouterr().out
