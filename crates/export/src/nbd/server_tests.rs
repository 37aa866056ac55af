//! Exports that are added and removed, over real sockets.

use std::{
    cell::Cell,
    io::{ErrorKind, Read, Write},
    os::unix::net::UnixStream,
};

use policy::throttle::Limits;

use super::{
    handshake::{VisibleExports, take_replies},
    *,
};
use crate::nbd::negotiate::{self, Handshake, TlsPolicy};
use block::{disk::Disk, layer::throttle::DiskSettings};
use image::{Image, RawImage};
use reactor::{PollingMode, run, sim};
use storage::Storage;

fn export(name: &str) -> NbdServerExport {
    let storage = Storage::memory(1 << 20);
    let disk = Disk::new(name, Image::Raw(RawImage::new(storage)), DiskSettings::default(), None);
    let disk = Arc::new(disk.expect("no limits"));
    NbdServerExport {
        name: name.into(),
        description: "".into(),
        disk,
        read_only: false,
        bitmaps: Arc::default(),
        access: AccessRules::default(),
    }
}

/// Connects a client to `server`, which runs on this thread; returns the client's end.
fn connect(server: &Arc<NbdServer>, number: u64) -> UnixStream {
    let (client_end, server_end) = UnixStream::pair().expect("sockets");
    let slot = ConnectionSlot { server: Arc::clone(server), number, address: None, memory: None };
    server.used_slots.fetch_add(1, Ordering::SeqCst);
    reactor::spawn(slot.serve_in_slot(server_end.into(), server.quiesce_state.arriving()));
    client_end
}

/// Chooses an export by EXPORT_NAME. Returns its size, or `None` if the server closes.
async fn choose(mut client: UnixStream, name: &'static str) -> Option<(u64, UnixStream)> {
    reactor::run_blocking(move || {
        client.read_exact(&mut [0; 18]).expect("a greeting");
        // Fixed newstyle without zeroes, then NBD_OPT_EXPORT_NAME.
        let mut bytes = 3_u32.to_be_bytes().to_vec();
        bytes.extend(*b"IHAVEOPT\0\0\0\x01");
        bytes.extend((name.len() as u32).to_be_bytes());
        bytes.extend(name.as_bytes());
        client.write_all(&bytes).expect("sent");
        let mut size = [0; 10];
        client.read_exact(&mut size).ok()?;
        Some((u64::from_be_bytes(size[..8].try_into().expect("eight bytes")), client))
    })
    .await
}

async fn hung_up(mut client: UnixStream) {
    let rest = reactor::run_blocking(move || client.read(&mut [0; 1])).await;
    assert_eq!(rest.ok(), Some(0), "no byte comes after the end");
}

fn real<T: 'static>(future: impl Future<Output = T> + 'static) -> T {
    run(PollingMode::Off, future).expect("io_uring works")
}

#[test]
fn an_export_is_found_from_when_it_is_added_until_it_is_removed() {
    real(async {
        let server = NbdServer::new(None, NbdServerTerms::default());
        assert!(choose(connect(&server, 1), "vm1").await.is_none());
        let first = server.add(export("vm1")).expect("free");
        assert_eq!(server.add(export("vm1")), None, "one of a name");
        let (size_bytes, client) = choose(connect(&server, 2), "vm1").await.expect("found");
        assert_eq!(size_bytes, 1 << 20);
        assert_eq!(server.connections_of(first), 1);
        drop(client);
        server.wait_until_unused(first).await;
        assert_eq!(server.remove(first, Removal::IfUnused), Ok(()));
        assert_eq!(server.remove(first, Removal::IfUnused), Err(NotRemoved::Unknown));
        assert!(choose(connect(&server, 3), "vm1").await.is_none());
        let second = server.add(export("vm1")).expect("free again");
        assert_ne!(second, first, "a number is given once");
    });
}

#[test]
fn clients_keep_an_export_or_go_with_it() {
    real(async {
        let server = NbdServer::new(None, NbdServerTerms::default());
        let (used, other) = (server.add(export("used")).unwrap(), server.add(export("other")).unwrap());
        let (_, client) = choose(connect(&server, 1), "used").await.expect("found");
        let (_, bystander) = choose(connect(&server, 2), "other").await.expect("found");
        assert_eq!(server.remove(used, Removal::IfUnused), Err(NotRemoved::InUse { connections: 1 }));
        assert_eq!(server.remove(used, Removal::Hard), Ok(()));
        hung_up(client).await;
        server.wait_until_unused(used).await;
        assert_eq!((server.connections_of(used), server.connections_of(other)), (0, 1));
        drop(bystander);
        server.wait_until_unused(other).await;
    });
}

#[test]
fn throttled_client_is_disconnected_with_its_export() {
    real(async {
        let server = NbdServer::new(None, NbdServerTerms::default());
        let slow = export("slow");
        let mut limits = Limits::default();
        limits
            .set(policy::throttle::LimitSetting::from_name("iops-total").expect("a setting"), 1)
            .expect("valid");
        slow.disk.throttle().set(DiskSettings { limits, ..DiskSettings::default() }).expect("valid");
        let number = server.add(slow).expect("free");
        let (_, mut client) = choose(connect(&server, 1), "slow").await.expect("found");
        // Reads of one byte each, a hundred seconds' worth at the limit.
        let request = [&[0x25, 0x60, 0x95, 0x13][..], &[0; 23], &[1]].concat();
        client.write_all(&request.repeat(100)).expect("sent");
        reactor::run_blocking({
            let mut client = client.try_clone().expect("a descriptor");
            move || client.read_exact(&mut [0; 17]).expect("the first passes at once")
        })
        .await;
        assert_eq!(server.remove(number, Removal::Hard), Ok(()));
        let unused = reactor::timeout(Duration::from_secs(30), server.wait_until_unused(number)).await;
        assert!(unused.is_ok(), "it waits for its limits");
    });
}

