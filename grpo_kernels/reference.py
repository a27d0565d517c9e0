"""The specification: what every backend must compute, in plain PyTorch and by autograd, at any floating precision.

It holds the full (N, V) logits and is slow and large on purpose: one line per formula, `detach()` for stop-gradient.
At run time it imports config/ and names.py alone. Symbols: N tokens (a (B, T) batch flattened, or packed),
S sequences, V vocabulary; m is the mask, A the advantage, r the importance ratio. Natural logs, nats.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .config import DEFAULT_CONFIG, SURROGATE_RULES, GRPOConfig
from .names import EXPONENT_LIMIT, PRODUCT_LIMIT

if TYPE_CHECKING:
    from .sampling_mask import SamplingMask
    from .teacher import Teacher, TopKTeacher


class ReferenceOutput(NamedTuple):
    """loss () differentiable; logps, entropy (N,) differentiable, 0 at masked tokens; per-token tensors for metrics."""

    loss: Tensor
    logps: Tensor
    entropy: Tensor
    metrics: dict[str, Tensor]


def reference_grpo_loss(
    hidden: Tensor,
    lm_head_weight: Tensor,
    completion_ids: Tensor,
    advantages: Tensor,
    *,
    lm_head_bias: Tensor | None = None,
    teacher: Teacher | TopKTeacher | None = None,
    config: GRPOConfig | None = None,
    **options: Tensor | float | None,
) -> ReferenceOutput:
    """The loss from hidden states (B, T, H) or (N, H); `options` are those of `reference_loss_from_logits`."""
    config = config or DEFAULT_CONFIG
    mask = options.get("completion_mask")

    def product(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if isinstance(mask, Tensor):  # padding may hold NaN, which a gradient of 0 would not keep out of the weight's
            hidden = torch.where(mask.bool()[..., None], hidden, 0.0)
        return hidden @ weight.mT if bias is None else hidden @ weight.mT + bias

    logits = product(hidden, lm_head_weight, lm_head_bias)
    if teacher is not None:
        cu_seqlens = options.get("cu_seqlens")
        assert cu_seqlens is None or isinstance(cu_seqlens, Tensor)
        temperature = _per_token(config.temperature, completion_ids.shape, cu_seqlens)
        log_p = _log_softmax(logits, temperature, config.logit_scale, config.logit_softcap)
        if hasattr(teacher, "ids"):
            options["divergence"] = top_k_divergence(config, log_p, teacher.ids, teacher.logps, teacher.mode)
        else:
            given = product(teacher.hidden, teacher.weight, teacher.bias).detach().to(logits.dtype)
            log_q = _log_softmax(given, temperature, teacher.logit_scale, teacher.logit_softcap)
            if teacher.top_k:
                ids = logits.detach().argsort(dim=-1, descending=True, stable=True)[..., : teacher.top_k]
                logps = log_q.gather(-1, ids)
                options["divergence"] = top_k_divergence(config, log_p, ids, logps, teacher.mode)
            else:
                options["divergence"] = divergence(config, log_p, log_q)
    return reference_loss_from_logits(logits, completion_ids, advantages, config=config, **options)


def reference_loss_from_logits(
    logits: Tensor,
    completion_ids: Tensor,
    advantages: Tensor,
    *,
    completion_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    sampling_mask: SamplingMask | None = None,
    config: GRPOConfig | None = None,
    **options: Tensor | float | None,
) -> ReferenceOutput:
    """The loss from raw logits (B, T, V) or (N, V); `options` are those of `reference_loss_from_logps`."""
    config = config or DEFAULT_CONFIG
    mask = torch.ones_like(completion_ids, dtype=torch.bool) if completion_mask is None else completion_mask.bool()
    # Padding may hold NaN, inf or any id: it is replaced before any arithmetic.
    ids = torch.where(mask, completion_ids, 0)
    logits = torch.where(mask[..., None], logits, 0.0)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logps, entropy = reference_logps(
        logits,
        ids,
        temperature=_per_token(config.temperature, ids.shape, cu_seqlens),
        logit_scale=config.logit_scale,
        logit_softcap=config.logit_softcap,
        sampling_mask=sampling_mask,
    )
    return reference_loss_from_logps(
        logps, advantages, entropy=entropy, completion_mask=mask, cu_seqlens=cu_seqlens, config=config, **options
    )


def _per_token(temperature: float | Tensor, shape: torch.Size, cu_seqlens: Tensor | None) -> float | Tensor:
    """A tensor of temperatures, of which there is one in all, one per token, or one per sequence (S,) or (S, 1)."""
    if not isinstance(temperature, Tensor) or temperature.shape == shape:
        return temperature
    if temperature.numel() == 1:
        return temperature.reshape(())
    return temperature.reshape(-1)[sequence_of_token(shape, cu_seqlens, temperature.device)].view(shape)


def reference_logps(
    logits: Tensor,
    ids: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    sampling_mask: SamplingMask | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of `ids` and entropy of softmax(z), z = softcap(scale * logits) / temperature, over kept ids."""
    allowed = None if sampling_mask is None else allowed_ids(sampling_mask, ids, logits.shape[-1])
    log_p = _log_softmax(logits, temperature, logit_scale, logit_softcap, allowed)
    entropy = -(log_p.exp() * log_p.masked_fill(log_p == -math.inf, 0.0)).sum(-1)
    return log_p.gather(-1, ids[..., None]).squeeze(-1), entropy


