"""Arrays of weight files on their devices: turned and cast there, bit for bit what numpy would make of them."""

from __future__ import annotations

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from bessemer.errors import StorageError
from bessemer.storage.weights import TURNED_ON_DEVICE, Signature, place

MESH = Mesh(np.array(jax.devices()).reshape(4, 2), ("fsdp", "tensor"))
SPECS = [(), ("fsdp",), (None, "tensor"), ("fsdp", "tensor"), (("fsdp", "tensor"),)]


class Stored:
    """Matrices that are stored transposed, as a Hugging Face folder holds them."""

    def __init__(self, dtype: str, count: int = 6):
        random = np.random.default_rng(0)
        shape = (1024, TURNED_ON_DEVICE // 1024)
        self.arrays = {f"w{n}": random.standard_normal(shape).astype(np.dtype(dtype)) for n in range(count)}

    def signature(self) -> Signature:
        return {name: (str(array.dtype), array.shape[::-1]) for name, array in self.arrays.items()}

    def read(self, name: str) -> np.ndarray:
        return self.arrays[name].T


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize(
    ("stored", "wanted"), [("bfloat16", "float32"), ("bfloat16", "bfloat16"), ("float32", "bfloat16")]
)
def test_a_transposed_matrix_is_turned_on_its_devices(spec: tuple[str, ...], stored: str, wanted: str) -> None:
    arrays = Stored(stored, 1)
    at = NamedSharding(MESH, PartitionSpec(*spec))
    shape = arrays.signature()["w0"][1]
    placed = place(arrays, {"w0": jax.ShapeDtypeStruct(shape, np.dtype(wanted), sharding=at)}, "here")["w0"]
    assert placed.sharding.is_equivalent_to(at, 2) and placed.dtype == np.dtype(wanted)
    np.testing.assert_array_equal(np.asarray(placed), arrays.read("w0").astype(np.dtype(wanted)))


def test_more_arrays_than_are_read_ahead_come_in_their_places() -> None:
    arrays = Stored("bfloat16", 11)
    at = SingleDeviceSharding(jax.devices()[0])
    wanted = {
        name: jax.ShapeDtypeStruct(shape, ml_dtypes.bfloat16, sharding=at)
        for name, (_, shape) in arrays.signature().items()
    }
    placed = place(arrays, wanted, "here")
    for name, leaf in placed.items():
        np.testing.assert_array_equal(np.asarray(leaf), arrays.read(name))


def test_an_array_that_cannot_be_read_is_the_error() -> None:
    class Damaged(Stored):
        def read(self, name: str) -> np.ndarray:
            if name == "w4":
                raise StorageError("w4 is damaged")
            return super().read(name)

    arrays = Damaged("bfloat16")
    at = SingleDeviceSharding(jax.devices()[0])
    wanted = {
        name: jax.ShapeDtypeStruct(shape, np.float32, sharding=at) for name, (_, shape) in arrays.signature().items()
    }
    with pytest.raises(StorageError, match="w4"):
        place(arrays, wanted, "here")
