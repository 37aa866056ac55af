//! `weir image` with `--image-opts`, `--target-image-opts` and names with `json:`, beside the
//! installed `qemu-img`; and the command lines that libvirt, oVirt, Proxmox VE, CloudStack and
//! ZStack call `qemu-img` with.

use std::{fs, os::unix::fs::FileExt as _};

use serde_json::Value;

use crate::harness::{
    MIB, Scratch, Serve, create_encrypted, pattern, qemu_img, qemu_io, text, weir, weir_image,
};

/// A base with data, an overlay of it, and an encrypted image with the passphrase `abc` in `key`.
fn images() -> Scratch {
    let scratch = Scratch::new();
    fs::write(scratch.path("base.raw"), pattern(2 * MIB as usize)).unwrap();
    let inside = scratch.path(".");
    let overlay = ["create", "-q", "-f", "qcow2", "-b", "base.raw", "-F", "raw", "top.qcow2"];
    qemu_img(overlay).inside(&inside).succeeds();
    qemu_io(["-f", "qcow2"], ["write -P 7 64k 100k", "write -z 512k 64k"], scratch.path("top.qcow2"));
    create_encrypted(&scratch.path("luks.qcow2"));
    fs::write(scratch.path("key"), "abc").unwrap();
    fs::write(scratch.path("a,b.raw"), pattern(MIB as usize)).unwrap();
    scratch
}

/// The fields of `info` that are independent of the way the image was named.
fn comparable_fields(mut info: Value) -> Value {
    let fields = info.as_object_mut().unwrap();
    fields.retain(|key, _| {
        ["format", "virtual-size", "cluster-size", "format-specific", "backing-filename", "encrypted"]
            .contains(&key.as_str())
    });
    info
}

/// Entries of `map` without the field that qemu-img 8.2 added.
fn without_later_fields(mut printed: Value) -> Value {
    for entry in printed.as_array_mut().into_iter().flatten() {
        entry.as_object_mut().unwrap().remove("compressed");
    }
    printed
}

const FORMS: [&[&str]; 10] = [
    &["--image-opts", "driver=qcow2,file.driver=file,file.filename=top.qcow2"],
    &["--image-opts", "file.filename=top.qcow2,driver=qcow2,read-only=on,file.locking=auto,file.aio=threads"],
    &["--image-opts", "driver=raw,file.filename=a,,b.raw"],
    &["--image-opts", "driver=raw,offset=64K,size=512K,file.driver=file,file.filename=base.raw"],
    &["--image-opts", "driver=raw,file.driver=null-co,file.size=1M,file.read-zeroes=on"],
    &["--image-opts", "driver=qcow2,file.driver=raw,file.file.filename=top.qcow2,cache.direct=off"],
    &["json:{\"driver\": \"qcow2\", \"file\": {\"driver\": \"file\", \"filename\": \"top.qcow2\"}}"],
    &["json:{\"driver\": \"raw\", \"offset\": 512, \"file.filename\": \"base.raw\"}"],
    &["-f", "qcow2", "json:{\"driver\": \"qcow2\", \"file.filename\": \"top.qcow2\"}"],
    &["json:{\"driver\": \"qcow2\", \"backing\": null, \"file.filename\": \"top.qcow2\"}"],
];

#[test]
fn image_options_match_qemu_img() {
    let scratch = images();
    let inside = scratch.path(".");
    for form in FORMS {
        let both = |command: &[&'static str]| {
            let arguments = [command, form].concat();
            let theirs = qemu_img(&arguments).inside(&inside).json();
            (theirs, without_later_fields(weir_image(&arguments).inside(&inside).json()))
        };
        let (theirs, ours) = both(&["info", "--output=json"]);
        assert_eq!(comparable_fields(ours), comparable_fields(theirs), "{form:?}");
        for command in [&["map", "--output=json"][..], &["measure", "--output=json", "-O", "qcow2"]] {
            let (theirs, ours) = both(command);
            assert_eq!(ours, theirs, "{command:?} {form:?}");
        }
        let name = form.last().unwrap();
        let convert = [&["convert", "-O", "raw"], &form[..form.len() - 1], &[*name]].concat();
        qemu_img(&convert).arg("theirs.raw").inside(&inside).succeeds();
        weir_image(&convert).arg("ours.raw").inside(&inside).succeeds();
        let [ours, theirs] = ["ours.raw", "theirs.raw"].map(|name| fs::read(scratch.path(name)).unwrap());
        assert!(ours == theirs, "{form:?}");
    }
}

