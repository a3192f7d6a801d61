"""Folders of the repository."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
REPO = TESTS.parent
SOURCE = REPO / "src" / "penstock"
DOCS = REPO / "docs"
EXAMPLES = REPO / "examples"
MACHINES = TESTS / "machines"
SITE = TESTS / "support" / "site"
