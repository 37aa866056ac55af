//! `weir image convert` beside qemu-img's: snapshots, bitmaps and encryption, each written by one
//! program and read by the other; and `weir image resize` with preallocation.

use std::{
    fs,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use serde_json::Value;

use crate::harness::{
    self, MIB, Scratch, TestClient, WEIR, assert_contains, qemu_img, text, weir_image as weir,
};

const LUKS: &str = "encrypt.format=luks,encrypt.iter-time=10";

#[track_caller]
fn qemu_io(path: &Path, commands: &[&str]) {
    harness::qemu_io(["-f", "qcow2"], commands, path);
}

#[track_caller]
fn assert_same_content(first: &Path, second: &Path) {
    qemu_img(["compare", "-q", text(first), text(second)]).succeeds();
    weir(&["compare", "-q", text(first), text(second)]).succeeds();
}

/// An image with two bitmaps, one enabled, and the snapshots `1` (named `one`) and `2` (named `1`).
fn original(scratch: &Scratch) -> PathBuf {
    let path = scratch.path("original.qcow2");
    qemu_img(["create", "-q", "-f", "qcow2", text(&path), "4M"]).succeeds();
    qemu_img(["bitmap", "--add", text(&path), "records"]).succeeds();
    qemu_img(["bitmap", "--add", "-g", "4k", text(&path), "rests"]).succeeds();
    qemu_io(&path, &["write -P 1 0 1M", "write -P 2 3000k 10k"]);
    qemu_img(["bitmap", "--disable", text(&path), "rests"]).succeeds();
    qemu_img(["snapshot", "-c", "one", text(&path)]).succeeds();
    qemu_io(&path, &["write -P 3 512k 1M", "write -z 3000k 4k"]);
    qemu_img(["snapshot", "-c", "1", text(&path)]).succeeds();
    qemu_io(&path, &["write -P 4 0 4M"]);
    path
}

#[test]
fn snapshot_conversion_matches_qemu() {
    let scratch = Scratch::new();
    let original = original(&scratch);
    let (ours, theirs) = (scratch.path("ours.raw"), scratch.path("theirs.raw"));
    // `1` is the ID of the first snapshot and the name of the second one.
    for snapshot in ["one", "1", "2", "snapshot.name=1", "snapshot.id=1", "snapshot.id=1,snapshot.name=one"] {
        for from in [&["-f", "qcow2"][..], &[]] {
            weir(&["convert", "-l", snapshot]).args(from).args([&original, &ours]).succeeds();
            qemu_img(["convert", "-l", snapshot, "-O", "raw"]).args([&original, &theirs]).succeeds();
            assert_same_content(&ours, &theirs);
        }
    }
    let raw = ours.clone();
    for (snapshot, source, why) in [
        ("none", &original, "has no such snapshot (`weir image snapshot -l` lists"),
        ("snapshot.id=2,snapshot.name=one", &original, "has no such snapshot"),
        ("snapshot.colour=1", &original, "is neither snapshot.id nor snapshot.name"),
        ("one", &raw, "raw images have no snapshots"),
    ] {
        let new = scratch.path("new.raw");
        assert_contains(&weir(&["convert", "-l", snapshot]).args([source, &new]).fails(), &[why]);
        assert!(!new.exists(), "{why}");
    }
    let both = weir(&["convert", "-l", "one", text(&original), text(&original), text(&ours)]).fails();
    assert_contains(&both, &["-l: applies to a single image"]);
}

/// Names, granularities and flags of bitmaps, and their content as nbdinfo reads it from qemu-nbd.
fn bitmaps(path: &Path) -> (Value, Vec<String>) {
    let info = qemu_img(["info", "--output=json", text(path)]).json();
    let list = info["format-specific"]["data"]["bitmaps"].clone();
    let mut maps = Vec::new();
    for bitmap in list.as_array().into_iter().flatten() {
        let name = bitmap["name"].as_str().unwrap();
        let map = TestClient::new("nbdinfo").arg(format!("--map=qemu:dirty-bitmap:{name}"));
        maps.push(
            map.args(["--", "[", "qemu-nbd", "-r", "-f", "qcow2", "-B", name, text(path), "]"]).succeeds(),
        );
    }
    (list, maps)
}

#[test]
fn bitmaps_are_copied_as_qemu_copies_them() {
    let scratch = Scratch::new();
    let original = original(&scratch);
    let (ours, theirs) = (scratch.path("ours.qcow2"), scratch.path("theirs.qcow2"));
    let expected = bitmaps(&original);
    assert_eq!(expected.1.len(), 2);
    for more in [&["-o", "cluster_size=512"][..], &["-c"], &["-o", "cluster_size=2M,refcount_bits=64"]] {
        weir(&["convert", "--bitmaps", "-O", "qcow2"]).args(more).args([&original, &ours]).succeeds();
        qemu_img(["convert", "--bitmaps", "-O", "qcow2"]).args(more).args([&original, &theirs]).succeeds();
        qemu_img(["check", "-q", text(&ours)]).succeeds();
        weir(&["check", "-q", text(&ours)]).succeeds();
        assert_same_content(&ours, &original);
        let copied = bitmaps(&ours);
        assert_eq!(copied, expected, "{more:?}");
        assert_eq!(copied, bitmaps(&theirs), "{more:?}");
    }
    // Into an existing image without bitmaps.
    qemu_img(["create", "-q", "-f", "qcow2", text(&theirs), "4M"]).succeeds();
    weir(&["convert", "-n", "--bitmaps", "-O", "qcow2"]).args([&original, &theirs]).succeeds();
    assert_eq!(bitmaps(&theirs), expected);
    let stderr = weir(&["convert", "-n", "--bitmaps", "-O", "qcow2"]).args([&original, &theirs]).fails();
    assert_contains(&stderr, &["--bitmaps: the new image already has a bitmap \"records\""]);
    qemu_img(["create", "-q", "-f", "qcow2", text(&theirs), "5M"]).succeeds();
    let larger = weir(&["convert", "-n", "--bitmaps", "-O", "qcow2"]).args([&original, &theirs]).fails();
    assert_contains(&larger, &["--bitmaps: the new disk has 5242880 bytes"]);
}

#[test]
fn inconsistent_bitmap_fails_the_copy_or_is_skipped() {
    let scratch = Scratch::new();
    let (original, new) = (original(&scratch), scratch.path("new.qcow2"));
    // A kill while the image is open for writing leaves the enabled bitmap in use.
    let killed = TestClient::new("qemu-io").args(["-f", "qcow2", "-c", "write 0 4k", "-c", "sigraise 9"]);
    assert!(killed.arg(&original).run().stdout().contains("wrote"));
    qemu_img(["bitmap", "--remove", text(&original), "rests"]).succeeds();
    qemu_img(["bitmap", "--add", text(&original), "new"]).succeeds();
    let stderr = weir(&["convert", "--bitmaps", "-O", "qcow2"]).args([&original, &new]).fails();
    assert_contains(&stderr, &["bitmap \"records\" is marked in-use", "--skip-broken-bitmaps skips it"]);
    assert!(!new.exists());
    weir(&["convert", "--bitmaps", "--skip-broken-bitmaps", "-O", "qcow2"])
        .args([&original, &new])
        .succeeds();
    let (list, _) = bitmaps(&new);
    let names: Vec<_> = list.as_array().unwrap().iter().map(|bitmap| bitmap["name"].as_str()).collect();
    assert_eq!(names, [Some("new")]);
    for (arguments, why) in [
        (&["--bitmaps"][..], "raw images have no bitmaps (use -O qcow2)"),
        (&["--skip-broken-bitmaps", "-O", "qcow2"], "--bitmaps"),
        (
            &["--bitmaps", "--skip-broken-bitmaps", "-O", "qcow2", "-o", "compat=0.10"],
            "version 2 have no bitmaps",
        ),
    ] {
        assert_contains(&weir(&["convert"]).args(arguments).args([&original, &new]).fails(), &[why]);
    }
}

/// Compressible text, with repetitions within and beyond the window of zlib.
fn lines(length: usize) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(7);
    let lines: Vec<String> = (0..400).map(|line| format!("{line} {:x}\n", random.u64(..))).collect();
    let any = std::iter::repeat_with(|| &lines[random.usize(..lines.len())]);
    any.flat_map(|line| line.bytes()).take(length).collect()
}

