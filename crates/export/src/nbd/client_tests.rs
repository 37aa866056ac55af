//! The client against weir's server, and against servers that break the rules. Simulated.

use std::{cell::RefCell, rc::Rc, sync::Arc};

use policy::{access::AccessRules, time::Duration};

use super::{
    client::{CONNECTION_LOST, HandshakeOptions, NbdClient, NbdConnectError, shake_hands},
    exports::NbdServerExport,
    pipe::Pipe,
    proto::{self, info, opt, rep, reply_flag, reply_type},
    server::{NbdServer, NbdServerTerms},
    stop_signal::StopSignal,
    stream::NbdStream,
};
use block::{disk::Disk, layer::throttle::DiskSettings};
use image::{Image, RawImage};
use reactor::{buffer::IoBuffer, error::Error, now, sim, sleep_until, spawn, spawn_joinable, timeout};
use storage::Storage;

const SIZE: u64 = 100_000;

/// Starts a server with a disk of [`SIZE`] bytes; returns the client's end of the connection.
fn serve(read_only: bool) -> Pipe {
    let storage = Storage::memory(SIZE);
    let disk = Disk::new("disk", Image::Raw(RawImage::new(storage)), DiskSettings::default(), None).unwrap();
    let (name, disk) = ("disk".into(), Arc::new(disk));
    let server = NbdServer::new(None, NbdServerTerms::default());
    server
        .add(NbdServerExport {
            name,
            description: "".into(),
            disk,
            read_only,
            bitmaps: Arc::default(),
            access: AccessRules::default(),
        })
        .expect("the first of its name");
    let (client_end, server_end) = Pipe::pair();
    spawn(async move {
        let stop = Arc::<StopSignal>::default();
        if let Ok(Some((connection, inbox))) =
            server.open(NbdStream::Simulated(server_end.clone()), &stop, 0).await
        {
            let _ = connection.serve(inbox).await;
        }
        server_end.close();
    });
    client_end
}

async fn connect_to_export(pipe: Pipe, export: &str) -> Result<NbdClient, NbdConnectError> {
    let options = HandshakeOptions { export: export.to_owned(), ..HandshakeOptions::default() };
    let handshake = shake_hands(NbdStream::Simulated(pipe), &options);
    timeout(Duration::from_secs(5), handshake).await.expect("the handshake ends").map(NbdClient::start)
}

#[test]
fn written_data_is_read_back_under_concurrency() {
    for seed in 0..20 {
        sim::run(seed, async move {
            let client = Rc::new(connect_to_export(serve(false), "disk").await.unwrap());
            assert_eq!(client.export().size_bytes, SIZE);
            let known = Rc::new(RefCell::new(vec![0; SIZE as usize]));
            let tasks = (0..5_usize).map(|task| {
                let (client, known) = (Rc::clone(&client), Rc::clone(&known));
                spawn_joinable(async move {
                    for _ in 0..20 {
                        let (at, length, byte, write) = sim::random(|random| {
                            let at = task * 20_000 + random.usize(..10_000);
                            (at, random.usize(1..10_000), random.u8(..), random.bool())
                        });
                        if write {
                            let data = IoBuffer::copy_of(&vec![byte; length]);
                            client.write(at as u64, data.into(), false).await.unwrap();
                            known.borrow_mut()[at..at + length].fill(byte);
                        } else {
                            let read = client.read(at as u64, length).await.unwrap();
                            assert!(read[..] == known.borrow()[at..at + length], "seed {seed}");
                        }
                    }
                })
            });
            for task in tasks.collect::<Vec<_>>() {
                task.await;
            }
            client.flush().await.unwrap();
            assert_eq!(client.read(SIZE, 1).await.unwrap_err(), Error::INVALID);
            assert_eq!(client.fault(), None);
            Rc::try_unwrap(client).unwrap().disconnect().await;
        });
    }
}

