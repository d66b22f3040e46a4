"""Functions without a derivative say so, in every mode of differentiation, and compute with constants."""

import pytest
import torch
from torch.autograd import forward_ad

from verl_fn.state import NotDifferentiable, Params, refuse_derivatives


def norm(w):
    refuse_derivatives("norm", Params({"w": w}), 3)
    return w.norm()


MODES = {
    "grad": lambda w: torch.func.grad(norm)(w),
    "jvp": lambda w: torch.func.jvp(norm, (w,), (w,)),
    "vjp": lambda w: torch.func.vjp(norm, w),
    "jacrev": lambda w: torch.func.jacrev(norm)(w),
    "gradients by row": lambda w: torch.func.vmap(torch.func.grad(norm))(w[None]),
    "grad of a row": lambda w: torch.func.grad(lambda x: torch.func.vmap(norm)(x[None]).sum())(w),
}


@pytest.mark.parametrize("mode", MODES)
def test_every_transformation_is_refused(mode):
    with pytest.raises(NotDifferentiable, match=r"norm has no derivative, .*backend\.loss_fn\(batch, loss\)"):
        MODES[mode](torch.ones(2))


def test_dual_tensors_are_refused():
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(2), torch.ones(2))
        with pytest.raises(NotDifferentiable):
            norm(dual)
        assert norm(torch.ones(4)) == 2.0


def test_a_constant_inside_a_transformation_is_accepted():
    weights = torch.full((4,), 0.5)
    assert torch.func.grad(lambda x: (x * norm(weights)).sum())(torch.ones(2)).tolist() == [1.0, 1.0]
