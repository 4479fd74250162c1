"""The page in a real browser: it shows, it lives, it can be used, and it runs nobody else's code."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from nanproof.report.html import write_html
from nanproof.watch.runs import find_runs
from support.incidents import make_incident
from support.pages import wait, write_log

EVIL = '<img src=x onerror="window.hit=1"><script>window.hit=1</script>\'"&</script>'


def ready(browser: webdriver.Chrome, address: str) -> None:
    browser.get_log("browser")
    browser.get(address)
    wait(browser, "document.body.dataset.ready == 'yes'")


def errors(browser: webdriver.Chrome) -> list[str]:
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


def colours(browser: webdriver.Chrome) -> int:
    picture = np.asarray(Image.open(io.BytesIO(browser.get_screenshot_as_png())).convert("RGB"))
    return len(np.unique(picture.reshape(-1, 3), axis=0))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "original"
    folder.mkdir()
    write_log(folder / "training_log.jsonl", 1000, bad=(400, 401, 402))
    make_incident(folder, 400)
    return folder


def test_curves_values_and_red_ticks(browser: webdriver.Chrome, serve: Callable[..., str], run: Path) -> None:
    ready(browser, serve(str(run)))
    charts = [f.text for f in browser.find_elements(By.CSS_SELECTOR, "figcaption > span:first-child")]
    assert charts[:3] == ["loss", "grad_norm", "lr"]
    assert colours(browser) > 50
    red = browser.execute_script("""
        const c = document.querySelector('.plot canvas');
        const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
        let n = 0;
        for (let i = 0; i < d.length; i += 4) if (d[i] > 180 && d[i+1] < 60 && d[i+2] < 80 && d[i+3] > 200) n++;
        return n""")
    assert red > 5
    assert browser.find_element(By.ID, "status").text == "live"
    assert errors(browser) == []


def test_it_lives(browser: webdriver.Chrome, serve: Callable[..., str], run: Path) -> None:
    ready(browser, serve(str(run)))
    wait(browser, "document.getElementById('status').textContent == 'live'")
    assert not browser.find_element(By.ID, "alarm").is_displayed()
    write_log(run / "training_log.jsonl", 5, bad=(1004,), first=1000, mode="a")
    wait(browser, "document.getElementById('summary').textContent.includes('1,004')")
    wait(browser, "!document.getElementById('alarm').hidden")
    make_incident(run, 1004, file="late.py")
    wait(browser, "document.getElementById('incidents').textContent.includes('late.py')")


def span(browser: webdriver.Chrome) -> tuple[float, float]:
    low, high = browser.execute_script("const d = document.querySelector('.plot').dataset; return [d.low, d.high]")
    return float(low), float(high)


def test_zoom_with_the_mouse_and_with_keys(browser: webdriver.Chrome, serve: Callable[..., str], run: Path) -> None:
    ready(browser, serve(str(run)))
    assert span(browser) == (0, 999)
    place = browser.find_element(By.CSS_SELECTOR, ".plot .u-over")
    ActionChains(browser).move_to_element(place).click_and_hold().move_by_offset(120, 0).release().perform()
    wait(browser, "document.querySelector('.plot').dataset.low > 0")
    low, high = span(browser)
    assert 0 < low < high < 999
    focus = browser.find_element(By.CSS_SELECTOR, ".plot")
    focus.send_keys(Keys.ARROW_RIGHT)
    wait(browser, f"document.querySelector('.plot').dataset.low > {low}")
    low, high = span(browser)
    focus.send_keys("+")
    wait(browser, f"document.querySelector('.plot').dataset.low > {low}")
    assert span(browser)[1] < high
    focus.send_keys("0")
    wait(browser, "document.querySelector('.plot').dataset.low == 0")
    assert span(browser) == (0, 999)
    assert errors(browser) == []


def test_a_click_opens_the_incident(browser: webdriver.Chrome, serve: Callable[..., str], run: Path) -> None:
    ready(browser, serve(str(run)))
    browser.find_element(By.CSS_SELECTOR, "#incidents button").click()
    text = str(wait(browser, "document.getElementById('detail').open && document.getElementById('incident').innerText"))
    for words in (
        "Step 400",
        "pole in log",
        "model.py:12",
        "return p.log()",
        "log at exactly zero",
        "log → mean → loss",
    ):
        assert words in text
    assert "return p.log()" in browser.find_element(By.CSS_SELECTOR, "pre mark").text
    browser.find_element(By.CSS_SELECTOR, "dialog button").click()
    wait(browser, "!document.getElementById('detail').open")


def test_two_runs_side_by_side(browser: webdriver.Chrome, serve: Callable[..., str], run: Path) -> None:
    other = run.with_name("stable")
    other.mkdir()
    write_log(other / "training_log.jsonl", 800)
    ready(browser, serve(str(run), str(other)))
    assert [b.text for b in browser.find_elements(By.CSS_SELECTOR, "#runs button")] == ["original", "stable"]
    values = browser.find_element(By.CSS_SELECTOR, "figcaption .values").text
    assert "original" in values
    assert "stable" in values
    browser.find_elements(By.CSS_SELECTOR, "#runs button")[0].click()
    assert "original" not in browser.find_element(By.CSS_SELECTOR, "figcaption .values").text


def test_no_foreign_code_runs(browser: webdriver.Chrome, serve: Callable[..., str], tmp_path: Path) -> None:
    folder = tmp_path / EVIL.replace("/", "∕")
    folder.mkdir()
    write_log(folder / "training_log.jsonl", 20)
    with (folder / "training_log.jsonl").open("a") as file:
        file.write('{"step": 21, "%s": 1.0, "event": "%s"}\n' % ((EVIL.replace('"', '\\"'),) * 2))
        file.write(f"Traceback (most recent call last):\nValueError: {EVIL}\n")
    make_incident(folder, 5, why=EVIL, file=EVIL, code=[EVIL], op=EVIL, chain=[EVIL])
    ready(browser, serve(str(folder)))
    browser.find_element(By.CSS_SELECTOR, "#incidents button").click()
    wait(browser, "document.getElementById('detail').open")
    assert browser.execute_script("return window.hit") is None
    assert browser.execute_script("return document.querySelectorAll('img, #incident script').length") == 0
    assert "<img" in browser.find_element(By.ID, "incident").text
    out = tmp_path / "report.html"
    write_html(find_runs([str(folder)]), out)
    ready(browser, out.as_uri())
    assert browser.execute_script("return window.hit") is None
    assert "<img" in browser.find_element(By.ID, "runs").text


def test_the_report_opens_from_disk_without_network(browser: webdriver.Chrome, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    write_html(find_runs([str(run)]), out, note="two runs compared")
    ready(browser, out.as_uri())
    assert errors(browser) == []
    assert colours(browser) > 50
    assert browser.find_element(By.ID, "status").text == "two runs compared"
    asked = browser.execute_script("return performance.getEntriesByType('resource').map(e => e.name)")
    assert [name for name in asked if not name.startswith("data:")] == []
    browser.find_element(By.CSS_SELECTOR, "#incidents button").click()
    wait(browser, "document.getElementById('incident').innerText.includes('pole in log')")


def test_a_run_that_is_deleted_or_cut_while_watched(
    browser: webdriver.Chrome, serve: Callable[..., str], run: Path
) -> None:
    ready(browser, serve(str(run)))
    shutil.rmtree(run)
    run.mkdir()
    write_log(run / "training_log.jsonl", 30, first=2000)
    wait(browser, "document.getElementById('summary').textContent.includes('2,029')")
    assert errors(browser) == []


def test_everything_can_be_reached_by_keyboard(browser: webdriver.Chrome, serve: Callable[..., str], run: Path) -> None:
    ready(browser, serve(str(run)))
    reached = set()
    body = browser.find_element(By.TAG_NAME, "body")
    for _ in range(25):
        body.send_keys(Keys.TAB) if not reached else browser.switch_to.active_element.send_keys(Keys.TAB)
        node = browser.switch_to.active_element
        reached.add(node.get_attribute("id") or node.get_attribute("class") or node.tag_name)
    assert {"logy", "smooth", "reset", "theme", "plot", "run"} <= reached
    unnamed = browser.execute_script("""
        return [...document.querySelectorAll('button, input, [tabindex="0"]')].filter((n) =>
          !n.hidden && !n.textContent.trim() && !n.getAttribute('aria-label') && !n.closest('label')).length""")
    assert unnamed == 0
