"""The shortcuts through TensorDict have the results of the public functions."""

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict

from envherd.executor.batches import fast_tensordict as tensordict_access
from envherd.executor.batches.fast_tensordict import get_leaf, maker, set_next

SIZE = torch.Size([2])


@pytest.fixture(params=["short", "public"], autouse=True)
def _way(request, monkeypatch):
    """Both ways: the short one, which this version of TensorDict allows, and the one for versions that do not."""
    assert tensordict_access.IS_AS_EXPECTED
    monkeypatch.setattr(tensordict_access, "IS_AS_EXPECTED", request.param == "short")


def leaves():
    return {"a": torch.arange(2), "b": torch.ones(2, 3)}


@pytest.mark.parametrize("device", [None, torch.device("cpu")])
def test_made_as_by_the_constructor(device):
    made, public = (
        maker(SIZE, device)(leaves()),
        TensorDict(leaves(), SIZE, device=device),
    )
    assert set(vars(made)) >= {"_tensordict", "_batch_size", "_device"}
    assert made.batch_size == public.batch_size
    assert made.device == public.device
    assert made.names == public.names
    assert (made == public).all()
    made["c"] = torch.zeros(2)
    made.rename_key_("c", "d")
    made.lock_()
    assert sorted(made.keys()) == ["a", "b", "d"]
    assert made.clone().unlock_()[0].batch_size == ()
    assert torch.stack([made, made]).batch_size == (2, 2)


def test_a_leaf_or_none():
    td = TensorDict(leaves(), SIZE)
    lazy = LazyStackedTensorDict(*td.unbind(0))
    for batch in (td, lazy):
        assert torch.equal(get_leaf(batch, "a"), torch.arange(2))
        assert torch.equal(get_leaf(batch, ("a",)), torch.arange(2))
        assert get_leaf(batch, "z") is None


def test_next_is_set_as_publicly():
    td, inner = TensorDict(leaves(), SIZE), maker(SIZE, None)(leaves())
    set_next(td, inner)
    assert td["next"] is inner
    lazy = LazyStackedTensorDict(*TensorDict(leaves(), SIZE).unbind(0))
    set_next(lazy, inner)
    assert torch.equal(lazy["next", "a"], inner["a"])
    with pytest.raises(RuntimeError, match="lock"):
        set_next(TensorDict(leaves(), SIZE).lock_(), inner)


def test_next_gets_the_device_and_the_names_of_its_parent():
    td = TensorDict(leaves(), SIZE, device="cpu", names=["env"])
    set_next(td, maker(SIZE, None)(leaves()))
    assert td["next"].device == torch.device("cpu")
    assert td["next"].names == ["env"]