def _log_softmax(
    logits: Tensor,
    temperature: float | Tensor,
    logit_scale: float,
    logit_softcap: float | None,
    allowed: Tensor | None = None,
) -> Tensor:
    z = logits * logit_scale
    if logit_softcap is not None:
        # A logit of -inf, an id that is excluded, stays one.
        z = torch.where(z == -math.inf, z, logit_softcap * torch.tanh(z / logit_softcap))
    z = z / (temperature[..., None] if isinstance(temperature, Tensor) else temperature)
    return (z if allowed is None else z.masked_fill(~allowed, -math.inf)).log_softmax(-1)


def divergence(cfg: GRPOConfig, log_p: Tensor, log_q: Tensor) -> Tensor:
    """(...,) from log-probabilities (..., V) of the policy and the teacher. "jsd": GKD, arXiv:2306.13649."""

    def kl(log_a: Tensor, log_b: Tensor) -> Tensor:
        """sum a log(a / b), where 0 log 0 = 0."""
        ratio = torch.where(log_a == -math.inf, 0.0, log_a - log_b)
        return (log_a.exp() * ratio).sum(-1)

    if cfg.divergence == "reverse_kl":
        return kl(log_p, log_q)
    if cfg.divergence == "forward_kl":
        return kl(log_q, log_p)
    b = float(cfg.divergence_beta or 0.5)
    neither = (log_p == -math.inf) & (log_q == -math.inf)  # logaddexp has a gradient of NaN there
    mixed = torch.logaddexp(log_p.masked_fill(neither, 0.0) + math.log(1 - b), log_q + math.log(b))
    log_m = mixed.masked_fill(neither, -math.inf)
    return b * kl(log_q, log_m) + (1 - b) * kl(log_p, log_m)


def top_k_divergence(cfg: GRPOConfig, log_p: Tensor, ids: Tensor, logps: Tensor, mode: str) -> Tensor:
    """(...,) of log-probabilities (..., V) and a teacher's at `ids` (..., K). "tail": one more outcome with what is
    left of either mass, the teacher's at least 2^-24, what float32 log-probabilities tell from none."""
    used, ids = ids >= 0, ids.clamp(min=0).long()
    log_q = logps.to(log_p.dtype).masked_fill(~used, -math.inf)
    inside = torch.zeros_like(log_p, dtype=torch.bool).scatter_add_(-1, ids, used)
    log_p, others = log_p.gather(-1, ids).masked_fill(~used, -math.inf), log_p.masked_fill(inside, -math.inf)
    if mode == "renormalize":
        return divergence(cfg, log_p.log_softmax(-1), log_q.log_softmax(-1))
    if mode == "tail":
        has_rest = ~inside.all(-1, keepdim=True)
        rest = torch.where(has_rest, others, 0.0).logsumexp(-1, keepdim=True)
        mass = (1 - log_q.double().exp().sum(-1, keepdim=True)).clamp(min=2.0**-24).to(log_p.dtype)
        log_p = torch.cat([log_p, torch.where(has_rest, rest, -math.inf)], -1)
        log_q = torch.cat([log_q, torch.where(has_rest, mass.log(), -math.inf)], -1)
    return divergence(cfg, log_p, log_q)


