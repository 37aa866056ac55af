//! `weir disk` and `weir group`: one more or one less of what runs, and of what the config file
//! has.

use std::fs;

use crate::harness::{
    Client, MIB, Scratch, Wire, assert_says,
    operator::{fails, find, misuses, prints, prints_json, serve, socket, status},
    text,
};

const CONFIG: &str = "
# pays
[group.gold]
iops-total = 1000

[disk.a] # the first
image = \"memory:1M\"

# the end
";

fn config(scratch: &Scratch) -> String {
    let nbd = text(&scratch.socket("nbd")).to_owned();
    let (qmp, root) = (socket(scratch), scratch.path(""));
    // Of images that come later.
    let root = text(&root);
    format!("[daemon]\nqmp = \"{qmp}\"\nnbd = \"unix:{nbd}\"\nimage-root = \"{root}\"\n{CONFIG}")
}

#[test]
fn what_is_added_is_served_and_saved_and_goes_again() {
    let scratch = Scratch::new();
    let before = config(&scratch);
    let file = scratch.file("weir.toml", &before);
    let weir = serve(&scratch, &file);
    let image = scratch.sparse("b.raw", 2 * MIB);
    let said =
        prints(&scratch, &["group", "add", "silver", "--group", "gold", "--bps-total", "5M", "--save"]);
    assert_eq!(said, format!("group silver: added\nsilver: saved in {}\n", text(&file)));
    let options =
        ["-f", "raw", "--cache", "none", "--group", "silver", "--iops-total", "70", "--read-only", "--save"];
    prints(&scratch, &[&["disk", "add", "b", text(&image)][..], &options].concat());
    let uri = format!("nbd+unix:///b?socket={}", text(&scratch.socket("nbd")));
    assert_eq!(Client::new("nbdinfo").args(["--size", &uri]).succeeds(), format!("{}\n", 2 * MIB));
    let now = status(&scratch, "0");
    let disk = find(&now, "disks", "b");
    assert_eq!(
        (&disk["group"], &disk["limits"]["iops-total"], &disk["cache"]),
        (&"silver".into(), &70.into(), &"none".into())
    );
    assert_eq!(
        (&disk["read-only"], &find(&now, "groups", "silver")["group"]),
        (&true.into(), &"gold".into())
    );
    let saved = fs::read_to_string(&file).unwrap();
    let group = "[group.silver]\nbps-total = \"5M\"\ngroup = \"gold\"\n";
    let disk = format!(
        "[disk.b]\nimage = \"{}\"\nformat = \"raw\"\ncache = \"none\"\nread-only = true\ngroup = \"silver\"\niops-total = 70\n",
        text(&image)
    );
    let expect = before
        .replace("\n[disk.a]", &format!("\n{group}\n[disk.a]"))
        .replace("\n# the end", &format!("\n{disk}\n# the end"));
    assert_eq!(saved, expect);
    // The file and what runs are one.
    assert_eq!(prints(&scratch, &["reload"]), "nothing has changed\n");
    let (client, _) = Wire::go(&scratch.socket("nbd"), "b");
    let busy = fails(&scratch, &["disk", "remove", "b", "--save"]);
    assert_says(&busy, &["export b of disk b: clients are connected: 1"]);
    assert_eq!(fs::read_to_string(&file).unwrap(), saved);
    drop(client);
    assert_says(&fails(&scratch, &["group", "remove", "silver"]), &["'silver' is in use"]);
    let removed = prints_json(&scratch, &["disk", "remove", "b", "--save", "--json"]);
    assert_eq!(
        removed,
        serde_json::json!({ "kind": "disk", "name": "b", "change": "removed", "saved": text(&file) })
    );
    prints(&scratch, &["group", "remove", "silver", "--save"]);
    assert_eq!(fs::read_to_string(&file).unwrap(), before);
    assert_eq!(prints(&scratch, &["reload"]), "nothing has changed\n");
    weir.stop();
}

#[test]
fn what_fails_leaves_nothing() {
    let scratch = Scratch::new();
    let before = config(&scratch);
    let file = scratch.file("weir.toml", &before);
    let weir = serve(&scratch, &file);
    let image = scratch.sparse("b.raw", MIB);
    let image = text(&image);
    for (arguments, expect) in [
        (&["disk", "add", "a", image, "-f", "raw"][..], "Duplicate nodes with node-name='a'"),
        (&["disk", "add", "b", "none.raw", "-f", "raw"], "none.raw"),
        // The second step, and the third.
        (&["disk", "add", "b", image, "-f", "raw", "--group", "nobody"], "there is no group \"nobody\""),
        (
            &["disk", "add", "b", image, "-f", "raw", "--nbd", "unix:/nobody"],
            "does not accept value 'unix:/nobody'",
        ),
        (
            &["disk", "add", "b", image, "--snapshot", "s"],
            "--snapshot: is not to be had by a daemon's control socket",
        ),
        (&["disk", "add", "a", image, "-f", "raw", "--save"], "has a [disk.a] already"),
        (&["disk", "remove", "b"], "b: no disk has this name"),
        (&["group", "add", "gold"], "gold"),
        (&["group", "add", "new", "--iops-total-max", "5"], "iops-total-max (5) is set without iops-total"),
        (&["group", "remove", "a"], "a: no group has this name"),
    ] {
        assert_says(&fails(&scratch, arguments), &[expect]);
        let now = status(&scratch, "0");
        let names = |list: &str| now[list].as_array().unwrap().len();
        assert_eq!((names("disks"), names("groups"), names("exports")), (1, 1, 1), "{arguments:?}");
        assert_eq!(fs::read_to_string(&file).unwrap(), before);
    }
    misuses(&scratch, &["group", "add", "g", "--weight", "0"]);
    weir.stop();
}
