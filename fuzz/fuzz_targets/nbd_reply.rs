//! The client on any bytes of a server: it terminates without a panic, and accepted replies match
//! the request.
//!
//! The first byte selects whether the server first completes a handshake, and whether with
//! structured replies.
#![no_main]

use libfuzzer_sys::fuzz_target;
use nbd::{
    client::{HandshakeOptions, NbdClient, shake_hands},
    pipe::Pipe,
    proto::{self, info, opt, rep},
    stream::NbdStream,
};
use reactor::{buffer::IoBuffer, now, sim, sleep_until, spawn, spawn_joinable, timeout};
use std::{rc::Rc, time::Duration};

const CONTEXT: u32 = 7;

fn reply(option: u32, kind: u32, data: &[u8]) -> Vec<u8> {
    let mut reply = proto::OPTION_REPLY_MAGIC.to_be_bytes().to_vec();
    reply.extend([option, kind, data.len() as u32].map(u32::to_be_bytes).concat());
    reply.extend(data);
    reply
}

fn handshake_replies(structured: bool) -> Vec<u8> {
    let mut bytes = [proto::INIT_MAGIC, proto::OPTION_MAGIC].map(u64::to_be_bytes).concat();
    bytes.extend(3_u16.to_be_bytes());
    if structured {
        let context = [&CONTEXT.to_be_bytes()[..], b"base:allocation"].concat();
        bytes.extend(reply(opt::STRUCTURED_REPLY, rep::ACK, &[]));
        bytes.extend(reply(opt::SET_META_CONTEXT, rep::META_CONTEXT, &context));
        bytes.extend(reply(opt::SET_META_CONTEXT, rep::ACK, &[]));
    } else {
        bytes.extend(reply(opt::STRUCTURED_REPLY, rep::ERR_UNSUP, &[]));
    }
    let export = [&info::EXPORT.to_be_bytes()[..], &100_000_u64.to_be_bytes(), &0xfd_u16.to_be_bytes()];
    bytes.extend(reply(opt::GO, rep::INFO, &export.concat()));
    bytes.extend(reply(opt::GO, rep::ACK, &[]));
    bytes
}

/// Sends `script` regardless of the client, and closes; returns both ends.
fn serve(script: Vec<u8>) -> (Pipe, Pipe) {
    let (client_end, theirs) = Pipe::pair();
    let (end, server_end) = (theirs.clone(), theirs.clone());
    spawn(async move { while let (Ok(1..), _) = theirs.receive(IoBuffer::new(4096), 0).await {} });
    spawn(async move {
        if end.send(IoBuffer::copy_of(&script).into()).await.is_ok() {
            sleep_until(now() + Duration::from_secs(1)).await;
        }
        end.close();
    });
    (client_end, server_end)
}

fuzz_target!(|input: &[u8]| {
    let Some((&how, rest)) = input.split_first() else { return };
    let structured = how & 2 != 0;
    let mut script = if how & 1 != 0 { handshake_replies(structured) } else { Vec::new() };
    script.extend(rest);
    sim::run(u64::from(how), async move {
        let (stream, end) = serve(script);
        ask(stream, structured).await;
        // A task that waits on a pipe that is never closed would leak.
        end.close();
    });
});

async fn ask(stream: Pipe, structured: bool) {
    let options =
        HandshakeOptions { export: "disk".to_owned(), allocation: structured, ..HandshakeOptions::default() };
    let handshake = shake_hands(NbdStream::Simulated(stream), &options);
    let Ok(established) = timeout(Duration::from_secs(5), handshake).await.expect("it does not hang") else {
        return;
    };
    let client = Rc::new(NbdClient::start(established));
    let second_reference = Rc::clone(&client);
    let flushing = spawn_joinable(async move {
        let _ = second_reference.flush().await;
        if second_reference.export().has_allocation()
            && let Ok(extents) = second_reference.extents(0, 4096).await
        {
            assert!(!extents.is_empty() && extents.iter().all(|extent| extent.length > 0));
        }
    });
    let reading = async {
        if let Ok(data) = client.read(1000, 100).await {
            assert_eq!(data.len(), 100);
        }
        flushing.await;
    };
    timeout(Duration::from_secs(10), reading).await.expect("it does not hang");
}
