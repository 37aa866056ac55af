//! Chains as qemu-img makes them, and as nobody should.

use std::{fs, os::unix::fs::symlink, path::Path, process::Command};

use super::{super::Secret, BackingChoice, ImageOptions, open};
use crate::{
    image::Image,
    reactor::{self, Polling},
    storage::{Format, OpenOptions, Root},
};

/// A directory with what `qemu-img` and `qemu-io` were told to make there.
struct Images(tempfile::TempDir);

impl Images {
    fn new() -> Self {
        Self(tempfile::tempdir().expect("a directory"))
    }

    fn path(&self, name: &str) -> String {
        self.0.path().join(name).to_str().expect("text").to_owned()
    }

    fn run(&self, program: &str, arguments: &[&str]) {
        let done = Command::new(program).current_dir(&self.0).args(arguments).output();
        let done = done.expect("package qemu-utils");
        assert!(done.status.success(), "{program} {arguments:?}: {done:?}");
    }

    fn qemu_img(&self, arguments: &str) {
        self.run("qemu-img", &arguments.split(' ').collect::<Vec<_>>());
    }

    fn write(&self, image: &str, command: &str) {
        self.run("qemu-io", &["-f", "qcow2", "-c", command, image]);
    }

    /// Three images on top of each other, each with a cluster of its own.
    fn chain() -> Self {
        let images = Self::new();
        fs::create_dir(images.path("sub")).expect("made");
        fs::write(images.path("sub/base.raw"), vec![1; 100 << 10]).expect("written");
        images.qemu_img("create -f qcow2 -b base.raw -F raw sub/middle.qcow2 300k");
        images.write("sub/middle.qcow2", "write -P 2 64k 64k");
        images.qemu_img("create -f qcow2 -b sub/middle.qcow2 -F qcow2 top.qcow2 1M");
        images.write("top.qcow2", "write -P 3 256k 64k");
        images
    }
}

fn options(format: Option<Format>) -> ImageOptions {
    let storage = OpenOptions { read_only: true, format, ..OpenOptions::default() };
    ImageOptions { storage, ..ImageOptions::default() }
}

fn qcow2() -> ImageOptions {
    options(Some(Format::Qcow2))
}

fn with<T: 'static>(
    path: String,
    options: ImageOptions,
    look: impl AsyncFnOnce(Result<Image, String>) -> T + 'static,
) -> T {
    reactor::run(Polling::OFF, async move {
        look(open(&format!("file:{path}"), options).await.map_err(|error| error.to_string())).await
    })
    .expect("io_uring works")
}

#[track_caller]
fn refused(path: String, options: ImageOptions, part: &str) {
    let said = with(path, options, async |opened| opened.expect_err("refused"));
    assert!(said.contains(part), "{said}");
}

/// The byte that every 64 KiB begin with.
async fn bytes(image: &Image) -> Vec<u8> {
    let mut bytes = Vec::new();
    for cluster in 0..image.size_bytes().div_ceil(65536) {
        let data = image.read(cluster * 65536, 1).await.expect("readable");
        bytes.push(data.iter().next().expect("one byte")[0]);
    }
    bytes
}

