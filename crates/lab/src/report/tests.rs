//! Pages of valid results, and of results with arbitrary content.

use proptest::prelude::*;

use super::{NamedResult, comparison, page};
use crate::result::{
    Better, Chart, ChartAxis, ChartSeries, Findings, HeatMap, Lines, MachineInfo, Measure, MeasureUnit,
    MeasuredDevice, ResultFile, ResultHeader, ResultTable,
};

fn header(command: &[&str]) -> ResultHeader {
    ResultHeader {
        command: command.iter().map(|word| (*word).to_owned()).collect(),
        began: 1_795_241_721,
        seconds: 592.0,
        weir: "0.1.0".to_owned(),
        machine: MachineInfo {
            kernel: "Linux 6.18.0 #1 SMP".to_owned(),
            processor: "A <fast> one".to_owned(),
            processors: 2,
            memory_bytes: 24 << 30,
        },
        device: Some(MeasuredDevice {
            node: "/dev/vda".to_owned(),
            key: "serial x".to_owned(),
            file_system: Some("ext4".to_owned()),
        }),
    }
}

fn measure(name: &str, unit: MeasureUnit, better: Better, samples: &[f64]) -> Measure {
    Measure::new(name, unit, better, samples.to_vec())
}

fn small() -> ResultFile {
    let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
    let axis = ChartAxis::new;
    let findings = Findings {
        summary: words(&["Use cache=none & 64K clusters.", "weir serve a.qcow2 \\\n    --cache none"]),
        measures: vec![measure("random read", MeasureUnit::Iops, Better::Higher, &[9.9e3, 10e3, 10.1e3])],
        tables: vec![ResultTable {
            title: "What each costs".to_owned(),
            columns: words(&["cache", "IOPS"]),
            rows: vec![words(&["none", "10.0K"]), words(&["<b>writeback</b>", "9"])],
            note: Some("Ratios to the raw device.".to_owned()),
        }],
        charts: vec![
            Chart::Lines(Lines {
                title: "IOPS over time".to_owned(),
                x: axis("time", MeasureUnit::Seconds),
                y: axis("IOPS", MeasureUnit::Iops),
                steps: false,
                limits: Vec::new(),
                note: None,
                series: vec![ChartSeries { name: "none".to_owned(), points: vec![(0.0, 1.0), (1.0, 2.0)] }],
            }),
            Chart::HeatMap(HeatMap {
                title: "The matrix".to_owned(),
                unit: MeasureUnit::Iops,
                better: Better::Higher,
                columns: words(&["64K"]),
                rows: words(&["none"]),
                values: vec![vec![Some(10e3)]],
                noise: Vec::new(),
            }),
        ],
        ..Findings::default()
    };
    ResultFile {
        partial: Some("interrupted".to_owned()),
        ..ResultFile::new(header(&["/usr/bin/weir", "tune", "/srv/a b", "--budget", "10m"]), findings)
    }
}

/// A page's texts in order, without the style sheet and the charts' own texts.
fn texts(page: &str) -> String {
    let body = page.split_once("<body>").unwrap().1;
    let mut texts = String::new();
    for (index, part) in body.split("<svg").enumerate() {
        let part = if index == 0 { part } else { part.split_once("</svg").unwrap().1 };
        for piece in part.split('<').filter_map(|piece| piece.split_once('>')) {
            let text = piece.1.trim();
            if !text.is_empty() {
                texts += text;
                texts.push('\n');
            }
        }
    }
    texts
}

