"""Datasets over .npy and .pt files: supported and rejected files."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock import DataLoader, open_tensors
from penstock.errors import BadArgument, BadStore
from penstock.sources.array_files import make_header

pytestmark = [pytest.mark.legacy, pytest.mark.windows]


def test_arrays_open_as_they_are(tmp_path: Path) -> None:
    x, y = np.arange(12, dtype=np.float32).reshape(4, 3), np.arange(4)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", y)
    for data, get in (
        (open_tensors(tmp_path / "x.npy", tmp_path / "y.npy"), lambda s: s),
        (open_tensors(tmp_path), lambda s: (s["x"], s["y"])),
        (open_tensors(x=tmp_path / "x.npy", y=tmp_path / "y.npy"), lambda s: (s["x"], s["y"])),
    ):
        (batch,) = DataLoader(data, batch_size=4)
        found = get(batch)
        assert torch.equal(found[0], torch.from_numpy(x))
        assert torch.equal(found[1], torch.from_numpy(y))
        assert torch.equal(get(pickle.loads(pickle.dumps(data))[2])[0], torch.from_numpy(x[2]))


def test_tensors_of_a_pt_file_open(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(6).reshape(3, 2), "b": torch.ones(3, dtype=torch.bfloat16)}
    for name, content in (("dict", tensors), ("list", list(tensors.values()))):
        torch.save(content, tmp_path / f"{name}.pt")
        (batch,) = DataLoader(open_tensors(tmp_path / f"{name}.pt"), batch_size=3)
        found = list(batch.values()) if name == "dict" else batch
        assert all(torch.equal(a, b) for a, b in zip(found, tensors.values(), strict=True))


def test_what_is_no_array_of_samples_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "o.npy", np.array([{}]), allow_pickle=True)
    np.savez(tmp_path / "z.npz", a=np.zeros(3))
    np.save(tmp_path / "f.npy", np.asfortranarray(np.zeros((3, 4))))
    np.save(tmp_path / "s.npy", np.float32(1))
    np.save(tmp_path / "big.npy", np.zeros(3, ">f4"))
    np.save(tmp_path / "three.npy", np.zeros(3))
    np.save(tmp_path / "four.npy", np.zeros(4))
    torch.save(object, tmp_path / "code.pt")
    (tmp_path / "cut.npy").write_bytes((tmp_path / "four.npy").read_bytes()[:-8])
    for name in ("o.npy", "z.npz", "f.npy", "s.npy", "big.npy", "code.pt", "cut.npy", "gone.npy"):
        with pytest.raises(BadStore):
            open_tensors(tmp_path / name)
    with pytest.raises(BadStore, match="differ in length"):
        open_tensors(tmp_path / "three.npy", tmp_path / "four.npy")
    with pytest.raises(BadArgument):
        open_tensors()


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("harm",)


ODD_FILES: dict[str, tuple[Any, str]] = {
    "big.npy": (np.arange(3, dtype=">i4"), "newbyteorder"),
    "text.npy": (np.array(["a"]), "contains <U1"),
    "sparse.pt": (torch.eye(3).to_sparse(), "sparse_coo tensor"),
    "numbered.pt": ({1: torch.eye(3)}, "cannot be the name of a field"),
    "evil.pt": ({"x": torch.eye(3), "e": Evil()}, "more than tensors"),
    "mixed.pt": ({"x": torch.eye(3), "n": 5}, "and nothing else"),
}


@pytest.mark.parametrize("name", ODD_FILES)
def test_odd_files_of_tensors_are_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    content, told = ODD_FILES[name]
    if name.endswith(".npy"):
        np.save(name, content)
    else:
        torch.save(content, name)
    with pytest.raises(BadStore, match=name) as caught:
        open_tensors(name)
    assert told in str(caught.value)
    assert "weights_only" not in str(caught.value)
    assert not Path("harm").exists()


def test_a_header_without_rows_cannot_ask_for_addresses(tmp_path: Path) -> None:
    """Without rows, the row size is an unverified number from an untrusted file."""
    header = make_header(np.dtype("u1"), (0, (1 << 64) + 4096))
    (tmp_path / "x.npy").write_bytes(header)
    with pytest.raises(BadStore, match=r"is not a \.npy file"):
        open_tensors(tmp_path / "x.npy")
    (tmp_path / "x.npy").write_bytes(make_header(np.dtype("u1"), (0, 1 << 40)))
    assert len(open_tensors(tmp_path / "x.npy")) == 0


def test_conjugated_tensors_are_read(tmp_path: Path) -> None:
    torch.save(torch.full((3,), 1j).conj(), tmp_path / "x.pt")
    wanted = torch.load(tmp_path / "x.pt", weights_only=True)  # torch 1.13 loses the conjugation
    assert open_tensors(tmp_path / "x.pt")[1] == wanted[1]
