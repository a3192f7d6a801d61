"""A machine as a file: what is said comes back, and what does not exist is refused."""

from __future__ import annotations

import json

import pytest

from penstock.machine.facts import Gpu, Machine

pytestmark = pytest.mark.legacy


def test_what_is_not_said_is_unknown() -> None:
    assert Machine.from_json('{"os": "win32"}') == Machine(os="win32")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[]", "a machine is a JSON object, not a list"),
        ("{}", "needs at least its 'os'"),
        ('{"os": "linux", "cores": 3}', "a machine has no cores"),
        ('{"os": "linux", "gpus": [{"name": "A", "vendor": "nvidia", "size": 1}]}', "no size"),
        ('{"os": "linux", "gpus": [{"name": "A"}]}', "a GPU needs at least"),
        ('{"os": "linux", "gpus": [3]}', "a GPU is a JSON object, not a int"),
        ("rubbish", "Expecting value"),
        ("[" * 100_000, "not a tower of brackets"),
        ('{"os": null}', "os of a machine is str, not None"),
        ('{"os": "linux", "num_cpus": "4"}', "num_cpus of a machine is int, not '4'"),
        ('{"os": "linux", "num_cpus": true}', "num_cpus of a machine is int"),
        ('{"os": "linux", "cpu_quota": NaN}', "cpu_quota of a machine is float"),
        ('{"os": "linux", "max_fds": -1}', "max_fds of a machine is int"),
        ('{"os": "linux", "gpus": null}', "gpus of a machine is tuple"),
        ('{"os": "linux", "environment": {"LOCAL_WORLD_SIZE": 8}}', "environment of a machine"),
        ('{"os": "linux", "gpus": [{"name": null, "vendor": "amd"}]}', "name of a GPU is str"),
    ],
)
def test_a_file_that_is_wrong_says_what_is_wrong(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Machine.from_json(text)


def test_a_machine_goes_through_json() -> None:
    before = Machine(
        os="linux",
        cpu_quota=1.5,
        gpus=(Gpu(name="A", vendor="amd", architecture="gfx1010"),),
        environment={"OMP_NUM_THREADS": "4"},
        decoders=("cv2",),
    )
    assert Machine.from_json(before.to_json()) == before
    assert json.loads(before.to_json())["gpus"][0]["architecture"] == "gfx1010"


@pytest.mark.parametrize(
    ("facts", "cores"),
    [
        ({"num_cpus": 64}, 64),
        ({"num_cpus": 64, "num_affine_cpus": 8}, 8),
        ({"num_cpus": 64, "cpu_quota": 2.0}, 2),
        ({"num_cpus": 64, "cpu_quota": 0.1}, 1),
        ({"num_cpus": 64, "num_affine_cpus": 8, "cpu_quota": 100.0}, 8),
        ({"num_cpus": 0}, 1),
    ],
)
def test_usable_cores(facts: dict[str, float], cores: int) -> None:
    assert Machine(os="linux", **facts).usable_cores == cores  # type: ignore[arg-type]
