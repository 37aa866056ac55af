//! `weir report`: results as tables, as a page in a browser, and two results compared.
//!
//! Chromium renders the page in the widths and colour schemes of readers. A second page shows it in
//! frames and measures the layout. Screenshots are measured as well, because a layout does not show
//! whether anything is visible.

use std::{f64::consts::TAU, fs, path::Path};

use serde_json::{Value, json};

use crate::harness::{Scratch, TestClient, assert_contains, text, weir};

/// A page that measures `page.html` in several frames, and screenshots of it.
///
/// `outside` are labels that leave their chart, `touching` labels that overlap others of the same
/// chart: neither can be read.
const MEASURING_PAGE: &str = r##"<!DOCTYPE html><html><body>
<iframe src="page.html" style="width:1200px;height:900px;border:0"></iframe>
<iframe src="page.html" style="width:360px;height:800px;border:0"></iframe>
<iframe src="page.html" style="width:360px;height:800px;border:0;color-scheme:dark"></iframe>
<img src="wide.png"><img src="phone.png"><img src="dark.png">
<script>
const box = (element) => element.getBoundingClientRect();
const inside = (inner, outer) => inner.left >= outer.left - 1 && inner.right <= outer.right + 1
    && inner.top >= outer.top - 1 && inner.bottom <= outer.bottom + 1;
const touch = (a, b) => a.left < b.right && b.left < a.right && a.top + 2 < b.bottom && b.top + 2 < a.bottom;
function frame(of) {
    const page = of.contentDocument, style = (element) => of.contentWindow.getComputedStyle(element);
    const charts = [...page.querySelectorAll('figure svg[role=img]')];
    const letters = charts.map((chart) => [...chart.querySelectorAll('text')].map((text) => [text, box(text)]));
    const of_charts = letters.flatMap((texts, index) => texts.map(([text, at]) => [text, at, box(charts[index])]));
    const pairs = letters.flatMap((texts) => texts.flatMap(([a, at], i) => texts.slice(i + 1).map(([b, bt]) => [a, at, b, bt])));
    return {
        wide: of.contentWindow.innerWidth, content: page.documentElement.scrollWidth,
        dark: of.contentWindow.matchMedia('(prefers-color-scheme: dark)').matches,
        ground: style(page.body).backgroundColor, ink: style(page.body).color,
        letters: style(page.querySelector('figure svg text')).fill,
        line: style(page.querySelector('figure polyline[stroke="#0072B2"]')).stroke,
        charts: charts.length, drawn: charts.filter((chart) => box(chart).width > 250 && box(chart).height > 50).length,
        stacked: page.querySelectorAll('.stacked td').length,
        cut: [...page.querySelectorAll('.stacked td')].filter((cell) => box(cell).right > of.contentWindow.innerWidth + 1 || cell.scrollWidth > cell.clientWidth + 1).map((cell) => cell.textContent),
        lowest: Math.min(...of_charts.map(([, at]) => at.height)),
        outside: of_charts.filter(([, at, chart]) => !inside(at, chart)).map(([text]) => text.textContent.trim()),
        touching: pairs.filter(([, at, , bt]) => touch(at, bt)).map(([a, , b]) => a.textContent.trim() + ' ' + b.textContent.trim()),
        scripts: page.scripts.length,
    };
}
function picture(image) {
    const canvas = document.createElement('canvas');
    [canvas.width, canvas.height] = [image.naturalWidth, image.naturalHeight];
    const context = canvas.getContext('2d');
    context.drawImage(image, 0, 0);
    const pixels = new Uint32Array(context.getImageData(0, 0, canvas.width, canvas.height).data.buffer);
    const counts = new Map();
    for (const pixel of pixels) counts.set(pixel, (counts.get(pixel) ?? 0) + 1);
    const [ground, most] = [...counts].reduce((one, other) => one[1] > other[1] ? one : other);
    return { wide: canvas.width, colours: counts.size, ground: ground & 255, empty: most / pixels.length };
}
addEventListener('load', () => {
    const found = { frames: [...document.querySelectorAll('iframe')].map(frame), pictures: [...document.images].map(picture) };
    document.body.textContent = JSON.stringify(found);
});
</script></body></html>"##;

/// Samples around a mean, deterministic.
fn samples(middle: f64) -> Vec<f64> {
    (0..9).map(|number| middle * (1.0 + 0.01 * (f64::from(number) * TAU / 9.0).sin())).collect()
}

