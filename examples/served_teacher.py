r"""On-policy distillation over the whole vocabulary from a model behind a vLLM server, which gives its hidden states.

    vllm serve Qwen/Qwen3-8B --no-enable-chunked-prefill \
        --speculative-config '{"method": "extract_hidden_states", "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [36]}}}' \
        --kv-transfer-config '{"kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": "/dev/shm/hidden_states"}}'
    python examples/served_teacher.py --server http://localhost:8000 --folder /dev/shm/hidden_states

36 is the number of the model's layers: states of the last one, in the type of the weights (16 bits), one file for each
request in a folder that both sides see. They are not normalised. The last norm and the lm_head, which is all that is
loaded of the teacher here, make its distribution from them. Without --server a random model in this process answers as
the server does.
"""

import argparse
import fcntl
import json
import tempfile
import urllib.request
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from grpo_kernels import Teacher, fused_distillation_loss
from grpo_kernels.integrations import logit_transform


def load_head(model):
    """Returns a teacher without its layers, which transformers reports as unexpected."""
    return AutoModelForCausalLM.from_pretrained(model, num_hidden_layers=0, dtype=torch.bfloat16)


def ask(server, folder, model, ids):
    """Returns the states (len(ids), H') of the teacher's last layer at these ids, a prompt and its completion."""
    body = {"model": model, "prompt": ids, "max_tokens": 1}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{server}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        return read_states(folder, json.load(answer)["kv_transfer_params"]["hidden_states_path"], ids)


def read_states(folder, path, ids):
    """Waits until the server has written a file, reads it and removes it: in no other folder, whatever it answers."""
    path, lock = Path(path), Path(f"{path}.lock")
    if path.resolve().parent != Path(folder).resolve():
        raise ValueError(f"the server names the file {path}; expected one in {folder}")
    with lock.open() as writing:
        fcntl.flock(writing, fcntl.LOCK_SH)
        saved = load_file(path)
    path.unlink()
    lock.unlink()
    if saved["token_ids"][: len(ids)].tolist() != ids:
        raise ValueError(f"{path} has the states of other ids than the request's")
    return saved["hidden_states"][: len(ids), -1]


def make_teacher(head, states, completions):
    """states: of `ask` for prompt + completion. Returns the teacher at the tokens of the completions, padded on the
    right: the state before a token predicts it."""
    rows = [rows[-len(ids) - 1 : -1] for rows, ids in zip(states, completions, strict=True)]
    with torch.no_grad():
        hidden = head.base_model.norm(pad_sequence(rows, batch_first=True).to(head.dtype))
    output, (scale, softcap) = head.get_output_embeddings(), logit_transform(head.config)
    bias = None if output.bias is None else output.bias.detach()
    return Teacher(hidden, output.weight.detach(), bias, scale, softcap)


def write_states(model, ids, folder):
    """Writes what the server would, and returns the path."""
    found = []
    with model.base_model.norm.register_forward_pre_hook(lambda norm, given: found.append(given[0])), torch.no_grad():
        model(torch.tensor([ids]))
    path = Path(folder, f"request-{len(ids)}.safetensors")
    save_file({"hidden_states": found[0][0, :, None].contiguous(), "token_ids": torch.tensor(ids)}, path)
    Path(f"{path}.lock").touch()
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server")
    parser.add_argument("--folder", default="/dev/shm/hidden_states", help="shared_storage_path of the server")
    parser.add_argument("--model", default="Qwen/Qwen3-8B")
    chosen = parser.parse_args()
    torch.manual_seed(0)
    prompt, completions = [5, 9, 2], [[7, 1, 30, 4], [8, 11]]
    if chosen.server:
        head = load_head(chosen.model)
        states = [ask(chosen.server, chosen.folder, chosen.model, prompt + ids) for ids in completions]
    else:
        sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4)
        head = LlamaForCausalLM(LlamaConfig(vocab_size=512, **sizes)).to(torch.bfloat16)
        with tempfile.TemporaryDirectory() as folder:
            paths = [write_states(head, prompt + ids, folder) for ids in completions]
            states = [read_states(folder, path, prompt + ids) for path, ids in zip(paths, completions, strict=True)]
    teacher = make_teacher(head, states, completions)

    # In a trainer: the policy's hidden states at these tokens, and its lm_head.
    hidden, weight = (torch.randn(*size, 32, dtype=torch.bfloat16) for size in ((2, 4), (len(teacher.weight),)))
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    out = fused_distillation_loss(hidden.requires_grad_(), weight.requires_grad_(), teacher, completion_mask=mask)
    out.loss.backward()
    print(f"loss {out.loss.item():.4f} from {2 * teacher.hidden.shape[-1]:,} bytes a token")
