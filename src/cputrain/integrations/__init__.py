"""How transformers' Trainer and Accelerate come to use cputrain: as imports of their own, or in stock's place."""