#[test]
fn a_chain_is_read_through() {
    let images = Images::chain();
    with(images.path("top.qcow2"), qcow2(), async |opened| {
        let image = opened.expect("opens");
        assert_eq!(bytes(&image).await, [1, 2, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    });
    let alone = ImageOptions { backing: BackingChoice::Nothing, ..qcow2() };
    with(images.path("top.qcow2"), alone, async |opened| {
        assert_eq!(bytes(&opened.expect("opens")).await[..5], [0, 0, 0, 0, 3]);
    });
}

#[test]
fn formats_are_guessed_only_where_nothing_else_is_named() {
    let images = Images::chain();
    refused(images.path("top.qcow2"), options(None), "looks like qcow2 and names other files");
    images.qemu_img("create -f qcow2 alone.qcow2 1M");
    with(images.path("alone.qcow2"), options(None), async |opened| {
        assert!(matches!(opened.expect("opens"), Image::Qcow2(_)));
    });
    with(images.path("top.qcow2"), options(Some(Format::Raw)), async |opened| {
        assert!(matches!(opened.expect("opens"), Image::Raw(_)));
    });
    refused(images.path("sub/base.raw"), qcow2(), "is no qcow2 image that can be used");
}

#[test]
fn what_a_chain_may_not_be() {
    let images = Images::chain();
    let rebase = |to: &str, image: &str| {
        let mut arguments = vec!["rebase", "-u", "-f", "qcow2"];
        arguments.extend(to.split(' '));
        arguments.push(image);
        images.run("qemu-img", &arguments);
    };
    images.qemu_img("create -f qcow2 a.qcow2 1M");
    images.qemu_img("create -f qcow2 b.qcow2 1M");
    rebase("-b b.qcow2 -F qcow2", "a.qcow2");
    symlink(images.path("a.qcow2"), images.path("link.qcow2")).expect("linked");
    rebase("-b link.qcow2 -F qcow2", "b.qcow2");
    refused(images.path("a.qcow2"), qcow2(), "is in the chain already");
    let writing = ImageOptions { storage: OpenOptions { read_only: false, ..qcow2().storage }, ..qcow2() };
    refused(images.path("a.qcow2"), writing, "is in the chain already");
    for (to, part) in [
        ("-b none.raw -F raw", "b.qcow2: its backing file"),
        ("-b none.raw -F raw", "no such file"),
        ("-b a.qcow2 -F vmdk", "is of the format \"vmdk\""),
        ("-b nbd://localhost/x -F raw", "is an address of the protocol \"nbd\""),
        ("-b json:{\"driver\":\"null-co\"} -F raw", "is a json: description"),
        ("-b sub -F raw", "is a directory"),
        ("-b sub/base.raw -F qcow2", "is no qcow2 image that can be used"),
    ] {
        rebase(to, "b.qcow2");
        refused(images.path("b.qcow2"), qcow2(), part);
    }
    // qemu-img writes none without a format any more: the extension's type is changed to one that nobody knows.
    rebase("-b sub/base.raw -F raw", "b.qcow2");
    let mut file = fs::read(images.path("b.qcow2")).expect("readable");
    let at = file.windows(4).position(|four| four == [0xe2, 0x79, 0x2a, 0xca]).expect("the extension");
    file[at] = 0x12;
    fs::write(images.path("b.qcow2"), file).expect("written");
    refused(images.path("b.qcow2"), qcow2(), "has no format, and guessing it is not safe");
}

#[test]
fn a_backing_file_is_locked_against_writers() {
    let images = Images::chain();
    let base = images.path("sub/middle.qcow2");
    let writing = ImageOptions { storage: OpenOptions { read_only: false, ..qcow2().storage }, ..qcow2() };
    let top = images.path("top.qcow2");
    with(base, writing.clone(), async move |opened| {
        let opened = opened.expect("opens");
        let error =
            open(&format!("file:{top}"), qcow2()).await.expect_err("somebody writes to its base").to_string();
        assert!(error.contains("its backing file") && error.contains("locked for writing"), "{error}");
        drop(opened);
        open(&format!("file:{top}"), qcow2()).await.expect("nobody does any more");
    });
    let base = images.path("sub/middle.qcow2");
    with(images.path("top.qcow2"), qcow2(), async move |opened| {
        let _opened = opened.expect("opens");
        open(&format!("file:{base}"), writing).await.expect_err("it is somebody's base");
    });
}

fn beneath(images: &Images, directory: &str, format: Option<Format>) -> ImageOptions {
    let root = Root::open(Path::new(&images.path(directory))).expect("a directory");
    ImageOptions {
        storage: OpenOptions { root: Some(root), ..options(format).storage },
        ..ImageOptions::default()
    }
}

#[test]
fn an_image_root_holds_for_what_images_name() {
    let images = Images::chain();
    let of = |directory: &str| beneath(&images, directory, Some(Format::Qcow2));
    with(images.path("top.qcow2"), of(""), async |opened| drop(opened.expect("all of it is inside")));
    refused(images.path("top.qcow2"), of("sub"), "lies outside of the image root");
    images.qemu_img("create -f qcow2 -b ../top.qcow2 -F qcow2 sub/over.qcow2");
    let said = with(images.path("sub/over.qcow2"), of("sub"), async |opened| opened.expect_err("leads out"));
    assert!(said.contains("over.qcow2: its backing file") && said.contains("lies outside"), "{said}");
    symlink("../top.qcow2", images.path("sub/inside.qcow2")).expect("linked");
    refused(images.path("sub/inside.qcow2"), of("sub"), "lies outside of the image root");
    images.qemu_img("create -f qcow2 -o data_file=../data sub/data.qcow2 1M");
    refused(images.path("sub/data.qcow2"), of("sub"), "its data file");
}

#[test]
fn data_files_are_opened_beside_the_image() {
    let images = Images::new();
    images.qemu_img("create -f qcow2 -o data_file=disk.data disk.qcow2 1M");
    images.write("disk.qcow2", "write -P 7 0 1M");
    with(images.path("disk.qcow2"), qcow2(), async |opened| {
        assert_eq!(bytes(&opened.expect("opens")).await, [7; 16]);
    });
    refused(images.path("disk.qcow2"), options(None), "names other files");
    fs::remove_file(images.path("disk.data")).expect("removed");
    refused(images.path("disk.qcow2"), qcow2(), "its data file");
}

#[test]
fn legacy_encryption_is_refused_by_name() {
    let images = Images::new();
    images.qemu_img("create -f qcow2 a.qcow2 1M");
    let mut file = fs::read(images.path("a.qcow2")).expect("readable");
    file[35] = 1;
    fs::write(images.path("a.qcow2"), file).expect("written");
    refused(images.path("a.qcow2"), qcow2(), "is encrypted in the old way (\"aes\")");
}

#[test]
fn secrets_are_asked_for_and_counted() {
    let images = Images::new();
    fs::write(images.path("key"), "geheim").expect("written");
    let luks = "create -f qcow2 --object secret,id=s,file=key -o encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10";
    images.qemu_img(&format!("{luks} e.qcow2 1M"));
    let with_secrets = |secrets: &[&str]| ImageOptions {
        secrets: secrets.iter().map(|text| Secret::new(text.as_bytes().to_vec())).collect(),
        ..qcow2()
    };
    refused(
        images.path("e.qcow2"),
        qcow2(),
        "is encrypted with LUKS (give its passphrase with --secret-file)",
    );
    refused(images.path("e.qcow2"), with_secrets(&["geheim", "b"]), "2 secrets for 1 encrypted images");
    refused(images.path("e.qcow2"), with_secrets(&["falsch"]), "opens none of its 1 key slots (is it");
    refused(images.path("e.qcow2"), with_secrets(&["geheim\n"]), "the line break at the end");
    images.qemu_img("create -f qcow2 plain.qcow2 1M");
    refused(images.path("plain.qcow2"), with_secrets(&["geheim"]), "is not encrypted");
}
