//! No descriptor of a front end is left open after it has disconnected. A separate test binary,
//! because descriptors are counted for the whole process.

use std::{
    fs::File,
    io::IoSlice,
    mem::MaybeUninit,
    os::{
        fd::{AsFd as _, BorrowedFd},
        unix::net::UnixStream,
    },
};

use export::vhost_user_blk::{VhostUserConnection, VhostUserOffer, VhostUserSession, fuzzing};
use reactor::PollingMode;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

fn count() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("procfs").count()
}

/// Sends one message with this number of descriptors, then disconnects.
async fn one_message(code: u32, flags: u32, payload: usize, descriptors: usize) {
    let (back_end, front_end) = UnixStream::pair().expect("sockets");
    let file = File::open("/dev/null").expect("it is there");
    let descriptors: Vec<BorrowedFd<'_>> = (0..descriptors).map(|_| file.as_fd()).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(40))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)));
    let mut bytes = [code, flags, payload as u32].map(u32::to_ne_bytes).concat();
    bytes.resize(12 + payload, 0);
    sendmsg(&front_end, &[IoSlice::new(&bytes)], &mut control, SendFlags::empty()).expect("there is room");
    drop(front_end);
    let session = VhostUserSession::new(VhostUserOffer { queues: 2, ..VhostUserOffer::default() });
    let mut connection = VhostUserConnection::new("vm1".into(), back_end.into(), session);
    while connection.next().await.is_ok() {}
}

#[test]
fn every_descriptor_is_closed() {
    let before = count();
    for seed in 0..2000 {
        fastrand::seed(seed);
        let length = fastrand::usize(..300);
        // In every second conversation all messages are generated, so that it lasts longer.
        let min_byte = if seed % 2 == 0 { 0 } else { 48 };
        let data: Vec<u8> = (0..length).map(|_| fastrand::u8(min_byte..)).collect();
        fuzzing::vhost_user_session(&data);
        assert_eq!(count(), before, "seed {seed}");
    }
    let leaked = reactor::run(PollingMode::Off, async move {
        one_message(3, 1, 0, 0).await;
        let before = count();
        for code in 0..46 {
            for descriptors in [0, 1, 2, 33, 40] {
                for (flags, payload) in [(1, 0), (9, 0), (1, 8), (1, 16), (1, 24), (1, 40), (1, 41), (2, 0)] {
                    one_message(code, flags, payload, descriptors).await;
                }
            }
        }
        // The kernel may release a socket of a cancelled operation a little later.
        for _ in 0..1000 {
            if count() == before {
                break;
            }
            reactor::yield_now().await;
        }
        count() as i64 - before as i64
    });
    assert_eq!(leaked.expect("io_uring works on a test machine"), 0);
}