#[test]
fn invalid_options_are_rejected_by_key() {
    let scratch = images();
    let inside = scratch.path(".");
    for (arguments, expect) in [
        (
            &["info", "--image-opts", "driver=qcow2,bogus=1,file.filename=top.qcow2"][..],
            "bogus: is not a key",
        ),
        (
            &["info", "--image-opts", "driver=qcow2,file.bogus=1,file.filename=top.qcow2"],
            "file.bogus: is not a key of the driver file",
        ),
        (&["info", "--image-opts", "driver=vmdk,file.filename=top.qcow2"], "driver=vmdk: not supported"),
        (&["info", "--image-opts", "top.qcow2"], "file=top.qcow2: names a node"),
        (
            &["info", "--image-opts", "-f", "qcow2", "driver=qcow2,file.filename=top.qcow2"],
            "--image-opts cannot be combined with a format option",
        ),
        (
            &["info", "-f", "raw", "json:{\"driver\": \"qcow2\", \"file.filename\": \"top.qcow2\"}"],
            "the format is qcow2, and raw was given",
        ),
        (&["info", "json:{"], "is not JSON"),
        (
            &["resize", "--image-opts", "driver=raw,file.filename=base.raw,read-only=on", "+1M"],
            "read-only=on",
        ),
        (
            &["map", "--image-opts", "driver=qcow2,encrypt.key-secret=s,file.filename=luks.qcow2"],
            "encrypt.key-secret=s: no such secret",
        ),
        (&["info", "--object", "secret,id=s,file=key", "top.qcow2"], "--object s: no image uses it"),
        (&["info", "--object", "secret,id=s,data=abc", "top.qcow2"], "every user of this machine"),
        (&["convert", "--target-image-opts", "base.raw", "driver=raw,file.filename=x"], "--no-create"),
        (&["commit", "--image-opts", "driver=qcow2,backing=,file.filename=top.qcow2"], "backing: is empty"),
        (
            &["convert", "-n", "--target-image-opts", "base.raw", "file.filename=missing"],
            "add driver=raw or driver=qcow2",
        ),
        (&["convert", "base.raw", "json:{\"driver\": \"raw\", \"file.filename\": \"x\"}"], "add -n"),
    ] {
        let refused = weir_image(arguments).inside(&inside).fails();
        assert!(refused.contains(expect), "{arguments:?}: {refused}");
        // qemu-img accepts unused objects, and ignores a format beside `json:`.
        if !arguments.contains(&"--object") && !arguments.contains(&"-f")
            || arguments.contains(&"--image-opts")
        {
            qemu_img(arguments).inside(&inside).fails();
        }
    }
    weir(&["bench", "--image-opts", "driver=raw,bogus=1,file.filename=base.raw"]).inside(&inside).fails();
}

#[test]
fn commands_that_need_no_passphrase_need_no_object() {
    let scratch = images();
    let inside = scratch.path(".");
    let described = "driver=qcow2,encrypt.key-secret=s,file.filename=luks.qcow2";
    for arguments in [
        &["info", "--image-opts", described][..],
        &["check", "--image-opts", described],
        &["snapshot", "-l", "--image-opts", described],
    ] {
        weir_image(arguments).inside(&inside).succeeds();
    }
    let unreadable = ["info", "--object", "secret,id=s,file=missing", "--image-opts", described];
    assert!(weir_image(&unreadable).inside(&inside).fails().contains("missing"));
}

#[test]
fn names_of_protocols_without_storage_here_are_refused() {
    for (name, protocol) in [("ssh://host/x", "ssh"), ("fat:rw:.", "fat")] {
        let refused = weir_image(&["info", name]).fails();
        assert!(refused.contains(&format!("the protocol {protocol} is not supported")), "{refused}");
    }
}