#[test]
fn a_dropped_request_does_not_affect_others() {
    sim::run(1, async {
        let client = connect_to_export(serve(false), "disk").await.unwrap();
        for _ in 0..10 {
            let dropped = timeout(Duration::ZERO, client.read(0, 60_000)).await;
            assert!(dropped.is_err());
            assert_eq!(client.read(7, 9).await.unwrap().len(), 9);
        }
        // Replies to dropped requests may arrive after the reply that was awaited.
        let forgotten = async {
            while !client.is_idle() {
                sleep_until(now() + Duration::from_millis(1)).await;
            }
        };
        timeout(Duration::from_secs(10), forgotten).await.expect("every request is answered");
    });
}

#[test]
fn writes_to_a_read_only_export_are_not_sent() {
    sim::run(1, async {
        let client = connect_to_export(serve(true), "disk").await.unwrap();
        let written = client.write(0, IoBuffer::zeroed(512).into(), false).await;
        assert_eq!(written, Err(Error::NOT_PERMITTED));
    });
}

#[test]
fn a_missing_export_is_named() {
    let refused =
        sim::run(1, async { connect_to_export(serve(false), "vm1").await.unwrap_err().to_string() });
    assert!(refused.starts_with("refused export \"vm1\": no export of this name"), "{refused}");
}

#[test]
fn a_weir_server_reports_all_its_features() {
    sim::run(1, async {
        let options =
            HandshakeOptions { export: "disk".to_owned(), allocation: true, ..HandshakeOptions::default() };
        let handshake = shake_hands(NbdStream::Simulated(serve(false)), &options);
        let client = NbdClient::start(handshake.await.unwrap());
        let export = client.export();
        assert!(export.can_flush() && export.can_fua() && export.can_zero() && export.can_trim());
        assert!(export.has_allocation() && export.can_multi_conn());
        client.write(8192, IoBuffer::copy_of(&[7; 4096]).into(), true).await.unwrap();
        let extents = client.extents(0, 90_000).await.unwrap();
        assert!(extents.len() >= 2, "{extents:?}");
        client.write_zeroes(8192, 4096, proto::cmd_flag::NO_HOLE).await.unwrap();
        client.trim(0, 4096).await.unwrap();
        assert!(client.read(8000, 5000).await.unwrap().iter().all(|&byte| byte == 0));
    });
}

#[test]
fn a_retired_connection_is_resumed() {
    for seed in 0..50 {
        sim::run(seed, async {
            let mut client = connect_to_export(serve(false), "disk").await.unwrap();
            for round in 0..5_u8 {
                client.write(0, IoBuffer::copy_of(&[round; 700]).into(), false).await.unwrap();
                let left = client.into_established().await.expect("nothing is in flight");
                client = NbdClient::start(left);
                assert!(client.read(0, 700).await.unwrap().iter().all(|&byte| byte == round));
            }
        });
    }
}

/// A server that sends `script`, whatever the client does, and closes.
fn scripted(script: Vec<u8>) -> Pipe {
    let (client_end, server_end) = Pipe::pair();
    let sender = server_end.clone();
    spawn(async move {
        // Receives whatever the client sends, because the client would block otherwise.
        loop {
            let (result, _) = server_end.receive(IoBuffer::new(4096), 0).await;
            if !matches!(result, Ok(1..)) {
                break;
            }
        }
    });
    spawn(async move {
        if sender.send(IoBuffer::copy_of(&script).into()).await.is_ok() {
            // A script cannot see requests, so it leaves time for them before the end of the
            // stream.
            sleep_until(now() + Duration::from_secs(1)).await;
        }
        sender.close();
    });
    client_end
}

fn greeting(flags: u16) -> Vec<u8> {
    let magic = [proto::INIT_MAGIC, proto::OPTION_MAGIC].map(u64::to_be_bytes).concat();
    [magic, flags.to_be_bytes().to_vec()].concat()
}

fn option_reply(option: u32, kind: u32, data: &[u8]) -> Vec<u8> {
    let mut reply = proto::OPTION_REPLY_MAGIC.to_be_bytes().to_vec();
    reply.extend([option, kind, data.len() as u32].map(u32::to_be_bytes).concat());
    reply.extend(data);
    reply
}

fn welcome(structured: bool) -> Vec<u8> {
    let mut export = info::EXPORT.to_be_bytes().to_vec();
    export.extend(SIZE.to_be_bytes());
    export.extend(1_u16.to_be_bytes());
    let chunks = if structured { rep::ACK } else { rep::ERR_UNSUP };
    [
        greeting(3),
        option_reply(opt::STRUCTURED_REPLY, chunks, &[]),
        option_reply(opt::GO, rep::INFO, &export),
        option_reply(opt::GO, rep::ACK, &[]),
    ]
    .concat()
}

