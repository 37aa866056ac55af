//! Descriptors that clients of a control socket pass with their commands (SCM_RIGHTS of unix(7)):
//! their reception, and their storage until they are used.
//!
//! ```text
//!   recvmsg ─► arrived ── getfd ──► by name, for this client only ─► a socket to listen at
//!                  └───── add-fd ─► a set, for all clients: control/fdsets.rs
//! ```
//!
//! As in QEMU, descriptors belong to the command that they are passed with: unused ones are closed
//! when more arrive or the client disconnects. Named ones are closed when the client disconnects.
//!
//! Never opens anything by itself.

use std::{
    cell::RefCell,
    collections::{BTreeMap, VecDeque},
    io::{self, ErrorKind, IoSliceMut},
    mem::MaybeUninit,
    os::fd::AsFd as _,
};

use reactor::operation::{self, Fd, PassedFd};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

use super::{error::QmpError, json::excerpt};

/// Maximum number of descriptors at once, as in QEMU (`TCP_MAX_FDS`). The kernel closes the excess.
const MAX_PER_MESSAGE: usize = 16;
/// Maximum number of named descriptors of one client.
const MAX_NAMED: usize = 256;
/// Maximum length of a name in bytes.
const MAX_NAME_BYTES: usize = 1024;

/// Descriptors passed by one client.
#[derive(Debug, Default)]
pub(crate) struct ClientDescriptors {
    arrived: RefCell<VecDeque<PassedFd>>,
    named: RefCell<BTreeMap<String, PassedFd>>,
}

/// Identity: two sets are never equal.
impl PartialEq for ClientDescriptors {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self, other)
    }
}

impl ClientDescriptors {
    /// Receives as `recv(2)` does, and stores passed descriptors.
    pub(super) async fn receive(&self, socket: &Fd, bytes: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.receive_once(socket, bytes) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => operation::readable(socket).await?,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                result => return result,
            }
        }
    }

    fn receive_once(&self, socket: &Fd, bytes: &mut [u8]) -> io::Result<usize> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_PER_MESSAGE))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        // Close-on-exec, or a child process would inherit them.
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let received = recvmsg(socket.as_fd(), &mut [IoSliceMut::new(bytes)], &mut ancillary, flags);
        let mut arrived = VecDeque::new();
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                arrived.extend(descriptors.map(PassedFd::from));
            }
        }
        if !arrived.is_empty() {
            // Closes unused descriptors of an earlier message.
            self.arrived.replace(arrived);
        }
        Ok(received?.bytes)
    }

    /// Takes the descriptor that was passed with a command.
    pub(super) fn take_arrived(&self) -> Result<PassedFd, QmpError> {
        let next = self.arrived.borrow_mut().pop_front();
        next.ok_or_else(|| QmpError::generic("No file descriptor supplied via SCM_RIGHTS"))
    }

    /// Gives a descriptor a name. An older one of this name is closed.
    pub(super) fn insert_named(&self, name: &str, descriptor: PassedFd) -> Result<(), QmpError> {
        check_text("fdname", name)?;
        if name.starts_with(|first: char| first.is_ascii_digit()) {
            return Err(QmpError::rule("fdname", "expects a name not starting with a digit"));
        }
        let mut named = self.named.borrow_mut();
        if named.len() >= MAX_NAMED && !named.contains_key(name) {
            return Err(too_many_error());
        }
        named.insert(name.to_owned(), descriptor);
        Ok(())
    }

    /// Takes the descriptor with this name.
    pub(super) fn take_named(&self, name: &str) -> Option<PassedFd> {
        self.named.borrow_mut().remove(name)
    }

    /// As [`ClientDescriptors::take_named`]; a missing descriptor is an error.
    pub(super) fn require_named(&self, name: &str) -> Result<PassedFd, QmpError> {
        let not_found = || QmpError::generic(format!("File descriptor named '{}' not found", excerpt(name)));
        self.take_named(name).ok_or_else(not_found)
    }
}

fn too_many_error() -> QmpError {
    QmpError::generic(format!("{MAX_NAMED} descriptors are kept already (close some first)"))
}

fn check_text(key: &str, text: &str) -> Result<(), QmpError> {
    match text.len() > MAX_NAME_BYTES {
        true => Err(QmpError::rule(key, format!("is longer than {MAX_NAME_BYTES} bytes"))),
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn number_of_named_descriptors_is_bounded() {
        let passed = ClientDescriptors::default();
        let file = File::open("/dev/null").expect("it is there");
        let another = || PassedFd::from(std::os::fd::OwnedFd::from(file.try_clone().expect("a descriptor")));
        for number in 0..MAX_NAMED {
            passed.insert_named(&format!("n{number}"), another()).expect("room");
        }
        assert!(passed.insert_named("more", another()).is_err());
        passed.insert_named("n0", another()).expect("in the place of the other");
        assert!(passed.insert_named("0", another()).is_err() && passed.take_arrived().is_err());
        assert!(passed.take_named("n0").is_some() && passed.require_named("n0").is_err());
    }
}