#[test]
fn writing_commands_accept_image_options() {
    let scratch = images();
    let inside = scratch.path(".");
    let image = |arguments: &[&str]| weir_image(arguments).inside(&inside);
    let top = "driver=qcow2,file.filename=top.qcow2";
    image(&["check", "-q", "--image-opts", top]).succeeds();
    image(&["snapshot", "-c", "one", "--image-opts", top]).succeeds();
    image(&["bitmap", "--add", "--image-opts", top, "bits"]).succeeds();
    image(&["resize", "-q", "--image-opts", top, "3M"]).succeeds();
    let base = "driver=raw,file.filename=base.raw";
    let differ = ["compare", "--image-opts", "json:{}", base];
    assert!(image(&differ).fails().contains("names a node"));
    assert_eq!(image(&["compare", "-q", "--image-opts", top, base]).run().code(), 1);
    weir(&["image", "bench", "-q", "-c", "10", "--image-opts", top]).inside(&inside).succeeds();
    fs::copy(scratch.path("base.raw"), scratch.path("other.raw")).unwrap();
    image(&["snapshot", "-d", "one", "--image-opts", top]).succeeds();
    image(&["rebase", "-q", "--image-opts", "-b", "other.raw", "-F", "raw", top]).succeeds();
    image(&["commit", "-q", "--image-opts", top]).succeeds();
    qemu_img(["check", "-q", "top.qcow2"]).inside(&inside).succeeds();
    qemu_io(["-f", "raw"], ["read -P 7 64k 100k", "read -P 0 512k 64k"], scratch.path("other.raw"));
}

/// libvirt's storage driver: resizing an encrypted volume, and the second step of making one from
/// another volume.
#[test]
fn libvirt_resizes_and_copies_encrypted_volumes() {
    let scratch = images();
    let inside = scratch.path(".");
    let resize = [
        "resize",
        "--object",
        "secret,id=luks.qcow2_encrypt0,file=key",
        "--image-opts",
        "driver=qcow2,encrypt.key-secret=luks.qcow2_encrypt0,file.filename=luks.qcow2",
        "9437184",
    ];
    weir_image(&resize).inside(&inside).succeeds();
    let convert = [
        "convert",
        "--image-opts",
        "-n",
        "--target-image-opts",
        "--object",
        "secret,id=vol_encrypt0,file=key",
        "driver=raw,file.filename=base.raw",
        "driver=qcow2,file.filename=luks.qcow2,encrypt.key-secret=vol_encrypt0",
    ];
    weir_image(&convert).inside(&inside).succeeds();
    // From one encrypted volume to another, with two passphrases.
    fs::write(scratch.path("key2"), "def").unwrap();
    let create = ["create", "-q", "-f", "qcow2", "--object", "secret,id=s,file=key2", "-o"];
    qemu_img(create)
        .args(["encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10", "other.qcow2", "9M"])
        .inside(&inside)
        .succeeds();
    let convert = [
        "convert",
        "--image-opts",
        "-n",
        "--target-image-opts",
        "--object",
        "secret,id=vol_encrypt0,file=key2",
        "--object",
        "secret,id=input_encrypt0,file=key",
        "driver=qcow2,file.filename=luks.qcow2,encrypt.key-secret=input_encrypt0",
        "driver=qcow2,file.filename=other.qcow2,encrypt.key-secret=vol_encrypt0",
    ];
    weir_image(&convert).inside(&inside).succeeds();
    let compare = [
        "compare",
        "--object",
        "secret,id=s,file=key2",
        "--image-opts",
        "driver=raw,file.filename=base.raw",
        "driver=qcow2,encrypt.key-secret=s,file.filename=other.qcow2",
    ];
    // The volume is longer by zeroes.
    for printed in [qemu_img(compare), weir_image(&compare)].map(|tool| tool.inside(&inside).succeeds()) {
        assert!(printed.contains("Images are identical."), "{printed}");
    }
}

/// vdsm's `qemuimg.measure` and `qemuimg.amend`.
#[test]
fn ovirt_measures_images_by_json() {
    let scratch = images();
    let inside = scratch.path(".");
    for node in [
        r#"json:{"file": {"driver": "file", "filename": "top.qcow2"}, "driver": "qcow2", "backing": null}"#,
        r#"json:{"file": {"driver": "file", "filename": "top.qcow2"}, "driver": "qcow2"}"#,
        r#"json:{"file": {"driver": "file", "filename": "base.raw"}, "driver": "raw"}"#,
        r#"json:{"file": {"driver": "file", "filename": "base.raw"}}"#,
    ] {
        let arguments = ["measure", "--output", "json", "-O", "qcow2", node];
        let theirs = qemu_img(arguments).inside(&inside).json();
        assert_eq!(weir_image(&arguments).inside(&inside).json(), theirs, "{node}");
    }
}

