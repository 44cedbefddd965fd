"""The report in headless Chromium: every width and colour scheme, without an error, a request, or anything cut off."""

import json
import os
import random
import shutil
import statistics
import time
from pathlib import Path

import pytest
from report_pages import kept, write_kept, write_run

from megappo.lab.report.report import write_comparison, write_report

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: bash launch/setup.sh installs it")
pytestmark = [
    pytest.mark.xdist_group("browser"),  # one process of it for all
    pytest.mark.skipif(not CHROMIUM, reason="no Chromium: apt-get install chromium, or name it in CHROMIUM"),
]
FAULTS = (Path(__file__).parents[1] / "support" / "page_faults.js").read_text()
ERROR = (
    "error: rank 1: the SGLang engine ended (exit code 1); /output" + "/a-long-folder" * 9 + "/engine_0.log ends:\n..."
)
PAPER_WIDTH = 794
"""Width of A4, in pixels of CSS."""
RUNS = "document.title='run'"
HOSTILE = f"</script><script>{RUNS}</script><img src=http://a.example/x onerror={RUNS}>"
LONG = "a-very-long-name-without-any-place-to-break-it/" * 4
VIEWS = [(width, scheme) for width in (400, 1400) for scheme in ("light", "dark")]


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Reports of a finished, a running, a failed and a long run, and their comparison."""
    folder = tmp_path_factory.mktemp("pages")
    endings = {
        "finished": {"num_steps": 40},
        "running": {"num_steps": 30, "status": "running", "total_steps": 100},
        "failed": {"num_steps": 3, "status": "failed", "total_steps": 100, "message": ERROR},
        "long": {"num_steps": 5000},
    }
    found = {}
    for name, facts in endings.items():
        run = write_run(folder / name, facts.pop("num_steps"), num_parts=3)
        (run / "run.json").write_text(json.dumps(json.loads((run / "run.json").read_text()) | facts))
        found[name] = write_report(run)
    runs = [folder / name for name in ("finished", "running", "failed")]
    return found | {"compare": write_comparison(runs, folder / "compare.html")}


@pytest.mark.parametrize("name", ["finished", "running", "failed", "long", "compare"])
def test_a_reader_sees_nothing_wrong_at_any_width_in_any_colours_and_on_paper(browser, pages, name, tmp_path):
    for width in (400, 1400):
        page, wrong = opened(browser, pages[name], width)
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            page.wait_for_timeout(50)  # the charts are drawn again
            assert page.evaluate(FAULTS) == [], (width, scheme)
        assert wrong == []
        assert page.locator(".chart").count() >= 5
        page.close()
    page, wrong = opened(browser, pages[name], PAPER_WIDTH, "dark")
    page.pdf(path=tmp_path / "page.pdf")
    page.emulate_media(media="print")
    page.evaluate("setPrinting(true)")
    assert page.evaluate(FAULTS) == [] and wrong == []
    page.close()


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        ("document.querySelector('.card b').style.cssText = 'white-space: nowrap; margin-left: 99%'", "is outside of"),
        ("document.querySelector('.card b').style.color = 'var(--paper)'", "has a contrast of 1.0"),
        ("[...plots][0].setData([[], []])", "nothing is drawn in the chart"),
        ("document.body.style.width = '3000px'", "the page is 3000 px wide"),
    ],
)
def test_what_a_reader_would_see_wrong_is_found(browser, pages, damage, fault):
    page, _ = opened(browser, pages["failed"])
    page.evaluate(damage)
    page.wait_for_timeout(50)
    assert any(fault in found for found in page.evaluate(FAULTS))
    page.close()


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A run of 1,000 steps and 8 ranks, with hostile and long texts."""
    run = write_run(tmp_path_factory.mktemp("large") / "run", 1000, num_ranks=8, model={"path": LONG + HOSTILE})
    rows = [kept(1000, row, random.Random(row)) for row in range(32)]
    rows[0] |= {"prompt": HOSTILE, "response": LONG, "texts": [HOSTILE, LONG, "\n", "c", "d"], "score": -1.0}
    write_kept(run, 1000, rows)
    with (run / "metrics.jsonl").open("a") as file:
        steps = {"step": 1001, f"reward/part/{HOSTILE}": 1.0, f"val/{LONG}/mean@4": 0.5, "health/truncation": 1.0}
        file.write(json.dumps(steps) + "\n")
    return write_report(run)


