"""The status page in Chromium: it draws itself again, on phones and in the dark, loads nothing foreign, runs no text.

`tests/integration/test_watched_page.py` has it watch a real run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from parashard._proto import coordinator_pb2 as pb
from parashard_coordinator.endpoints.history import RECENT_POINTS
from support.browser import skip_without_browser
from support.status_cases import status_of, worker_of
from support.status_port import StatusPort, status_port

CHROMIUM = skip_without_browser()

from playwright.sync_api import Browser, Page, Route, expect, sync_playwright  # noqa: E402  # after the skip

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext

pytestmark = [
    pytest.mark.xdist_group("more clusters"),
    pytest.mark.timeout(900),
    pytest.mark.full("a browser; test_status_page.py and test_pages.py see what it is sent"),
]

DEADLINE_MS = 60_000
POLL_MS, TIMEOUT_MS, LOST_MS = 2000, 5000, 5000  # those of page.js
EVIL = '<img src=x onerror="window.evil=1"><script>window.evil=1</script>\'&\u202e'
LINE_1 = {"light": (11, 107, 203), "dark": (108, 178, 247)}
LINE_DRAWN = """([r, g, b]) => [...document.querySelectorAll("canvas")].every((canvas) => {
  const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", { willReadFrequently: true });
  copy.drawImage(canvas, 0, 0);
  const { data } = copy.getImageData(0, 0, canvas.width, canvas.height);
  for (let i = 0; i < data.length; i += 4)
    if (data[i] === r && data[i + 1] === g && data[i + 2] === b && data[i + 3] === 255) return true;
  return false;
})"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        yield browser
        browser.close()


@pytest.fixture
def served() -> Iterator[StatusPort]:
    with status_port() as served:
        for second in range(30):
            served.show(moment(second))
        yield served


Open = Callable[..., Page]


@pytest.fixture
def opened(browser: Browser, served: StatusPort) -> Iterator[Open]:
    """Return what opens the page; at the end nothing may have been wrong in it, and all it asked for was its own."""
    contexts: list[BrowserContext] = []
    asked: list[str] = []
    wrong: list[str] = []

    def note(message: Any) -> None:
        if "net::ERR_" not in message.text:  # of a request that a test has fail
            wrong.append(message.text)

    def open_page(virtual_time: bool = False, **options: Any) -> Page:
        contexts.append(browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options}))
        page = contexts[-1].new_page()
        page.set_default_timeout(DEADLINE_MS)
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", note)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        if virtual_time:
            page.clock.install()
        page.goto(served.url)
        return page

    expect.set_options(timeout=DEADLINE_MS)
    yield open_page
    for context in contexts:
        context.close()
    assert asked
    assert not [url for url in asked if not url.startswith(served.url)], "it loads nothing from elsewhere"
    assert not wrong


def moment(second: int, **more: Any) -> pb.GetStatusReply:
    workers = [worker_of(index, live=index < 2, device="cpu") for index in range(3)]
    figures = {"elapsed_s": float(second), "steps_complete": second, "training_loss": 1 / (1 + second)}
    return status_of(**{"run_id": "run-1", "workers": workers, **figures, **more})


def plot(page: Page, title: str) -> Any:
    return page.get_by_role("img", name=f"plot of {title},")


def name_at_its_left(drawn: Any) -> str:
    """Return what a plot tells where the cursor is on its first point."""
    drawn.locator(".u-over").hover(position={"x": 1, "y": 50})
    return str(drawn.get_attribute("aria-label"))


def test_it_follows_the_run_without_being_loaded_again(opened: Open, served: StatusPort) -> None:
    page = opened()
    page.evaluate("window.stillHere = true")
    expect(page.locator("figure")).to_have_count(6)
    page.wait_for_function(LINE_DRAWN, arg=list(LINE_1["light"]))
    expect(plot(page, "steps")).to_have_accessible_name("plot of steps, after 29 s: steps complete 29")
    served.show(moment(31, training_loss=0.0000123, problems=["no space left"], events=["first", "second"]))
    expect(plot(page, "steps")).to_have_accessible_name("plot of steps, after 31 s: steps complete 31")
    expect(plot(page, "loss")).to_have_accessible_name("plot of loss, after 31 s: training loss 1.23e-5")
    expect(plot(page, "workers and shards")).to_have_accessible_name(
        "plot of workers and shards, after 31 s: workers 2, shards 1"
    )
    expect(page.locator("#problems li")).to_have_text(["no space left"])
    expect(page.locator("#events li")).to_have_text(["second", "first"])
    expect(page.locator("#workers tbody tr")).to_have_count(3)
    expect(page.locator("#workers tr.down")).to_have_count(1)
    expect(page).to_have_title("3 % digits: running - parashard")
    assert page.evaluate("window.stillHere")