fn measure(name: &str, unit: &str, better: &str, middle: f64) -> Value {
    json!({ "name": name, "unit": unit, "better": better, "samples": samples(middle) })
}

fn result(speed: f64) -> Value {
    let modes = ["writeback", "writethrough", "none", "directsync", "<script>alert(1)</script>"];
    let series = |mode: &&str| {
        let points: Vec<(u32, f64)> =
            (0..60).map(|second| (second, f64::from(second * 400) * speed)).collect();
        json!({ "name": mode, "points": points })
    };
    let axis = |label, unit, logarithmic| json!({ "label": label, "unit": unit, "logarithmic": logarithmic });
    let shares: Vec<(f64, f64)> =
        (0..50).map(|step| (1e4 * 1.2f64.powi(step), f64::from(step) / 49.0)).collect();
    let row = |mode: &&'static str| {
        [*mode, "18.2K", "0.85ms", "1.9 GiB/s", "yes", "what it means for a guest that never flushes"]
    };
    let recommended = ["throughput", "latency", "integrity", "balanced"].map(|goal| {
        [
            goal,
            "writethrough, 512K, L2 1/128, prefetch\nnot settled\n104M more memory",
            "what was not flushed",
            "+112 % sequential sync write 1M ×32\n+54 % random first write 4K ×32\nand 7 more",
            "-12 % sequential first write 1M ×32\n-9 % random write 4K ×32",
        ]
    });
    json!({
        "format": "weir-result",
        "version": 1,
        "header": {
            "command": ["weir", "tune", "/srv/<images>"],
            "began": 1_795_241_721,
            "seconds": 598.2,
            "weir": "0.1.0",
            "machine": { "kernel": "Linux 6.18", "processor": "P", "processors": 2, "memory-bytes": 1u64 << 34 },
        },
        "partial": "interrupted",
        "findings": {
            "summary": ["Use cache mode none.", "weir serve vm1.qcow2 \\\n  --cache none \
                                                 --a-word-that-is-far-too-long-for-a-phone-and-cannot-be-broken"],
            "opening": [{
                "title": "Recommended",
                "columns": ["For", "Use", "A power failure loses", "Gains", "Costs"],
                "rows": recommended,
            }],
            "measures": [
                measure("random read", "iops", "higher", 20_000.0 * speed),
                measure("p99", "nanoseconds", "lower", 850_000.0),
                measure("\u{1b}[2Jname", "count", "higher", 5.0),
            ],
            "tables": [{
                "title": "What each costs",
                "columns": ["mode", "IOPS", "p99", "rate", "safe", "remark"],
                "rows": modes.iter().map(row).collect::<Vec<_>>(),
            }],
            "charts": [
                { "kind": "lines", "title": "IOPS over time", "x": axis("time", "seconds", false), "y": axis("IOPS", "iops", false),
                  "series": modes.iter().map(series).collect::<Vec<_>>() },
                { "kind": "lines", "title": "Latency", "x": axis("latency", "nanoseconds", true), "y": axis("share", "share", false),
                  "series": [{ "name": "all", "points": shares }] },
                { "kind": "heat-map", "title": "All", "unit": "iops", "better": "higher", "columns": ["64K", "128K", "2M"], "rows": modes,
                  "values": vec![vec![Some(20_000.0), Some(1234.5), None]; modes.len()] },
            ],
        },
    })
}

fn keep(scratch: &Scratch, name: &str, result: &Value) -> String {
    text(&scratch.file(name, result.to_string())).to_owned()
}

fn chromium(directory: &Path, page: &str, options: &[&str]) -> TestClient {
    let profile = format!("--user-data-dir={}", directory.join("profile").display());
    // Chromium's sandbox needs privileges that root in a container lacks; the pages are trusted.
    let always = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--enable-logging=stderr",
        &profile,
    ];
    let address = format!("file://{}", directory.join(page).display());
    TestClient::new("chromium").args(always).args(options).arg(address)
}

fn take_screenshot(directory: &Path, file: &str, size: &str, options: &[&str]) {
    let picture = format!("--screenshot={}", directory.join(file).display());
    let outcome =
        chromium(directory, "page.html", &[&picture, &format!("--window-size={size}")]).args(options).run();
    let stderr = outcome.stderr();
    outcome.succeeded();
    assert!(!stderr.contains("CONSOLE"), "{stderr}");
}

