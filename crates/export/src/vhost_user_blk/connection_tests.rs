//! Connections over real sockets, with the interruptions and floods of a hostile front end.

use std::{
    future::poll_fn,
    io::{Read as _, Write as _},
    os::{fd::BorrowedFd, unix::net::UnixStream},
    pin::pin,
    task::Poll,
};

use reactor::{PollingMode, buffer::IoBuffer};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use super::*;
use crate::vhost_user_blk::{
    features::{VhostUserOffer, protocol},
    message::{MAX_PAYLOAD_BYTES, RegionInfo, VringAddresses, code},
};

fn real<T: 'static>(future: impl Future<Output = T> + 'static) -> T {
    reactor::run(PollingMode::Off, future).expect("io_uring works on a test machine")
}

fn connection() -> (VhostUserConnection, UnixStream) {
    let (back_end, front_end) = UnixStream::pair().expect("sockets");
    let session =
        VhostUserSession::new(VhostUserOffer { size_bytes: 1 << 20, queues: 2, ..VhostUserOffer::default() });
    (VhostUserConnection::new("vm1".into(), back_end.into(), session), front_end)
}

fn message(code: u32, flags: u32, payload: &[u8]) -> Vec<u8> {
    let mut bytes = [code, flags, payload.len() as u32].map(u32::to_ne_bytes).concat();
    bytes.extend_from_slice(payload);
    bytes
}

fn number(code: u32, number: u64) -> Vec<u8> {
    message(code, 1, &number.to_ne_bytes())
}

fn reply(code: u32, number: u64) -> Vec<u8> {
    message(code, 5, &number.to_ne_bytes())
}

fn send_with(socket: &UnixStream, bytes: &[u8], descriptors: usize) {
    let (channel, _) = UnixStream::pair().expect("sockets");
    let descriptors: Vec<BorrowedFd<'_>> = (0..descriptors).map(|_| channel.as_fd()).collect();
    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(64))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)));
    let sent = sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::empty());
    assert_eq!(sent, Ok(bytes.len()));
}

/// The next `count` bytes that the front end receives.
async fn received(connection: &mut VhostUserConnection, front_end: &UnixStream, count: usize) -> Vec<u8> {
    let front_end = Fd::from(front_end.try_clone().expect("a copy"));
    let mut reading = pin!(async {
        let mut buffer = IoBuffer::new(count);
        let mut filled = 0;
        while filled < count {
            let (result, returned) = operation::receive(&front_end, buffer, filled).await;
            (filled, buffer) = (filled + result.expect("connected"), returned);
        }
        buffer.to_vec()
    });
    let mut next = pin!(connection.next());
    poll_fn(|context| {
        if let Poll::Ready(bytes) = reading.as_mut().poll(context) {
            return Poll::Ready(bytes);
        }
        match next.as_mut().poll(context) {
            Poll::Ready(next) => panic!("{next:?}"),
            Poll::Pending => Poll::Pending,
        }
    })
    .await
}

/// Polls the connection once, so that it receives available bytes.
async fn poll_once(connection: &mut VhostUserConnection) {
    let mut next = pin!(connection.next());
    poll_fn(|context| {
        assert!(next.as_mut().poll(context).is_pending());
        Poll::Ready(())
    })
    .await;
}

#[test]
fn messages_parse_in_any_pieces() {
    real(async {
        let (mut connection, mut front_end) = connection();
        let requests = [
            message(code::GET_QUEUE_NUM, 1, &[]),
            number(code::SET_PROTOCOL_FEATURES, protocol::REPLY_ACK),
            message(code::SET_STATUS, 9, &3_u64.to_ne_bytes()),
            message(code::GET_STATUS, 1, &[]),
        ];
        let requests = requests.concat();
        let replies =
            [reply(code::GET_QUEUE_NUM, 2), reply(code::SET_STATUS, 0), reply(code::GET_STATUS, 3)].concat();
        front_end.write_all(&requests).expect("there is room");
        assert_eq!(received(&mut connection, &front_end, replies.len()).await, replies);
        // The same messages byte by byte: each is parsed only when it is complete.
        for byte in &requests {
            front_end.write_all(&[*byte]).expect("there is room");
            poll_once(&mut connection).await;
        }
        assert_eq!(received(&mut connection, &front_end, replies.len()).await, replies);
        drop(front_end);
        assert!(matches!(connection.next().await, Err(FrontEndEnd::Disconnected)));
    });
}

