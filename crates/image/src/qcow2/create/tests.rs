//! Content of a new image, rejected options, and interrupted creations.

use super::*;
use reactor::sim;
use storage::{
    align::Align,
    simulated::{Behaviour, SimulatedStorage},
};

use crate::qcow2::{big_endian::words, read_header};
use policy::time::Duration;

async fn numbers_of(storage: &Storage, offset: u64, count: usize) -> Vec<u64> {
    let bytes = metadata_io::read(storage, offset, count * 8).await.expect("memory");
    words(&bytes).collect()
}

#[test]
fn created_image_has_all_its_options() {
    let backing = Some(BackingReference { name: "base.raw".into(), format: Some("raw".into()) });
    let plain = CreateOptions { size_bytes: 1 << 30, ..CreateOptions::default() };
    for options in [
        plain.clone(),
        CreateOptions { version: 2, ..plain.clone() },
        CreateOptions { cluster_bytes: 512, size_bytes: 1 << 24, refcount_bits: 1, ..plain.clone() },
        CreateOptions { cluster_bytes: 2 << 20, refcount_bits: 64, extended_l2: true, ..plain.clone() },
        CreateOptions { compression: CompressionType::Zstd, lazy_refcounts: true, backing, ..plain.clone() },
        CreateOptions { luks: Some([&b"LUKS\xba\xbe"[..], &[0; 99994]].concat()), ..plain.clone() },
        CreateOptions { size_bytes: 0, ..plain },
    ] {
        sim::run(1, async move {
            let storage = Storage::memory(512);
            let header = create(&storage, None, &options).await.expect("valid");
            assert_eq!(read_header(&storage).await, Ok(header.clone()));
            assert_eq!(header.size_bytes, options.size_bytes);
            assert_eq!(header.refcount_bits(), options.refcount_bits);
            if let Some(FileRegion { offset, length }) = header.encryption {
                assert_eq!(
                    metadata_io::read(&storage, offset, length as usize).await,
                    Ok(options.luks.expect("given"))
                );
            }
        });
    }
}

#[test]
fn created_image_has_exact_refcounts() {
    sim::run(1, async {
        let options = CreateOptions {
            size_bytes: 4 << 20,
            cluster_bytes: 512,
            refcount_bits: 32,
            preallocation: Preallocation::Metadata,
            ..CreateOptions::default()
        };
        let storage = Storage::memory(512);
        let header = create(&storage, None, &options).await.expect("valid");
        let entries = header.refcount_table_clusters as usize * 64;
        let mut used = 0;
        for block in numbers_of(&storage, header.refcount_table_offset, entries).await {
            let bytes = if block == 0 {
                Vec::new()
            } else {
                metadata_io::read(&storage, block, 512).await.expect("memory")
            };
            for index in 0..bytes.len() / 4 {
                let count = refcount_entries::get(&bytes, 5, index);
                assert!(count <= 1);
                used += count;
            }
        }
        assert_eq!(storage.size_bytes(), used * 512, "the file ends with the last used cluster");
        let l1 = numbers_of(&storage, header.l1_offset, header.l1_entries as usize).await;
        assert_eq!(l1.len(), 128, "8192 clusters in tables of 64");
        let first = numbers_of(&storage, l1[0] & !(1 << 63), 2).await;
        assert_eq!(first[1] - first[0], 512, "guest clusters follow each other");
        assert_eq!(first[0] >> 63, 1);
    });
}

#[test]
fn invalid_options_are_rejected() {
    let plain = CreateOptions { size_bytes: 1 << 20, ..CreateOptions::default() };
    let backing = || Some(BackingReference { name: "b".into(), format: None });
    for (expect, options) in [
        ("cluster_size=3000: is not", CreateOptions { cluster_bytes: 3000, ..plain.clone() }),
        ("refcount_bits=128: is not", CreateOptions { refcount_bits: 128, ..plain.clone() }),
        ("extended_l2=on: needs", CreateOptions { extended_l2: true, cluster_bytes: 4096, ..plain.clone() }),
        (
            "lazy_refcounts=on: needs compat=1.1",
            CreateOptions { lazy_refcounts: true, version: 2, ..plain.clone() },
        ),
        (
            "refcount_bits=8: needs compat=1.1",
            CreateOptions { refcount_bits: 8, version: 2, ..plain.clone() },
        ),
        ("data_file_raw=on: needs a data_file", CreateOptions { data_file_raw: true, ..plain.clone() }),
        (
            "data_file_raw=on: and a backing file",
            CreateOptions {
                data_file_raw: true,
                data_file: Some("d".into()),
                backing: backing(),
                ..plain.clone()
            },
        ),
        (
            "preallocation: and a backing file",
            CreateOptions { preallocation: Preallocation::Full, backing: backing(), ..plain.clone() },
        ),
        (
            "too large for clusters of 512",
            CreateOptions { cluster_bytes: 512, size_bytes: 1 << 40, ..plain.clone() },
        ),
        ("sizes are below 8E", CreateOptions { size_bytes: u64::MAX, ..plain }),
    ] {
        sim::run(1, async move {
            let storage = Storage::memory(512);
            let message = create(&storage, None, &options).await.expect_err(expect).to_string();
            assert!(message.contains(expect), "{message}");
            assert_eq!(storage.size_bytes(), 512, "{expect}: nothing was written");
        });
    }
}

