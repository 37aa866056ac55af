//! A disk that is resized while a stream keeps a base that is longer than a removed image.

use std::sync::Arc;

use block::{
    disk::Disk,
    layer::throttle::{BackgroundSettings, DiskSettings},
};
use image::{
    Image, Qcow2Image, RawImage,
    qcow2::{
        Qcow2Components,
        create::{CreateOptions, create},
        header::BackingReference,
    },
};
use jobs::{
    job::{Job, JobKind, JobResult},
    stream::{Stream, StreamBase},
};
use policy::time::Duration;
use reactor::{sim, sleep_until, spawn_joinable};
use storage::Storage;

const CLUSTER: u64 = 64 << 10;

async fn overlay(size_bytes: u64, below: Arc<Image>) -> Image {
    let backing = Some(BackingReference { name: "below".to_owned(), format: Some("raw".to_owned()) });
    let options = CreateOptions { size_bytes, backing, ..CreateOptions::default() };
    let storage = Storage::with_content(&[]).await;
    create(&storage, None, &options).await.expect("valid");
    let components = Qcow2Components { backing: Some(below), ..Qcow2Components::of(storage) };
    Image::Qcow2(Qcow2Image::open(components).await.expect("valid"))
}

/// Sizes in clusters: of the disk and the removed image, and those that the disk gets meanwhile.
async fn stream_beside(removed: u64, disk: u64, changes: &[u64]) -> (JobResult, Vec<u8>) {
    let base = Storage::with_content(&vec![7; 4 * CLUSTER as usize]).await;
    let base = Arc::new(Image::Raw(RawImage::new(base)));
    let middle = Arc::new(overlay(removed * CLUSTER, Arc::clone(&base)).await);
    let top = overlay(disk * CLUSTER, middle).await;
    let disk = Arc::new(Disk::new("disk", top, DiskSettings::default(), None).expect("no reservations"));
    let reference = BackingReference { name: "base".to_owned(), format: Some("raw".to_owned()) };
    let job = Job::new("stream-disk", JobKind::Stream);
    let base = StreamBase { image: base, reference };
    let stream = Stream::begin(&job, &disk, Some(base), BackgroundSettings::default()).await.expect("valid");
    job.pause().expect("it is running");
    let running = spawn_joinable(stream.run());
    for size in changes {
        disk.resize(size * CLUSTER).await.expect("memory");
    }
    sleep_until(reactor::now() + Duration::from_millis(1)).await;
    job.resume().expect("it is paused");
    let result = running.await;
    let content = disk.image().read(0, disk.size_bytes() as usize).await.expect("memory").to_vec();
    (result, content)
}

#[test]
fn a_resize_shows_nothing_of_the_base() {
    sim::run(1, async {
        let pages = |data: u64, zeroes: u64| {
            let mut content = vec![7; (data * CLUSTER) as usize];
            content.resize(((data + zeroes) * CLUSTER) as usize, 0);
            content
        };
        let (result, content) = stream_beside(2, 2, &[]).await;
        assert_eq!(result, JobResult::Completed);
        assert!(content == pages(2, 0));
        for (removed, disk, changes) in [(2, 2, &[4][..]), (2, 4, &[2, 4]), (1, 1, &[3])] {
            let (result, content) = stream_beside(removed, disk, changes).await;
            assert!(matches!(result, JobResult::Failed(why) if why.contains("was resized")), "{changes:?}");
            let last = *changes.last().expect("one");
            assert!(content == pages(removed, last - removed), "{changes:?}");
        }
    });
}
