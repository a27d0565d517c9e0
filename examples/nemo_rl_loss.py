"""NeMo-RL: a loss function in place of ClippedPGLossFn. It needs NeMo-RL, which is on no package index."""

from nemo_rl.algorithms.loss.interfaces import LossInputType, LossType

from grpo_kernels import GRPOConfig, grpo_loss_from_logps


class FusedPolicyLossFn:
    """loss, metrics from the log-probabilities (B, S - 1) of the next tokens; `config` is any GRPOConfig.

    NeMo-RL multiplies its KL by exp(logp - sg(logp)): where no clamp acts, its default is kl_estimator="k3+" with
    kl_clamp=(20, 10). aggregation "token_mean" divides by the valid tokens of the global batch, "seq_mean" by its
    sequences.
    """

    input_type = LossInputType.LOGPROB

    def __init__(self, config: GRPOConfig):
        self.config = config
        self.by_token = config.aggregation == "token_mean"
        self.loss_type = LossType.TOKEN_LEVEL if self.by_token else LossType.SEQUENCE_LEVEL

    def __call__(self, next_token_logprobs, data, global_valid_seqs, global_valid_toks):
        out = grpo_loss_from_logps(
            next_token_logprobs,
            data["advantages"][:, 1:],
            completion_mask=data["token_mask"][:, 1:] * data["sample_mask"][:, None],
            old_logps=data["prev_logprobs"][:, 1:],
            rollout_logps=data["generation_logprobs"][:, 1:],
            ref_logps=data["reference_policy_logprobs"][:, 1:] if self.config.beta else None,
            normalizer=global_valid_toks if self.by_token else global_valid_seqs,
            config=self.config,
        )
        # NeMo-RL adds metrics over micro-batches: sums over the global count.
        metrics = {name: (total / global_valid_toks).item() for name, (total, _) in out.metric_sums.items()}
        return out.loss, metrics | {"loss": out.loss.item(), "num_valid_samples": data["sample_mask"].sum().item()}
