"""The commands: grpo-kernels env, check, bench, demo."""