/// The measurements that the measuring page prints.
fn measured(directory: &Path) -> Value {
    let dumped =
        chromium(directory, "measuring.html", &["--allow-file-access-from-files", "--dump-dom"]).succeeds();
    let found =
        dumped.split_once("<body>").and_then(|(_, rest)| rest.split_once("</body>")).expect("a document").0;
    let found = found.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&");
    serde_json::from_str(&found).unwrap_or_else(|error| panic!("{error} in {dumped}"))
}

#[test]
fn page_is_readable_on_desktop_phone_and_in_dark_colours() {
    let scratch = Scratch::new();
    let a = keep(&scratch, "a.json", &result(1.0));
    let page = scratch.path("page.html");
    weir(&["report", &a, "--report", text(&page)]).succeeds();
    let directory = page.parent().expect("it lies in a directory");
    take_screenshot(directory, "wide.png", "1200,900", &[]);
    take_screenshot(directory, "phone.png", "360,800", &[]);
    take_screenshot(directory, "dark.png", "1200,900", &["--blink-settings=preferredColorScheme=0"]);
    scratch.file("measuring.html", MEASURING_PAGE);
    let found = measured(directory);
    let frames = found["frames"].as_array().expect("a list");
    assert_eq!(frames.len(), 3, "{found:#}");
    for (frame, (wide, dark)) in frames.iter().zip([(1200, false), (360, false), (360, true)]) {
        assert_eq!((&frame["wide"], &frame["dark"]), (&json!(wide), &json!(dark)), "{frame:#}");
        assert!(frame["content"].as_u64() <= Some(wide), "the page scrolls horizontally: {frame:#}");
        assert_eq!((&frame["charts"], &frame["drawn"]), (&json!(3), &json!(3)), "{frame:#}");
        assert!(frame["lowest"].as_f64() >= Some(10.0), "letters are too small: {frame:#}");
        assert_eq!((&frame["outside"], &frame["touching"]), (&json!([]), &json!([])), "{frame:#}");
        assert_eq!(frame["scripts"], 0, "{frame:#}");
        assert_eq!((&frame["stacked"], &frame["cut"]), (&json!(20), &json!([])), "{frame:#}");
        let colours =
            ["ground", "ink", "letters", "line"].map(|part| frame[part].as_str().unwrap_or_default());
        let expected = if dark {
            ["rgb(23, 25, 29)", "rgb(228, 232, 237)", "rgb(201, 209, 220)", "rgb(43, 143, 214)"]
        } else {
            ["rgb(255, 255, 255)", "rgb(27, 33, 40)", "rgb(51, 59, 70)", "rgb(0, 114, 178)"]
        };
        assert_eq!(colours, expected, "{frame:#}");
    }
    for (picture, ground) in found["pictures"].as_array().expect("a list").iter().zip([255, 255, 23]) {
        assert!(
            picture["colours"].as_u64() > Some(20) && picture["empty"].as_f64() < Some(0.97),
            "{picture}"
        );
        assert_eq!(picture["ground"], ground, "{picture}");
    }
}

#[test]
fn page_can_be_printed() {
    let scratch = Scratch::new();
    let a = keep(&scratch, "a.json", &result(1.0));
    let page = scratch.path("page.html");
    weir(&["report", &a, "--report", text(&page)]).succeeds();
    let directory = page.parent().expect("it lies in a directory");
    let printed = scratch.path("page.pdf");
    chromium(
        directory,
        "page.html",
        &[&format!("--print-to-pdf={}", printed.display()), "--no-pdf-header-footer"],
    )
    .succeeds();
    let document = fs::read(&printed).expect("it was printed");
    assert!(document.starts_with(b"%PDF-"), "the file is a PDF");
    // ISO 32000-1, 7.7.3: each page is an object of type Page; Pages is their list.
    let document = String::from_utf8_lossy(&document).into_owned();
    let pages = document.matches("/Type /Page").count() - document.matches("/Type /Pages").count();
    assert!((1..=5).contains(&pages), "{pages} pages");
}