def opened(browser, path, width=1400, scheme="light"):
    """Return a page on which everything has been drawn, and what went wrong until now."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    wrong = []
    page.on("console", lambda message: wrong.append(message.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda request: wrong.append(request.url) if request.url != path.as_uri() else None)
    page.on("dialog", lambda dialog: wrong.append(dialog.message))
    page.goto(path.as_uri())
    page.wait_for_selector(".uplot")
    # A chart is drawn when it comes near the window.
    page.evaluate("for (const [box, draw] of [...waiting]) { near.unobserve(box); waiting.delete(box); draw(); } null")
    return page, wrong


@pytest.mark.parametrize(("width", "scheme"), VIEWS)
def test_nothing_overflows_fails_or_is_requested(browser, large, width, scheme, tmp_path):
    page, wrong = opened(browser, large, width, scheme)
    assert wrong == []
    assert page.title() == "/".join(large.parts[-3:-1])
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.locator(".chart .uplot").count() == page.locator(".chart").count() == 9
    wider = page.evaluate("""[...document.querySelectorAll("body *")].filter((one) =>
        !one.closest(".scroll, nav, .u-wrap, pre, .item span, .other span") &&
        one.getBoundingClientRect().right > innerWidth + 1
    ).map((one) => one.className || one.tagName)""")
    assert wider == []
    finding = page.locator(".finding.now").inner_text()
    assert finding.startswith("truncation") and "Raise rollout.max_response_length" in finding
    page.screenshot(path=tmp_path / "page.png", full_page=True)
    pixels = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert pixels == {"light": "rgb(246, 247, 249)", "dark": "rgb(15, 18, 22)"}[scheme]
    page.close()


def test_1000_steps_of_8_ranks_open_at_once(browser, large):
    assert large.stat().st_size < 6_000_000
    page = browser.new_page()
    start = time.monotonic()
    page.goto(large.as_uri())
    page.wait_for_selector(".uplot")
    assert time.monotonic() - start < 5
    page.close()


def test_the_figures_are_those_of_the_run(browser, tmp_path):
    run = write_run(tmp_path / "run", 20)
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    page, _ = opened(browser, write_report(run))
    cards = [card.inner_text().split("\n") for card in page.locator(".card").all()]
    assert cards[0] == ["Steps", "20 of 20", "finished"]
    first, last = steps[1]["reward/score/mean"], steps[-1]["reward/score/mean"]
    assert cards[1] == ["Reward", f"{last:.3f}", f"at step 20; {first:.3f} at step 1"]
    assert cards[2][:2] == ["Held out: sums@4", f"{steps[-1]['val/sums/mean@4']:.3f} \u00b1 0.020"]
    legend = page.locator("figure[aria-label=Entropy] .legend").inner_text()
    entropy = float(f"{steps[-1]['actor/entropy']:.4g}")
    assert legend == f"step 20:\nactor {entropy}"
    assert page.locator(".lane").count() == 2
    page.close()


def test_who_waits_for_whom(browser, tmp_path):
    """Rank 1 enters the exchange last and leaves it with the others: rank 0 waits 0.3 s for it, rank 2 0.1 s."""
    run = write_run(tmp_path / "run", 4, num_ranks=3)
    for rank, seconds in enumerate((0.5, 0.2, 0.3)):
        line = {"step": 4, "phases": [["gather", 100 - seconds, seconds], ["update_actor", 100, rank + 1]]}
        (run / "timeline" / f"rank_{rank:05d}.jsonl").write_text(json.dumps(line) + "\n")
    page, _ = opened(browser, write_report(run))
    rows = page.locator("#time table tbody tr").all_inner_texts()
    assert [row.split("\t") for row in rows] == [
        ["rank 0", "300 ms", "0 ms"],
        ["rank 1", "0 ms", "400 ms"],
        ["rank 2", "100 ms", "0 ms"],
    ]
    page.close()


def test_responses_are_filtered_searched_and_read_by_keyboard(browser, tmp_path):
    run = write_run(tmp_path / "run", 8)
    for step, response in ((0, "wrong one"), (8, "right one")):
        line = {"step": step, "dataset": "sums", "prompt": "4+4=", "response": response, "passed": step == 8}
        (run / "rollouts" / f"step_{step:08d}.jsonl").write_text(json.dumps(line) + "\n")
    page, wrong = opened(browser, write_report(run))
    items, count = page.locator(".item"), page.locator("#responses .controls > span").last
    assert count.inner_text() == "74 of 74"
    page.keyboard.press("/")
    page.keyboard.type("4+4=")
    assert items.count() == 2 and count.inner_text() == "2 of 74"
    page.get_by_role("button", name="wrong", exact=True).click()
    assert items.count() == 1 and "wrong one" in page.locator(".detail").inner_text()
    same = page.locator(".other").all_inner_texts()
    assert [" ".join(text.split()) for text in same] == [
        "\u2717 step 0 \u2013 wrong one",
        "\u2713 step 8 \u2013 right one",
    ]
    page.locator("#search").fill("")
    page.get_by_role("button", name="all", exact=True).click()
    page.locator(".list").focus()
    before = page.locator(".item[aria-selected=true]").inner_text()
    page.keyboard.press("k")
    page.keyboard.press("ArrowUp")
    assert page.locator(".item[aria-selected=true]").inner_text() != before
    page.locator("#search").fill("0+2=")
    tokens = page.locator(".token")
    assert tokens.count() == 5 and tokens.nth(0).get_attribute("style").startswith("background-color")
    page.locator(".detail .tokens").focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert "token 3 of 5" in page.locator(".detail").inner_text()
    assert wrong == []
    page.close()


def test_a_token_with_numbers_that_are_not_finite_is_shown(browser, tmp_path):
    run = write_run(tmp_path / "run", 4)
    write_kept(run, 4, [kept(4, 0, random.Random(0), prompt="odd", values=[float("nan"), 1.0, 2.0, 3.0, 4.0])])
    page, wrong = opened(browser, write_report(run))
    page.locator("#search").fill("odd")
    page.locator("select:has(option[value=advantages])").select_option("values")
    page.locator(".detail .tokens").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowLeft")
    assert "value NaN" in page.locator(".detail").inner_text() and wrong == []
    assert page.locator(".token").nth(4).get_attribute("style").startswith("background-color")
    page.close()


def test_all_charts_zoom_together_and_any_metric_can_be_found(browser, tmp_path):
    page, wrong = opened(browser, write_report(write_run(tmp_path / "run", 40)))
    page.locator("figure[aria-label=Reward]").focus()
    page.keyboard.press("+")
    ranges = page.evaluate("[...plots].map((plot) => [plot.scales.x.min, plot.scales.x.max])")
    assert len(ranges) > 5 and all(one == [10, 30] for one in ranges)
    page.keyboard.press("0")
    assert page.evaluate("[...plots].every((plot) => plot.scales.x.min === 0 && plot.scales.x.max === 40)")
    page.locator("#all-metrics input").fill("reward part 7")
    page.wait_for_timeout(300)
    assert page.locator("#all-metrics .controls").inner_text().split("\n")[-1].startswith("17 of ")
    assert page.locator("#all-metrics figure").count() == 17
    assert wrong == []
    page.close()


def test_seeds_are_a_band(browser, tmp_path):
    runs = [write_run(tmp_path / f"seed{seed}", 10, seed=seed) for seed in range(3)]
    runs.append(write_run(tmp_path / "other", 10, seed=7, actor={"optim": {"lr": 0.5}}))
    for run, step in ((runs[0], 11), (runs[3], 5)):
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        lines = [line | ({"health/truncation": 1.0} if line["step"] == step else {}) for line in lines]
        lines += [{"step": 11, "health/truncation": 1.0}] if step == 11 else []
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rewards = []
    for run in runs[:3]:
        rewards.append(json.loads((run / "metrics.jsonl").read_text().splitlines()[10])["reward/score/mean"])
    page, wrong = opened(browser, write_comparison(runs, tmp_path / "page.html"))
    legend = page.locator("figure[aria-label=Reward] .legend button")
    assert [text.rpartition(" ")[0] for text in legend.all_inner_texts()] == ["seed0, seed1, seed2", "other"]
    line = page.evaluate("linesOf(DATA.charts['Reward and responses'][0])[0]")
    assert line["values"][10] == pytest.approx(sum(rewards) / 3, rel=1e-4)
    assert [limit[10] for limit in line["band"]] == pytest.approx([min(rewards), max(rewards)], rel=1e-4)
    assert page.locator("section").first.locator("tbody tr").all_inner_texts() == [
        "trainer.seed\t0\t1\t2\t7",
        "actor.optim.lr\t1e-06\t1e-06\t1e-06\t0.5",
    ]
    [_, count, reward, _] = page.locator("#results table").first.locator("tbody tr").first.inner_text().split("\t")
    mean, deviation = statistics.fmean(rewards), statistics.stdev(rewards)
    assert (count, reward) == ("3", f"{mean:.3f} \u00b1 {deviation:.3f} step 10")
    assert page.locator(".finding").count() == 1, "a rule of several runs stands once"
    assert page.locator(".finding li").all_inner_texts() == ["seed0: in the last step; step 11", "other: step 5"]
    page.get_by_role("button", name="Seeds as a band").click()
    page.wait_for_timeout(300)
    assert legend.count() == 4 and wrong == []
    page.close()


def test_a_spike_of_a_long_run_is_drawn_named_and_exported(browser, tmp_path):
    run = write_run(tmp_path / "run", 3000)
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps[1502]["actor/grad_norm"] = 1000.0
    del steps[3000]["actor/grad_norm"]
    (run / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    facts = json.loads((run / "run.json").read_text()) | {"status": "running", "total_steps": 4000}
    (run / "run.json").write_text(json.dumps(facts))
    page, wrong = opened(browser, write_report(run))
    chart = page.locator("figure[aria-label='Gradient norm']")
    assert page.evaluate("[...plots].some((plot) => plot.scales.y.max >= 1000)")
    assert chart.locator(".legend").inner_text() == "step 2,999:\nactor 1.0e-5"
    page.evaluate(
        "showValues(document.querySelector(\"figure[aria-label='Gradient norm'] .legend\"), "
        "linesOf(DATA.charts.Optimizer[0]), 375)"
    )
    assert chart.locator(".legend").inner_text() == "steps 1,500 to 1,503:\nactor 250 (1.0e-5 to 1,000)"
    with page.expect_download() as saved:
        chart.get_by_role("button", name="CSV").click()
    rows = saved.value.path().read_text().splitlines()
    assert rows[0] == "first step,last step,actor,actor lowest,actor highest"
    assert rows[376] == "1500,1503,250,0.00001,1000" and len(rows) == 752
    with page.expect_download() as saved:
        chart.get_by_role("button", name="SVG").click()
    drawing = saved.value.path().read_text()
    assert drawing.startswith("<svg") and drawing.count("<polyline") == 3 and "mean of 4 steps" in drawing
    remaining = page.locator(".card", has_text="Remaining").inner_text().split("\n")[1]
    assert remaining.startswith("0:17:") or remaining.startswith("0:18:"), "1,000 steps of about 1.06 s"
    assert page.locator(".reload input").is_checked() and wrong == []
    page.close()


def test_phases_of_points_add_up_to_the_step(browser, tmp_path):
    run = write_run(tmp_path / "run", 1500)
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for step in steps[10::10]:
        step |= {"timing_s/evaluate": 5.0, "timing_s/step": step["timing_s/step"] + 5}
    (run / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    page, _ = opened(browser, write_report(run))
    gaps = page.evaluate("""RUNS[0].metrics["timing_s/step"].map((whole, i) => whole - RUNS[0].phases.reduce(
        (sum, phase) => sum + (RUNS[0].metrics[`timing_s/${phase}`][i] ?? 0), 0))""")
    assert len(gaps) == 751 and max(map(abs, gaps)) < 1e-5
    page.close()


def test_a_print_has_all_charts_in_light_colours(browser, tmp_path):
    page = browser.new_page(viewport={"width": 1400, "height": 300}, color_scheme="dark")
    page.goto(write_report(write_run(tmp_path / "run", 40)).as_uri())
    page.wait_for_selector(".uplot")
    page.evaluate("addEventListener('beforeprint', () => { window.printed = [css('--paper'), plots.size]; })")
    page.pdf(path=tmp_path / "page.pdf")
    assert page.evaluate("window.printed") == ["#fff", page.locator(".chart").count()]
    assert page.evaluate("css('--paper')") == "#181c22"
    page.close()


def test_episodes_are_turns_and_scores_without_a_verdict_have_no_ticks(browser, tmp_path):
    run = write_run(tmp_path / "run", 4)
    texts = ["<tool_call>", "3*4", "</tool_call>", "12", "=12"]
    turns = [{"turn": 1, "text": "<tool_call>3*4</tool_call>", "reward": 0.0}]
    turns += [{"turn": 0, "text": "12", "reward": 0.0}, {"turn": 2, "text": "=12", "reward": 0.25}]
    episode = {"texts": texts, "turns": turns, "response_mask": [1, 1, 1, 0, 1], "prompt": "3*4"}
    tree = [{"turn": 1, "text": "main", "reward": 0.0}, {"turn": 3, "text": "merged", "reward": 0.0}]
    tree.append({"turn": 0, "text": "given", "reward": 0.0, "begins": "branch", "follows": 1, "depth": 1})
    tree.append({"turn": 2, "text": "helped", "reward": 1.0, "depth": 1})
    rows = [kept(4, row, random.Random(row), score=row / 8) for row in range(8)]
    rows.append(kept(4, 8, random.Random(8), score=0.1, turns=tree, prompt="of a tree", texts=["main", "merged"]))
    tree = [{"turn": 1, "text": "helped", "reward": 0.0}, *tree]  # the text of a branch's turn
    rows.append(kept(4, 9, random.Random(9), score=0.2, turns=tree, prompt="given", texts=["helped"]))
    write_kept(run, 4, [kept(4, 0, random.Random(0), score=0.3, **episode), *rows])
    page, wrong = opened(browser, write_report(run))
    assert page.locator(".segments").count() == 0 and page.locator(".item .good, .item .bad").count() == 0
    page.locator("#search").fill("3*4")
    detail = page.locator(".detail")
    assert [text.split("\n") for text in detail.locator(".turn").all_inner_texts()] == [
        ["policy, turn 1", "<tool_call>3*4</tool_call>"],
        ["environment", "12"],
        ["policy, turn 2 \u00b7 reward 0.25", "=12"],
    ]
    assert detail.locator(".token.call").count() == 3
    assert detail.locator(".legend").inner_text().split("\n") == ["policy", "environment (not trained)", "tool call"]
    page.locator("#search").fill("of a tree")
    detail.locator(".turn.begins summary").click()
    assert [text.split("\n") for text in detail.locator(".turn").all_inner_texts()] == [
        ["policy, turn 1", "main"],
        ["policy, turn 3", "merged"],
        ["branch after turn 1", "given"],
        ["policy, turn 2 \u00b7 reward 1", "helped"],
    ]
    margins = detail.locator(".turn").evaluate_all("boxes => boxes.map((box) => box.style.marginLeft)")
    assert margins == ["", "", "1.5rem", "1.5rem"]
    assert "environment or agent" in detail.locator(".legend").inner_text()
    page.locator("#search").fill("given")
    assert detail.locator(".turn:has(.token)").all_inner_texts() == ["policy, turn 2 \u00b7 reward 1\nhelped"]
    page.locator("#search").fill("")
    page.locator("#responses label:has-text('Step') select").select_option("4")
    page.get_by_role("spinbutton", name="Lowest score").fill("0.4")
    page.locator("#responses label:has-text('Order') select").select_option("highest")
    scores = page.locator(".item .score").all_inner_texts()
    assert scores == ["0.875", "0.750", "0.625", "0.500"] and wrong == []
    page.close()
