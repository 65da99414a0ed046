"""Backbones, heads, weights in and out, frozen features."""
