"""The page in a real browser: it shows, it lives, it can be used, and it runs nobody else's code."""

from __future__ import annotations

import io
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from nanproof.records import Repair
from nanproof.report.html import write_html
from nanproof.watch.runs import find_runs
from support.incidents import make_incident
from support.pages import wait, write_log

pytestmark = pytest.mark.slow

EVIL = '<img src=x onerror="window.hit=1"><script>window.hit=1</script>\'"&</script>'


CODE = ["      11 | p = p.softmax(-1)", "  >   12 | return p.log()", "      13 |", "      14 | # the line after"]


def ready(browser: webdriver.Chrome, address: str) -> None:
    browser.get_log("browser")
    browser.get(address)
    wait(browser, "document.body.dataset.facts == 'yes'")  # cause and repair come last and move what lies below


def errors(browser: webdriver.Chrome) -> list[str]:
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


def colors(browser: webdriver.Chrome) -> int:
    picture = np.asarray(Image.open(io.BytesIO(browser.get_screenshot_as_png())).convert("RGB"))
    return len(np.unique(picture.reshape(-1, 3), axis=0))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "original"
    folder.mkdir()
    write_log(folder / "training_log.jsonl", 1000, bad=(400, 401, 402))
    make_incident(folder, 400, code=CODE)
    return folder


def test_curves_and_values(browser: webdriver.Chrome, serve: Callable[..., str], run: Path) -> None:
    ready(browser, serve(str(run)))
    charts = [f.text for f in browser.find_elements(By.CSS_SELECTOR, "figcaption .title")]
    assert charts[:3] == ["loss", "grad_norm", "lr"]
    assert colors(browser) > 50
    assert browser.find_element(By.ID, "status").text == "live"
    assert errors(browser) == []


def of_color(browser: webdriver.Chrome, color: str, low: float, high: float, chart: int = 0) -> float:
    """The share of the pixels between two steps of a chart that are tinted with a color."""
    share = browser.execute_script(
        """
        const [color, low, high, chart] = arguments;
        const plot = document.querySelectorAll('.plot')[chart];
        const [from, to] = [Number(plot.dataset.low), Number(plot.dataset.high)];
        const canvas = plot.querySelector('canvas'), over = plot.querySelector('.u-over');
        const ratio = devicePixelRatio, left = over.offsetLeft * ratio, width = over.clientWidth * ratio;
        const x = (step) => Math.round(left + (step - from) / (to - from) * width);
        const top = over.offsetTop * ratio + 30, tall = over.clientHeight * ratio - 40;
        const data = canvas.getContext('2d').getImageData(x(low), top, Math.max(1, x(high) - x(low)), tall).data;
        const red = parseInt(color.slice(1, 3), 16), blue = parseInt(color.slice(5, 7), 16);
        let n = 0;  // a band is a tint: what counts is on which side of grey a pixel lies
        for (let i = 0; i < data.length; i += 4)
          if (data[i + 3] > 7 && (data[i] - data[i + 2]) * Math.sign(red - blue) > 60) n++;
        return n / (data.length / 4)""",
        color,
        low,
        high,
        chart,
    )
    assert isinstance(share, float | int)
    return float(share)


BLUE, AMBER = "#2f6fd0", "#d97706"


