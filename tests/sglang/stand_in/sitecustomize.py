"""Begun with every process of the tests: PyPI's torchvision is built for CUDA, and registers shapes of operators that do
not load beside a CPU build of torch. Nothing here uses them."""

import sys
import types

sys.modules["torchvision._meta_registrations"] = types.ModuleType("torchvision._meta_registrations")