#[test]
fn result_is_shown_as_tables() {
    let scratch = Scratch::new();
    let a = keep(&scratch, "a.json", &result(1.0));
    let printed = weir(&["report", &a]).succeeds();
    assert_contains(
        &printed,
        &[
            "weir tune '/srv/<images>'\n",
            "This result is not complete: interrupted.",
            "\nwriteback                  18.2K  0.85ms  1.9 GiB/s  yes   what it means",
            "random read   20.0K  19.8K … 20.2K        9\n",
            "?[2Jname",
            "Charts, which --report FILE.html and --charts DIR draw: IOPS over time; Latency; All\n",
        ],
    );
    let report = weir(&["report", &a, "--json"]).json();
    assert_eq!(report["measures"][0]["estimate"]["median"], 20_000.0, "{report:#}");
    assert_eq!(report["partial"], "interrupted", "{report:#}");
}

#[test]
fn charts_are_written_to_separate_files() {
    let scratch = Scratch::new();
    let a = keep(&scratch, "a.json", &result(1.0));
    let directory = scratch.path("charts");
    weir(&["report", &a, "--charts", text(&directory)]).succeeds();
    for name in ["iops-over-time", "latency", "all"] {
        let drawn = fs::read_to_string(directory.join(format!("{name}.svg"))).expect(name);
        assert!(drawn.starts_with("<svg xmlns=") && !drawn.contains("<script>"), "{name}");
    }
    assert_eq!(weir(&["report", &a, &a, "--charts", text(&directory)]).run().code(), 2);
}

#[test]
fn saved_bench_results_are_shown_and_compared() {
    let scratch = Scratch::new();
    let (a, page) = (scratch.path("a.json"), scratch.path("page.html"));
    let bench = ["bench", "-q", "-c", "5000", "--result", text(&a), "--report", text(&page), "memory:16M"];
    weir(&bench).succeeds();
    let drawn = fs::read_to_string(&page).expect("it was drawn");
    assert_contains(&drawn, &["<title>weir bench</title>", "Requests and their latencies", "role=\"img\""]);
    weir(&["report", text(&a), "--report", text(&page)]).succeeds();
    assert_eq!(
        fs::read_to_string(&page).expect("it was drawn again"),
        drawn,
        "the page must not refer to other files"
    );
    let printed = weir(&["report", text(&a), text(&a)]).succeeds();
    assert_contains(&printed, &["read IOPS", "No real difference"]);
}

#[test]
fn two_results_are_compared() {
    let scratch = Scratch::new();
    let (a, same) = (keep(&scratch, "a.json", &result(1.0)), keep(&scratch, "same.json", &result(1.0)));
    let mut slower = result(0.8);
    slower["header"]["machine"]["kernel"] = json!("Linux 7.0");
    slower["findings"]["measures"][2]["name"] = json!("another");
    let slower = keep(&scratch, "slower.json", &slower);
    let page = scratch.path("page.html");
    let printed = weir(&["report", &a, &slower, "--report", text(&page)]).succeeds();
    assert_contains(
        &printed,
        &[
            "Kernel  Linux 6.18  Linux 7.0\n",
            "random read  worse              -20.0%",
            "p99          no difference        0.0%",
            "only in B: another\n\
             \n\
             1 of 2 measures differs by more than noise: B is better in 0 and worse in 1.\n",
        ],
    );
    assert_contains(
        &fs::read_to_string(&page).expect("it was drawn"),
        &["<svg ", "Linux 7.0", "no difference"],
    );
    assert_eq!(weir(&["report", &a, &slower, "--fail-on-worse"]).run().code(), 1);
    assert_eq!(weir(&["report", &slower, &a, "--fail-on-worse"]).run().code(), 0, "better is not worse");
    let printed = weir(&["report", &a, &same, "--fail-on-worse"]).succeeds();
    assert_contains(&printed, &["No real difference: none of 3 measures differs by more than noise.\n"]);
    let report = weir(&["report", &a, &slower, "--json"]).json();
    assert_eq!((&report["worse"], &report["better"]), (&json!(1), &json!(0)), "{report:#}");
    assert_eq!(report["measures"][0]["verdict"], "worse", "{report:#}");
}

/// The recording of a disk limited to 50 IOPS, made by a simulation.
fn recording(scratch: &Scratch) -> String {
    let mut trace = "time_ns,disk,op,offset,length\n".to_owned();
    for number in 0..2000_u64 {
        // Above the limit for the first ten seconds, then below it.
        let at_ns = if number < 1000 { number * 10_000_000 } else { number * 40_000_000 };
        trace += &format!("{at_ns},vm1,read,{},4096\n", number * 4096);
    }
    let trace = scratch.file("trace.csv", trace);
    let (events, recording) = (scratch.path("events.csv"), scratch.path("day.recording"));
    let simulate = ["simulate", text(&trace), "--iops-total", "50", "--delay", "read=2ms"];
    weir(&[&simulate[..], &["--events", text(&events)]].concat()).succeeds();
    weir(&["trace", "convert", text(&events), text(&recording)]).succeeds();
    text(&recording).to_owned()
}