@pytest.mark.parametrize("served", [True, False], ids=["page", "report"])
def test_a_death_is_drawn_to_the_last_logged_step(
    browser: webdriver.Chrome, serve: Callable[..., str], tmp_path: Path, served: bool
) -> None:
    for name, count, bad in (("alive", 200, ()), ("dead", 300, tuple(range(109, 300)))):
        (tmp_path / name).mkdir()
        write_log(tmp_path / name / "training_log.jsonl", count, bad=bad)
    paths = [str(tmp_path / "alive"), str(tmp_path / "dead")]
    if not served:
        write_html(find_runs(paths), tmp_path / "report.html")
    ready(browser, serve(*paths) if served else (tmp_path / "report.html").as_uri())
    charts = browser.find_elements(By.CSS_SELECTOR, ".plot")
    assert len(charts) == 3
    for number, chart in enumerate(charts):  # all charts show the whole run, also where nothing is NaN in them
        assert (float(chart.get_attribute("data-low") or -1), float(chart.get_attribute("data-high") or -1)) == (0, 299)
        inside, outside = (of_color(browser, AMBER, *span, number) for span in ((210, 290), (20, 100)))
        assert inside > 2 * outside
        assert inside > 0.5  # every pixel of the band is tinted in the run's own color, not in the other's
        assert of_color(browser, BLUE, 210, 290, number) == 0
    assert "NaN 109–299" in (charts[0].get_attribute("data-bands") or "")
    assert "NaN 109–299" in (charts[0].get_attribute("aria-label") or "")
    first = browser.find_element(By.CSS_SELECTOR, ".state.bad").text
    assert "died at step 109" in first
    assert "loss is NaN since step 109" in first
    assert errors(browser) == []


def test_a_forecast_is_drawn_and_its_risk_is_a_band(
    browser: webdriver.Chrome, serve: Callable[..., str], tmp_path: Path
) -> None:
    """A log that no guard wrote: an activation in float16 grows and will reach 65,504 some steps after its end."""
    log = tmp_path / "train.jsonl"
    rows = (
        {"step": s, "loss": 2.0, "loss_scale": 1024.0, "activation": 20 * 1.15 ** max(0, s - 110)} for s in range(150)
    )
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    ready(browser, serve(str(log)))
    titles = [f.text for f in browser.find_elements(By.CSS_SELECTOR, "figcaption .title")]
    assert {"activation", "risk"} <= set(titles)
    assert not any(t.startswith("forecast") for t in titles), "drawn in the chart of its series"
    number = titles.index("activation")
    end = float(browser.find_elements(By.CSS_SELECTOR, ".plot")[number].get_attribute("data-high") or 0)
    assert 155 < end < 190, "the axis reaches to the step of the limit"
    # the band where the risk is high, and the dashed line behind the last logged step
    assert of_color(browser, "#d98a00", 142, 148, number) > 0.5
    assert of_color(browser, "#d98a00", 20, 90, number) == 0
    assert of_color(browser, BLUE, 151, end - 1, number) > 0
    said = browser.find_element(By.ID, "events").text
    assert "activation grows 1.15 × per step and reaches 65,504 in about 40 steps (at step ~170)" in said
    assert errors(browser) == []