#[test]
fn descriptors_belong_to_their_message() {
    real(async {
        let (mut connection, mut front_end) = connection();
        front_end.write_all(&number(code::SET_PROTOCOL_FEATURES, protocol::OFFERED)).expect("sent");
        for _ in 0..2 {
            send_with(&front_end, &message(code::SET_BACKEND_REQ_FD, 9, &[]), 1);
            front_end.write_all(&message(code::GET_QUEUE_NUM, 9, &[])).expect("sent");
        }
        send_with(&front_end, &message(code::SET_BACKEND_REQ_FD, 9, &[]), 2);
        // Passed with the payload instead of the header.
        let kick = message(code::SET_VRING_KICK, 9, &[0; 8]);
        front_end.write_all(&kick[..12]).expect("sent");
        send_with(&front_end, &kick[12..], 1);
        let (channel, queues) = (reply(code::SET_BACKEND_REQ_FD, 0), reply(code::GET_QUEUE_NUM, 2));
        let (refused, kick) = (reply(code::SET_BACKEND_REQ_FD, 1), reply(code::SET_VRING_KICK, 0));
        let replies = [&channel[..], &queues, &channel, &queues, &refused, &kick].concat();
        assert_eq!(received(&mut connection, &front_end, replies.len()).await, replies);
    });
}

#[test]
fn too_many_descriptors_end_the_connection() {
    for count in [40, 64] {
        real(async move {
            let (mut connection, front_end) = connection();
            send_with(&front_end, &message(code::SET_OWNER, 1, &[]), count);
            assert!(matches!(connection.next().await, Err(FrontEndEnd::Descriptors)));
        });
    }
    real(async {
        // A few descriptors with each byte.
        let (mut connection, front_end) = connection();
        let bytes = message(code::SET_VRING_ADDR, 1, &[0; 40]);
        for byte in &bytes[..40] {
            send_with(&front_end, &[*byte], 4);
        }
        assert!(matches!(connection.next().await, Err(FrontEndEnd::Descriptors)));
    });
}

#[test]
fn malformed_header_ends_the_connection() {
    for (bytes, why) in [
        (message(code::GET_FEATURES, 2, &[]), "not a message: version 2 of the protocol instead of 1"),
        (message(code::GET_FEATURES, 5, &[]), "not a message: a reply instead of a request"),
        (message(77, 1, &[]), "unknown request: request 77 is not supported"),
        (message(code::SET_OWNER, 1, &[0]), "SET_OWNER: a payload of 1 bytes instead of 0"),
        (
            [1_u32, 1, MAX_PAYLOAD_BYTES as u32 + 1].map(u32::to_ne_bytes).concat(),
            "not a message: a payload of 4109 bytes; the maximum is 4108",
        ),
    ] {
        real(async move {
            let (mut connection, mut front_end) = connection();
            front_end.write_all(&bytes).expect("sent");
            let end = connection.next().await.expect_err("it ends");
            assert_eq!(end.to_string(), why);
        });
    }
}

/// The reactor's clock is real here, so the test moves the deadline instead.
#[test]
fn incomplete_message_times_out() {
    real(async {
        let (mut connection, mut front_end) = connection();
        front_end.write_all(&message(code::SET_OWNER, 1, &[])[..5]).expect("sent");
        poll_once(&mut connection).await;
        let deadline = connection.inbox.deadline.as_mut().expect("it has begun");
        assert!(*deadline > reactor::now());
        *deadline = reactor::now();
        assert!(matches!(connection.next().await, Err(FrontEndEnd::IncompleteMessage)));
    });
}