#[test]
fn compressed_images_are_interchangeable() {
    let scratch = Scratch::new();
    let original = scratch.file("original.raw", lines(4 << 16));
    let (ours, theirs) = (scratch.path("ours.qcow2"), scratch.path("theirs.qcow2"));
    for kind in ["zlib", "zstd"] {
        let options = format!("compression_type={kind}");
        let arguments = ["convert", "-c", "-f", "raw", "-O", "qcow2", "-o", &options];
        weir(&arguments).args([&original, &ours]).succeeds();
        qemu_img(arguments).args([&original, &theirs]).succeeds();
        for image in [&ours, &theirs] {
            let checked = weir(&["check", "--output=json", text(image)]).json();
            assert_eq!(checked["compressed-clusters"], 4, "{kind}: {checked}");
            assert_same_content(image, &original);
        }
    }
}

#[test]
fn encrypted_images_are_converted_both_ways() {
    let scratch = Scratch::new();
    let (original, plain) = (original(&scratch), scratch.path("plain.raw"));
    let (ours, theirs) = (scratch.path("ours.qcow2"), scratch.path("theirs.qcow2"));
    let (key, other) = (scratch.file("key", "a passphrase"), scratch.file("other", "another\n"));
    let object = |id: &str, file: &Path| format!("secret,id={id},file={}", text(file));
    let by_qemu =
        |path: &Path, id: &str| format!("driver=qcow2,encrypt.key-secret={id},file.filename={}", text(path));
    // Written by weir, read by QEMU: passphrase by file, by descriptor, as an object.
    let options = format!("{LUKS},encrypt.key-secret=k");
    // The shell opens descriptor 7 for the program.
    let passed = format!("exec 7<{}; exec \"$@\"", text(&key));
    for (first, more) in [
        (weir(&["convert"]), vec!["-o", LUKS, "--target-secret-file", text(&key)]),
        (
            TestClient::new("sh").args(["-c", &passed, "sh", "timeout", "300", WEIR, "image", "convert"]),
            vec!["-o", LUKS, "--target-secret-fd", "7"],
        ),
        (weir(&["convert"]), vec!["-o", &options, "--object", &object("k", &key)]),
    ] {
        first.args(["-O", "qcow2"]).args(more).args([&original, &ours]).succeeds();
        qemu_img(["convert", "--object", &object("k", &key), "--image-opts"])
            .args([&by_qemu(&ours, "k"), "-O", "raw", text(&plain)])
            .succeeds();
        assert_same_content(&plain, &original);
        weir(&["check", "-q", text(&ours)]).succeeds();
        let info = qemu_img(["info", text(&ours)]).succeeds();
        assert_contains(&info, &["encrypted: yes"]);
    }
    // Written by QEMU, read by weir, and written with a new passphrase.
    qemu_img(["convert", "--object", &object("o", &other), "-O", "qcow2", "-o"])
        .args([&format!("{LUKS},encrypt.key-secret=o"), text(&original), text(&theirs)])
        .succeeds();
    weir(&["convert", "-O", "qcow2", "-o", LUKS, "--target-secret-file", text(&key)])
        .args(["--secret-file", text(&other)])
        .args([&theirs, &ours])
        .succeeds();
    weir(&["compare", "-q", "--secret-file", text(&key), text(&ours), text(&original)]).succeeds();
    weir(&["compare", "-q", "--secret-file", text(&key), "--secret-file", text(&other)])
        .args([&ours, &theirs])
        .succeeds();
    // Into an existing image.
    weir(&["convert", "-n", "-O", "qcow2", "-l", "one", "--target-secret-file", text(&other)])
        .args([&original, &theirs])
        .succeeds();
    weir(&["convert", "-O", "raw", "--secret-file", text(&other)]).args([&theirs, &plain]).succeeds();
    let snapshot = scratch.path("snapshot.raw");
    qemu_img(["convert", "-l", "one", "-O", "raw"]).args([&original, &snapshot]).succeeds();
    assert_same_content(&plain, &snapshot);
}