#[test]
fn page_shows_the_contents_of_the_file() {
    let expect = "\
weir tune on /dev/vda
weir tune &#39;/srv/a b&#39; --budget 10m
This result is not complete: interrupted. The values shown were measured nevertheless.
Use cache=none &amp; 64K clusters.
weir serve a.qcow2 \\
    --cache none
IOPS over time
none
The matrix
The stronger a cell, the better; higher is better.
What each costs
cache
IOPS
none
10.0K
&lt;b&gt;writeback&lt;/b&gt;
9
Ratios to the raw device.
Numbers that other runs can be compared with
1 measured
measure
median
95 of 100 in
samples
random read
10.00K
9.90K … 10.10K
3
Where and how
When
2026-11-21 06:15:21 UTC, for 9m 52s
Device
/dev/vda (serial x), ext4
Machine
2 × A &lt;fast&gt; one, 24G of memory
Kernel
Linux 6.18.0 #1 SMP
weir
0.1.0
";
    let page = page(&small()).unwrap();
    let texts = texts(&page);
    assert!(texts.starts_with(expect), "{texts}");
    assert_eq!(page.matches("<th scope=\"col\" class=\"number\">").count(), 4, "columns of numbers");
    assert_eq!(page.matches("role=\"img\" aria-label=").count(), 2, "charts that say what they show");
}

#[test]
fn page_loads_no_other_resources() {
    let page = page(&small()).unwrap();
    for outside in ["<script", "<link", "<img", "src=", "url(", "@import", "http://", "https://"] {
        let page = page.replace("http://www.w3.org/2000/svg", "");
        assert!(!page.contains(outside), "{outside}");
    }
}

#[test]
fn comparison_page_reports_the_better_result() {
    let (a, mut b) = (small(), small());
    let samples =
        |middle: f64| (-5..=5).map(|step| middle * (1.0 + f64::from(step) / 1e3)).collect::<Vec<_>>();
    let list = |one: f64, two: f64| {
        vec![
            measure("reads", MeasureUnit::Iops, Better::Higher, &samples(one)),
            measure("p99", MeasureUnit::Nanoseconds, Better::Lower, &samples(two)),
            measure("the same", MeasureUnit::Share, Better::Lower, &samples(0.5)),
        ]
    };
    let mut a = ResultFile { partial: None, ..a };
    (a.findings.measures, b.findings.measures) = (list(1e4, 1e6), list(2e4, 2e6));
    b.findings.measures.push(measure("<new>", MeasureUnit::Count, Better::Higher, &[1.0]));
    b.header.machine.kernel = "Linux 7".to_owned();
    let a = NamedResult { name: "a.json", result: &a };
    let b = NamedResult { name: "b.json", result: &b };
    let texts = texts(&comparison(a, b).unwrap());
    for part in [
        "2 of 3 measures differ by more than noise: B is better in 1 and worse in 1.",
        "B (b.json) is not complete: interrupted.",
        "Kernel\nLinux 6.18.0 #1 SMP\nLinux 7\n",
        "reads\nbetter\n+100.0%\n+99.4% … +100.6%\n10.00K [9.97K, 10.03K]\n20.00K [19.94K, 20.06K]\n",
        "p99\nworse\n+100.0%\n",
        "the same\nno difference\n0.0%\n",
        "Only in B: &lt;new&gt;.\n",
    ] {
        assert!(texts.contains(part), "{part:?} is missing in:\n{texts}");
    }
    assert!(!texts.contains("Device\n/dev/vda (serial x), ext4\n/dev/vda"), "the device is the same");
}

fn number() -> impl Strategy<Value = f64> {
    prop_oneof![
        any::<f64>().prop_filter("finite, as JSON's are", |value| value.is_finite()),
        prop::sample::select(vec![0.0, -0.0, 1.0, -1.0, f64::MAX, f64::MIN, f64::MIN_POSITIVE, 1e15]),
        0.0..1e6,
    ]
}

fn text() -> impl Strategy<Value = String> {
    prop_oneof![any::<String>(), Just("</text></svg><script>x()</script>\"'&".to_owned()), "[a-z ]{0,90}"]
}

fn unit() -> impl Strategy<Value = MeasureUnit> {
    use MeasureUnit::{Bytes, BytesPerSecond, Count, Iops, Nanoseconds, Ratio, Seconds, Share};
    prop::sample::select(vec![Iops, Bytes, BytesPerSecond, Nanoseconds, Seconds, Share, Ratio, Count])
}

