//! A proxy between a new process and the daemon that it replaces. It forwards message by message,
//! so that the new process can be killed at any step.
//!
//! It parses only the framing of messages. Both sides observe the same as without it, except that
//! the daemon sees the credentials of this process.

use std::{
    fs,
    io::{BufRead as _, BufReader, ErrorKind, IoSlice, IoSliceMut, Read as _, Write as _},
    mem::MaybeUninit,
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::net::{UnixListener, UnixStream},
    },
    path::Path,
};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use serde_json::{Value, json};

use crate::harness::{DEADLINE, Qmp, Serve};

/// Maximum number of descriptors that accompany one byte.
const MAX_DESCRIPTORS: usize = 250;

/// The step of an upgrade at which the new process is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum UpgradeStep {
    /// It has received a part of the offer.
    OfferCutShort,
    /// It has received the offer, and opens images.
    Offered,
    /// All images are open, and its message is not delivered.
    Prepared,
    /// The daemon has received the message, and is suspended.
    Suspended,
    /// It has received a part of the transferred state.
    StateCutShort,
    /// It has received the state, and reads tables.
    State,
    /// It is ready to serve, and its message is not delivered.
    Ready,
}

impl UpgradeStep {
    pub(super) const ALL: [Self; 7] = [
        Self::OfferCutShort,
        Self::Offered,
        Self::Prepared,
        Self::Suspended,
        Self::StateCutShort,
        Self::State,
        Self::Ready,
    ];
}

/// Starts a new process and kills it at this step. The daemon sees the disconnect once this
/// returns. The proxy listens on a socket at the given path meanwhile.
#[track_caller]
pub(super) fn kill_new_process(serve: Serve, control: &Path, socket_path: &Path, step: UpgradeStep) {
    let listener = UnixListener::bind(socket_path).unwrap();
    // The new process takes this socket for the daemon's control socket.
    let new_process = serve.arg(format!("--takeover=unix:{}", socket_path.display())).spawn_unready();
    let (upgrading, serving) = forward_request(&listener.accept().unwrap().0, control);
    forward_until(step, &upgrading, &serving);
    new_process.kill();
    // The rest of its messages, then the end; a reset if it had unread data.
    match (&upgrading).read_to_end(&mut Vec::new()) {
        Ok(_) => {}
        Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{step:?}"),
    }
    fs::remove_file(socket_path).unwrap();
}

fn forward_until(step: UpgradeStep, upgrading: &UnixStream, serving: &UnixStream) {
    let assert_text =
        |message: &ProxiedMessage, expected: &str| assert_eq!(message.text, expected.as_bytes(), "{step:?}");
    let offer = receive_message(serving);
    if step == UpgradeStep::OfferCutShort {
        return send_half(upgrading, &offer);
    }
    send_message(upgrading, &offer);
    if step == UpgradeStep::Offered {
        return;
    }
    let prepared = receive_message(upgrading);
    assert_text(&prepared, "\"prepared\"");
    if step == UpgradeStep::Prepared {
        return;
    }
    send_message(serving, &prepared);
    if step == UpgradeStep::Suspended {
        return;
    }
    let state = receive_message(serving);
    if step == UpgradeStep::StateCutShort {
        return send_half(upgrading, &state);
    }
    send_message(upgrading, &state);
    if step == UpgradeStep::Ready {
        assert_text(&receive_message(upgrading), "\"ready\"");
    }
}

/// Forwards the request of a new process at `socket` to the daemon; returns the sockets to both.
fn forward_request(socket: &UnixStream, control: &Path) -> (UnixStream, UnixStream) {
    let reply = |message: Value| writeln!(&*socket, "{message}").unwrap();
    socket.set_read_timeout(Some(DEADLINE)).unwrap();
    // Acts as the control socket: greeting, capabilities, and one command with a descriptor.
    reply(json!({ "QMP": {} }));
    let mut line = String::new();
    BufReader::new(socket.take(1 << 10)).read_line(&mut line).unwrap();
    assert!(line.contains("qmp_capabilities"), "{line}");
    reply(json!({ "return": {} }));
    let mut command = [0; 1 << 10];
    let (length, mut descriptors) = receive(socket, &mut command);
    let command: Value = serde_json::from_slice(&command[..length]).unwrap();
    // The new process passes one end of its socket pair; the daemon gets an end of another pair.
    let upgrading = UnixStream::from(descriptors.remove(0));
    let (serving, passed) = UnixStream::pair().unwrap();
    let name = command["execute"].as_str().unwrap();
    let response = Qmp::negotiated(control).command_with_descriptor(&passed, name, &command["arguments"]);
    assert!(response.get("return").is_some(), "{response}");
    reply(response);
    for socket in [&upgrading, &serving] {
        socket.set_read_timeout(Some(DEADLINE)).unwrap();
    }
    (upgrading, serving)
}

struct ProxiedMessage {
    text: Vec<u8>,
    bytes: Vec<u8>,
    /// The descriptors of each byte after the text.
    descriptors: Vec<Vec<OwnedFd>>,
}

impl ProxiedMessage {
    fn head(&self) -> Vec<u8> {
        let count = self.descriptors.iter().map(Vec::len).sum();
        [self.text.len(), self.bytes.len(), count].map(|length| (length as u64).to_le_bytes()).concat()
    }
}

fn receive_message(mut socket: &UnixStream) -> ProxiedMessage {
    let mut lengths = [[0; 8]; 3];
    lengths.iter_mut().for_each(|length| socket.read_exact(length).unwrap());
    let [text, bytes, mut count] = lengths.map(|length| u64::from_le_bytes(length) as usize);
    let mut read = |length| {
        let mut read = vec![0; length];
        socket.read_exact(&mut read).unwrap();
        read
    };
    let (text, bytes) = (read(text), read(bytes));
    let mut descriptors = Vec::new();
    // One byte carries a limited number of descriptors.
    while count > 0 {
        let (length, received) = receive(socket, &mut [0]);
        assert_eq!(length, 1);
        count -= received.len();
        descriptors.push(received);
    }
    ProxiedMessage { text, bytes, descriptors }
}

fn send_message(mut socket: &UnixStream, message: &ProxiedMessage) {
    socket.write_all(&[message.head(), message.text.clone(), message.bytes.clone()].concat()).unwrap();
    for chunk in &message.descriptors {
        let borrowed: Vec<_> = chunk.iter().map(|descriptor| descriptor.as_fd()).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&borrowed)));
        assert_eq!(sendmsg(socket, &[IoSlice::new(b".")], &mut control, SendFlags::empty()), Ok(1));
    }
}

fn send_half(mut socket: &UnixStream, message: &ProxiedMessage) {
    // The head announces the full length, so the receiver waits for the rest.
    let half = message.text.len() / 2;
    socket.write_all(&[message.head(), message.text[..half].to_vec()].concat()).unwrap();
}

fn receive(socket: &UnixStream, bytes: &mut [u8]) -> (usize, Vec<OwnedFd>) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC;
    let received = recvmsg(socket, &mut [IoSliceMut::new(bytes)], &mut control, flags).unwrap();
    let descriptors = control.drain().flat_map(|message| match message {
        RecvAncillaryMessage::ScmRights(descriptors) => descriptors.collect(),
        _ => Vec::new(),
    });
    (received.bytes, descriptors.collect())
}
