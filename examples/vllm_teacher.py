"""On-policy distillation from a model behind a vLLM server, which gives the log-probabilities of its likeliest ids.

    vllm serve Qwen/Qwen2.5-7B-Instruct --max-logprobs 64
    python examples/vllm_teacher.py --server http://localhost:8000 --model Qwen/Qwen2.5-7B-Instruct

Without --server a random model in this process answers as the server does.
"""

import argparse
import json
import urllib.request

import torch

from grpo_kernels import TopKTeacher, fused_distillation_loss

K = 16  # ids per token


def ask(server, model, ids):
    """For each token of ids the K likeliest in its place: a dictionary of id -> {"logprob": ...}; None for the first.

    temperature=1 in the loss: a server's prompt_logprobs have no other.
    """
    body = {"model": model, "prompt": ids, "max_tokens": 1, "prompt_logprobs": K}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{server}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["prompt_logprobs"]


def make_teacher(answers, completions, mode="tail"):
    """answers: of `ask` for prompt + completion. The teacher at the tokens of the completions, padded on the right."""
    rows = [
        [{int(i): entry["logprob"] for i, entry in token.items()} for token in answer[-len(ids) :]]
        for answer, ids in zip(answers, completions, strict=True)
    ]
    return TopKTeacher.from_lists(rows, mode=mode)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server")
    parser.add_argument("--model", default="Qwen/Qwen2.5-7B-Instruct")
    chosen = parser.parse_args()
    vocab = 512  # of the policy: the teacher's, in a run of your own
    torch.manual_seed(0)
    prompt, completions = [5, 9, 2], [[7, 1, 30, 4], [8, 11]]

    def answer(ids):
        found = torch.randn(len(ids), vocab).log_softmax(-1).topk(K)
        rows = zip(found.indices.tolist(), found.values.tolist(), strict=True)
        told = [{str(i): {"logprob": x} for i, x in zip(*row, strict=True)} for row in rows]
        return [None, *told[1:]]

    answers = [
        ask(chosen.server, chosen.model, prompt + c) if chosen.server else answer(prompt + c) for c in completions
    ]
    teacher = make_teacher(answers, completions)
    vocab = max(vocab, int(teacher.ids.max()) + 1)

    # In a trainer: the policy's hidden states at these tokens, and its lm_head.
    hidden, weight = torch.randn(2, 4, 32, requires_grad=True), torch.randn(vocab, 32, requires_grad=True)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    out = fused_distillation_loss(hidden, weight, teacher, completion_mask=mask)
    out.loss.backward()
    print(f"loss {out.loss.item():.4f}, {out.metrics['divergence/mass'].item():.1%} of the teacher's mass is known")