@given(
    values=st.lists(st.sampled_from([1.0, 2.0, math.nan, math.inf, -math.inf]), min_size=1, max_size=40),
    first=st.integers(0, 10**6),
    gap=st.integers(1, 1000),
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_was_logged_lies_within_the_axis(
    browser: webdriver.Chrome, tmp_path: Path, values: list[float], first: int, gap: int
) -> None:
    log, out = tmp_path / "any.jsonl", tmp_path / "any.html"
    log.write_text("".join(json.dumps({"step": first + gap * i, "loss": v}) + "\n" for i, v in enumerate(values)))
    write_html(find_runs([str(log)]), out)
    ready(browser, out.as_uri())
    last = first + gap * (len(values) - 1)
    low, high = span(browser)
    assert low <= first
    assert last <= high


def test_it_lives(browser: webdriver.Chrome, serve: Callable[..., str], run: Path) -> None:
    ready(browser, serve(str(run)))
    wait(browser, "document.getElementById('status').textContent == 'live'")
    assert "died" not in browser.find_element(By.ID, "states").text
    write_log(run / "training_log.jsonl", 5, bad=(1004,), first=1000, mode="a")
    wait(browser, "document.getElementById('summary').textContent.includes('1,004')")
    wait(browser, "document.getElementById('states').textContent.includes('died at step 1,004')")
    assert span(browser) == (0, 1004)
    make_incident(run, 1004, file="late.py")
    wait(browser, "document.getElementById('incidents').textContent.includes('late.py')")


def span(browser: webdriver.Chrome) -> tuple[float, float]:
    low, high = browser.execute_script("const d = document.querySelector('.plot').dataset; return [d.low, d.high]")
    return float(low), float(high)


def test_zoom_with_the_mouse_and_with_keys(browser: webdriver.Chrome, serve: Callable[..., str], run: Path) -> None:
    ready(browser, serve(str(run)))
    wait(browser, "document.body.dataset.facts == 'yes'")  # until then what is above the curves may grow
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
        "nanproof locate",
    ):
        assert words in text
    lines = browser.find_elements(By.CSS_SELECTOR, "#incident pre span")
    assert [line.text for line in lines] == CODE
    tops = [line.rect["y"] for line in lines]
    heights = [line.rect["height"] for line in lines]
    assert all(a + h <= b + 0.5 for a, b, h in zip(tops, tops[1:], heights, strict=False)), "a line lies under another"
    assert [line.text for line in browser.find_elements(By.CSS_SELECTOR, "pre .culprit")] == [CODE[1]]
    browser.find_element(By.CSS_SELECTOR, "dialog form button").click()
    wait(browser, "!document.getElementById('detail').open")


def test_two_runs_side_by_side(browser: webdriver.Chrome, serve: Callable[..., str], run: Path) -> None:
    other = run.with_name("stable")
    other.mkdir()
    write_log(other / "training_log.jsonl", 800)
    ready(browser, serve(str(run), str(other)))
    names = "[...document.querySelectorAll('#table .named')].map(b => b.innerText)"
    assert browser.execute_script(f"return {names}") == ["original", "stable"]
    values = browser.find_element(By.CSS_SELECTOR, "figcaption .values").text
    assert "original" in values
    assert "stable" in values
    browser.find_elements(By.CSS_SELECTOR, "#table input")[0].click()
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
    assert "<img" in browser.find_element(By.ID, "states").text


