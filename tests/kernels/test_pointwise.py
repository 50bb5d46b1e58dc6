import pytest
import torch

from phalanx.kernels.pointwise import add_rms_norm, add_rms_norm_twin

pytestmark = pytest.mark.usefixtures("instruction_set", "threads")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 15, 16, 17, 64, 576, 1000])
@pytest.mark.parametrize("rows", [1, 3, 33])
def test_add_rms_norm(dtype, width, rows):
    torch.manual_seed(0)
    x, delta = torch.randn(rows, width, dtype=dtype), torch.randn(rows, width, dtype=dtype)
    weight = torch.randn(width, dtype=dtype)
    for added, scaled in ((delta, weight), (None, weight), (delta, None)):
        mine, theirs = x.clone(), x.clone()
        expected = add_rms_norm_twin(theirs, added, scaled, 1e-5)
        result = add_rms_norm(mine, added, scaled, 1e-5)
        assert torch.equal(mine, theirs)
        torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5 if dtype == torch.float32 else 1e-2)
        one_by_one = [add_rms_norm(x[i : i + 1].clone(), None if added is None else added[i : i + 1], scaled, 1e-5)
                      for i in range(rows)]  # fmt: skip
        assert torch.equal(result, torch.cat(one_by_one)), "a row's result depends on no other"