fn axis() -> impl Strategy<Value = ChartAxis> {
    (text(), unit(), any::<bool>()).prop_map(|(label, unit, logarithmic)| ChartAxis {
        label,
        unit,
        logarithmic,
    })
}

fn better() -> impl Strategy<Value = Better> {
    prop::sample::select(vec![Better::Higher, Better::Lower])
}

fn chart() -> impl Strategy<Value = Chart> {
    let points = prop::collection::vec((number(), number()), 0..6);
    let series = (text(), points).prop_map(|(name, points)| ChartSeries { name, points });
    let lines =
        (text(), axis(), axis(), prop::collection::vec(series, 0..11)).prop_map(|(title, x, y, series)| {
            Chart::Lines(Lines { title, x, y, steps: false, series, limits: Vec::new(), note: None })
        });
    let names = || prop::collection::vec(text(), 0..4);
    let values = prop::collection::vec(prop::collection::vec(prop::option::of(number()), 0..4), 0..4);
    let map = (text(), unit(), better(), names(), names(), values).prop_map(
        |(title, unit, better, columns, rows, values)| {
            Chart::HeatMap(HeatMap { title, unit, better, columns, rows, values, noise: Vec::new() })
        },
    );
    prop_oneof![lines, map]
}

fn findings() -> impl Strategy<Value = Findings> {
    let list = || prop::collection::vec(text(), 0..4);
    let table = (text(), list(), prop::collection::vec(list(), 0..4), prop::option::of(text()))
        .prop_map(|(title, columns, rows, note)| ResultTable { title, columns, rows, note });
    let measure = (text(), unit(), better(), prop::collection::vec(number(), 1..4))
        .prop_map(|(name, unit, better, samples)| Measure::new(name, unit, better, samples));
    (
        list(),
        prop::collection::vec(measure, 0..4),
        prop::collection::vec(table, 0..3),
        prop::collection::vec(chart(), 0..3),
    )
        .prop_map(|(summary, measures, tables, charts)| Findings {
            opening: tables.clone(),
            summary,
            measures,
            tables,
            charts,
        })
}

/// Names of tags; closing tags begin with a slash.
fn tags(page: &str) -> Vec<&str> {
    let body = page.split_once("<body>").unwrap().1;
    body.split('<').skip(1).map(|part| part.split([' ', '>', '\n']).next().unwrap()).collect()
}

/// Fails unless each tag is known and properly closed.
fn assert_sound(page: &str) {
    let mut open = vec!["html", "body"];
    for tag in tags(page) {
        if let Some(name) = tag.strip_prefix('/') {
            assert_eq!(open.pop(), Some(name), "ends: {page}");
        } else if !["line", "rect", "circle", "polyline", "polygon"].contains(&tag) {
            let known = "main h1 h2 h3 p code pre section div table thead tbody tr th td figure \
                         figcaption ul li svg title text dl dt dd details summary footer";
            assert!(known.split(' ').any(|known| known == tag), "{tag:?} in {page}");
            open.push(tag);
        }
    }
    assert!(open.is_empty(), "{open:?} in {page}");
    assert!(!page.contains("NaN") && !page.contains("inf,"), "{page}");
}

#[test]
fn small_page_is_well_formed() {
    assert_sound(&page(&small()).unwrap());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn any_result_has_a_page(findings in findings(), words in prop::collection::vec(text(), 0..3), name in text()) {
        let mut result = small();
        result.header.command = words;
        result.header.machine.processor = name.clone();
        result.partial = Some(name);
        result.header.began = u64::MAX;
        result.header.seconds = 1e300;
        result.findings = findings;
        assert_sound(&page(&result).unwrap());
        let mut other = result.clone();
        other.findings.measures.iter_mut().for_each(|measure| measure.samples.push(1.0));
        let a = NamedResult { name: "<a>", result: &result };
        let b = NamedResult { name: "b", result: &other };
        assert_sound(&comparison(a, b).unwrap());
        let _ = super::text::result(&result, &[], true);
    }
}
