//! Errors that a guest sees after writes were lost with the process that acknowledged them.

use std::os::unix::fs::FileExt as _;

use image::qcow2::{
    Qcow2Components as ImageParts, Qcow2Image,
    create::{CreateOptions, create},
};

use super::*;

const FLUSH: u32 = 4;

/// A disk with qcow2 metadata that stays in memory until a flush.
async fn server_of_qcow2() -> Arc<VhostUserServer> {
    let storage = Storage::memory(0);
    let options = CreateOptions { size_bytes: 1 << 20, ..CreateOptions::default() };
    create(&storage, None, &options).await.expect("valid");
    let image = Qcow2Image::open(ImageParts::of(storage)).await.expect("valid");
    let disk = Disk::new("disk", Image::Qcow2(image), DiskSettings::default(), None).expect("no limits");
    VhostUserServer::new(VhostUserExport {
        disk: Arc::new(disk),
        ..export_of(Storage::memory(512), Limits::default(), offer())
    })
}

fn offer() -> VhostUserOffer {
    VhostUserOffer { queues: 2, queue_size: SIZE, write_cache: true, ..VhostUserOffer::default() }
}

/// An in-flight area, as a front end keeps it.
struct KeptInflightArea(File, u64);

impl KeptInflightArea {
    fn new() -> Self {
        let (file, bytes) = crate::vhost_user_blk::inflight::create(2, SIZE, false).expect("made");
        Self(file.into(), bytes)
    }

    /// Copy of the area's part behind the rings, at the moment when the process is killed. The copy
    /// belongs to another guest, whose rings start at 0.
    fn as_of_now(&self) -> Self {
        let copy = Self::new();
        let (at, mut content) = (self.1 - 64, [0; 64]);
        self.0.read_exact_at(&mut content, at).expect("it is there");
        copy.0.write_all_at(&content, at).expect("it may be written to");
        copy
    }
}

/// Connects a front end that passes its area, and starts its first ring.
async fn connect(server: &Arc<VhostUserServer>, area: &KeptInflightArea) -> (SocketFrontEnd, GuestRing) {
    let front_end = SocketFrontEnd::connect(server).await;
    pass_area(&front_end, area).await;
    let ring = front_end.start(0, event(0), event(0)).await;
    (front_end, ring)
}

async fn pass_area(front_end: &SocketFrontEnd, area: &KeptInflightArea) {
    let info = [numbers(&[area.1, 0]), [2, SIZE].map(u16::to_ne_bytes).concat()].concat();
    front_end.request_acknowledged(code::SET_INFLIGHT_FD, &info, &[area.0.as_fd()]).await;
}

/// Status of a request of this kind.
async fn request_status(front_end: &mut SocketFrontEnd, ring: &mut GuestRing, kind: u32) -> u8 {
    let at = front_end.request(ring, kind, 0, &[7; 512]);
    ring.kick_and_wait().await;
    front_end.data(at).1
}

/// Status of a flush at another process that is given this area.
async fn flush_status_after(area: &KeptInflightArea) -> u8 {
    let other = server_over(Storage::memory(1 << 20), Limits::default());
    let (mut front_end, mut ring) = connect(&other, area).await;
    let status = request_status(&mut front_end, &mut ring, FLUSH).await;
    front_end.leave().await;
    status
}

#[test]
fn flushes_fail_after_unflushed_writes_were_lost() {
    real(async {
        let (server, area) = (server_of_qcow2().await, KeptInflightArea::new());
        let (mut front_end, mut ring) = connect(&server, &area).await;
        assert_eq!(flush_status_after(&area.as_of_now()).await, 0, "nothing was written");
        assert_eq!(request_status(&mut front_end, &mut ring, 1).await, 0);
        let killed = area.as_of_now();
        assert_eq!(flush_status_after(&killed).await, 1);
        assert_eq!(
            flush_status_after(&killed.as_of_now()).await,
            1,
            "the death of another process has no effect"
        );

        assert_eq!(request_status(&mut front_end, &mut ring, FLUSH).await, 0);
        assert_eq!(flush_status_after(&area.as_of_now()).await, 0);
        // The cluster is already allocated, so the write leaves no dirty metadata.
        assert_eq!(request_status(&mut front_end, &mut ring, 1).await, 0);
        assert_eq!(flush_status_after(&area.as_of_now()).await, 0);
        front_end.leave().await;
    });
}