#[test]
fn invalid_encryption_options_are_reported() {
    let scratch = Scratch::new();
    let (original, key) = (original(&scratch), scratch.file("key", "a passphrase"));
    let (locked, new) = (scratch.path("locked.qcow2"), scratch.path("new.qcow2"));
    weir(&["convert", "-O", "qcow2", "-o", LUKS, "--target-secret-file", text(&key)])
        .args([&original, &locked])
        .succeeds();
    let wrong = scratch.file("wrong", "not it");
    for (arguments, source, why) in [
        (&["-O", "qcow2", "-o", LUKS][..], &original, "needs a passphrase"),
        (&["-O", "qcow2", "--target-secret-file", "KEY"], &original, "without encrypt.format=luks"),
        (&["--target-secret-file", "KEY"], &original, "raw images are not encrypted"),
        (&["--secret-file", "KEY"], &original, "no image is encrypted"),
        (&[], &locked, "give its passphrase with --secret-file"),
        (&["--secret-file", "WRONG"], &locked, "is it the passphrase of this image?"),
        (
            &["-c", "-O", "qcow2", "-o", LUKS, "--target-secret-file", "KEY"],
            &original,
            "no compressed clusters",
        ),
        (
            &["--secret-file", "KEY", "--secret-file", "WRONG"],
            &locked,
            "passphrases given: 2, encrypted images: 1",
        ),
    ] {
        let arguments = arguments.iter().map(|argument| match *argument {
            "KEY" => text(&key),
            "WRONG" => text(&wrong),
            other => other,
        });
        assert_contains(&weir(&["convert"]).args(arguments).args([source, &new]).fails(), &[why]);
        assert!(!new.exists(), "{why}");
    }
    let stderr = weir(&["convert", "-C", text(&original), text(&new)]).fails();
    assert_contains(&stderr, &["-C", "cp --reflink"]);
}

