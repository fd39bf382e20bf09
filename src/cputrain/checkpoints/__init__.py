"""Checkpoints that are whole or not there, and what resumption to the bit needs beside the weights."""