/// `amend` by weir and by qemu-img leaves equal format-specific fields in two equal images.
#[test]
fn ovirt_raises_the_version_of_an_image() {
    let scratch = images();
    let inside = scratch.path(".");
    for name in ["ours.qcow2", "theirs.qcow2"] {
        let create =
            ["create", "-q", "-f", "qcow2", "-o", "compat=0.10", "-b", "base.raw", "-F", "raw", name];
        qemu_img(create).inside(&inside).succeeds();
        qemu_io(["-f", "qcow2"], ["write -P 7 64k 100k"], scratch.path(name));
        qemu_img(["snapshot", "-c", "one", name]).inside(&inside).succeeds();
    }
    let info = |name| qemu_img(["info", "--output=json", name]).inside(&inside).json();
    for options in ["compat=1.1", "lazy_refcounts=on", "compat=1.1,lazy_refcounts=off"] {
        qemu_img(["amend", "-o", options, "theirs.qcow2"]).inside(&inside).succeeds();
        assert_eq!(weir_image(&["amend", "-o", options, "ours.qcow2"]).inside(&inside).succeeds(), "");
        assert_eq!(
            comparable_fields(info("ours.qcow2")),
            comparable_fields(info("theirs.qcow2")),
            "{options}"
        );
        qemu_img(["check", "-q", "ours.qcow2"]).inside(&inside).succeeds();
        qemu_img(["compare", "-q", "ours.qcow2", "theirs.qcow2"]).inside(&inside).succeeds();
    }
    qemu_img(["snapshot", "-a", "one", "ours.qcow2"]).inside(&inside).succeeds();
    for (options, expect) in [
        ("compat=0.10", "version 3 cannot become version 2 in place"),
        ("cluster_size=4K", "cluster_size: cannot be changed in place"),
    ] {
        let refused = weir_image(&["amend", "-o", options, "ours.qcow2"]).inside(&inside).fails();
        assert!(refused.contains(expect), "{refused}");
    }
}

/// In version 2, bit 0 of a mapping is reserved; in version 3 the cluster would be zeroes.
#[test]
fn damaged_image_keeps_its_version() {
    let scratch = Scratch::new();
    let image = scratch.path("old.qcow2");
    qemu_img(["create", "-q", "-f", "qcow2", "-o", "compat=0.10"]).arg(&image).arg("1M").succeeds();
    qemu_io(["-f", "qcow2"], ["write -P 7 0 64k"], &image);
    let file = fs::File::options().read(true).write(true).open(&image).unwrap();
    let number = |at| {
        let mut bytes = [0; 8];
        file.read_exact_at(&mut bytes, at).unwrap();
        u64::from_be_bytes(bytes)
    };
    let table = number(number(40)) & 0x00ff_ffff_ffff_fe00;
    file.write_all_at(&(number(table) | 1).to_be_bytes(), table).unwrap();
    let before = fs::read(&image).unwrap();
    let refused = weir_image(&["amend", "-o", "compat=1.1", text(&image)]).fails();
    assert!(refused.contains("the image is damaged"), "{refused}");
    assert!(fs::read(&image).unwrap() == before);
}

/// `PVE::QemuServer::QemuImage`: onto a qcow2 volume whose clusters keep their offsets.
#[test]
fn proxmox_copies_onto_preallocated_volumes() {
    let scratch = images();
    let inside = scratch.path(".");
    qemu_img(["create", "-q", "-f", "qcow2", "volume.qcow2", "2M"]).inside(&inside).succeeds();
    qemu_io(["-f", "qcow2"], ["write -P 9 0 2M"], scratch.path("volume.qcow2"));
    let allocated_extents = || {
        let map = qemu_img(["map", "--output=json", "-f", "qcow2", "volume.qcow2"]).inside(&inside).json();
        map.as_array().unwrap().iter().filter(|entry| entry["offset"].is_u64()).count()
    };
    assert_eq!(allocated_extents(), 1);
    fs::write(scratch.path("empty.raw"), vec![0; 2 * MIB as usize]).unwrap();
    let convert = |target: &str| {
        let arguments = [
            "convert",
            "-p",
            "-n",
            "-r",
            "1048576K",
            "-f",
            "raw",
            "--target-image-opts",
            "empty.raw",
            target,
        ];
        weir_image(&arguments).inside(&inside).succeeds();
        qemu_img(["compare", "-q", "empty.raw", "volume.qcow2"]).inside(&inside).succeeds();
    };
    convert("discard-no-unref=true,driver=qcow2,file.driver=file,file.filename=volume.qcow2");
    assert_eq!(allocated_extents(), 1, "zeroed clusters are still allocated");
    convert("driver=qcow2,file.driver=file,file.filename=volume.qcow2");
    assert_eq!(allocated_extents(), 0);
}

