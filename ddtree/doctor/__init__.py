"""What stands between this machine, these files and a server that is right; and what to do about each point."""

from ddtree.doctor.checks import FAILED, OK, SKIPPED, WARNING, Check

__all__ = ["FAILED", "OK", "SKIPPED", "WARNING", "Check"]
