"""Pools for tests, on every device that is here."""

import os
import subprocess
import sys

import pytest
import torch

from allocator import extensible_kv_pool
from allocator.shim import lib
from allocator.torch_routing import empty_cache

ON_EVERY_DEVICE = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
MIB = 1 << 20


def make_pool(device, num_layers=4, num_blocks=64, block_bytes=96 * 1024, block_dim=0, **options):
    """A layers-outermost int32 cache: pool and view `[layers, blocks, words]`; blocks straddle granules."""
    with extensible_kv_pool(device, **options) as pool:
        flat = torch.zeros(num_layers * num_blocks * block_bytes, dtype=torch.int8, device=device)
    view = flat.view(torch.int32).view(num_layers, num_blocks, -1)
    for layer in view:
        pool.bind(layer, block_dim)
    return pool, view


def fill(view, first, last):
    """A pattern that tells layer, block and place."""
    layers, _, words = view.shape
    pattern = torch.arange(words, dtype=torch.int32, device=view.device)
    for layer in range(layers):
        for block in range(first, last):
            view[layer, block] = pattern + (layer * 1009 + block * 7919)


def assert_filled(view, first, last):
    layers, _, words = view.shape
    pattern = torch.arange(words, dtype=torch.int32, device=view.device)
    for layer in range(layers):
        for block in range(first, last):
            assert torch.equal(view[layer, block], pattern + (layer * 1009 + block * 7919)), (layer, block)


def num_reservations(device):
    empty_cache(torch.device(device, 0) if device == "cuda" else torch.device(device))
    return lib.ekv_num_reservations()


def run_python(code, timeout=120, **environment):
    """Run `code` in a fresh interpreter; returns the finished process with its output as text."""
    env = {**os.environ, **{k: str(v) for k, v in environment.items()}}
    return subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=timeout
    )