#[test]
fn recording_is_drawn_with_its_limits() {
    let scratch = Scratch::new();
    let recording = recording(&scratch);
    let page = scratch.path("day.html");
    let config = scratch.file("weir.toml", "[disk.vm1]\nimage = \"null:1G\"\niops-total = 50\n");
    let printed = weir(&["report", &recording, "-o", text(&page), "--config", text(&config)]).succeeds();
    assert_contains(&printed, &["disk vm1: 2000 requests; 99 of 100 took at most", "mostly by iops-total."]);
    assert_contains(&printed, &["Charts: vm1: requests a second; ", &format!("Written: {}\n", text(&page))]);
    let drawn = fs::read_to_string(&page).expect("it was drawn");
    assert_contains(
        &drawn,
        &[
            "<figcaption>vm1: requests a second</figcaption>",
            "</svg>iops-total 50</li>",
            "<figcaption>vm1: bytes a second</figcaption>",
            "<figcaption>vm1: latency</figcaption>",
            "<figcaption>vm1: share of the time throttled, by limit</figcaption>",
        ],
    );
    let far = scratch.file("far.toml", "[disk.vm1]\nimage = \"null:1G\"\niops-total = 20000\n");
    weir(&["report", &recording, "-o", text(&page), "--config", text(&far)]).succeeds();
    let drawn = fs::read_to_string(&page).expect("it was drawn");
    assert_contains(&drawn, &["<p class=\"note\">Above the range shown: iops-total 20000.</p>"]);
    let directory = scratch.path("charts");
    let printed = weir(&["report", &recording, "--charts", text(&directory)]).succeeds();
    assert_contains(&printed, &["--config FILE draws those of a config file"]);
    assert!(directory.join("vm1-latency.svg").exists(), "each chart is a file");
    assert_eq!(weir(&["report", &recording, "--json"]).run().code(), 2);
    let a = keep(&scratch, "a.json", &result(1.0));
    assert_contains(&weir(&["report", &recording, &a]).run().stderr(), &["a.json: is no recording"]);
    assert_contains(
        &weir(&["report", &a, "--config", text(&config)]).run().stderr(),
        &["--config: draws limits"],
    );
}

/// `weir trace info` and `weir report` print the same duration, rates and shares of a recording.
#[test]
fn report_and_trace_info_have_equal_figures() {
    let scratch = Scratch::new();
    let recording = recording(&scratch);
    let report = weir(&["report", &recording]).succeeds();
    let info = weir(&["trace", "info", &recording]).succeeds();
    let lasts = |text: &str, after: &str, until: &str| {
        let rest = text.split_once(after).unwrap_or_else(|| panic!("no {after:?}: {text}")).1;
        rest.split_once(until).expect("an end").0.trim().to_owned()
    };
    let duration = lasts(&info, "\n\n", " from the first arrival to the last completion.");
    assert_eq!(lasts(&report, "When", "\n"), duration, "{report}{info}");
    // The row of the disk; its last cell is the share of the requests that each limit throttled.
    let row = |text: &str, heading: &str| -> Vec<String> {
        let after = text.split_once(heading).unwrap_or_else(|| panic!("no {heading:?}: {text}")).1;
        let row = after.lines().find(|line| line.trim_start().starts_with("vm1")).expect("a row");
        row.split_whitespace().map(str::to_owned).collect()
    };
    let reported = row(&report, "held by (of requests)");
    let held_by = row(&info, "HELD BY (OF REQUESTS)");
    assert_eq!(reported[reported.len() - 2..], held_by[held_by.len() - 2..], "{report}{info}");
    let amounts = row(&info, "BYTES/S");
    assert_eq!(reported[2..4], amounts[amounts.len() - 2..], "{report}{info}");
}