def allowed_ids(sampling_mask: SamplingMask, ids: Tensor, vocab_size: int) -> Tensor:
    """bool (..., V): what truncated sampling kept, the sampled ids always among it (DeepSeek-V3.2, arXiv:2512.02556,
    section 3.1). A token with count 0 keeps the whole vocabulary."""
    if sampling_mask.counts.shape != ids.shape:
        raise ValueError(f"sampling_mask is of tokens {tuple(sampling_mask.counts.shape)}; expected {tuple(ids.shape)}")
    if sampling_mask.ids.numel() and int(sampling_mask.ids.max()) >= vocab_size:
        raise ValueError(f"sampling_mask holds id {int(sampling_mask.ids.max())}; expected ids < {vocab_size}")
    counts = sampling_mask.counts.reshape(-1).long()
    token = torch.arange(counts.numel(), device=counts.device).repeat_interleave(counts)
    allowed = torch.zeros(counts.numel(), vocab_size, dtype=torch.bool, device=counts.device)
    allowed[token, sampling_mask.ids.long()] = True
    allowed.scatter_(1, ids.reshape(-1, 1), True)
    return (allowed | (counts == 0)[:, None]).view(*ids.shape, vocab_size)


def reference_loss_from_logps(
    logps: Tensor,
    advantages: Tensor,
    *,
    entropy: Tensor | None = None,
    completion_mask: Tensor | None = None,
    old_logps: Tensor | None = None,
    ref_logps: Tensor | None = None,
    rollout_weights: Tensor | None = None,
    rollout_logps: Tensor | None = None,
    token_weights: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    num_items_in_batch: Tensor | float | None = None,
    normalizer: Tensor | float | None = None,
    entropy_normalizer: Tensor | float | None = None,
    divergence: Tensor | None = None,
    config: GRPOConfig | None = None,
) -> ReferenceOutput:
    """The loss from log-probabilities (B, T) or packed (N,): ratio, surrogate, KL, aggregation, metrics.

    divergence: to a teacher's distribution, of the same shape."""
    cfg = config or DEFAULT_CONFIG
    shape = logps.shape
    seq = sequence_of_token(shape, cu_seqlens, logps.device)
    num_seq = shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    m = torch.ones(shape, dtype=torch.bool, device=logps.device) if completion_mask is None else completion_mask.bool()
    m = m.flatten()

    def tokens(x: Tensor | None, fill: float = 0.0) -> Tensor | None:
        """One value per token, from (B,), (B, 1), (B, T) or (N,), with `fill` at masked tokens."""
        if x is None:
            return None
        per_sequence = x.numel() == num_seq and x.shape != shape
        x = x.reshape(-1)[seq] if per_sequence else x.reshape(-1)
        return torch.where(m, x.to(logps.dtype), fill)

    def seq_sum(x: Tensor) -> Tensor:
        return torch.zeros(num_seq, dtype=x.dtype, device=x.device).index_add(0, seq, x)

    logp, A = tokens(logps), tokens(advantages)
    H = None if entropy is None else tokens(entropy)
    old, ref, rollout = tokens(old_logps), tokens(ref_logps), tokens(rollout_logps)
    weight = tokens(rollout_weights, 1.0)
    length = seq_sum(m.to(logp.dtype))

    # DPPO and IPO divide by the sampling engine's probability. Where it is unknown (NaN) they fall back to the old
    # policy's, and without one the token has a ratio of 1 and no surrogate.
    base, known = old, None
    if SURROGATE_RULES[cfg.surrogate].divides_by_rollout and rollout is not None:
        known = ~rollout.isnan() if old is None else None
        base = torch.where(rollout.isnan(), logp.detach() if old is None else old, rollout)
    log_ratio = logp - (logp.detach() if base is None else base)

    # Ratio
    if cfg.surrogate == "gmpo":
        clipped = log_ratio.clamp(-cfg.epsilon_low, cfg.epsilon_high)
        narrow = torch.where(A > 0, torch.minimum(log_ratio, clipped), torch.maximum(log_ratio, clipped))
        s = (seq_sum(narrow * m) / length.clamp(min=1))[seq]
    elif cfg.importance_sampling_level == "sequence":
        s = (seq_sum(log_ratio * m) / length.clamp(min=1))[seq]
    elif cfg.importance_sampling_level == "sequence_sum":
        s = seq_sum(log_ratio * m)[seq]
    elif cfg.importance_sampling_level == "sequence_token":
        s = (seq_sum(log_ratio * m) / length.clamp(min=1))[seq].detach() + logp - logp.detach()
    else:
        s = log_ratio
    bound = math.inf if cfg.log_ratio_clamp is None else cfg.log_ratio_clamp
    r = s.clamp(-bound, min(bound, EXPONENT_LIMIT)).exp()

    # Surrogate x off-policy mask x entropy mask x rollout weight, then + beta KL
    if cfg.surrogate == "vespo":
        low, log_w = math.log(1e-8), seq_sum((log_ratio.detach() * m).clamp(-20, 20))
        if weight is not None:
            log_w = log_w + seq_sum(weight.log().clamp(low, 20) * m)
        value = -vespo_phi(cfg, A, log_w.clamp(low, 20)[seq]) * A * logp
    else:
        value = SURROGATES[cfg.surrogate](cfg, r, s, logp, A)
        if weight is not None:
            value = value * weight
    if known is not None:
        value = torch.where(known, value, 0.0)
    if cfg.off_policy_mask_threshold is not None:
        before = rollout if rollout is not None else old if old is not None else logp.detach()
        drift = torch.nan_to_num((before - logp.detach()) * m, nan=0.0)
        keep = (A >= 0) | ((seq_sum(drift) / length.clamp(min=1))[seq] <= cfg.off_policy_mask_threshold)
        value = value * keep
    if cfg.entropy_threshold is not None:
        value = value * ~(H.detach() < cfg.entropy_threshold)
    # NaN logits show in the loss, even where a threshold or a mask drops their token.
    value = value.masked_fill(logp.isnan() if H is None else logp.isnan() | H.isnan(), math.nan)
    kl = None
    if ref is not None and cfg.kl_estimator != "none":
        kl = kl_estimate(cfg, logp, ref)
        if cfg.kl_score_term:
            kl = score_term(cfg, kl, logp, ref)
        if cfg.use_bias_correction_kl:
            kl = (kl * r).clamp(-PRODUCT_LIMIT, PRODUCT_LIMIT)
        if cfg.beta != 0.0:
            value = value + cfg.beta * kl

    D = tokens(divergence)
    if D is not None:
        value = value + cfg.distill_coef * D
    w, accumulation = aggregation_weights(cfg, m, length, seq, num_items_in_batch, normalizer)
    of_entropy = w
    if token_weights is not None:
        scale = tokens(token_weights)
        w, value = w * scale, torch.where(scale == 0, 0.0, value)
    loss = (w * value).sum()
    if cfg.entropy_aggregation == "loss":
        loss = loss - cfg.entropy_coef * (of_entropy * H).sum()
    elif cfg.entropy_coef != 0.0:
        kept = m & ~(H.detach() < cfg.entropy_threshold) if cfg.entropy_kept_only else m
        bonus = cfg.entropy_coef * (H * kept).sum()
        own = entropy_normalizer is None
        loss = loss - (bonus / kept.sum().clamp(min=1) / accumulation if own else bonus / entropy_normalizer)

    metrics = _metrics(cfg, m, logp=logp, H=H, r=r, A=A, kl=kl, old=old, base=base, rollout=rollout, weight=weight)
    if D is not None:
        metrics["divergence"] = (torch.where(m, D.detach(), 0.0).sum()) / m.sum().clamp(min=1)
    if cfg.entropy_coef != 0.0:
        metrics["policy_loss"] = (w * value).sum().detach()
    zero = torch.zeros((), dtype=logp.dtype, device=logp.device)
    H = zero.expand(logp.shape) if H is None else H
    return ReferenceOutput(loss, logp.reshape(shape), H.reshape(shape), metrics)


