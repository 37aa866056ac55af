//! Images on the exports of other NBD servers: relative names in images without a directory,
//! headers of earlier images, and the names of exports.

use std::fs;

use super::{BackgroundNbdServer, uri};
use crate::harness::{MIB, Scratch, assert_contains, qemu_img, text, weir, weir_image};

#[test]
fn relative_name_in_an_image_on_an_export_is_rejected() {
    let scratch = Scratch::new();
    let inside = scratch.path(".");
    let (disk, socket) = (scratch.sparse("disk.raw", 8 * MIB), scratch.path("nbd.sock"));
    let (base, source) = (scratch.sparse("base.raw", MIB), scratch.sparse("source.raw", MIB));
    let _server = BackgroundNbdServer::qemu_nbd(&scratch, &socket, &["-f", "raw", "-e", "4", text(&disk)]);
    let image = &uri(&socket, "");
    let refuses = |arguments: &[&str]| {
        let refused = weir(arguments).inside(&inside).fails();
        assert_contains(&refused, &["base.raw", "is relative", "absolute path"]);
    };
    let create = ["image", "create", "-q", "-f", "qcow2"];
    refuses(&[&create[..], &["-b", "base.raw", "-F", "raw", image]].concat());
    refuses(&[&create[..], &["-u", "-b", "base.raw", "-F", "raw", image, "1M"]].concat());
    refuses(&[&create[..], &["-o", "data_file=base.raw", image, "1M"]].concat());
    assert!(fs::read(&disk).unwrap().iter().all(|&byte| byte == 0), "a refused command wrote");

    weir_image(&["create", "-q", "-f", "qcow2", image, "1M"]).succeeds();
    let rebase = ["image", "rebase", "-q", "-f", "qcow2", "-b", "base.raw", "-F", "raw"];
    refuses(&[&rebase[..], &[image]].concat());
    refuses(&[&rebase[..], &["-u", image]].concat());
    let convert = ["image", "convert", "-n", "-O", "qcow2", "-F", "raw", "-B", "base.raw"];
    refuses(&[&convert[..], &[text(&source), image]].concat());

    // Another program may have written such a name.
    let foreign = ["rebase", "-u", "-f", "qcow2", "-b", "base.raw", "-F", "raw", image];
    qemu_img(foreign).inside(&inside).succeeds();
    for command in ["map", "compare", "convert"] {
        let target: &[&str] = match command {
            "map" => &[],
            "compare" => &[text(&source)],
            _ => &["copy.raw"],
        };
        refuses(&[&["image", command, "-f", "qcow2", image], target].concat());
    }
    refuses(&["serve", "--format", "qcow2", image]);

    weir_image(&["rebase", "-u", "-f", "qcow2", "-b", text(&base), "-F", "raw", image]).succeeds();
    weir_image(&["map", "-f", "qcow2", image]).succeeds();
}

#[test]
fn new_raw_image_overwrites_the_header_of_an_earlier_one() {
    let scratch = Scratch::new();
    let (disk, socket) = (scratch.path("disk.qcow2"), scratch.path("nbd.sock"));
    qemu_img(["create", "-q", "-f", "qcow2", text(&disk), "1M"]).succeeds();
    let earlier = fs::read(&disk).unwrap();
    let _server = BackgroundNbdServer::qemu_nbd(&scratch, &socket, &["-f", "raw", "-e", "4", text(&disk)]);
    let image = &uri(&socket, "");
    let refused = weir_image(&["create", "-f", "raw", image, "1G"]).fails();
    assert_contains(&refused, &["bytes, but the image needs 1073741824"]);
    assert!(fs::read(&disk).unwrap() == earlier, "a refused command wrote");

    weir_image(&["create", "-q", "-f", "raw", image, "4K"]).succeeds();
    let now = fs::read(&disk).unwrap();
    assert!(now[..512] == [0; 512] && now[512..] == earlier[512..], "other bytes than the first sector");
    let info = weir_image(&["info", "--output=json", image]).json();
    assert_eq!(info["format"], "raw");
}

#[test]
fn read_only_export_is_rejected_for_writing() {
    let scratch = Scratch::new();
    let (disk, socket) = (scratch.sparse("disk.raw", MIB), scratch.path("nbd.sock"));
    let _server = BackgroundNbdServer::qemu_nbd(&scratch, &socket, &["-f", "raw", "-r", text(&disk)]);
    let refused = weir_image(&["create", "-f", "raw", &uri(&socket, ""), "1M"]).fails();
    assert_contains(
        &refused,
        &["the export is read-only at its server", "make the export writable at its server"],
    );
    assert!(!refused.contains("--read-only"), "{refused}");
}

#[test]
fn old_uri_forms_match_qemu_img() {
    let scratch = Scratch::new();
    let (disk, socket) = (scratch.sparse("disk.raw", MIB), scratch.path("nbd.sock"));
    let _server = BackgroundNbdServer::qemu_nbd(
        &scratch,
        &socket,
        &["-f", "raw", "-x", "disk a", "-e", "4", text(&disk)],
    );
    let name = format!("nbd:unix:{}:exportname=disk a", text(&socket));
    for info in [qemu_img(["info", "--output=json", &name]), weir_image(&["info", "--output=json", &name])] {
        assert_eq!(info.json()["virtual-size"], MIB);
    }
}
