//! Internal snapshots on storage that answers late.

use block::disk::Disk;
use image::{
    Image,
    qcow2::{
        Qcow2Components,
        create::{CreateOptions, create},
    },
};
use reactor::sim;
use storage::{
    Storage,
    align::Align,
    simulated::{Behaviour, SimulatedStorage},
};

use super::*;
use crate::registry::RunningDisk;

const SIZE: u64 = 1 << 20;

async fn prepared(registry: &Registry, disk: &str, behaviour: Behaviour) -> PreparedSnapshot {
    let file = Storage::with_content(&[]).await;
    create(&file, None, &CreateOptions { size_bytes: SIZE, ..CreateOptions::default() })
        .await
        .expect("valid");
    let mut content = file.read_all().await.expect("memory");
    content.resize(content.len().next_multiple_of(behaviour.block_bytes), 0);
    let device = Storage::Simulated(Align::new(SimulatedStorage::new(content, behaviour)));
    let image = Qcow2Image::open(Qcow2Components::of(device)).await.expect("new");
    let block = Disk::new(disk, Image::Qcow2(image.clone()), Default::default(), None).expect("no limits");
    let running = Rc::new(RunningDisk::new(block, Default::default()));
    let below = running.disk.image();
    let kind = PreparedKind::Internal { image, name: "one".to_owned() };
    let reserved = Rc::new(registry.jobs.reserve_snapshot(disk).expect("it is idle"));
    PreparedSnapshot { running, below, kind, reserved }
}

async fn count(prepared: &PreparedSnapshot) -> usize {
    let PreparedKind::Internal { image, .. } = &prepared.kind else { unreachable!("both are internal") };
    image.snapshots().await.expect("valid").len()
}

#[test]
fn late_internal_snapshots_are_deleted_on_all_disks() {
    sim::run(1, async {
        let registry = Registry::new(None, Rc::new(|_| ()));
        let slow = Behaviour { latency: Duration::from_secs(1), ..Behaviour::default() };
        let all = [
            prepared(&registry, "fast", Behaviour::default()).await,
            prepared(&registry, "slow", slow).await,
        ];
        let internal = InternalSnapshots::of(&all);
        let deadline = reactor::now() + Duration::from_millis(500);
        let error = internal.take(deadline).await.expect_err("the second disk takes seconds");
        assert!(error.to_string().starts_with("disk fast, slow: the storage did not answer"), "{error}");
        let images = all.map(|prepared| {
            // Like the end of the command.
            let PreparedSnapshot { running, below, kind, .. } = prepared;
            (running, below, kind)
        });
        drop(internal);
        assert!(registry.jobs.check_idle("slow").is_err(), "its image is still changing");
        while registry.jobs.check_idle("slow").is_err() {
            reactor::sleep_until(reactor::now() + Duration::from_secs(1)).await;
        }
        for (running, below, kind) in images {
            let disk = running.disk.name().to_string();
            let reserved = Rc::new(registry.jobs.reserve_snapshot(&disk).expect("it is idle"));
            let prepared = PreparedSnapshot { running, below, kind, reserved };
            assert_eq!(count(&prepared).await, 0, "{disk}");
        }
    });
}

#[test]
fn internal_snapshots_in_time_stay() {
    sim::run(1, async {
        let registry = Registry::new(None, Rc::new(|_| ()));
        let all = [
            prepared(&registry, "a", Behaviour::default()).await,
            prepared(&registry, "b", Behaviour::default()).await,
        ];
        let internal = InternalSnapshots::of(&all);
        internal.take(reactor::now() + PAUSE_TIMEOUT).await.expect("nothing fails");
        assert_eq!([count(&all[0]).await, count(&all[1]).await], [1, 1]);
    });
}

#[test]
fn no_snapshot_is_taken_once_the_daemon_is_stopping() {
    sim::run(1, async {
        let registry = Registry::new(None, Rc::new(|_| ()));
        let all = [prepared(&registry, "a", Behaviour::default()).await];
        registry.lifecycle.is_ending.set(true);
        let error = take_all(&registry, &all, Instant::MAX).await.expect_err("it is stopping");
        assert_eq!(error.to_string(), "weir is stopping");
        assert_eq!(count(&all[0]).await, 0);
        registry.lifecycle.is_ending.set(false);
        take_all(&registry, &all, Instant::MAX).await.expect("nothing fails");
        assert_eq!(count(&all[0]).await, 1);
    });
}