# --- surrogates: (config, ratio r, its logarithm without a clamp, logp, A) -> loss per token ----------------------


def clip(cfg: GRPOConfig, r: Tensor, log_ratio: Tensor, logp: Tensor, A: Tensor) -> Tensor:
    """PPO (arXiv:1707.06347), and with it GRPO, DAPO, GSPO, LUSPO. delta: two-sided clipping of INTELLECT-2
    (arXiv:2505.07291). dual_clip: arXiv:1912.09729.
    """
    first = r if cfg.delta is None else r.clamp(max=cfg.delta)
    loss = -torch.minimum(first * A, r.clamp(1 - cfg.epsilon_low, 1 + cfg.epsilon_high) * A)
    if cfg.dual_clip is not None:
        loss = torch.where(A < 0, torch.minimum(loss, -cfg.dual_clip * A), loss)
    return loss


def cispo(cfg: GRPOConfig, r: Tensor, log_ratio: Tensor, logp: Tensor, A: Tensor) -> Tensor:
    """CISPO of MiniMax-M1 (arXiv:2506.13585), the upper bound alone; cap 5: ScaleRL (arXiv:2510.13786)."""
    return -r.clamp(max=cfg.epsilon_high).detach() * A * logp


def cispo_two_sided(cfg: GRPOConfig, r: Tensor, log_ratio: Tensor, logp: Tensor, A: Tensor) -> Tensor:
    """CISPO of MiniMax-M1 (arXiv:2506.13585) with both bounds, as in verl and NeMo-RL."""
    return -r.clamp(1 - cfg.epsilon_low, 1 + cfg.epsilon_high).detach() * A * logp


