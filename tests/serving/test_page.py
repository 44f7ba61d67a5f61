"""The page at /, driven in a browser."""

import re
import shutil

import pytest
from support import served

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")


def expect(locator):
    """Playwright's assertions; its import takes seconds, so tests are collected without it."""
    from playwright import sync_api

    return sync_api.expect(locator)


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture(params=[(1280, "light"), (390, "dark")], ids=["wide", "narrow"])
def page(browser, server, request):
    width, scheme = request.param
    opened = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    problems = []
    opened.on("console", lambda one: problems.append(one.text) if "policy" in one.text else None)
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.goto(server.url)
    expect(opened.locator("#model")).to_contain_text("tiny")
    yield opened
    assert problems == []
    opened.close()


def send(page, text):
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")
    done = expect(page.locator("#turns"))
    done.to_have_attribute("aria-busy", "false", timeout=60_000)


def test_a_chat_colors_drafts(page, server):
    send(page, "abcabcabcabc")
    (mine, answer) = page.locator(".said").all()
    wanted = server.plain("abcabcabcabc\n", max_tokens=24)
    assert mine.text_content() == "abcabcabcabc"
    assert answer.text_content() == wanted
    assert page.locator("#turns .drafted").count() > 0 < page.locator("#turns .own").count()
    assert "τ" in page.locator("#turns .facts").text_content()
    assert "tokens/s" in page.locator("#live").text_content()
    refused = page.locator("#turns .refused")
    assert refused.count() > 0
    assert not refused.first.is_visible()
    page.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
    page.check("#refusals")
    assert refused.first.is_visible()
    assert refused.first.get_attribute("data-text")
    width = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
    assert width <= 0  # nothing is cut off at the side


def test_with_and_without_drafting(page):
    page.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
    page.fill("#max_tokens", "40")
    page.check("#compare")
    send(page, "xyxyxy")
    with_drafts, without = page.locator(".pair .said").all_text_contents()
    assert with_drafts == without != ""
    first, second = page.locator(".pair .said").all()
    assert first.locator(".drafted").count() > 0 == second.locator(".drafted").count()
    verdict = page.locator(".pair .verdict").text_content()
    assert re.fullmatch(r"\d+\.\d\d× as fast with drafting · same text", verdict)
    assert page.locator("#live").text_content().startswith("τ"), "of the drafted answer"


def test_speeds_are_by_the_engines_clock_where_it_is_known(page):
    """Otherwise they are by the browser's, which measures the network and the page as well."""
    figures = "{tokens: 11, seconds: 1, decode_ms: %s}"
    assert page.evaluate(f"speed({figures % 'null'})") == 10
    assert page.evaluate(f"speed({figures % 100})") == 100
    shape = "{text: '%s', tokens: 11, seconds: 1, decode_ms: %s}"
    verdict = page.evaluate(f"comparison({shape % ('a', 100)}, {shape % ('b', 200)})")
    assert verdict == "2.00× as fast with drafting · texts differ"


def test_examples_are_offered_until_one_talks(page):
    examples = page.locator("#examples button")
    assert examples.count() == 3
    shortest = examples.first.text_content()
    expect(examples.first).to_be_visible()
    examples.first.click()
    done = expect(page.locator("#turns"))
    done.to_have_attribute("aria-busy", "false", timeout=60_000)
    assert page.locator(".user .said").text_content() == shortest
    assert not examples.first.is_visible()
    page.click("#clear")
    assert examples.first.is_visible()


def test_outputs_are_shown_as_text(page):
    page.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
    page.fill("#max_tokens", "5")
    send(page, "<img src=x onerror=alert(1)><b>bold</b>")
    assert page.locator("#turns img, #turns b").count() == 0
    assert "<b>bold</b>" in page.locator(".user .said").text_content()


def test_an_error_is_shown(page):
    send(page, "a" * 200)
    assert "128" in page.locator(".facts.error").text_content()


def test_a_chat_with_a_real_template(browser, tmp_path):
    """In the page's default state, which asks for rejected drafts."""
    with served.serving(tmp_path, config_text=served.REAL_CONFIG) as own:
        opened = browser.new_page(viewport={"width": 390, "height": 500})
        opened.goto(own.url)
        expect(opened.locator("#single")).to_be_visible()
        assert not opened.locator("#compare").is_visible(), "this server compares nothing"
        for count in (1, 2, 3):
            send(opened, "Tom has 3 pens and finds 4 more. How many pens does Tom have?")
            assert opened.locator(".said").count() == 2 * count
            hidden = "(t => t.scrollHeight - t.scrollTop - t.clientHeight)"
            assert opened.evaluate(f"{hidden}(document.getElementById('turns'))") < 2
            assert "7" in opened.locator(".said").last.text_content(), "turns are read one by one"
            assert opened.locator("#examples button").first.is_visible()
            assert "error" not in opened.locator("#turns").text_content().lower()
        assert opened.locator("#turns .refused").count() > 0
        opened.close()
        assert "Traceback" not in own.log.read_text()
