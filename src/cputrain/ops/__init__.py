"""Fused operators, one file each: the kernel call, its gradient, and the plain PyTorch twin that says what it does."""