def cispo_mask(cfg: GRPOConfig, r: Tensor, log_ratio: Tensor, logp: Tensor, A: Tensor) -> Tensor:
    """Masked importance sampling of SkyRL: ratios outside of the range have no weight."""
    r = r.detach()
    inside = (1 - cfg.epsilon_low < r) & (r < 1 + cfg.epsilon_high)
    return torch.where(inside, -r * A * logp, 0.0)


def cispo_unified(cfg: GRPOConfig, r: Tensor, log_ratio: Tensor, logp: Tensor, A: Tensor) -> Tensor:
    """CISPO of ROLL: clipped ratios, and no weight where the advantage pushes out of the range."""
    r = r.detach()
    outward = ((A > 0) & (r > 1 + cfg.epsilon_high)) | ((A < 0) & (r < 1 - cfg.epsilon_low))
    return torch.where(outward, 0.0, cispo_two_sided(cfg, r, log_ratio, logp, A))


def sapo(cfg: GRPOConfig, r: Tensor, log_ratio: Tensor, logp: Tensor, A: Tensor) -> Tensor:
    """SAPO (arXiv:2511.20347)."""
    tau = _choose(A > 0, cfg.sapo_temperature_pos, cfg.sapo_temperature_neg, r)
    return -(4 / tau) * torch.sigmoid(tau * (r - 1)) * A


def reinforce(cfg: GRPOConfig, r: Tensor, log_ratio: Tensor, logp: Tensor, A: Tensor) -> Tensor:
    """REINFORCE (Williams, Machine Learning 8, 1992). A = 1 is supervised fine-tuning."""
    return -A * logp


def gmpo(cfg: GRPOConfig, r: Tensor, log_ratio: Tensor, logp: Tensor, A: Tensor) -> Tensor:
    """GMPO (arXiv:2507.20673). r is already the exponential of the sequence mean of clipped log-ratios."""
    return -A * r


def dppo_tv(cfg: GRPOConfig, r: Tensor, log_ratio: Tensor, logp: Tensor, A: Tensor) -> Tensor:
    """DPPO with the binary total-variation mask (arXiv:2602.04879) and the squared log-ratio of prime-rl's loss."""
    change = _probability_change(log_ratio, logp)
    drop = ((A > 0) & (change > cfg.epsilon_high)) | ((A <= 0) & (change < -cfg.epsilon_low))
    return _trust_region(cfg, r, log_ratio, logp, A, drop)


def dppo_kl(cfg: GRPOConfig, r: Tensor, log_ratio: Tensor, logp: Tensor, A: Tensor) -> Tensor:
    """DPPO with the binary KL mask (arXiv:2602.04879): of the sampled id against all others."""
    p, mu = logp.detach().exp(), (logp - log_ratio).detach().exp()
    kl = mu * -log_ratio.detach() + (1 - mu) * ((1 - mu + 1e-8) / (1 - p + 1e-8)).log()
    drop = torch.where(A > 0, (p > mu) & (kl > cfg.epsilon_high), (p < mu) & (kl > cfg.epsilon_low))
    return _trust_region(cfg, r, log_ratio, logp, A, drop)