/// libnbd takes a reply to a request that it still sends for an unknown cookie, and closes.
#[test]
fn rejected_write_is_answered_after_its_payload() {
    real(async {
        let server = NbdServer::new(None, NbdServerTerms::default());
        server.add(export("vm1")).expect("free");
        let (size_bytes, client) = choose(connect(&server, 1), "vm1").await.expect("found");
        let request = |command: u8, offset: u64, length: u32| {
            let head = [&[0x25, 0x60, 0x95, 0x13, 0, 0, 0, command][..], &[command; 8]].concat();
            [&head, &offset.to_be_bytes()[..], &length.to_be_bytes()].concat()
        };
        let payload = vec![1; 1 << 20];
        let replies = reactor::run_blocking(move || {
            let mut client = client;
            client.write_all(&request(1, size_bytes - 512, 1 << 20)).expect("sent");
            client.write_all(&payload[1..]).expect("sent");
            client.set_nonblocking(true).expect("set");
            let early = client.read(&mut [0; 1]).map_err(|error| error.kind());
            client.set_nonblocking(false).expect("set");
            client.write_all(&payload[..1]).expect("sent");
            client.write_all(&request(0, 0, 1)).expect("sent");
            let mut replies = [0; 16 + 17];
            client.read_exact(&mut replies).expect("two answers");
            (early, replies)
        });
        let (early, replies) = replies.await;
        // The last byte of the payload was withheld until here.
        assert_eq!(early, Err(ErrorKind::WouldBlock), "nothing before the last byte");
        let (refused, read) = replies.split_at(16);
        assert_eq!((&refused[4..8], &refused[8..]), (&28_u32.to_be_bytes()[..], &[1; 8][..]));
        assert_eq!((&read[4..8], &read[8..]), (&[0; 4][..], &[0, 0, 0, 0, 0, 0, 0, 0, 0][..]));
    });
}

/// Thousands of options at full speed, with no reply read: whatever the options are, the memory
/// held for replies is bounded. The receive buffer is not counted.
#[test]
fn option_replies_use_bounded_memory() {
    real(async {
        let server = NbdServer::new(None, NbdServerTerms::default());
        for number in 0..200 {
            server.add(export(&format!("disk-{number}"))).expect("a name of its own");
        }
        let offer =
            VisibleExports { server: &server, client: ClientIdentity::default(), shown: Cell::new(None) };
        let info = [&[0, 0, 0, 6][..], b"disk-7", &[0, 0]].concat();
        for (option, data) in [(3, &[][..]), (6, &info), (77, b""), (8, b"")] {
            let mut out = Vec::new();
            let mut handshake = Handshake::start(TlsPolicy::Off, &mut out);
            let option_bytes =
                [b"IHAVEOPT", &u32::to_be_bytes(option)[..], &(data.len() as u32).to_be_bytes(), data]
                    .concat();
            let input = [&3_u32.to_be_bytes()[..], &option_bytes.repeat(4096 / option_bytes.len())].concat();
            let (mut input, mut sent, mut max_bytes) = (&input[..], 0, 0);
            loop {
                let step = handshake.advance(input, &offer, &mut out);
                input = &input[step.consumed..];
                max_bytes = max_bytes.max(out.capacity());
                if let Some(reply) = take_replies(step.event, &mut out) {
                    max_bytes = max_bytes.max(reply.len() + out.capacity());
                    sent += reply.len();
                }
                if matches!(step.event, negotiate::HandshakeEvent::NeedInput) {
                    break;
                }
            }
            assert!(sent > 4096 && out.is_empty(), "option {option}: {sent} bytes were answered");
            assert!(max_bytes <= 8 << 10, "option {option}: {max_bytes} bytes are kept");
        }
    });
}

/// Each client is disconnected once. After that, and without any client, the function returns a
/// time to wait, because callers that need its memory must let its task end.
#[test]
fn a_client_in_its_handshake_is_disconnected_once() {
    sim::run(1, async {
        let server = NbdServer::new(None, NbdServerTerms::default());
        assert_eq!(server.disconnect_oldest(), Some(HANDSHAKE_GRACE));
        let (server_end, mut client_end) = UnixStream::pair().expect("sockets");
        server.lock().insert(1, ConnectedClient::new(OwnedFd::from(server_end).into(), None, reactor::now()));
        assert_eq!(server.disconnect_oldest(), Some(HANDSHAKE_GRACE));
        reactor::sleep_until(reactor::now() + HANDSHAKE_GRACE).await;
        assert_eq!(server.disconnect_oldest(), None);
        assert_eq!(client_end.read(&mut [0; 1]).ok(), Some(0), "it is disconnected");
        assert_eq!(server.disconnect_oldest(), Some(HANDSHAKE_GRACE));
    });
}
