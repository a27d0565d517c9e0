"""The commands: grpo-kernels env, check, tune, bench, demo."""
