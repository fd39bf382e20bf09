"""How the fused operators take a model's sub-modules over: one file per shape of sub-module."""
