"""The places of the contract's fields and columns (contract.py) as constants that kernels read."""

from __future__ import annotations

import triton
import triton.language as tl

from ...names import COLUMN, COLUMNS, FIELD, VALUE_FIELDS

# Rows of the table.
ADVANTAGE: tl.constexpr = tl.constexpr(FIELD["advantage"])
OLD: tl.constexpr = tl.constexpr(FIELD["old"])
REF: tl.constexpr = tl.constexpr(FIELD["ref"])
MULTIPLIER: tl.constexpr = tl.constexpr(FIELD["multiplier"])
WEIGHT_RATIO: tl.constexpr = tl.constexpr(FIELD["weight_ratio"])
WEIGHT_DIRECT: tl.constexpr = tl.constexpr(FIELD["weight_direct"])
WEIGHT_ENTROPY: tl.constexpr = tl.constexpr(FIELD["weight_entropy"])
TEMPERATURE: tl.constexpr = tl.constexpr(FIELD["temperature"])
ENTROPY_THRESHOLD: tl.constexpr = tl.constexpr(FIELD["entropy_threshold"])
ROLLOUT: tl.constexpr = tl.constexpr(FIELD["rollout"])
ROLLOUT_WEIGHT: tl.constexpr = tl.constexpr(FIELD["rollout_weight"])

# Rows of the values.
LOGP: tl.constexpr = tl.constexpr(VALUE_FIELDS.index("logp"))
ENTROPY: tl.constexpr = tl.constexpr(VALUE_FIELDS.index("entropy"))
LOG_RATIO: tl.constexpr = tl.constexpr(VALUE_FIELDS.index("log_ratio"))
VALUE: tl.constexpr = tl.constexpr(VALUE_FIELDS.index("value"))
KL_VALUE: tl.constexpr = tl.constexpr(VALUE_FIELDS.index("kl"))
G_LOGP: tl.constexpr = tl.constexpr(VALUE_FIELDS.index("g_logp"))
VALUE_COUNT: tl.constexpr = tl.constexpr(len(VALUE_FIELDS))

# Columns of the sums.
LOSS_SUM: tl.constexpr = tl.constexpr(COLUMN["loss"])
TOKENS: tl.constexpr = tl.constexpr(COLUMN["tokens"])
KL_SUM: tl.constexpr = tl.constexpr(COLUMN["kl"])
ENTROPY_SUM: tl.constexpr = tl.constexpr(COLUMN["entropy"])
RATIO: tl.constexpr = tl.constexpr(COLUMN["ratio"])
CLIP_LOW: tl.constexpr = tl.constexpr(COLUMN["clip_low"])
CLIP_HIGH: tl.constexpr = tl.constexpr(COLUMN["clip_high"])
CISPO_CLIP: tl.constexpr = tl.constexpr(COLUMN["cispo_clip"])
APPROX_KL: tl.constexpr = tl.constexpr(COLUMN["approx_kl"])
MISMATCH: tl.constexpr = tl.constexpr(COLUMN["mismatch"])
MISMATCH_COUNT: tl.constexpr = tl.constexpr(COLUMN["mismatch_count"])
WEIGHT_SUM: tl.constexpr = tl.constexpr(COLUMN["rollout_weight"])
WEIGHT_SQUARES: tl.constexpr = tl.constexpr(COLUMN["rollout_weight_sq"])
ZERO_GRADIENT: tl.constexpr = tl.constexpr(COLUMN["zero_gradient"])
COLUMN_COUNT: tl.constexpr = tl.constexpr(len(COLUMNS))
COLUMN_WIDTH: tl.constexpr = tl.constexpr(triton.next_power_of_2(len(COLUMNS)))