const DISK: usize = 1 << 20;

fn small() -> CreateOptions {
    CreateOptions {
        size_bytes: 256 << 10,
        cluster_bytes: 4096,
        preallocation: Preallocation::Full,
        ..CreateOptions::default()
    }
}

/// Content of a disk after an image was created on it.
fn created(content: &[u8]) -> Vec<u8> {
    let content = content.to_vec();
    sim::run(1, async move {
        let storage = Storage::memory(512);
        metadata_io::write(&storage, 0, &content).await.expect("memory");
        create(&storage, None, &small()).await.expect("valid");
        metadata_io::read(&storage, 0, DISK).await.expect("memory")
    })
}

#[test]
fn crash_during_creation_leaves_old_new_or_no_image() {
    let old = sim::run(1, async {
        let storage = Storage::memory(512);
        let options = CreateOptions { size_bytes: 1 << 20, ..CreateOptions::default() };
        create(&storage, None, &options).await.expect("valid");
        metadata_io::read(&storage, 0, DISK).await.expect("memory")
    });
    let new = created(&old);
    let mut left = [0; 3];
    for seed in 0..300 {
        let content = old.clone();
        let content = sim::run(seed, async move {
            let disk = SimulatedStorage::new(content, Behaviour::default());
            let storage = Storage::Simulated(Align::new(disk.clone()));
            let creating = reactor::spawn_joinable(async move { create(&storage, None, &small()).await });
            let instant = sim::random(|random| random.u64(..40_000_000));
            reactor::sleep_until(reactor::now() + Duration::from_nanos(instant)).await;
            let content = disk.crash();
            drop(creating);
            content
        });
        if content == new {
            left[0] += 1;
        } else if content == old {
            left[1] += 1;
        } else {
            assert!(Qcow2Header::parse(&content).is_err(), "seed {seed}: half an image");
            left[2] += 1;
        }
    }
    assert!(left.iter().all(|count| *count > 0), "{left:?}: each happens");
}

#[test]
fn preallocated_metadata_is_sparse_without_old_bytes() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let path = directory.path().join("image");
    let spec = format!("file:{}", path.to_str().expect("UTF-8"));
    for options in [
        CreateOptions { size_bytes: 1 << 40, cluster_bytes: 2 << 20, ..CreateOptions::default() },
        CreateOptions { size_bytes: 1 << 40, preallocation: Preallocation::Off, ..CreateOptions::default() },
        CreateOptions { size_bytes: 1 << 20, cluster_bytes: 512, ..CreateOptions::default() },
    ] {
        for old in [512, 20 << 20] {
            std::fs::write(&path, vec![0xaa; old]).expect("there is room");
            let (spec, create_options) = (spec.clone(), options.clone());
            let header = reactor::run(reactor::PollingMode::Off, async move {
                let storage = storage::open_storage(&spec, Default::default()).expect("there");
                create(&storage, None, &create_options).await.expect("valid")
            });
            let header = header.expect("io_uring");
            let content = std::fs::read(&path).expect("there");
            let l1 = header.l1_offset as usize..header.l1_offset as usize + header.l1_entries as usize * 8;
            assert!(content[l1].iter().all(|byte| *byte == 0));
            let metadata = options.cluster_bytes as usize..(4 * options.cluster_bytes) as usize;
            let not_zero = content[metadata].iter().filter(|byte| **byte != 0).count();
            assert!(not_zero < 64, "{not_zero} bytes are not zero");
            if old == 512 {
                let blocks =
                    std::os::unix::fs::MetadataExt::blocks(&std::fs::metadata(&path).expect("there"));
                assert!(blocks * 512 <= 64 << 10, "{} bytes", blocks * 512);
            }
        }
    }
}