def test_a_new_metric_gets_a_plot(opened: Open, served: StatusPort) -> None:
    page = opened()
    expect(plot(page, "accuracy")).to_be_visible()
    served.show(moment(31, held_out={"mean_squared_error": 2.5, "loss": 0.5}))
    expect(plot(page, "mean squared error")).to_have_accessible_name(
        "plot of mean squared error, after 31 s: held-out mean squared error 2.5"
    )
    expect(plot(page, "loss")).to_have_accessible_name(
        "plot of loss, after 31 s: training loss 0.03125, held-out loss 0.5"
    )
    expect(plot(page, "accuracy")).to_have_count(0)
    assert name_at_its_left(plot(page, "steps")) == "plot of steps, after 0 s: steps complete 0"


def test_no_text_becomes_markup(opened: Open, served: StatusPort) -> None:
    page = opened()
    expect(page.locator("figure")).to_have_count(6)
    served.show(
        moment(
            40,
            job=EVIL,
            reason=EVIL,
            consistency=EVIL,
            events=[EVIL],
            problems=[EVIL],
            held_out={EVIL: 1.0},
            workers=[pb.WorkerStatus(name=EVIL, live=True, device=EVIL)],
            shards=[pb.ShardStatus(address=EVIL)],
        )
    )
    for place in ("#heading", "#reason", "#problems li", "#events li", "#workers td >> nth=0", "#shards td >> nth=0"):
        expect(page.locator(place)).to_contain_text(EVIL)
    expect(page.locator("figcaption b").nth(1)).to_have_text(EVIL)
    page.reload()
    expect(page.locator("#heading")).to_contain_text(EVIL)
    expect(page.locator("figure")).to_have_count(6)
    assert page.locator("img, body script").count() == 0
    assert page.evaluate("window.evil") is None


def test_the_policy_stops_what_is_inline_and_what_is_foreign(browser: Browser, served: StatusPort) -> None:
    page = browser.new_page()
    page.goto(served.url)
    page.evaluate(
        """() => {
          window.violated = [];
          document.addEventListener("securitypolicyviolation", (event) => violated.push(event.effectiveDirective));
          const [image, script, style] = ["img", "script", "style"].map((tag) => document.createElement(tag));
          image.src = "http://192.0.2.1/x.png";
          script.textContent = "window.evil = 1";
          style.textContent = "body { display: none; }";
          document.body.append(image, script, style);
        }"""
    )
    page.wait_for_function("violated.length >= 3", timeout=DEADLINE_MS)
    assert sorted(page.evaluate("violated")) == ["img-src", "script-src-elem", "style-src-elem"]
    assert page.evaluate("window.evil") is None
    page.close()


def test_without_an_answer_it_says_since_when_keeps_the_picture_and_goes_on(opened: Open, served: StatusPort) -> None:
    page = opened(virtual_time=True)
    expect(plot(page, "steps")).to_have_accessible_name("plot of steps, after 29 s: steps complete 29")
    contact = page.locator("#contact")
    expect(contact).to_be_hidden()

    page.route("**/*.json*", lambda route: route.abort())
    page.clock.run_for(POLL_MS)
    expect(contact).to_contain_text("has not answered since")
    expect(contact).to_be_visible()
    expect(page.locator("figure")).to_have_count(6)
    expect(page.locator("#workers tbody tr")).to_have_count(3)

    silent: list[Route] = []
    page.unroute("**/*.json*")

    def hold(route: Route) -> None:
        silent.append(route)

    page.route("**/*.json*", hold)
    with page.expect_request("**/status.json"):
        page.clock.run_for(LOST_MS)
    page.clock.run_for(TIMEOUT_MS)
    expect(contact).to_contain_text("no answer within 5 s")
    assert len(silent) == 2, "each is asked for once"

    page.unroute("**/*.json*")
    served.show(moment(31))
    page.clock.run_for(LOST_MS)
    expect(contact).to_be_hidden()
    expect(plot(page, "steps")).to_have_accessible_name("plot of steps, after 31 s: steps complete 31")