def ipo(cfg: GRPOConfig, r: Tensor, log_ratio: Tensor, logp: Tensor, A: Tensor) -> Tensor:
    """The IPO loss (INTELLECT Policy Optimization) of prime-rl: docs.primeintellect.ai/prime-rl/ipo."""
    drop = _probability_change(log_ratio, logp).abs() > cfg.epsilon_high
    return _trust_region(cfg, r, log_ratio, logp, A, drop)


def a2po(cfg: GRPOConfig, r: Tensor, log_ratio: Tensor, logp: Tensor, A: Tensor) -> Tensor:
    """A*-PO (arXiv:2505.20686), TRL's A2PO: regression of the sequence's log-ratio on the advantage."""
    return (cfg.a2po_beta * log_ratio - A) ** 2


def _trust_region(cfg: GRPOConfig, r: Tensor, log_ratio: Tensor, logp: Tensor, A: Tensor, drop: Tensor) -> Tensor:
    """The cap: section 5.4 of arXiv:2602.04879. The squared log-ratio: prime-rl."""
    value = r * A if cfg.ratio_cap is None else r.detach().clamp(max=cfg.ratio_cap) * A * logp
    return -torch.where(drop, 0.0, value) + cfg.dppo_kl_tau * log_ratio**2


def _choose(condition: Tensor, yes: float, no: float, like: Tensor) -> Tensor:
    """torch.where of two numbers, which rounds them to float32 first, in the type of `like`."""
    return torch.full_like(like, no).masked_fill(condition, yes)


def _probability_change(log_ratio: Tensor, logp: Tensor) -> Tensor:
    return (logp.exp() - (logp - log_ratio).exp()).detach()


_NAMED = clip, cispo, cispo_two_sided, cispo_mask, cispo_unified, sapo, reinforce, gmpo, dppo_tv, dppo_kl, ipo, a2po
SURROGATES = {f.__name__: f for f in _NAMED}


def vespo_phi(cfg: GRPOConfig, A: Tensor, log_w: Tensor) -> Tensor:
    """VESPO (arXiv:2602.10693): phi(w) = exp(lambda + k ln w - lambda w) of the sequence weight w, without gradient."""
    k = _choose(A >= 0, cfg.vespo_k_pos, cfg.vespo_k_neg, log_w)
    lam = _choose(A >= 0, cfg.vespo_lambda_pos, cfg.vespo_lambda_neg, log_w)
    return (lam + k * log_w - lam * log_w.exp()).exp().detach()


# --- KL to the reference policy -----------------------------------------------------------------------------------


def kl_estimate(cfg: GRPOConfig, logp: Tensor, ref: Tensor) -> Tensor:
    """k1, k2, k3: Schulman, "Approximating KL Divergence", 2020, joschu.net/blog/kl-approx.html. GRPO uses k3
    (arXiv:2402.03300). abs, k1+ and k3+ (value of the one, gradient of k2): verl (arXiv:2409.19256). The product with
    the ratio, use_bias_correction_kl, is in `reference_loss_from_logps`: DeepSeek-V3.2 (arXiv:2512.02556).
    """
    delta_bound, kl_bound = cfg.kl_clamps
    d = ref - logp
    if delta_bound is not None:
        d = d.clamp(-delta_bound, delta_bound)

    def bounded(x: Tensor) -> Tensor:
        return x if kl_bound is None else x.clamp(-kl_bound, kl_bound)

    if cfg.kl_estimator == "k2":
        return bounded(d**2 / 2)
    if cfg.kl_estimator == "abs":
        return bounded(d.abs())
    exponent = d.clamp(max=EXPONENT_LIMIT)
    value = -d if cfg.kl_estimator.startswith("k1") else exponent.expm1() - exponent
    if cfg.kl_estimator.endswith("+"):
        k2 = (ref - logp) ** 2 / 2  # verl's has no clamp
        return bounded(value).detach() + k2 - k2.detach()
    return bounded(value)


def score_term(cfg: GRPOConfig, kl: Tensor, logp: Tensor, ref: Tensor) -> Tensor:
    """kl times exp(logp - sg(logp)) (arXiv:2506.09477), the gradient 0 where a clamp acts, as in NeMo-RL."""
    delta_bound, kl_bound = cfg.kl_clamps
    d = ref - logp
    upper = EXPONENT_LIMIT if cfg.kl_estimator == "k3" else math.inf
    inside = (d.abs() <= (math.inf if delta_bound is None else delta_bound)) & (d <= upper)
    if kl_bound is not None:
        inside &= kl.abs() < kl_bound
    return torch.where(inside, kl * (logp - logp.detach()).exp(), kl)