/// The calls of ZStack and CloudStack; the source is on an NBD server.
#[test]
fn images_at_nbd_servers_are_described_as_nodes() {
    let scratch = images();
    let inside = scratch.path(".");
    let image = scratch.path("top.qcow2");
    let server = Serve::new(&scratch).arg(&image).args(["--format", "raw"]).start();
    let socket = server.uri("top");
    let (_, path) = socket.split_once("socket=").unwrap();
    let node = format!(
        "driver=qcow2,backing=,file.driver=nbd,file.server.type=unix,file.server.path={path},file.export=top"
    );
    let info = ["info", "--output=json", "--image-opts", &node];
    let theirs = qemu_img(info).json();
    assert_eq!(comparable_fields(weir_image(&info).json()), comparable_fields(theirs));
    let copy = scratch.path("copy.raw");
    weir_image(&["convert", "--image-opts", "-O", "raw", &node, text(&copy)]).succeeds();
    qemu_io(["-f", "raw"], ["read -P 7 64k 100k", "read -P 0 512k 64k"], &copy);
    let cloudstack = ["info", "-U", "--image-opts", "driver=qcow2,file.filename=top.qcow2"];
    weir_image(&cloudstack).inside(&inside).succeeds();
}

#[test]
fn image_is_created_on_an_nbd_export_of_fixed_size() {
    let scratch = Scratch::new();
    fs::write(scratch.path("small.raw"), pattern(64 << 10)).unwrap();
    let small = scratch.path("small.raw");
    let server = Serve::new(&scratch).args(["memory:4M", "--format", "raw"]).start();
    let uri = server.uri("memory");
    for tool in
        [qemu_img(["create", "-f", "raw", &uri, "4M"]), weir_image(&["create", "-f", "raw", &uri, "4M"])]
    {
        assert!(tool.succeeds().contains("fmt=raw size=4194304"));
    }
    qemu_img(["create", "-q", "-f", "raw", &uri, "5M"]).fails();
    let refused = weir_image(&["create", "-f", "raw", &uri, "5M"]).fails();
    assert!(refused.contains("has 4194304 bytes"), "{refused}");
    weir_image(&["create", "-q", "-f", "qcow2", &uri, "1G"]).succeeds();
    qemu_img(["check", "-q", "-f", "qcow2", &uri]).succeeds();
    let info = qemu_img(["info", "--output=json", "-f", "qcow2", &uri]).json();
    assert_eq!(info["virtual-size"], 1 << 30);
    qemu_io(["-f", "qcow2"], ["write -P 5 0 1M", "read -P 5 0 1M"], &uri);
    server.stop();
    // A disk that is too small is not changed.
    let server = Serve::new(&scratch).arg(&small).args(["--format", "raw"]).start();
    let refused = weir_image(&["create", "-q", "-f", "qcow2", &server.uri("small"), "1G"]).fails();
    assert!(refused.contains("needs at least 262144 bytes"), "{refused}");
    server.stop();
    assert!(fs::read(&small).unwrap() == pattern(64 << 10));
}

#[test]
fn range_beyond_the_end_is_rejected_in_terms_of_the_options() {
    let scratch = Scratch::new();
    let image = scratch.sparse("part.raw", MIB);
    let options = format!("driver=raw,offset=1M,file.filename={}", text(&image));
    let refused = weir_image(&["info", "--image-opts", &options]).fails();
    assert!(refused.contains("the part given by offset and size"), "{refused}");
    assert!(!refused.contains("--options"), "{refused}");
}
