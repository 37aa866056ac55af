//! Valid and invalid backing chains.

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    time,
};

use super::{super::Secret, BackingChoice, ImageOptions, open};
use reactor::{PollingMode, buffer::IoBuffer};
use storage::{Durability, ImageFormat, OpenOptions, Root, open_storage};

use crate::{
    Image,
    qcow2::{
        create::{CreateOptions, create},
        header::BackingReference,
        luks::{self, LuksOptions},
    },
};

/// A directory of images.
struct TestImages(tempfile::TempDir);

impl TestImages {
    fn new() -> Self {
        Self(tempfile::tempdir().expect("a directory"))
    }

    fn path(&self, name: &str) -> String {
        self.0.path().join(name).to_str().expect("text").to_owned()
    }

    /// Creates an image of 1 MiB, replacing the previous one.
    fn create(&self, name: &str, options: CreateOptions) {
        let options = CreateOptions { size_bytes: 1 << 20, ..options };
        let create_file = |path: PathBuf| {
            fs::write(&path, [0; 512]).expect("written");
            format!("file:{}", path.to_str().expect("text"))
        };
        let path = self.0.path().join(name);
        let data = options.data_file.as_ref().map(|name| create_file(path.with_file_name(name)));
        let image = create_file(path);
        let created = reactor::run(PollingMode::Off, async move {
            let opened = |spec: &str| open_storage(spec, OpenOptions::default()).expect("opens");
            create(&opened(&image), data.as_deref().map(opened).as_ref(), &options).await
        });
        created.expect("io_uring works").expect("valid");
    }

    /// Creates an overlay.
    fn over(&self, name: &str, backing: &str, format: Option<&str>) {
        let backing = BackingReference { name: backing.to_owned(), format: format.map(str::to_owned) };
        self.create(name, CreateOptions { backing: Some(backing), ..CreateOptions::default() });
    }

    /// Fills clusters of 64 KiB with a byte.
    fn write(&self, name: &str, byte: u8, first: u64, clusters: usize) {
        with_opened(self.path(name), writing(), async move |opened| {
            let image = opened.expect("opens");
            let data = IoBuffer::copy_of(&vec![byte; clusters << 16]);
            image.write(first << 16, data.into(), Durability::Cached).await.expect("written");
            image.close().await.expect("closed");
        });
    }

    /// Three images in a chain, each with a different allocated cluster.
    fn chain() -> Self {
        let images = Self::new();
        fs::create_dir(images.path("sub")).expect("made");
        fs::write(images.path("sub/base.raw"), vec![1; 100 << 10]).expect("written");
        images.over("sub/middle.qcow2", "base.raw", Some("raw"));
        images.write("sub/middle.qcow2", 2, 1, 1);
        images.over("top.qcow2", "sub/middle.qcow2", Some("qcow2"));
        images.write("top.qcow2", 3, 4, 1);
        images
    }
}

fn options(format: Option<ImageFormat>) -> ImageOptions {
    let storage = OpenOptions { read_only: true, format, ..OpenOptions::default() };
    ImageOptions { storage, ..ImageOptions::default() }
}

fn qcow2() -> ImageOptions {
    options(Some(ImageFormat::Qcow2))
}

fn writing() -> ImageOptions {
    ImageOptions { storage: OpenOptions { read_only: false, ..qcow2().storage }, ..qcow2() }
}

fn with_opened<T: 'static>(
    path: String,
    options: ImageOptions,
    inspect: impl AsyncFnOnce(Result<Image, String>) -> T + 'static,
) -> T {
    reactor::run(PollingMode::Off, async move {
        inspect(open(&format!("file:{path}"), options).await.map_err(|error| error.to_string())).await
    })
    .expect("io_uring works")
}

#[track_caller]
fn assert_refused(path: String, options: ImageOptions, part: &str) {
    let message = with_opened(path, options, async |opened| opened.expect_err("refused"));
    assert!(message.contains(part), "{message}");
}

/// First byte of each 64 KiB.
async fn bytes(image: &Image) -> Vec<u8> {
    let mut bytes = Vec::new();
    for cluster in 0..image.size_bytes().div_ceil(65536) {
        let data = image.read(cluster * 65536, 1).await.expect("readable");
        bytes.push(data.to_vec()[0]);
    }
    bytes
}