# --- aggregation --------------------------------------------------------------------------------------------------


def aggregation_weights(
    cfg: GRPOConfig,
    m: Tensor,
    length: Tensor,
    seq: Tensor,
    num_items_in_batch: Tensor | float | None,
    normalizer: Tensor | float | None,
) -> tuple[Tensor, Tensor | float]:
    """(w, accumulation): loss = sum_t w_t l_t; accumulation = normaliser / this call's, for the entropy bonus.

    `normalizer` replaces the denominator of the rule (B, the tokens, B * max_completion_length), so that micro-batches
    and ranks that pass the global one add up to the loss of one big batch.
    """
    # Counts in the type of the values: two integers would be divided in torch's default type.
    num_seq, num_tokens = max(length.numel(), 1), length.sum().clamp(min=1)
    denominators: dict[str, Tensor | float] = {
        "seq_mean": num_seq,
        "token_mean": num_tokens,
        "fixed_length": num_seq * (cfg.max_completion_length or math.nan),
        "num_items": num_tokens,
        "seq_sum": num_seq,
    }
    own = denominators[cfg.aggregation]
    given = num_items_in_batch if normalizer is None else normalizer
    if given is None:
        given = own
    else:
        given = torch.as_tensor(given, dtype=length.dtype, device=length.device)
        given = given if num_items_in_batch is None else given.clamp(min=1)
    w = m.to(length.dtype)
    if cfg.aggregation == "seq_mean":
        w = w / length.clamp(min=1)[seq]
    return w / given, given / own


def sequence_of_token(shape: torch.Size, cu_seqlens: Tensor | None, device: torch.device) -> Tensor:
    """Index of the sequence of each of the N tokens."""
    if cu_seqlens is None:
        return torch.arange(shape[0], device=device).repeat_interleave(shape[1])
    return torch.arange(cu_seqlens.numel() - 1, device=device).repeat_interleave(cu_seqlens.diff().to(device))


def _metrics(
    cfg: GRPOConfig, m: Tensor, *, logp: Tensor, H: Tensor | None, r: Tensor, A: Tensor, kl: Tensor | None,
    old: Tensor | None, base: Tensor | None, rollout: Tensor | None, weight: Tensor | None,
) -> dict[str, Tensor]:  # fmt: skip
    """Means over unmasked tokens."""
    count = m.sum().clamp(min=1)

    def mean(x: Tensor) -> Tensor:
        return torch.where(m, x.detach().to(logp.dtype), 0.0).sum() / count

    out = {"ratio/mean": mean(r)}
    if m.any():
        out |= {"ratio/min": r[m].min().detach(), "ratio/max": r[m].max().detach()}
    if H is not None:
        out["entropy"] = mean(H)
    if kl is not None:
        out["kl"] = mean(kl)
    out["approx_kl"] = mean((logp if base is None else base) - logp)
    if cfg.surrogate == "cispo":
        out["cispo_clip_ratio"] = mean((r > cfg.epsilon_high) & (A > 0))
    elif cfg.surrogate in ("clip", "cispo_two_sided", "cispo_mask", "cispo_unified"):
        bounded = r if cfg.delta is None else r.clamp(max=cfg.delta)
        low, high = (bounded < 1 - cfg.epsilon_low) & (A < 0), (bounded > 1 + cfg.epsilon_high) & (A > 0)
        out |= {"clip_ratio/low": mean(low), "clip_ratio/high": mean(high), "clip_ratio/region": mean(low | high)}
    if rollout is not None:
        known = m & ~rollout.isnan()
        # DPPO and IPO divide by the rollout itself: there the current policy is compared with it.
        current = old is None or SURROGATE_RULES[cfg.surrogate].divides_by_rollout
        gap = ((logp.detach() if current else old) - rollout).abs()[known]
        out["rollout_mismatch/mean"] = gap.sum() / known.sum().clamp(min=1)
        if known.any():
            out["rollout_mismatch/max"] = gap.max()
    if weight is not None:
        w = weight[m]
        out["rollout_ess"] = w.sum() ** 2 / (w**2).sum() / count if w.any() else w.new_zeros(())
    return out