/// Each image has its own passphrase.
#[test]
fn commands_support_chains_of_encrypted_images() {
    let scratch = Scratch::new();
    let keys: Vec<_> =
        (0..3).map(|number| scratch.file(&format!("key{number}"), [b'a' + number; 9])).collect();
    let at = |number: usize| scratch.path(&format!("{number}.qcow2"));
    for (number, key) in keys.iter().enumerate() {
        let backing = format!("{}.qcow2", number.max(1) - 1);
        let below = if number > 0 { vec!["-b", &backing, "-F", "qcow2"] } else { vec![] };
        weir(&["create", "-q", "-f", "qcow2", "-o", "encrypt.iter-time=10", "--secret-file", text(key)])
            .args(below)
            .args([text(&at(number)), "1M"])
            .succeeds();
    }
    let secrets = |numbers: &[usize]| {
        let files = numbers.iter().flat_map(|number| ["--secret-file", text(&keys[*number])]);
        files.map(str::to_owned).collect::<Vec<_>>()
    };
    let content = |byte: u8, from: usize| {
        let mut content = vec![0; MIB as usize];
        content[from..from + 70_000].fill(byte);
        content
    };
    let raw = scratch.file("raw", content(5, 300_000));
    // Passphrases are given from the top of the chain down.
    let all = secrets(&[2, 1, 0]);
    weir(&["convert", "-n", "-O", "qcow2"])
        .args(all.iter().map(|argument| argument.replace("--secret", "--target-secret")))
        .args([&raw, &at(2)])
        .succeeds();
    weir(&["map", "--output=json", "-f", "qcow2"]).args(&all).arg(at(2)).succeeds();
    weir(&["commit", "-q", "-f", "qcow2"]).args(&all).arg(at(2)).succeeds();
    weir(&["compare", "-q", "-f", "qcow2"]).args(secrets(&[1, 0])).args([&at(1), &raw]).succeeds();
    weir(&["rebase", "-f", "qcow2", "-b", "0.qcow2", "-F", "qcow2"])
        .args(&all)
        .args(secrets(&[0]))
        .arg(at(2))
        .succeeds();
    weir(&["compare", "-q", "-f", "qcow2"]).args(secrets(&[2, 0])).args([&at(2), &raw]).succeeds();
    weir(&["resize", "-q", "-f", "qcow2", "--preallocation=falloc"])
        .args(secrets(&[2, 0]))
        .args([text(&at(2)), "+1M"])
        .succeeds();
    weir(&["compare", "-q", "-f", "qcow2"]).args(secrets(&[2, 0])).args([&at(2), &raw]).succeeds();
    for number in 0..3 {
        weir(&["check", "-q", text(&at(number))]).succeeds();
    }
    // One passphrase does not apply to other images of the chain.
    let one_for_all = weir(&["compare", "-f", "qcow2"]).args(secrets(&[1])).args([&at(1), &raw]).fails();
    assert_contains(&one_for_all, &["0.qcow2", "is it the passphrase of this image?"]);
}

