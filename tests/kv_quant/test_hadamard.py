"""The rotation: orthonormal, its own inverse, and what it is for."""

import pytest
import torch

from vllm_ktx.kv_quant import hadamard

DIMS = [16, 48, 64, 80, 96, 128, 256]


@pytest.mark.parametrize("dim", DIMS)
def test_orthonormal_and_symmetric(dim):
    matrix = hadamard.rotate(torch.eye(dim, dtype=torch.float64))
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(dim, dtype=torch.float64))
    assert torch.equal(matrix, matrix.T)


@pytest.mark.parametrize("dim", DIMS)
def test_twice_is_the_input(dim):
    x = torch.randn(3, 5, dim)
    torch.testing.assert_close(hadamard.rotate(hadamard.rotate(x)), x)
    assert hadamard.rotate(x).dtype == torch.float32


@pytest.mark.parametrize(("dim", "block"), [(16, 16), (48, 16), (80, 16), (96, 32), (128, 128)])
def test_block_diagonal(dim, block):
    assert hadamard.block_size(dim) == block
    x = torch.zeros(dim)
    x[block - 1] = 1.0
    y = hadamard.rotate(x)
    assert not y[block:].any()
    torch.testing.assert_close(y[:block].abs(), torch.full((block,), block**-0.5))


def test_spreads_an_outlier():
    x = torch.ones(128)
    x[3] = 100.0
    assert hadamard.rotate(x).abs().max() < 25
