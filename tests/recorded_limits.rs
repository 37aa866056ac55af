//! Limits in recordings: `weir report` draws the limits in force, and their changes.

use std::{collections::BTreeSet, fs};

use crate::{
    harness::{
        Scratch, Serve,
        operator::{run_ok, socket},
        text, weir,
    },
    record::{RunningRecorder, fio},
};

/// A disk with its own limit and the limit of a group that it joins and leaves.
#[test]
fn recording_contains_the_limits_in_force() {
    let scratch = Scratch::new();
    let kept = scratch.path("kept");
    fs::create_dir(&kept).expect("the directory can be created");
    let config = format!(
        "[daemon]\nqmp = \"{}\"\nrecord = {{ directory = \"{}\" }}\n\
         [group.gold]\niops-total = 700\n\
         [disk.a]\nimage = \"memory:16M\"\niops-total = 400\n",
        socket(&scratch),
        text(&kept)
    );
    let file = scratch.file("weir.toml", config);
    let daemon = Serve::new(&scratch).arg("--config").arg(&file).start();
    let recording = scratch.path("a.recording");
    let recorder = RunningRecorder::begin(&scratch, &recording, &["a"]);
    assert_eq!(fio(&daemon, "a", "randread", 100), 100);
    run_ok(&scratch, &["throttle", "a", "--iops-total", "500"]);
    assert_eq!(fio(&daemon, "a", "randread", 100), 100);
    run_ok(&scratch, &["throttle", "a", "--group", "gold"]);
    run_ok(&scratch, &["throttle", "gold", "--iops-total", "800"]);
    assert_eq!(fio(&daemon, "a", "randread", 100), 100);
    run_ok(&scratch, &["throttle", "a", "--no-group"]);
    assert_eq!(fio(&daemon, "a", "randread", 100), 100);
    recorder.end();
    daemon.stop();

    let page = scratch.path("a.html");
    let named = |arguments: &[&str]| {
        weir(&[&["report", "-o", text(&page)], arguments].concat()).succeeds();
        limits_in(&fs::read_to_string(&page).expect("it was drawn"))
    };
    let [a, gold] = [["400", "500"], ["700", "800"]];
    let all = (a.map(str::to_owned).into(), gold.map(str::to_owned).into());
    assert_eq!(named(&[text(&recording)]), all);
    // A converted copy contains them, and so does the daemon's own recording.
    let copy = scratch.path("copy.recording");
    weir(&["trace", "convert", text(&recording), text(&copy)]).succeeds();
    assert_eq!(named(&[text(&copy)]), all);
    let hour =
        fs::read_dir(&kept).expect("the directory exists").next().expect("a recording").expect("it is there");
    assert_eq!(named(&[text(&hour.path())]), all);
    // A config file replaces them.
    let other = scratch.file("other.toml", "[disk.a]\nimage = \"null:1G\"\niops-total = 450\n");
    let replaced = named(&[text(&recording), "--config", text(&other)]);
    assert_eq!(replaced, (BTreeSet::from(["450".to_owned()]), BTreeSet::new()));
}

/// The values of `iops-total` on a page, of the disk and of its group, in the legend or in the note
/// on limits above the shown range; the measured rates decide which of the two.
fn limits_in(page: &str) -> (BTreeSet<String>, BTreeSet<String>) {
    let items = page.split("</svg>").skip(1).filter_map(|rest| rest.split("</li>").next());
    let notes = page.split("Above the range shown: ").skip(1).filter_map(|rest| rest.split(".</p>").next());
    let named = items.chain(notes.flat_map(|note| note.split(", ")));
    let (mut of_disk, mut of_group) = (BTreeSet::new(), BTreeSet::new());
    for values in named.filter_map(|item| item.strip_prefix("iops-total ")) {
        let (values, into) = match values.strip_suffix(" of gold") {
            Some(values) => (values, &mut of_group),
            None => (values, &mut of_disk),
        };
        into.extend(values.split(" → ").map(str::to_owned));
    }
    (of_disk, of_group)
}
