//! An image on a file that the same daemon serves over FUSE is rejected, under any name.

use std::{
    fs::{self, File, OpenOptions},
    os::{fd::AsRawFd as _, unix::fs::symlink},
    path::{Path, PathBuf},
};

use serde_json::{Value, json};

use crate::{
    fuse::{can_mount, mount_point, wait_until_unmounted},
    harness::{
        LoopDevice, MIB, Qmp, Scratch, Serve, TestClient, assert_contains, need_root, pattern, qemu_img,
        text, weir,
    },
};

/// Adds disk `b` with this image.
fn add(qmp: &mut Qmp, format: &str, image: &Path) -> Value {
    let keys = json!({ "image": text(image), "format": format });
    qmp.command_reply("x-weir-add-disk", json!({ "name": "b", "keys": keys, "exports": [] }))
}

/// A second name of the mount: a bind mount.
struct BindMount(PathBuf);

impl BindMount {
    fn new(scratch: &Scratch, file: &Path) -> Self {
        let name = mount_point(scratch, "bound");
        TestClient::new("mount").args(["--bind", text(file), text(&name)]).succeeds();
        Self(name)
    }
}

impl Drop for BindMount {
    fn drop(&mut self) {
        TestClient::new("umount").args(["-l", text(&self.0)]).run();
    }
}

#[test]
fn image_on_own_export_is_rejected_under_any_name() {
    if !can_mount() {
        return;
    }
    need_root("mounts and loop devices");
    let scratch = Scratch::new();
    let (image, file) = (scratch.filled("a.raw", MIB), scratch.filled("shown", 2 * MIB));
    let control = scratch.socket("qmp");
    let daemon = Serve::new(&scratch)
        .arg(&image)
        .args(["--name", "a", "--format", "raw", "--fuse", text(&file)])
        .args(["--qmp", &format!("unix:{}", text(&control))])
        .start();
    let open = OpenOptions::new().read(true).write(true).open(&file).expect("it is served");
    let mut qmp = Qmp::negotiated(&control);

    let link = scratch.path("link");
    symlink(&file, &link).expect("it is new");
    let bound = BindMount::new(&scratch, &file);
    let elsewhere = PathBuf::from(format!("/proc/{}/fd/{}", std::process::id(), open.as_raw_fd()));
    let overlay = scratch.path("overlay.qcow2");
    qemu_img(["create", "-q", "-f", "qcow2", "-F", "raw", "-b", text(&link)]).arg(&overlay).succeeds();
    let split = scratch.path("split.qcow2");
    let data = scratch.path("data.raw");
    let options = format!("data_file={}", text(&data));
    qemu_img(["create", "-q", "-f", "qcow2", "-o", &options]).arg(&split).arg("1M").succeeds();
    fs::remove_file(&data).expect("it was made");
    symlink(&bound.0, &data).expect("the path is unused");
    let device = LoopDevice::attach(&file, 512);
    qmp.command_with_descriptor(&open, "add-fd", &json!({ "fdset-id": 7 }));
    let set = PathBuf::from("/dev/fdset/7");

    for (format, path) in [
        ("raw", &file),
        ("raw", &link),
        ("raw", &bound.0),
        ("raw", &elsewhere),
        ("raw", &set),
        ("qcow2", &overlay),
        ("qcow2", &split),
    ] {
        let error = add(&mut qmp, format, path).to_string();
        assert_contains(&error, &["itself serves", "requests would deadlock"]);
    }
    assert_contains(&add(&mut qmp, "raw", device.path()).to_string(), &["itself serves"]);
    drop((device, bound));

    // The daemon and its disk are unaffected, and other processes may open the file.
    assert!(fs::read(&file).expect("it is served") == pattern(MIB as usize));
    weir(&["image", "info", "-f", "raw", text(&file)]).succeeds();
    drop(open);
    qmp.command("remove-fd", json!({ "fdset-id": 7 }));

    // Without the export, the name refers to the underlying file.
    let exports = qmp.command("query-block-exports", json!({}));
    let exports = exports.as_array().expect("a list");
    let export = exports.iter().find(|export| export["type"] == "fuse").expect("the entry exists");
    qmp.command("block-export-del", json!({ "id": export["id"], "mode": "hard" }));
    wait_until_unmounted(&file);
    assert_eq!(add(&mut qmp, "raw", &file).get("error"), None);
    assert_eq!(File::open(&file).and_then(|file| file.metadata()).expect("the file exists").len(), 2 * MIB);
    daemon.stop();
}

#[test]
fn upgrade_rejects_an_image_on_its_own_export() {
    if !can_mount() {
        return;
    }
    let scratch = Scratch::new();
    let (image, file) = (scratch.filled("a.raw", MIB), mount_point(&scratch, "shown"));
    let first = format!(
        "[disk.a]\nimage = {:?}\nformat = \"raw\"\nexport = [{{ type = \"fuse\", file = {:?} }}]\n",
        text(&image),
        text(&file)
    );
    let second = format!(
        "{first}\n\
         [disk.b]\n\
         image = {:?}\n\
         format = \"raw\"\n\
         export = [{{ type = \"nbd\", listen = \"unix:{}\" }}]\n",
        text(&file),
        text(&scratch.socket("b"))
    );
    let control = format!("unix:{}", text(&scratch.socket("the-control")));
    let serve = |config: &str| {
        let config = scratch.file("weir.toml", config);
        Serve::new(&scratch).at_given_addresses().args(["--config", text(&config)]).env("WEIR_QMP", &control)
    };
    let old = serve(&first).start();
    assert_contains(&serve(&second).arg("--takeover").fails(), &[text(&file), "itself serves"]);
    assert!(fs::read(&file).expect("it is served") == pattern(MIB as usize));
    old.stop();
}