#[test]
fn a_chain_is_read_through() {
    let images = TestImages::chain();
    with_opened(images.path("top.qcow2"), qcow2(), async |opened| {
        let image = opened.expect("opens");
        assert_eq!(bytes(&image).await, [1, 2, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    });
    let alone = ImageOptions { backing: BackingChoice::Nothing, ..qcow2() };
    with_opened(images.path("top.qcow2"), alone, async |opened| {
        assert_eq!(bytes(&opened.expect("opens")).await[..5], [0, 0, 0, 0, 3]);
    });
}

#[test]
fn format_is_probed_only_if_none_is_given() {
    let images = TestImages::chain();
    assert_refused(images.path("top.qcow2"), options(None), "looks like qcow2 and names other files");
    images.create("alone.qcow2", CreateOptions::default());
    with_opened(images.path("alone.qcow2"), options(None), async |opened| {
        assert!(matches!(opened.expect("opens"), Image::Qcow2(_)));
    });
    with_opened(images.path("top.qcow2"), options(Some(ImageFormat::Raw)), async |opened| {
        assert!(matches!(opened.expect("opens"), Image::Raw(_)));
    });
    assert_refused(images.path("sub/base.raw"), qcow2(), "is not a usable qcow2 image");
}

#[test]
fn invalid_chains_are_rejected() {
    let images = TestImages::chain();
    images.over("a.qcow2", "b.qcow2", Some("qcow2"));
    symlink(images.path("a.qcow2"), images.path("link.qcow2")).expect("linked");
    images.over("b.qcow2", "link.qcow2", Some("qcow2"));
    assert_refused(images.path("a.qcow2"), qcow2(), "is already in the chain");
    assert_refused(images.path("a.qcow2"), writing(), "is already in the chain");
    for (backing, format, part) in [
        ("none.raw", Some("raw"), "b.qcow2: its backing file"),
        ("none.raw", Some("raw"), "no such file"),
        ("a.qcow2", Some("vmdk"), "has the format \"vmdk\""),
        ("nbd://localhost/x", Some("raw"), "is an address of the protocol \"nbd\""),
        ("json:{\"driver\":\"null-co\"}", Some("raw"), "is a json: description"),
        ("sub", Some("raw"), "is a directory"),
        ("sub/base.raw", Some("qcow2"), "is not a usable qcow2 image"),
        ("sub/base.raw", None, "has no format, and probing it is not safe"),
    ] {
        images.over("b.qcow2", backing, format);
        assert_refused(images.path("b.qcow2"), qcow2(), part);
    }
}

#[test]
fn empty_raw_image_is_rejected() {
    let images = TestImages::new();
    fs::write(images.path("empty"), []).expect("written");
    images.over("top.qcow2", "empty", Some("raw"));
    images.write("top.qcow2", 3, 4, 1);
    with_opened(images.path("top.qcow2"), writing(), async |opened| {
        let image = opened.expect("opens");
        assert_eq!(bytes(&image).await[..6], [0, 0, 0, 0, 3, 0]);
        // The rest of the cluster is copied from the backing file.
        image.write(5 << 16, IoBuffer::copy_of(&[4]).into(), Durability::Cached).await.expect("written");
        assert_eq!(image.read(5 << 16, 4096).await.expect("readable").to_vec()[..2], [4, 0]);
        image.close().await.expect("closed");
    });
    images.over("top.qcow2", "empty", Some("qcow2"));
    assert_refused(images.path("top.qcow2"), qcow2(), "is empty");
    assert_refused(images.path("empty"), options(Some(ImageFormat::Raw)), "is empty");
}

#[test]
fn a_backing_file_is_locked_against_writers() {
    let images = TestImages::chain();
    let base = images.path("sub/middle.qcow2");
    let top = images.path("top.qcow2");
    with_opened(base, writing(), async move |opened| {
        let opened = opened.expect("opens");
        let error = open(&format!("file:{top}"), qcow2())
            .await
            .expect_err("its backing file is open for writing")
            .to_string();
        assert!(error.contains("its backing file") && error.contains("locked for writing"), "{error}");
        drop(opened);
        open(&format!("file:{top}"), qcow2()).await.expect("no writer any more");
    });
    let base = images.path("sub/middle.qcow2");
    with_opened(images.path("top.qcow2"), qcow2(), async move |opened| {
        let _opened = opened.expect("opens");
        open(&format!("file:{base}"), writing()).await.expect_err("it is in use as a backing file");
    });
}

fn with_data(name: &str) -> CreateOptions {
    CreateOptions { data_file: Some(name.to_owned()), ..CreateOptions::default() }
}

fn beneath(images: &TestImages, directory: &str, format: Option<ImageFormat>) -> ImageOptions {
    let root = Root::open(Path::new(&images.path(directory))).expect("a directory");
    ImageOptions {
        storage: OpenOptions { root: Some(root), ..options(format).storage },
        ..ImageOptions::default()
    }
}

#[test]
fn image_root_applies_to_backing_files() {
    let images = TestImages::chain();
    let options = |directory: &str| beneath(&images, directory, Some(ImageFormat::Qcow2));
    with_opened(images.path("top.qcow2"), options(""), async |opened| {
        drop(opened.expect("all of it is inside"));
    });
    assert_refused(images.path("top.qcow2"), options("sub"), "lies outside of the image root");
    images.over("sub/over.qcow2", "../top.qcow2", Some("qcow2"));
    let message = with_opened(images.path("sub/over.qcow2"), options("sub"), async |opened| {
        opened.expect_err("leads out")
    });
    assert!(
        message.contains("over.qcow2: its backing file") && message.contains("lies outside"),
        "{message}"
    );
    symlink("../top.qcow2", images.path("sub/inside.qcow2")).expect("linked");
    assert_refused(images.path("sub/inside.qcow2"), options("sub"), "lies outside of the image root");
    images.create("sub/data.qcow2", with_data("../data"));
    assert_refused(images.path("sub/data.qcow2"), options("sub"), "its data file");
}

#[test]
fn data_files_are_opened_relative_to_the_image() {
    let images = TestImages::new();
    images.create("disk.qcow2", with_data("disk.data"));
    images.write("disk.qcow2", 7, 0, 16);
    with_opened(images.path("disk.qcow2"), qcow2(), async |opened| {
        assert_eq!(bytes(&opened.expect("opens")).await, [7; 16]);
    });
    assert_refused(images.path("disk.qcow2"), options(None), "names other files");
    fs::remove_file(images.path("disk.data")).expect("removed");
    assert_refused(images.path("disk.qcow2"), qcow2(), "its data file");
}

#[test]
fn legacy_encryption_is_refused_by_name() {
    let images = TestImages::new();
    images.create("a.qcow2", CreateOptions::default());
    let mut file = fs::read(images.path("a.qcow2")).expect("readable");
    file[35] = 1;
    fs::write(images.path("a.qcow2"), file).expect("written");
    assert_refused(images.path("a.qcow2"), qcow2(), "has legacy encryption (\"aes\")");
}

#[test]
fn missing_and_unused_secrets_are_reported() {
    let images = TestImages::new();
    let quick = LuksOptions { iteration_time: time::Duration::ZERO, ..LuksOptions::default() };
    let luks = luks::create(&Secret::new("geheim".into()), &quick).expect("made").area;
    images.create("e.qcow2", CreateOptions { luks: Some(luks), ..CreateOptions::default() });
    let with_secrets = |secrets: &[&str]| ImageOptions {
        secrets: secrets.iter().map(|text| Secret::new(text.as_bytes().to_vec())).collect(),
        ..qcow2()
    };
    assert_refused(
        images.path("e.qcow2"),
        qcow2(),
        "is encrypted with LUKS (give its passphrase with --secret-file)",
    );
    assert_refused(
        images.path("e.qcow2"),
        with_secrets(&["geheim", "b"]),
        "2 secrets for 1 encrypted images",
    );
    assert_refused(
        images.path("e.qcow2"),
        with_secrets(&["falsch"]),
        "does not unlock any of its 1 key slots (is it",
    );
    assert_refused(images.path("e.qcow2"), with_secrets(&["geheim\n"]), "a line break at the end");
    images.create("plain.qcow2", CreateOptions::default());
    assert_refused(images.path("plain.qcow2"), with_secrets(&["geheim"]), "is not encrypted");
}