def test_the_report_opens_from_disk_without_network(browser: webdriver.Chrome, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    write_html(find_runs([str(run)]), out, note="two runs compared")
    ready(browser, out.as_uri())
    assert errors(browser) == []
    assert colors(browser) > 50
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
    for _ in range(25):
        ActionChains(browser).send_keys(Keys.TAB).perform()
        # asked in one go: the page may rebuild what has the focus at any moment
        reached.add(browser.execute_script("const n = document.activeElement; return n.id || n.className || n.tagName"))
    assert {"find", "logy", "smooth", "reset", "theme", "plot", "pin"} <= reached
    unnamed = browser.execute_script("""
        return [...document.querySelectorAll('button, input, [tabindex="0"]')].filter((n) =>
          !n.hidden && !n.textContent.trim() && !n.getAttribute('aria-label') && !n.closest('label')).length""")
    assert unnamed == 0


@pytest.fixture
def several(tmp_path: Path) -> Path:
    """Three runs in one folder, one of them dead, with configs, layers and a risk."""
    for name, rate, bad in (("a", 0.1, range(60, 100)), ("b", 0.01, ()), ("c", 0.001, ())):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(f"optimizer:\n  lr: {rate}\nbatch_size: 8\nmax_steps: 100\n")
        with (folder / "training_log.jsonl").open("w") as file:
            for step in range(100):
                loss = math.nan if step in bad else 3 * math.exp(-step / 50)
                row = {"step": step, "loss": loss, "grad_norm": 1.0, "reward": step, "risk": step / 100}
                row |= {f"absmax/layers.{i}": math.nan if step in bad else 1.0 + i * step for i in range(4)}
                file.write(json.dumps(row) + "\n")
    make_incident(tmp_path / "runs" / "a", 60, code=CODE)
    make_incident(tmp_path / "runs" / "a", 61, code=CODE)
    write_html(find_runs([str(tmp_path / "runs")]), tmp_path / "runs.html")
    return tmp_path / "runs.html"


def test_many_runs_search_pins_layers_links_and_files(browser: webdriver.Chrome, several: Path) -> None:
    ready(browser, several.as_uri())
    wait(browser, "document.body.dataset.facts == 'yes'")
    table = browser.find_element(By.ID, "table").text
    assert "optimizer.lr" in table
    assert "batch_size" not in table  # only what differs
    assert "died at step 60" in table
    assert len(browser.find_elements(By.CSS_SELECTOR, ".state")) == 1  # the one in trouble
    # layers are a heat map and no charts; what is not finite in them is red
    titles = [t.text for t in browser.find_elements(By.CSS_SELECTOR, "figcaption .title")]
    assert titles == ["loss", "grad_norm", "reward", "risk"]
    browser.find_element(By.XPATH, "//div[@class='picks']/button[text()='a']").click()
    red = """const c = document.querySelector('#layers canvas');
        const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
        let n = 0;
        for (let i = 0; i < d.length; i += 4) if (d[i] === 200 && d[i + 1] === 16 && d[i + 2] === 46) n++;
        return n"""
    wait(browser, f"(() => {{ {red} }})() > 500")
    # search, pin, and the address of the view
    browser.find_element(By.ID, "find").send_keys("rew")
    assert [t.text for t in browser.find_elements(By.CSS_SELECTOR, "figcaption .title")] == ["reward"]
    browser.find_element(By.CSS_SELECTOR, ".pin").click()
    browser.find_element(By.ID, "find").send_keys(Keys.BACKSPACE * 3)
    titles = [t.text for t in browser.find_elements(By.CSS_SELECTOR, "figcaption .title")]
    assert titles[:2] == ["reward", "loss"]
    browser.execute_script("document.querySelector('#table input').click(); document.querySelector('.plot').focus()")
    browser.find_element(By.CSS_SELECTOR, ".plot").send_keys("+")
    wait(browser, "location.hash.includes('zoom=')")
    address, seen = browser.current_url, span(browser)
    browser.get("about:blank")
    ready(browser, address)
    assert span(browser) == pytest.approx(seen)
    assert browser.find_element(By.CSS_SELECTOR, "figcaption .title").text == "reward"
    assert not browser.find_elements(By.CSS_SELECTOR, "#table input")[0].is_selected()
    assert errors(browser) == []


def test_on_a_phone_incidents_come_before_curves_and_an_incident_has_an_address(
    browser: webdriver.Chrome, several: Path
) -> None:
    metrics = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        ready(browser, several.as_uri())
        wait(browser, "document.body.dataset.facts == 'yes'")
        top = {k: browser.find_element(By.ID, k).rect["y"] for k in ("states", "incidents", "charts")}
        assert top["states"] < top["incidents"] < top["charts"]
        assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")
        browser.find_element(By.CSS_SELECTOR, "#incidents button").click()
        wait(browser, "document.getElementById('detail').open")
        heads = [h.text.lower() for h in browser.find_elements(By.CSS_SELECTOR, "#incident h3")]
        assert heads == ["cause", "evidence", "code", "tensors", "repair"]
        address = browser.current_url
        browser.get("about:blank")
        ready(browser, address)
        wait(browser, "document.getElementById('detail').open")
        assert "a, step 61" in browser.find_element(By.ID, "incident").text
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_a_run_that_begins_later_appears(browser: webdriver.Chrome, serve: Callable[..., str], run: Path) -> None:
    ready(browser, serve(str(run.parent)))
    names = "[...document.querySelectorAll('#table .named')].map(b => b.innerText)"
    assert browser.execute_script(f"return {names}") == []  # of one run there is no table
    later = run.with_name("later")
    later.mkdir()
    write_log(later / "log.jsonl", 50, bad=(49,))
    wait(browser, f"{names}.includes('later')")
    wait(browser, "document.getElementById('states').innerText.includes('died at step 49')")
    assert errors(browser) == []


def test_a_report_of_two_holds_evidence_repair_command_and_what_differs(
    browser: webdriver.Chrome, tmp_path: Path
) -> None:
    for name, rate, bad in (("dead", "0.1", range(30, 60)), ("alive", "0.01", ())):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(f"optimizer:\n  lr: {rate}\nmax_steps: 60\n")
        write_log(folder / "log.jsonl", 60, bad=tuple(bad))
    write_html(find_runs([str(tmp_path / "runs" / name) for name in ("dead", "alive")]), tmp_path / "two.html")
    ready(browser, (tmp_path / "two.html").as_uri())
    wait(browser, "document.body.dataset.facts == 'yes'")
    first = browser.find_element(By.CSS_SELECTOR, ".state")
    browser.execute_script("arguments[0].open = true", first.find_element(By.TAG_NAME, "details"))
    for words in ("dead", "died at step 30", "cause:", "repair:", "for: ", "nanproof "):
        assert words in first.text
    parted = browser.find_element(By.ID, "parted").text
    assert "loss first differs at step 30" in parted
    assert "optimizer.lr 0.1 0.01" in parted


def test_a_report_of_several_says_of_a_guarded_run_what_broke_and_what_repairs_it(
    browser: webdriver.Chrome, tmp_path: Path
) -> None:
    for name, bad in (("dead", range(30, 60)), ("guarded", (8,))):
        folder = tmp_path / name
        folder.mkdir()
        write_log(folder / "training_log.jsonl", 60, bad=tuple(bad))
    make_incident(tmp_path / "guarded", 8, code=CODE)
    (tmp_path / "guarded" / "run.json").write_text('{"state": "finished", "exit_code": 0}')
    repair = Repair(path="AdamW", kind="eps", step=3, value=0.003, why="eps 1e-08 is 0 in float16")
    (tmp_path / "guarded" / "repairs.json").write_text(json.dumps([repair.to_json()]))
    write_html(find_runs([str(tmp_path / "dead"), str(tmp_path / "guarded")]), tmp_path / "two.html")
    ready(browser, (tmp_path / "two.html").as_uri())
    wait(browser, "document.body.dataset.facts == 'yes'")
    (cell,) = browser.find_elements(By.CSS_SELECTOR, "#table details")  # what is on top is not said twice
    cell.find_element(By.TAG_NAME, "summary").click()
    for words in (
        "pole in log at model.py:12",
        "repair in force: AdamW steps with eps 0.003 since step 3",
        "repair:",
        "for: ",
        "nanproof locate",
    ):
        assert words in cell.text
    assert "guarded · skip" in browser.find_element(By.ID, "incidents").text
    assert errors(browser) == []


def test_evidence_that_was_opened_stays_open_while_news_arrive(
    browser: webdriver.Chrome, serve: Callable[..., str], tmp_path: Path
) -> None:
    log = tmp_path / "dying" / "training_log.jsonl"
    log.parent.mkdir()
    write_log(log, 20, bad=tuple(range(10, 20)))
    ready(browser, serve(str(log.parent)))
    wait(browser, "document.body.dataset.facts == 'yes'")
    browser.find_element(By.CSS_SELECTOR, ".state summary").click()
    assert browser.execute_script("return document.querySelector('.state details').open")
    with log.open("a") as file:
        for step in range(20, 25):
            file.write(json.dumps({"step": step, "loss": math.nan}) + "\n")
    wait(browser, "document.querySelector('.state').textContent.includes('step 24')")
    assert browser.execute_script("return document.querySelector('.state details').open")
    assert browser.execute_script("return document.activeElement.tagName") == "SUMMARY"
    assert errors(browser) == []
