//! Big-endian integers in the metadata of qcow2 and LUKS.
//!
//! Callers have checked the length; a short slice panics.

pub(super) fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut array = [0; N];
    array.copy_from_slice(&bytes[at..at + N]);
    array
}

pub(super) fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes(array(bytes, at))
}

pub(super) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(array(bytes, at))
}

pub(super) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(array(bytes, at))
}

/// Entries of a table of 64-bit integers.
pub(super) fn words(bytes: &[u8]) -> impl ExactSizeIterator<Item = u64> {
    bytes.chunks_exact(8).map(|word| u64_at(word, 0))
}