#[test]
fn growth_with_preallocation_matches_qemu() {
    let scratch = Scratch::new();
    for (format, modes) in
        [("qcow2", &["off", "metadata", "falloc", "full"][..]), ("raw", &["off", "falloc", "full"])]
    {
        for mode in modes {
            let mode = format!("--preallocation={mode}");
            let mut maps = Vec::new();
            for by_weir in [true, false] {
                let path = scratch.path(if by_weir { "ours" } else { "theirs" });
                qemu_img(["create", "-q", "-f", format, text(&path), "1M"]).succeeds();
                let resize = ["resize", "-q", "-f", format, &mode, text(&path), "+1000k"];
                let program = if by_weir { weir(&resize) } else { qemu_img(resize) };
                program.succeeds();
                if format == "qcow2" {
                    qemu_img(["check", "-q", text(&path)]).succeeds();
                }
                let map = qemu_img(["map", "--output=json", "-f", format, text(&path)]).json();
                let keys = ["start", "length", "data", "zero"];
                let shown = map.as_array().unwrap().iter().map(|entry| keys.map(|key| entry[key].clone()));
                maps.push(shown.collect::<Vec<_>>());
                let room = fs::metadata(&path).unwrap().blocks() * 512;
                // `falloc` and `full` allocate the added range; `off` and `metadata` do not.
                let full = !mode.ends_with("off") && !mode.ends_with("metadata");
                assert_eq!(room >= 1000 * 1024, full, "{format} {mode}: {room} bytes");
            }
            assert_eq!(maps[0], maps[1], "{format} {mode}");
        }
    }
    let path = scratch.sparse("raw", 4 * MIB);
    for (arguments, why) in [
        (&["--preallocation=metadata", "FILE", "+1M"][..], "raw images have no metadata"),
        (&["--preallocation=some", "FILE", "+1M"], "is none of off, metadata, falloc and full"),
        (&["FILE", "-1M"], "add --shrink"),
        (&["--shrink", "--preallocation=full", "FILE", "-1M"], "applies only to added space"),
    ] {
        let arguments =
            arguments.iter().map(|argument| if *argument == "FILE" { text(&path) } else { argument });
        assert_contains(&weir(&["resize", "-f", "raw"]).args(arguments).fails(), &[why]);
        assert_eq!(fs::metadata(&path).unwrap().len(), 4 * MIB, "{why}");
    }
    weir(&["resize", "-q", "-f", "raw", "--shrink", text(&path), "-1M"]).succeeds();
    assert_eq!(fs::metadata(&path).unwrap().len(), 3 * MIB);
}

#[test]
fn new_image_is_no_larger_than_qemus() {
    let scratch = Scratch::new();
    let (ours, theirs) = (scratch.path("ours.qcow2"), scratch.path("theirs.qcow2"));
    for options in
        ["cluster_size=2M", "cluster_size=64k", "cluster_size=512", "cluster_size=2M,extended_l2=on"]
    {
        weir(&["create", "-q", "-f", "qcow2", "-o", options, text(&ours), "10G"]).succeeds();
        qemu_img(["create", "-q", "-f", "qcow2", "-o", options, text(&theirs), "10G"]).succeeds();
        let [ours, theirs] = [&ours, &theirs].map(|path| fs::metadata(path).unwrap().blocks() * 512);
        assert!(ours <= theirs, "{options}: {ours} bytes, and QEMU's {theirs}");
        assert!(ours <= 400 << 10, "{options}: {ours} bytes");
    }
}