#[test]
fn front_end_that_reads_nothing_is_disconnected() {
    real(async {
        let (mut connection, front_end) = connection();
        let requests = message(code::GET_FEATURES, 1, &[]).repeat(64);
        let writer = std::thread::spawn(move || {
            let mut front_end = front_end;
            // Ends when the connection is dropped. It blocks once the server has stopped reading.
            while front_end.write_all(&requests).is_ok() {}
        });
        assert!(matches!(connection.next().await, Err(FrontEndEnd::NotReading)));
        drop(connection);
        writer.join().expect("it ends with the connection");
    });
}

#[test]
fn base_of_a_stopped_ring_is_sent_at_once() {
    real(async {
        let (mut connection, mut front_end) = connection();
        front_end.write_all(&message(code::GET_VRING_BASE, 1, &[0; 8])).expect("sent");
        let base = reply(code::GET_VRING_BASE, 0);
        assert_eq!(received(&mut connection, &front_end, base.len()).await, base);
        connection.stopped(0, 5);
        assert_eq!(connection.running().count(), 0);
    });
}

#[test]
fn disconnect_while_rings_stop_is_detected() {
    real(async {
        let (mut connection, mut front_end) = connection();
        let (begin, ring) = (0x10_0000, 0);
        let region = RegionInfo { guest_address: 0, bytes: 1 << 16, user_address: begin, file_offset: 0 };
        let memory = memfd_create("guest", MemfdFlags::CLOEXEC).expect("a memfd");
        ftruncate(&memory, 1 << 16).expect("its length");
        let [descriptors, driver, device] = [0, 1, 2].map(|page| begin + page * 4096);
        for (code, request) in [
            (code::SET_MEM_TABLE, VhostUserRequest::SetMemTable(vec![(region, memory)])),
            (code::SET_VRING_NUM, VhostUserRequest::SetVringNum { ring, descriptors: 128 }),
            (
                code::SET_VRING_ADDR,
                VhostUserRequest::SetVringAddr {
                    ring,
                    addresses: VringAddresses { descriptors, device, driver },
                },
            ),
            (code::SET_VRING_KICK, VhostUserRequest::SetVringKick { ring, event: None }),
            (code::GET_VRING_BASE, VhostUserRequest::GetVringBase { ring }),
        ] {
            connection.session.receive(code, false, Ok(request), &mut connection.outputs);
        }
        assert!(matches!(connection.next().await, Ok(Effect::WriteCache(false))));
        assert!(matches!(connection.next().await, Ok(Effect::Start { ring: 0, .. })));
        assert!(matches!(connection.next().await, Ok(Effect::Stop { ring: 0 })));
        // The next message is not received while a reply is pending.
        front_end.write_all(&message(code::GET_FEATURES, 1, &[])).expect("sent");
        poll_once(&mut connection).await;
        drop(front_end);
        assert!(matches!(connection.next().await, Err(FrontEndEnd::Disconnected)));
        assert_eq!(connection.running().collect::<Vec<_>>(), [0]);
        connection.stopped(0, 7);
        assert_eq!(connection.running().count(), 0);
    });
}

#[test]
fn resize_is_sent_once_on_the_channel() {
    real(async {
        let (mut connection, mut front_end) = connection();
        let (channel, mut events) = UnixStream::pair().expect("sockets");
        front_end.write_all(&number(code::SET_PROTOCOL_FEATURES, protocol::OFFERED)).expect("sent");
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let descriptors = [channel.as_fd()];
        assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)));
        let bytes = message(code::SET_BACKEND_REQ_FD, 1, &[]);
        sendmsg(&front_end, &[IoSlice::new(&bytes)], &mut control, SendFlags::empty()).expect("sent");
        front_end.write_all(&message(code::GET_QUEUE_NUM, 1, &[])).expect("sent");
        received(&mut connection, &front_end, 20).await;
        connection.resize(2 << 20);
        connection.resize(2 << 20);
        let mut notification = [0; 13];
        assert_eq!(events.read(&mut notification).expect("an event is written"), 12, "once");
        assert_eq!(notification[..12], message(code::CONFIG_CHANGE_MSG, 1, &[]));
        // Neither a full channel nor a closed one is an error.
        for size_bytes in 0..10_000 {
            connection.resize(size_bytes);
        }
        drop((channel, events));
        connection.resize(3 << 20);
    });
}
