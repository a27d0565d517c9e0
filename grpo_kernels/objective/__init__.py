"""The GRPO family's losses from log-probabilities, in closed form: every formula over tokens stands here, once.

    tokens.py       which tokens count, and their share in the loss, before any log-probability is known
    aggregation.py  the weight of a token
    surrogates.py   the policy term of a token, and its derivatives
    kl.py           the estimate of the KL to a reference policy
    sequences.py    ratios, weights and masks of whole sequences
    loss.py         the loss and d loss / d logp
    rollout.py      ratios of the old policy to the sampling engine, and what their weights are worth
    metrics.py      what is measured of a batch, computed when it is asked for

reference.py is the specification by autograd. Nothing here waits for a GPU; coefficients are selected, never multiplied
by a mask: 0 * inf at a clipped or padded token would be NaN.
"""