#[test]
fn malformed_handshake_closes_the_connection() {
    let no = option_reply(opt::STRUCTURED_REPLY, rep::ERR_UNSUP, &[]);
    let go = |kind, data: &[u8]| [greeting(3), no.clone(), option_reply(opt::GO, kind, data)].concat();
    let mut long = option_reply(opt::GO, rep::INFO, &[]);
    long.splice(16..20, u32::MAX.to_be_bytes());
    for (script, why) in [
        (vec![], "cannot connect"),
        (b"HTTP/1.1 400 Bad Request\r\n".to_vec(), "it does not send an NBD greeting"),
        (greeting(0), "it is too old"),
        (greeting(3)[..17].to_vec(), "cannot connect"),
        ([greeting(3), vec![0; 20]].concat(), "wrong magic number"),
        (
            [greeting(3), option_reply(opt::GO, rep::ACK, &[])].concat(),
            "it answers an option that was not sent",
        ),
        (go(rep::ACK, &[]), "it does not report the export's size"),
        (go(rep::SERVER, &[]), "an unexpected reply to an option"),
        (go(rep::ERR_TLS_REQD, b""), "the server requires TLS"),
        (go(rep::ERR_POLICY, b"no\x1b[2J"), "refused export \"disk\": no?[2J"),
        ([greeting(3), no.clone(), long].concat(), "longer than any option needs"),
    ] {
        let error =
            sim::run(1, async move { connect_to_export(scripted(script), "disk").await.unwrap_err() });
        assert!(error.to_string().contains(why), "{error}, not {why}");
    }
}

fn simple(cookie: u64, error: u32) -> Vec<u8> {
    let head = [proto::SIMPLE_REPLY_MAGIC, error].map(u32::to_be_bytes).concat();
    [head, cookie.to_be_bytes().to_vec()].concat()
}

fn chunk(flags: u16, kind: u16, data: &[u8]) -> Vec<u8> {
    let mut bytes = proto::STRUCTURED_REPLY_MAGIC.to_be_bytes().to_vec();
    bytes.extend([flags, kind].map(u16::to_be_bytes).concat());
    bytes.extend(0_u64.to_be_bytes());
    bytes.extend((data.len() as u32).to_be_bytes());
    bytes.extend(data);
    bytes
}

/// Header of a chunk, without the payload.
fn announced(kind: u16, length: u32) -> Vec<u8> {
    let mut head = chunk(reply_flag::DONE, kind, &[]);
    head.splice(16..20, length.to_be_bytes());
    head
}

/// Result of one read of 100 bytes at 1000, with cookie 0, and the connection's fault.
fn read_from(structured: bool, replies: &[Vec<u8>]) -> (Result<IoBuffer, Error>, Option<String>) {
    let script = [welcome(structured), replies.concat()].concat();
    sim::run(1, async move {
        let client = connect_to_export(scripted(script), "disk").await.unwrap();
        let read = timeout(Duration::from_secs(5), client.read(1000, 100)).await.expect("it does not hang");
        (read, client.fault())
    })
}

fn data(offset: u64, bytes: &[u8]) -> Vec<u8> {
    [&offset.to_be_bytes()[..], bytes].concat()
}

#[test]
fn simple_and_chunked_replies_complete_requests() {
    let (read, _) = read_from(false, &[simple(0, 0), vec![7; 100]]);
    assert!(read.unwrap()[..] == [7; 100]);
    let pieces = [
        chunk(0, reply_type::OFFSET_DATA, &data(1040, &[7; 60])),
        chunk(reply_flag::DONE, reply_type::OFFSET_HOLE, &data(1000, &40_u32.to_be_bytes())),
    ];
    let (read, _) = read_from(true, &pieces);
    assert!(read.unwrap()[..] == [vec![0; 40], vec![7; 60]].concat());
}

