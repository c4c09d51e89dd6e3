"""Tests of this folder that have a loop run on both loops, as those of streams do."""

from tests.comm.conftest import pytest_asyncio_loop_factories as pytest_asyncio_loop_factories