def test_another_coordinator_s_history_replaces_the_one_before(opened: Open, served: StatusPort) -> None:
    page = opened()
    expect(page.locator("#incomplete")).to_be_hidden()
    served.begin_again()
    for second in range(60, 103):
        served.show(moment(second))
    expect(page.locator("#incomplete")).to_have_text("This coordinator has no history of the job before 60 s.")
    expect(plot(page, "steps")).to_have_accessible_name("plot of steps, after 1.7 min: steps complete 102")
    assert name_at_its_left(plot(page, "steps")) == "plot of steps, after 1 min: steps complete 60"


def test_it_fits_a_phone(opened: Open, served: StatusPort) -> None:
    long = "x" * 300
    served.show(
        moment(31, job=long, reason=long, events=[long], problems=[long], shards=[pb.ShardStatus(address=long)])
    )
    page = opened(viewport={"width": 375, "height": 700}, is_mobile=True, has_touch=True)
    expect(page.locator("figure")).to_have_count(6)
    page.wait_for_function(LINE_DRAWN, arg=list(LINE_1["light"]))
    assert page.evaluate("document.documentElement.scrollWidth") == 375
    widths = page.locator("canvas").evaluate_all("all => all.map((one) => one.getBoundingClientRect().right)")
    assert max(widths) <= 375
    page.set_viewport_size({"width": 700, "height": 375})
    page.wait_for_function("document.querySelector('.uplot').getBoundingClientRect().width > 250")
    assert page.evaluate("document.documentElement.scrollWidth") == 700


def test_it_is_light_or_dark_as_the_system_is_and_changes_with_it(opened: Open) -> None:
    page = opened(color_scheme="dark")
    page.wait_for_function(LINE_DRAWN, arg=list(LINE_1["dark"]))
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(18, 23, 29)"
    page.emulate_media(color_scheme="light")
    page.wait_for_function(LINE_DRAWN, arg=list(LINE_1["light"]))
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(245, 247, 249)"


def test_the_keyboard_reaches_all_that_there_is_to_reach(opened: Open, served: StatusPort) -> None:
    page = opened()
    expect(page.locator("figure")).to_have_count(6)
    reached = []
    for _ in range(12):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.innerText.split('\\n')[0]"))
    for name in ("span", "metrics", "status.json", "history.json"):
        assert name in reached
    regions = page.get_by_role("region", name="Workers").or_(page.get_by_role("region", name="Shards"))
    assert regions.evaluate_all("all => all.filter((one) => one.tabIndex === 0).length") == 2
    headers = page.get_by_role("columnheader")
    assert (
        headers.count()
        == page.locator("thead th:visible").count()
        == page.locator("thead th[scope=col]:visible").count()
        > 10
    )
    assert page.get_by_role("rowheader").count() == 5


def test_a_shorter_span_can_be_looked_at(opened: Open, served: StatusPort) -> None:
    for second in range(31, 31 + 2 * RECENT_POINTS):
        served.show(moment(second))
    page = opened()
    expect(plot(page, "steps")).to_be_visible()
    before = plot(page, "steps").screenshot()
    page.get_by_label("show").select_option("120")
    page.wait_for_function("() => new Promise(requestAnimationFrame)")
    assert plot(page, "steps").screenshot() != before
    expect(plot(page, "steps")).to_have_accessible_name("plot of steps, after 30.5 min: steps complete 1,830")


def test_without_scripts_it_is_a_page_of_tables(opened: Open, served: StatusPort) -> None:
    page = opened(java_script_enabled=False)
    expect(page.locator("#heading")).to_have_text("digits: running")
    expect(page.locator("#workers tbody tr")).to_have_count(3)
    expect(page.locator("#plots")).to_be_hidden()
    served.show(moment(31, job="other"))
    expect(page.locator("#heading")).to_have_text("other: running")
