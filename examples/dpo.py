"""Direct preference optimisation (arXiv:2305.18290) without logits: a loss over whole sequences through fused_logps."""

import torch
import torch.nn.functional as F

from grpo_kernels import fused_logps


def dpo_loss(hidden, weight, ids, mask, ref_logps, beta=0.1, **options):
    """mean over pairs of -log sigmoid(beta ((chosen - rejected) - (ref_chosen - ref_rejected))).

    hidden (2 P, T, H), ids and mask (2 P, T): P chosen completions, then the P rejected ones. weight (V, H).
    ref_logps (2 P,): the reference model's log-probabilities, summed over each completion. options: of fused_logps.
    """
    logps, _ = fused_logps(hidden, weight, ids, completion_mask=mask, **options)
    chosen, rejected = (logps.sum(-1) - ref_logps).chunk(2)
    return -F.logsigmoid(beta * (chosen - rejected)).mean()


if __name__ == "__main__":
    torch.manual_seed(0)
    hidden, weight = torch.randn(6, 10, 32, requires_grad=True), torch.randn(512, 32, requires_grad=True)
    ids, mask = torch.randint(512, (6, 10)), torch.ones(6, 10)
    with torch.no_grad():
        ref_logps = fused_logps(hidden, weight, ids)[0].sum(-1)
    loss = dpo_loss(hidden, weight, ids, mask, ref_logps)
    loss.backward()
    print(f"loss {loss.item():.4f}, log 2 at the reference model")