#[test]
fn server_errors_are_returned() {
    assert_eq!(read_from(false, &[simple(0, 5)]).0.unwrap_err(), Error::IO);
    let message = [&28_u32.to_be_bytes()[..], &4_u16.to_be_bytes(), b"full"].concat();
    let (read, _) = read_from(true, &[chunk(reply_flag::DONE, reply_type::ERROR, &message)]);
    assert_eq!(read.unwrap_err(), Error::NO_SPACE);
}

#[test]
fn protocol_violation_or_disconnect_fails_requests_in_flight() {
    let payload = data(1000, &[7; 100]);
    let error = chunk(0, reply_type::ERROR, &[0, 0, 0, 5, 0, 0]);
    for (structured, replies, expected) in [
        (false, vec![], "has closed the connection"),
        (false, vec![simple(0, 0), vec![7; 99]], "the connection broke"),
        (false, vec![simple(1, 0)], "a reply to an unknown or already answered request"),
        (false, vec![simple(u64::MAX, 0)], "a reply to an unknown or already answered request"),
        (false, vec![vec![0xff; 16]], "wrong magic number"),
        (false, vec![chunk(1, reply_type::OFFSET_DATA, &payload)], "which was not negotiated"),
        (true, vec![simple(0, 0)], "a simple reply to a read"),
        (true, vec![chunk(1, reply_type::NONE, &[])], "less data than requested"),
        (true, vec![chunk(0, reply_type::OFFSET_DATA, &data(999, &[7; 100]))], "more data than"),
        (true, vec![chunk(0, reply_type::OFFSET_DATA, &data(1001, &[7; 100]))], "more data than"),
        (true, vec![chunk(0, reply_type::OFFSET_DATA, &data(u64::MAX, &[7; 100]))], "more data than"),
        (true, vec![chunk(0, reply_type::OFFSET_DATA, &payload); 2], "a part of a read's data twice"),
        (true, vec![chunk(1, reply_type::OFFSET_HOLE, &data(1000, &[0xff; 4]))], "more data than"),
        (true, vec![error; 1025], "more than 1024 errors in one reply"),
        (true, vec![announced(reply_type::OFFSET_DATA, 109)], "more data than"),
        (true, vec![announced(reply_type::OFFSET_DATA, u32::MAX)], "more data than"),
        (true, vec![announced(reply_type::BLOCK_STATUS, 12)], "extents in a reply"),
    ] {
        let (read, fault) = read_from(structured, &replies);
        assert_eq!(read.unwrap_err(), CONNECTION_LOST, "{expected}");
        let fault = fault.expect(expected);
        assert!(fault.contains(expected), "{fault}, not {expected}");
    }
}

#[test]
fn every_request_completes_for_any_server_output() {
    let mut ends = [0, 0];
    for seed in 0..1000 {
        let read = sim::run(seed, async move {
            let structured = sim::random(fastrand::Rng::bool);
            let pieces = [
                chunk(0, reply_type::OFFSET_DATA, &data(1040, &[7; 60])),
                chunk(reply_flag::DONE, reply_type::OFFSET_HOLE, &data(1000, &40_u32.to_be_bytes())),
            ];
            let replies = if structured { pieces.concat() } else { [simple(0, 0), vec![7; 100]].concat() };
            let mut script = [welcome(structured), replies].concat();
            sim::random(|random| {
                // Up to three damaged bytes anywhere in the server's stream.
                for _ in 0..random.usize(0..4) {
                    let at = random.usize(..script.len());
                    script[at] = if random.bool() { random.u8(..) } else { script[at] ^ 1 << random.u8(..8) };
                }
            });
            let Ok(client) = connect_to_export(scripted(script), "disk").await else { return false };
            let read =
                timeout(Duration::from_secs(5), client.read(1000, 100)).await.expect("it does not hang");
            let flushed = timeout(Duration::from_secs(5), client.flush()).await.expect("it does not hang");
            assert!(flushed.is_ok() || client.fault().is_some() || read.is_ok(), "seed {seed}");
            assert!(read.as_ref().map_or(true, |data| data.len() == 100), "seed {seed}");
            read.is_ok()
        });
        ends[usize::from(read)] += 1;
    }
    assert!(ends.iter().all(|&count| count > 100), "both happen: {ends:?}");
}
