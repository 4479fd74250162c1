"""A page that is really served, and a browser that really looks at it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

from support.pages import serving

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-quic",
    "--window-size=1300,900",
)


@pytest.fixture(scope="module")
def serve() -> Iterator[Callable[..., str]]:
    """Starts ``nanproof watch --web`` on some paths and returns the address that it prints."""
    with serving() as start:
        yield start


@pytest.fixture(scope="session")
def browser() -> Iterator[webdriver.Chrome]:
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("NO BROWSER TESTS: chromium and chromedriver are missing. Next: apt-get install chromium-driver")
    options = Options()
    options.binary_location = chromium
    profile = tempfile.mkdtemp()
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chrome = webdriver.Chrome(options=options, service=Service(driver, env={**os.environ}))
    yield chrome
    chrome.quit()
    shutil.rmtree(profile, ignore_errors=True)
