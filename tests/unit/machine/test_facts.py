"""A machine survives a JSON round trip, and unknown facts are rejected."""

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
        ("[]", "a machine must be a JSON object, not list"),
        ("{}", "a machine must have an 'os'"),
        ('{"os": "linux", "cores": 3}', "unknown machine field: cores"),
        (
            '{"os": "linux", "gpus": [{"name": "A", "vendor": "nvidia", "size": 1}]}',
            "unknown GPU field: size",
        ),
        ('{"os": "linux", "gpus": [{"name": "A"}]}', "a GPU must have a 'name' and a 'vendor'"),
        ('{"os": "linux", "gpus": [3]}', "a GPU must be a JSON object, not int"),
        ("rubbish", "Expecting value"),
        ("[" * 100_000, "not deeply nested brackets"),
        ('{"os": null}', "machine field os must be str, not None"),
        ('{"os": "linux", "num_cpus": "4"}', "machine field num_cpus must be int, not '4'"),
        ('{"os": "linux", "num_cpus": true}', "machine field num_cpus must be int"),
        ('{"os": "linux", "cpu_quota": NaN}', "machine field cpu_quota must be float"),
        ('{"os": "linux", "max_fds": -1}', "machine field max_fds must be int"),
        ('{"os": "linux", "gpus": null}', "machine field gpus must be tuple"),
        (
            '{"os": "linux", "environment": {"LOCAL_WORLD_SIZE": 8}}',
            "machine field environment must be",
        ),
        (
            '{"os": "linux", "gpus": [{"name": null, "vendor": "amd"}]}',
            "GPU field name must be str",
        ),
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
