//! LUKS version 1, as embedded in an encrypted qcow2 image: a header, followed by eight key slots.
//!
//! ```text
//!   passphrase ─PBKDF2─► slot key ─┐
//!                                  ▼
//!   key slot: 4000 encrypted stripes ─► stripes ─merge─► master key ─PBKDF2─► digest in header?
//!                                                            │
//!   clusters of guest data ◄── AES, by sector of the file ◄──┘
//! ```
//!
//! - `header`: decodes and encodes the 592 bytes of the header.
//! - `cipher`: encryption of sectors; the only module on the data path.
//! - `anti_forensic`: the splitter of keys into stripes.
//! - `unlock`: derives a [`SectorCipher`] from a passphrase, and creates the key slots of a new
//!   image.
//!
//! The master key persists only in openssl's contexts, which wipe it; every copy made here is
//! wiped when dropped.
//!
//! Supports AES only. openssl has no accelerated code for the other ciphers, which are rejected by
//! name.
//!
//! Source: cryptsetup's "LUKS On-Disk Format Specification" 1.2.3. The embedding in qcow2
//! (docs/interop/qcow2.rst, "Full disk encryption header pointer") was verified with images made
//! by QEMU.

mod anti_forensic;
mod cipher;
mod header;
mod unlock;

pub use self::{
    cipher::{ChainingMode, CipherKind, IvKind, SECTOR_BYTES, SectorCipher},
    header::{HEADER_BYTES, KeySlot, LuksHash, LuksHeader, MAX_ITERATIONS, SLOTS, check_slots},
    unlock::{LuksOptions, NewLuks, UnlockError, create, read_header, unlock},
};
