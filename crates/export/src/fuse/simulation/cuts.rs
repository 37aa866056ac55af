//! A file that is truncated at any byte and extended again, while other requests read, write and
//! punch holes: bytes past its end must never reappear. The image's size is a multiple of one byte
//! or of a block.

use std::{
    rc::Rc,
    sync::{Arc, atomic::Ordering::SeqCst},
};

use block::{
    disk::Disk,
    layer::throttle::{GroupSettings, ThrottleGroup},
};
use image::{Image, RawImage};
use policy::time::Duration;
use reactor::{sim, spawn_joinable, timeout};
use storage::Storage;

use super::{
    BLOCK, DISK_BYTES, FALLOCATE, FOREVER, READ, SETATTR, WRITE, kernel::SimulatedFuseConnection, open,
    read_or_write,
};
use crate::{
    fuse::{
        channel::FuseChannel,
        device::{FuseDevice, FuseExport, FuseFileOwner},
        file_end::FileEnd,
        queue::FuseQueue,
    },
    random::{self, chance, sleep_randomly},
    seeds,
};

const GETATTR: u32 = 3;

#[test]
fn bytes_past_a_cut_never_reappear() {
    seeds::for_each("--lib", 600, |seed| {
        sim::run(seed, run());
    });
}

#[test]
fn stale_file_end_is_dropped_after_a_resize() {
    sim::run(1, async {
        let group = ThrottleGroup::new("group", GroupSettings::default(), None).expect("no limits");
        let behaviour = storage::simulated::Behaviour {
            block_bytes: BLOCK,
            latency: Duration::from_micros(10),
            error_probability: 0.0,
        };
        let (_, disk) = open(vec![0; DISK_BYTES], behaviour, &group);
        let (end, size) = (FileEnd::default(), DISK_BYTES as u64);
        end.set(Some(size - 1));
        end.forget_stale(&disk);
        assert_eq!(end.file_bytes(&disk), size - 1);
        disk.resize(2 * size).await.expect("it grows");
        assert_eq!(end.file_bytes(&disk), 2 * size);
        end.forget_stale(&disk);
        disk.resize(size).await.expect("it shrinks");
        assert_eq!(end.file_bytes(&disk), size);
    });
}

async fn run() {
    let settings = GroupSettings { limits: random::limits(40), ..GroupSettings::default() };
    let group = ThrottleGroup::new("group", settings, None).expect("drawn valid");
    let disk = if chance(50) {
        // An image whose size may be any number of bytes.
        let image = Image::Raw(RawImage::new(Storage::memory(DISK_BYTES as u64)));
        Arc::new(Disk::new("disk", image, <_>::default(), Some(&group)).expect("nothing is reserved"))
    } else {
        let latency = Duration::from_micros(sim::random(|random| random.u64(..2000)));
        let behaviour = storage::simulated::Behaviour { block_bytes: BLOCK, latency, error_probability: 0.0 };
        open(vec![0; DISK_BYTES], behaviour, &group).1
    };
    let device = Arc::new(FuseDevice::new(FuseExport {
        id: "file".into(),
        disk: Arc::clone(&disk),
        read_only: false,
        growable: true,
        owner: FuseFileOwner { permissions: 0o600, uid: 0, gid: 0 },
    }));
    let connection = Rc::<SimulatedFuseConnection>::default();
    let queues: Vec<_> = (0..sim::random(|random| random.usize(1..=3)))
        .map(|_| {
            let channel = FuseChannel::Simulated(connection.descriptor());
            spawn_joinable(FuseQueue::new(Arc::clone(&device), channel).serve())
        })
        .collect();
    let programs: Vec<_> = (0..sim::random(|random| random.usize(2..=6)))
        .map(|_| spawn_joinable(program(Rc::clone(&connection))))
        .collect();
    for program in programs {
        timeout(FOREVER, program).await.expect("every program ends");
    }
    let size = size(&connection).await;
    set_size(&connection, DISK_BYTES).await;
    let body = read_or_write(0, DISK_BYTES, 0);
    let content = ask(&connection, READ, &body, &[]).await;
    assert_eq!(content.len(), DISK_BYTES);
    // Extended to the full length, everything past the former end must read as zeroes.
    let stale = content.iter().skip(size).position(|&byte| byte != 0);
    assert_eq!(stale, None, "bytes past the end of {size} bytes have reappeared");
    connection.unmount();
    for queue in queues {
        timeout(FOREVER, queue).await.expect("a queue ends");
    }
    assert_eq!(device.in_flight.load(SeqCst), 0);
    assert_eq!(disk.memory().used(), 0, "memory that was not given back");
}

async fn program(connection: Rc<SimulatedFuseConnection>) {
    for _ in 0..sim::random(|random| random.usize(4..20)) {
        let start = sim::random(|random| random.usize(..DISK_BYTES));
        let length = sim::random(|random| random.usize(1..=3 * BLOCK)).min(DISK_BYTES - start);
        match sim::random(|random| random.u8(..8)) {
            0 | 1 => {
                let found = ask(&connection, READ, &read_or_write(start, length, 0), &[]).await;
                assert!(found.len() <= length, "more data than requested");
            }
            2..5 => {
                let reply =
                    ask(&connection, WRITE, &read_or_write(start, length, 0), &vec![0xff; length]).await;
                assert_eq!(reply[..4], (length as u32).to_ne_bytes(), "all was written");
            }
            5 => {
                let mut body = vec![0; 32];
                body[8..16].copy_from_slice(&(start as u64).to_ne_bytes());
                body[16..24].copy_from_slice(&(length as u64).to_ne_bytes());
                let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
                body[24..28].copy_from_slice(&mode.to_ne_bytes());
                ask(&connection, FALLOCATE, &body, &[]).await;
            }
            _ => set_size(&connection, if chance(20) { start - start % BLOCK } else { start }).await,
        }
        if chance(30) {
            sleep_randomly(Duration::from_millis(5)).await;
        }
    }
}

async fn size(connection: &SimulatedFuseConnection) -> usize {
    /// Offset of `size` in `fuse_attr_out`.
    const AT: usize = 24;
    let reply = ask(connection, GETATTR, &[0; 16], &[]).await;
    u64::from_ne_bytes(reply[AT..AT + 8].try_into().expect("eight bytes")) as usize
}

async fn set_size(connection: &SimulatedFuseConnection, size: usize) {
    let mut body = vec![0; 88];
    body[0] = 1 << 3;
    body[16..24].copy_from_slice(&(size as u64).to_ne_bytes());
    ask(connection, SETATTR, &body, &[]).await;
}

async fn ask(connection: &SimulatedFuseConnection, opcode: u32, body: &[u8], data: &[u8]) -> Vec<u8> {
    let unique = connection.send(opcode, body, data, true);
    let reply = connection.answer(unique).await;
    reply.unwrap_or_else(|errno| panic!("opcode {opcode} failed with {errno}"))
}
