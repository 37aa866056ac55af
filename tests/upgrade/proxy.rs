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
const AT_ONCE: usize = 250;

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
/// returns. `place` is a path for a socket.
#[track_caller]
pub(super) fn kill_new_process(serve: Serve, control: &Path, place: &Path, step: UpgradeStep) {
    let listener = UnixListener::bind(place).unwrap();
    // The new process takes this socket for the daemon's control socket.
    let newcomer = serve.arg(format!("--takeover=unix:{}", place.display())).spawn_unready();
    let (its, daemons) = ask(&listener.accept().unwrap().0, control);
    pass_until(step, &its, &daemons);
    newcomer.kill();
    // The rest of its messages, then the end; a reset if it had unread data.
    match (&its).read_to_end(&mut Vec::new()) {
        Ok(_) => {}
        Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{step:?}"),
    }
    fs::remove_file(place).unwrap();
}

fn pass_until(step: UpgradeStep, its: &UnixStream, daemons: &UnixStream) {
    let said = |message: &ProxiedMessage, what: &str| assert_eq!(message.text, what.as_bytes(), "{step:?}");
    let offer = receive_message(daemons);
    if step == UpgradeStep::OfferCutShort {
        return send_half(its, &offer);
    }
    send_message(its, &offer);
    if step == UpgradeStep::Offered {
        return;
    }
    let prepared = receive_message(its);
    said(&prepared, "\"prepared\"");
    if step == UpgradeStep::Prepared {
        return;
    }
    send_message(daemons, &prepared);
    if step == UpgradeStep::Suspended {
        return;
    }
    let state = receive_message(daemons);
    if step == UpgradeStep::StateCutShort {
        return send_half(its, &state);
    }
    send_message(its, &state);
    if step == UpgradeStep::Ready {
        said(&receive_message(its), "\"ready\"");
    }
}

/// Forwards the request of a new process at `socket` to the daemon; returns the sockets to both.
fn ask(socket: &UnixStream, control: &Path) -> (UnixStream, UnixStream) {
    let answer = |message: Value| writeln!(&*socket, "{message}").unwrap();
    socket.set_read_timeout(Some(DEADLINE)).unwrap();
    // Acts as the control socket: greeting, capabilities, and one command with a descriptor.
    answer(json!({ "QMP": {} }));
    let mut line = String::new();
    BufReader::new(socket.take(1 << 10)).read_line(&mut line).unwrap();
    assert!(line.contains("qmp_capabilities"), "{line}");
    answer(json!({ "return": {} }));
    let mut command = [0; 1 << 10];
    let (length, mut descriptors) = receive(socket, &mut command);
    let command: Value = serde_json::from_slice(&command[..length]).unwrap();
    // The new process passes one end of its socket pair; the daemon gets an end of another pair.
    let its = UnixStream::from(descriptors.remove(0));
    let (daemons, passed) = UnixStream::pair().unwrap();
    let name = command["execute"].as_str().unwrap();
    let said = Qmp::negotiated(control).command_with_descriptor(&passed, name, &command["arguments"]);
    assert!(said.get("return").is_some(), "{said}");
    answer(said);
    for socket in [&its, &daemons] {
        socket.set_read_timeout(Some(DEADLINE)).unwrap();
    }
    (its, daemons)
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
    // One byte carries at most `AT_ONCE` descriptors.
    while count > 0 {
        let (length, some) = receive(socket, &mut [0]);
        assert_eq!(length, 1);
        count -= some.len();
        descriptors.push(some);
    }
    ProxiedMessage { text, bytes, descriptors }
}

fn send_message(mut socket: &UnixStream, message: &ProxiedMessage) {
    socket.write_all(&[message.head(), message.text.clone(), message.bytes.clone()].concat()).unwrap();
    for some in &message.descriptors {
        let some: Vec<_> = some.iter().map(|descriptor| descriptor.as_fd()).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(AT_ONCE))];
        let mut beside = SendAncillaryBuffer::new(&mut space);
        assert!(beside.push(SendAncillaryMessage::ScmRights(&some)));
        assert_eq!(sendmsg(socket, &[IoSlice::new(b".")], &mut beside, SendFlags::empty()), Ok(1));
    }
}

fn send_half(mut socket: &UnixStream, message: &ProxiedMessage) {
    // The head announces the full length, so the receiver waits for the rest.
    let half = message.text.len() / 2;
    socket.write_all(&[message.head(), message.text[..half].to_vec()].concat()).unwrap();
}

fn receive(socket: &UnixStream, bytes: &mut [u8]) -> (usize, Vec<OwnedFd>) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(AT_ONCE))];
    let mut beside = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC;
    let received = recvmsg(socket, &mut [IoSliceMut::new(bytes)], &mut beside, flags).unwrap();
    let descriptors = beside.drain().flat_map(|message| match message {
        RecvAncillaryMessage::ScmRights(descriptors) => descriptors.collect(),
        _ => Vec::new(),
    });
    (received.bytes, descriptors.collect())
}
