import numpy as np
import pytest
import torch

from llmcache.support.arrays import product


@pytest.mark.parametrize("shape", [(5, 4), (5,)])
def test_a_product_is_that_of_numpy_whatever_autocast_says(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((3, 5), dtype=np.float32), rng.standard_normal(shape, dtype=np.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made = product(a, b)
    assert made.dtype == np.float32
    np.testing.assert_allclose(made, a @ b, rtol=1e-5, atol=1e-6)


def test_a_product_takes_a_transposed_array() -> None:
    a, b = np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(12, dtype=np.float32).reshape(4, 3)
    np.testing.assert_array_equal(product(a, b.T), a @ b.T)
