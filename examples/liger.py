"""Code for Liger's losses. LigerFusedLinearGRPOLoss: one import is another. LigerFusedLinearJSDLoss: jsd_loss below.

python examples/liger.py
"""

import torch

# from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss
from grpo_kernels import Teacher, fused_distillation_loss, fused_logps
from grpo_kernels.integrations.liger import LigerFusedLinearGRPOLoss


def jsd_loss(student, head, teacher, labels, weight_hard_loss=0.5, weight_soft_loss=0.5, **divergence):
    """The mean, over labels (N,) other than -100, of their cross-entropy and of the divergence to a teacher.

    student (N, H); head: its Linear; teacher: a `Teacher` of hidden states (1, N, H'). divergence: the options of
    `fused_distillation_loss`, where Liger's beta is `divergence="jsd", divergence_beta=beta`, its 0 `"forward_kl"` and
    its 1 `"reverse_kl"`.
    """
    mask, bias = labels != -100, head.bias
    logps, _ = fused_logps(student, head.weight, labels.clamp(min=0), completion_mask=mask, lm_head_bias=bias)
    soft = fused_distillation_loss(
        student[None], head.weight, teacher, completion_mask=mask[None], lm_head_bias=bias, **divergence
    )
    return weight_soft_loss * soft.loss - weight_hard_loss * logps.sum() / mask.sum().clamp(min=1)


def main():
    torch.manual_seed(0)
    head = torch.nn.Linear(64, 1024, bias=False)
    hidden = torch.randn(4, 12, 64, requires_grad=True)  # row t predicts token t of the completion
    ids, mask = torch.randint(1024, (4, 12)), torch.ones(4, 12)
    ref_logps = torch.full((4, 12), -6.9)

    loss_fn = LigerFusedLinearGRPOLoss(beta=0.04, loss_type="dapo", epsilon_high=0.28, temperature=0.9)
    loss, (kl, clipped) = loss_fn(
        _input=hidden,
        lin_weight=head.weight,
        selected_token_ids=ids,
        attention_mask=mask,
        advantages=torch.tensor([1.0, -1.0, 0.5, -0.5]),
        ref_per_token_logps=ref_logps,
    )
    loss.backward()
    print(f"loss {loss.item():.4f}, kl {kl.item():.4f}, clipped {clipped.item():.3f}")

    teacher = Teacher(torch.randn(1, 48, 96), torch.randn(1024, 96) / 10)
    loss = jsd_loss(hidden.view(48, 64), head, teacher, ids.view(48), divergence="jsd", divergence_beta=0.5)
    loss.backward()
    print(f"jsd loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
