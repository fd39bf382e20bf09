"""Real training steps of models with random weights, for a few seconds: what `plan` and `bench` measure."""
