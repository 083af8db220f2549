import numpy as np
import pytest
import torch

from llmcache.support.arrays import product


@pytest.mark.parametrize("shape", [(5, 4), (5,), (4, 5)])
def test_a_product_is_that_of_numpy_whatever_autocast_says(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((3, 5), dtype=np.float32), rng.standard_normal(shape, dtype=np.float32)
    b = b.T if shape == (4, 5) else b
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made = product(a, b)
    assert made.dtype == np.float32
    np.testing.assert_allclose(made, a @ b, rtol=1e-5, atol=1e-6)
