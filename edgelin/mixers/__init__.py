"""Layers that mix information along time, one file a mechanism."""