#[test]
fn disk_with_a_data_file_is_resized() {
    let scratch = Scratch::new();
    for raw in ["off", "on"] {
        let mut maps = Vec::new();
        for by_weir in [true, false] {
            let (path, data) = (scratch.path("disk.qcow2"), scratch.path("data"));
            let options = format!("data_file={},data_file_raw={raw}", text(&data));
            qemu_img(["create", "-q", "-f", "qcow2", "-o", &options, text(&path), "1M"]).succeeds();
            qemu_io(&path, &["write -P 1 0 1M"]);
            for more in
                [&["+100k"][..], &["--preallocation=metadata", "+1M"], &["--preallocation=full", "+200k"]]
            {
                let resize = ["resize", "-q", "-f", "qcow2", text(&path)];
                let program = if by_weir { weir(&resize) } else { qemu_img(resize) };
                program.args(more).succeeds();
            }
            qemu_img(["check", "-q", text(&path)]).succeeds();
            qemu_io(&path, &["read -P 1 0 1M", "read -P 0 1M 1324k"]);
            // QEMU rounds it up to a cluster.
            let length = fs::metadata(&data).unwrap().len();
            assert!(!by_weir || length == 2 * MIB + 300 * 1024, "data_file_raw={raw}: {length} bytes");
            let map = qemu_img(["map", "--output=json", "-f", "qcow2", text(&path)]).json();
            let zeroes = map.as_array().unwrap().iter().filter(|entry| entry["present"] == false);
            maps.push(zeroes.map(|entry| entry["length"].as_u64()).collect::<Vec<_>>());
        }
        assert_eq!(maps[0], maps[1], "data_file_raw={raw}");
    }
}

/// A header that a guest writes into its raw disk must not select files to read or to write.
#[test]
fn references_are_followed_only_with_an_explicit_format() {
    let scratch = Scratch::new();
    let (base, path) = (scratch.filled("base.raw", MIB), scratch.path("disk"));
    qemu_img(["create", "-q", "-f", "qcow2", "-b", text(&base), "-F", "raw", text(&path)]).succeeds();
    let before = fs::read(&path).unwrap();
    for arguments in
        [&["commit"][..], &["rebase", "-b", ""], &["rebase", "-u", "-b", ""], &["map"], &["resize"]]
    {
        let more = if arguments == ["resize"] { vec!["+1M"] } else { vec![] };
        let stderr = weir(arguments).arg(&path).args(more).fails();
        assert_contains(&stderr, &["looks like qcow2 and names other files, so its format must be given"]);
        assert!(fs::read(&path).unwrap() == before, "{arguments:?}");
    }
    weir(&["rebase", "-f", "qcow2", "-b", "", text(&path)]).succeeds();
    assert_same_content(&path, &base);
    assert_contains(&weir(&["rebase", "-b", "", text(&base)]).fails(), &["raw images have no backing file"]);
}

#[test]
fn image_cannot_be_its_own_target_or_backing_file() {
    let scratch = Scratch::new();
    let (image, overlay) = (scratch.path("one.qcow2"), scratch.path("other.qcow2"));
    weir(&["create", "-q", "-f", "qcow2", text(&image), "1M"]).succeeds();
    weir(&["create", "-q", "-f", "qcow2", "-b", "one.qcow2", "-F", "qcow2", text(&overlay)]).succeeds();
    let stderr = weir(&["convert", "-O", "qcow2"]).args([&image, &image]).fails();
    assert_contains(&stderr, &["is both source and target"]);
    for backing in ["one.qcow2", "other.qcow2"] {
        let stderr = weir(&["rebase", "-b", backing, "-F", "qcow2", text(&image)]).fails();
        assert_contains(&stderr, &["would be its own backing file"]);
    }
    let missing = scratch.path("nowhere").join("new");
    assert_contains(&weir(&["convert"]).args([&image, &missing]).fails(), &["is not a directory"]);
}