/// A page of a recording of disks with long names fits, and its busiest disks come first.
#[test]
fn recording_page_is_readable_on_desktop_and_phone() {
    let scratch = Scratch::new();
    let mut trace = "time_ns,disk,op,offset,length,admitted_ns,completed_ns,bucket\n".to_owned();
    for number in 0..3000_u64 {
        let disk = if number % 3 == 0 { "a" } else { "b" };
        let name = format!("customer-17-database-volume-{disk}-of-a-long-name");
        let at_ns = number * 10_000_000;
        let (admitted_ns, completed_ns) = (at_ns + 5_000_000, at_ns + 7_000_000);
        let held_by = format!("iops-total@tenants-of-the-{disk}-building");
        trace +=
            &format!("{at_ns},{name},read,{},4096,{admitted_ns},{completed_ns},{held_by}\n", number * 4096);
    }
    let (trace, recording) = (scratch.file("trace.csv", trace), scratch.path("day.recording"));
    weir(&["trace", "convert", text(&trace), text(&recording)]).succeeds();
    let page = scratch.path("page.html");
    let printed = weir(&["report", text(&recording), "-o", text(&page)]).succeeds();
    let positions =
        ["-b-of-a-long-name", "-a-of-a-long-name"].map(|name| printed.find(name).expect("a disk"));
    assert!(positions[0] < positions[1], "the busiest disk comes first: {printed}");
    let directory = page.parent().expect("it lies in a directory");
    take_screenshot(directory, "wide.png", "1200,900", &[]);
    take_screenshot(directory, "phone.png", "360,800", &[]);
    take_screenshot(directory, "dark.png", "360,800", &["--blink-settings=preferredColorScheme=0"]);
    scratch.file("measuring.html", MEASURING_PAGE);
    for (frame, wide) in
        measured(directory)["frames"].as_array().expect("a list").iter().zip([1200, 360, 360])
    {
        assert_eq!(&frame["wide"], &json!(wide), "{frame:#}");
        assert!(frame["content"].as_u64() <= Some(wide), "the page scrolls horizontally: {frame:#}");
        assert_eq!((&frame["outside"], &frame["touching"]), (&json!([]), &json!([])), "{frame:#}");
        assert_eq!((&frame["stacked"], &frame["cut"]), (&json!(22), &json!([])), "{frame:#}");
    }
}

#[test]
fn single_run_has_no_confidence_interval() {
    let scratch = Scratch::new();
    let with = |value: f64| {
        let mut result = result(1.0);
        result["findings"]["measures"] = json!([
            { "name": "startup", "unit": "seconds", "better": "lower", "samples": [value] },
        ]);
        result
    };
    let (a, b) = (keep(&scratch, "a.json", &with(1.5)), keep(&scratch, "b.json", &with(1.6)));
    assert_contains(&weir(&["report", &a]).succeeds(), &["startup    1.5s  one run             1\n"]);
    assert_contains(&weir(&["report", &a, &b]).succeeds(), &["one run  1.5s (one run)  1.6s (one run)\n"]);
    let report = weir(&["report", &a, "--json"]).json();
    let expected = json!({ "median": 1.5, "low": null, "high": null });
    assert_eq!(report["measures"][0]["estimate"], expected, "{report:#}");
}

#[test]
fn invalid_result_is_rejected() {
    let scratch = Scratch::new();
    let a = keep(&scratch, "a.json", &result(1.0));
    let mut newer = result(1.0);
    newer["version"] = json!(2);
    let newer = keep(&scratch, "newer.json", &newer);
    let mut damaged = result(1.0);
    damaged["findings"]["charts"][0]["series"] = json!(5);
    let damaged = keep(&scratch, "damaged.json", &damaged);
    let other = text(&scratch.file("other.json", "{\"jobs\": []}")).to_owned();
    let missing = text(&scratch.path("missing.json")).to_owned();
    for (file, why) in [
        (newer, "is of version 2, and this weir reads up to 1 (use a newer one)"),
        (damaged, "is a damaged result file"),
        (other, "is JSON, but no result file of weir"),
        (missing, "No such file"),
    ] {
        for arguments in [vec!["report", &file], vec!["report", &a, &file]] {
            let outcome = weir(&arguments).run();
            assert_eq!(outcome.code(), 1);
            assert_contains(&outcome.stderr(), &[&format!("weir: {file}: "), why]);
        }
    }
    assert_eq!(weir(&["report", &a, "--fail-on-worse"]).run().code(), 2, "a single result is not compared");
    assert_eq!(weir(&["report"]).run().code(), 2);
}