#[test]
fn a_guest_that_resets_its_device_flushes_again() {
    real(async {
        let (server, area) = (server_of_qcow2().await, KeptInflightArea::new());
        let (mut front_end, mut ring) = connect(&server, &area).await;
        request_status(&mut front_end, &mut ring, 1).await;
        let other = server_of_qcow2().await;
        let (mut killed, mut ring) = connect(&other, &area.as_of_now()).await;
        assert_eq!(request_status(&mut killed, &mut ring, FLUSH).await, 1);
        assert_eq!(request_status(&mut killed, &mut ring, 1).await, 0, "writes do not fail");
        assert_eq!(request_status(&mut killed, &mut ring, FLUSH).await, 1, "the loss is unknown");
        killed.request_acknowledged(code::RESET_DEVICE, &[], &[]).await;
        let mut ring = killed.start(1, event(0), event(0)).await;
        assert_eq!(request_status(&mut killed, &mut ring, FLUSH).await, 0);
        killed.leave().await;
        front_end.leave().await;
    });
}

#[test]
fn orderly_end_loses_no_writes() {
    real(async {
        let (server, area) = (server_of_qcow2().await, KeptInflightArea::new());
        let (mut front_end, mut ring) = connect(&server, &area).await;
        request_status(&mut front_end, &mut ring, 1).await;
        front_end.leave().await;
        assert_eq!(
            flush_status_after(&area.as_of_now()).await,
            0,
            "it was written once its front end had gone"
        );

        // The front end is transferred to another process.
        let (first, second) = (server_of_qcow2().await, server_of_qcow2().await);
        let area = area.as_of_now();
        let (mut front_end, mut ring) = connect(&first, &area).await;
        request_status(&mut front_end, &mut ring, 1).await;
        assert!(first.quiesce(TEST_TIMEOUT).await);
        second.adopt(first.take_quiesced().expect("it is at rest")).expect("the same export");
        let served = attend(&second, front_end.socket.clone());
        request_status(&mut front_end, &mut ring, 0).await;
        assert_eq!(flush_status_after(&area.as_of_now()).await, 0, "it was written before it came here");
        assert_eq!(request_status(&mut front_end, &mut ring, FLUSH).await, 0);
        drop((front_end.socket, served));
    });
}

#[test]
fn paused_machine_loses_no_writes() {
    // QEMU's `stop` and `cont`: the device is reset, and the same area is passed again.
    real(async {
        let (server, area) = (server_of_qcow2().await, KeptInflightArea::new());
        let (mut front_end, mut ring) = connect(&server, &area).await;
        request_status(&mut front_end, &mut ring, 1).await;
        front_end.stop(0).await;
        front_end.request_acknowledged(code::SET_STATUS, &numbers(&[0]), &[]).await;
        assert_eq!(flush_status_after(&area.as_of_now()).await, 0, "it was written when the machine stopped");
        let other = KeptInflightArea::new();
        pass_area(&front_end, &other).await;
        assert_eq!(flush_status_after(&other.as_of_now()).await, 0);
        pass_area(&front_end, &area).await;
        let mut ring = front_end.start(1, event(0), event(0)).await;
        assert_eq!(request_status(&mut front_end, &mut ring, FLUSH).await, 0);
        front_end.leave().await;

        let (server, area) = (server_of_qcow2().await, KeptInflightArea::new());
        let (mut front_end, mut ring) = connect(&server, &area).await;
        request_status(&mut front_end, &mut ring, 1).await;
        front_end.stop(0).await;
        front_end.request_acknowledged(code::SET_STATUS, &numbers(&[0]), &[]).await;
        front_end.leave().await;
        assert_eq!(
            flush_status_after(&area.as_of_now()).await,
            0,
            "it was written once its front end had gone"
        );
    });
}