/// Data beyond the end of the disk in a raw data file must not change.
#[test]
fn raw_data_file_keeps_data_beyond_the_disk() {
    let scratch = Scratch::new();
    let (path, data) = (scratch.path("disk.qcow2"), scratch.path("data"));
    let options = format!("data_file={},data_file_raw=on", text(&data));
    qemu_img(["create", "-q", "-f", "qcow2", "-o", &options, text(&path), "1000k"]).succeeds();
    qemu_io(&path, &["write -P 1 0 1000k"]);
    fs::File::options().write(true).open(&data).unwrap().set_len(3 * MIB).unwrap();
    harness::qemu_io(["-f", "raw"], ["write -P 84 1000k 2072k"], &data);
    let before = fs::read(&data).unwrap();
    for size in ["1500k", "2M", "3M", "4M"] {
        weir(&["resize", "-q", "-f", "qcow2", text(&path), size]).succeeds();
        let after = fs::read(&data).unwrap();
        assert!(after[..before.len()] == before, "{size}");
        assert!(after[before.len()..].iter().all(|&byte| byte == 0), "{size}");
        qemu_img(["check", "-q", text(&path)]).succeeds();
    }
    qemu_io(&path, &["read -P 1 0 1000k", "read -P 84 1000k 2072k", "read -P 0 3M 1M"]);
}

/// A source that ends inside a cluster of a larger target. The rest of that cluster keeps the
/// target's content.
#[test]
fn source_ending_within_a_cluster_is_compressed_into_a_larger_target() {
    let scratch = Scratch::new();
    let base = scratch.path("base.qcow2");
    qemu_img(["create", "-q", "-f", "qcow2", text(&base), "1M"]).succeeds();
    qemu_io(&base, &["write -P 9 0 1M"]);
    for version in ["0.10", "1.1"] {
        for (fill, end) in
            [("write -P 3 0 100k", "read -P 3 0 100k"), ("write -z 0 100k", "read -P 0 0 100k")]
        {
            let (source, target) = (scratch.path("source.qcow2"), scratch.path("target.qcow2"));
            for (path, size) in [(&source, "100k"), (&target, "1M")] {
                let options = format!("compat={version}");
                qemu_img(["create", "-q", "-f", "qcow2", "-o", &options, text(path), size]).succeeds();
            }
            qemu_io(&source, &[fill]);
            let convert =
                ["convert", "-q", "-n", "-c", "-f", "qcow2", "-O", "qcow2", "-B", text(&base), "-F", "qcow2"];
            weir(&convert).args([&source, &target]).succeeds();
            qemu_img(["check", "-q", text(&target)]).succeeds();
            qemu_io(&target, &[end, "read -P 0 100k 924k"]);
            qemu_img(["rebase", "-u", "-f", "qcow2", "-F", "qcow2", "-b", text(&base), text(&target)])
                .succeeds();
            qemu_io(&target, &[end]);
        }
    }
}

/// Clusters that begin in a hole, or in a part of a larger cluster.
#[test]
fn sparse_source_is_compressed() {
    let scratch = Scratch::new();
    let raw = scratch.path("sparse.raw");
    fs::File::create(&raw).unwrap().set_len(5 * MIB).unwrap();
    harness::qemu_io(["-f", "raw"], ["write -P 5 20k 4k", "write -P 6 1M 100k", "write -P 7 5116k 4k"], &raw);
    let source = scratch.path("small.qcow2");
    let create = ["create", "-q", "-f", "qcow2", "-o", "cluster_size=4k"];
    qemu_img(create).args([text(&source), "5M"]).succeeds();
    qemu_io(&source, &["write -P 5 20k 4k", "write -P 6 1M 100k", "write -P 7 5116k 4k"]);
    for (format, path) in [("raw", &raw), ("qcow2", &source)] {
        for clusters in ["4k", "64k", "2M"] {
            let target = scratch.path("compressed.qcow2");
            let options = format!("cluster_size={clusters}");
            let convert = ["convert", "-q", "-f", format, "-O", "qcow2", "-c", "-o", &options];
            weir(&convert).args([path, &target]).succeeds();
            qemu_img(["check", "-q", text(&target)]).succeeds();
            assert_same_content(path, &target);
        }
    }
}
