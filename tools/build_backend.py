"""setuptools, and NVRTC where the CUDA kernels are wanted and nothing that is installed has it (pyproject.toml)."""

from kernel_build import cuda
from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  # the hooks of PEP 517 and PEP 660


def get_requires_for_build_wheel(config_settings=None):
    return build_meta.get_requires_for_build_wheel(config_settings) + cuda.build_requirements()


def get_requires_for_build_editable(config_settings=None):
    return build_meta.get_requires_for_build_editable(config_settings) + cuda.build_requirements()


if __name__ == "__main__":
    print(*cuda.build_requirements())
